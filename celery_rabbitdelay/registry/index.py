"""The names of all Redis keys, and the index of waiting tracked tasks by due time."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.store import Answers, ScriptCall, Store, readable

#: The number of hash tags that keys are spread over.
SHARDS: Final = 32


#: The kinds of keys: the record of a task; the stored message of a tracked task; the newest task
#: sent with ``key=``; a lock (``alone``); a job; a rate that several senders share; a schedule, its
#: running occurrence, and its queued occurrence; the progress of an action of the web page. The
#: scripts write some of these keys.
KeyKind: TypeAlias = Literal[
    "task", "message", "key", "alone", "job", "rate", "schedule", "running", "queued", "work"
]


class Names(NamedTuple):
    """The names of all keys under one prefix.

    Attributes:
        prefix: The first part of every name; the same as the prefix of the levels.
    """

    prefix: str

    def of(self, kind: KeyKind, name: str) -> str:
        """Return the key of one task (by its id), job (by its name), ...; see :data:`KeyKind`."""
        return f"{self.prefix}:{{{shard_of(name)}}}:{kind}:{name}"

    def each(self, kind: KeyKind, names: Iterable[str]) -> list[str]:
        """Return the keys of several tasks, jobs, ...; see :meth:`of`."""
        return [self.of(kind, name) for name in names]

    def only(self, name: str) -> str:
        """Return a key that exists once per prefix.

        ``schedules`` holds the names of the schedules; ``beat:`` and an application's name, the
        beat entries of the application; ``healing``, the lease of the worker that repairs
        schedules; ``paused``, the pauses; ``complete-since``, the start of the index; and
        ``nothing``, a key that is never written.
        """
        return f"{self.prefix}:{{0}}:{name}"

    def in_shards(self, name: str) -> list[str]:
        """Return the names of a key in all shards; the scripts build the same names.

        ``jobs`` and ``open`` are the lists of jobs and of open jobs, ``kinds`` is the list of
        kinds; for the other keys, see :meth:`due`.
        """
        return [f"{self.prefix}:{{{shard}}}:{name}" for shard in range(SHARDS)]

    def due(self, kind: Kind | None = None, job: str | None = None) -> list[str]:
        """Return every shard's index by due time: of all tasks, of a kind, or of a job."""
        if kind is not None:
            return self.in_shards(f"due:kind:{kind.text}")
        return self.in_shards("due" if job is None else f"due:job:{job}")


def shard_of(name: str) -> int:
    """Return the number of the hash tag of a task id, a key or a job."""
    # A name may hold half of a surrogate pair, which strict UTF-8 refuses.
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % SHARDS


class Kind(NamedTuple):
    """The name and the queue of a tracked task; the registry keeps an index per kind.

    Attributes:
        task: The task's name.
        queue: The queue that gets the task when it is due; empty if the exchange routes it.
    """

    task: str
    queue: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Parse :attr:`text`."""
        length, _, rest = text.partition(":")
        return cls(rest[int(length) :], rest[: int(length)])

    @property
    def text(self) -> str:
        """The kind as written in the registry's keys and records."""
        return f"{len(self.queue)}:{self.queue}{self.task}"


#: The number of tasks in a page of one shard, and in the first page of the shard.
PAGE: Final = 100
FIRST: Final = 8

#: The default maximum of separately counted kinds, and a maximum that no application reaches.
MOST_KINDS: Final = 200
ALL_KINDS: Final = 1_000_000

#: The maximum size in bytes of stored messages that are read for a list of tasks.
SHORT: Final = 65_536


class Filter(NamedTuple):
    """Selects tracked tasks; None matches all tasks.

    Attributes:
        task: The task's name.
        key: The task's ``key=``.
        job: The task's ``job=``.
        due_after_ms: The earliest due time, inclusive, in milliseconds since 1970-01-01 UTC.
        due_before_ms: The exclusive upper bound of due times.
        sent_before_ms: The exclusive upper bound of sending times, by the clock of the task's Redis
            server.
        kinds: The allowed kinds.
        where: A further condition on tasks that meet all other conditions.
        where_message: A further condition on a task and its stored message; the message is empty if
            it is unknown or longer than :data:`SHORT`.
    """

    task: str | None = None
    key: str | None = None
    job: str | None = None
    due_after_ms: int | None = None
    due_before_ms: int | None = None
    sent_before_ms: int | None = None
    kinds: frozenset[Kind] | None = None
    where: Callable[[Pending], bool] | None = None
    where_message: Callable[[Pending, str], bool] | None = None

    @property
    def is_of_kinds(self) -> bool:
        """Whether the filter selects tasks of some kinds only."""
        return self.task is not None or self.kinds is not None

    @classmethod
    def of(
        cls,
        task: str | None = None,
        key: str | None = None,
        job: str | None = None,
        due_before: datetime | None = None,
        due_after: datetime | None = None,
    ) -> Self:
        """Return a filter for due times given as aware datetimes."""
        after, before = (
            None if instant is None else milliseconds_of(instant)
            for instant in (due_after, due_before)
        )
        return cls(task, key, job, after, before)

    def scores(self, least_ms: int) -> tuple[int, str]:
        """Return the lowest and the highest score, in the syntax of Redis.

        Args:
            least_ms: The due time of the oldest task that still counts as waiting.
        """
        highest = "+inf" if self.due_before_ms is None else f"({self.due_before_ms}"
        return max(self.due_after_ms or least_ms, least_ms), highest

    @property
    def needs_records(self) -> bool:
        """Whether the tasks' records must be read, because no index holds exactly these tasks."""
        by_record = self.key, self.sent_before_ms, self.where, self.where_message
        return any(field is not None for field in by_record) or (
            self.is_of_kinds and self.job is not None
        )

    def matches(self, task: Pending) -> bool:
        """Return whether the filter selects a task."""
        return (
            self.task in (None, task.task)
            and (self.kinds is None or Kind(task.task, task.queue) in self.kinds)
            and self.key in (None, task.key)
            and self.job in (None, task.job)
            and (self.due_after_ms is None or milliseconds_of(task.due) >= self.due_after_ms)
            and _is_before(task.due, self.due_before_ms)
            and _is_before(task.sent, self.sent_before_ms)
            and (self.where is None or self.where(task))
        )


class Part(NamedTuple):
    """A page of waiting tasks.

    Attributes:
        tasks: The matching tasks.
        read: The number of tasks read, matching or not.
        last: The due time, in milliseconds, and the id of the last task read.
    """

    tasks: list[Pending]
    read: int
    last: tuple[int, str]


class Pending(NamedTuple):
    """A waiting tracked task.

    Attributes:
        task_id: The task's id.
        task: The task's name.
        due: The task's due time.
        key: The task's ``key=``, or None.
        job: The task's ``job=``, or None.
        sent: When the task was sent; None if an earlier version sent it, which did not record the
            time.
        queue: The queue that gets the task when it is due; empty if the exchange routes it.
    """

    task_id: str
    task: str
    due: datetime
    key: str | None
    job: str | None
    sent: datetime | None = None
    queue: str = ""


class KindCounts(NamedTuple):
    """Counts of the waiting tracked tasks of one kind.

    Attributes:
        kind: The kind.
        total: The number of waiting tasks, including overdue tasks.
        first_due_ms: The earliest due time, which may be long ago; None if no task waits.
        next_due_ms: The earliest due time from the call's first instant on; None if no task is due
            then or later.
        cancelled: The number of cancelled tasks whose messages are not due yet at the first
            instant.
        before: The number of tasks due before an instant, for every instant of the call.
    """

    kind: Kind
    total: int
    first_due_ms: int | None
    next_due_ms: int | None
    cancelled: int
    before: Mapping[int, int]


class Summary(NamedTuple):
    """Counts of the waiting tracked tasks of all kinds.

    Attributes:
        kinds: The counts per kind, largest first.
        left_out: The number of tasks of all other kinds.
    """

    kinds: list[KindCounts]
    left_out: int


@dataclass(frozen=True)
class Index:
    """Reads the index of waiting tracked tasks.

    Attributes:
        store: Redis.
        names: The names of all keys.
        margin_ms: How late a task may be, in milliseconds. A later task does not count as waiting;
            for example, its queue was purged.
        paused_since_ms: Returns the start of the oldest pause, because paused tasks may be later
            than the margin; None if nothing is paused.
    """

    store: Store
    names: Names
    margin_ms: int
    paused_since_ms: Callable[[], int | None]

    def complete_since(self) -> datetime:
        """Return the instant since which the index is complete."""
        key = self.names.only("complete-since")
        now = milliseconds_of(wall_clock.now())

        _, since = self.store.commands(lambda pipe: (pipe.set(key, now, nx=True), pipe.get(key)))
        return instant_of(int(since))

    def summary(self, instants_ms: Sequence[int], most: int = MOST_KINDS) -> Summary:
        """Count the waiting tasks per kind, in one round trip.

        Args:
            instants_ms: At least one instant in milliseconds since 1970-01-01 UTC. Some counts
                concern the first instant only; see :class:`KindCounts`.
            most: The maximum number of separately counted kinds.
        """
        in_order = sorted({*instants_ms})
        arguments = [(self.least_ms(), most, instants_ms[0], *in_order)]
        calls = [ScriptCall("summary", [name], arguments) for name in self.names.in_shards("kinds")]
        found: dict[str, list[KindCounts]] = {}
        left_out = 0
        # One call per shard, so that Redis serves other clients in between.
        for (answer,) in self.store.of_each(*calls):
            others, kinds = readable("the index", answer)
            left_out += others
            for text, total, first, following, cancelled, before in kinds:
                first_ms, next_ms = (int(due) if due else None for due in (first, following))
                of_instants = dict(zip(in_order, before, strict=True))
                counts = KindCounts(Kind.of(text), total, first_ms, next_ms, cancelled, of_instants)
                found.setdefault(text, []).append(counts)
        kinds = sorted(map(_sum, found.values()), key=lambda counts: -counts.total)
        left_out += sum(counts.total for counts in kinds[most:])
        return Summary(kinds[:most], left_out)

    def pending(self, wanted: Filter) -> Iterator[Pending]:
        """Yield the matching tasks by due time, reading page by page."""
        for part in self.parts(wanted):
            yield from part.tasks

    def parts(
        self, wanted: Filter, after: tuple[int, str] | None = None, most: int | None = None
    ) -> Iterator[Part]:
        """Yield the matching tasks by due time, page by page.

        Args:
            wanted: The filter.
            after: The due time, in milliseconds, and the id of the task after which to begin.
            most: The maximum number of tasks to read, matching or not; None for no limit.
        """
        entries, read = self._due(wanted, after), 0
        while page := list(islice(entries, PAGE if most is None else min(PAGE, most - read))):
            read += len(page)
            yield Part(self._records(page, wanted), len(page), page[-1])

    def tasks(self, task_ids: Sequence[str]) -> list[Pending]:
        """Return the tasks among these ids that are tracked and wait."""
        records = self.fields(task_ids, *_SHOWN, "due", "not_before")
        return [
            _pending(task_id, max(int(due), int(later or 0)), kind, *shown)
            for task_id, (kind, *shown, due, later) in zip(task_ids, records, strict=True)
            if kind is not None
        ]

    def messages(self, task_ids: Sequence[str]) -> list[str | None]:
        """Return the stored messages of tasks, from which they can be sent again.

        None stands for a task that does not wait or is not tracked; an empty string stands for an
        unknown message.
        """
        names = self.names.each("message", task_ids)
        return self.store.commands(lambda pipe: [pipe.get(name) for name in names])

    def short_messages(self, task_ids: Sequence[str]) -> list[str]:
        """Return the stored messages of at most :data:`SHORT` bytes; empty for longer messages."""
        names = self.names.each("message", task_ids)
        found = self.store.commands(lambda pipe: [pipe.getrange(name, 0, SHORT) for name in names])
        return [message if len(message) <= SHORT else "" for message in found]

    def count(self, wanted: Filter) -> int:
        """Return the number of matching tasks."""
        if wanted.needs_records:
            return sum(1 for _ in self.pending(wanted))
        (count,) = self.counts([wanted])
        return count

    def counts(self, wanted: Sequence[Filter]) -> list[int]:
        """Return the number of matching tasks per filter, in one round trip.

        No filter may need the records of tasks.
        """
        least_ms, kinds = self.least_ms(), self._kinds(wanted)
        ranges = [
            [(name, *one.scores(least_ms)) for name in self._indexes(one, kinds)] for one in wanted
        ]
        counts = self.store.commands(
            lambda pipe: [pipe.zcount(*each) for of_one in ranges for each in of_one]
        )
        found = iter(counts)
        return [sum(islice(found, len(of_one))) for of_one in ranges]

    def due_of_jobs(
        self, jobs: Sequence[str], before_ms: int, most: int
    ) -> list[tuple[Pending, float]]:
        """Return the tasks of some jobs that are due before ``before_ms``, with their weights.

        The weight is 1, unless there are more than ``most`` tasks: then the first tasks per job and
        shard represent the remaining tasks, and the weight is the number of tasks that a task
        represents.
        """
        of_jobs = [
            (name, self.least_ms(), f"({before_ms}")
            for job in jobs
            for name in self.names.due(None, job)
        ]
        counts = self.store.commands(lambda pipe: [pipe.zcount(*each) for each in of_jobs])
        found = [(each, count) for each, count in zip(of_jobs, counts, strict=True) if count]
        size = max(most // max(len(found), 1), 1)
        pages = self.store.commands(
            lambda pipe: [pipe.zrangebyscore(*each, 0, size, withscores=True) for each, _ in found]
        )
        stands_for = {
            task_id: (int(due_ms), count / len(page))
            for (_, count), page in zip(found, pages, strict=True)
            for task_id, due_ms in page
        }
        due = [(due_ms, task_id) for task_id, (due_ms, _) in stands_for.items()]
        return [(task, stands_for[task.task_id][1]) for task in self._records(due, Filter())]

    def least_ms(self) -> int:
        """Return the earliest due time of a task that still counts as waiting."""
        now_ms, paused_ms = milliseconds_of(wall_clock.now()), self.paused_since_ms()
        return min(now_ms, now_ms if paused_ms is None else paused_ms) - self.margin_ms

    def _due(self, wanted: Filter, after: tuple[int, str] | None) -> Iterator[tuple[int, str]]:
        """Yield due times and ids in order, reading all shards page by page."""
        names = self._indexes(wanted, self._kinds([wanted]))
        least_ms, _ = wanted.scores(self.least_ms())
        last: tuple[float, str] = (least_ms - 0.5, "")
        if after is not None:
            last = max(last, after)
        ranks = self.store.commands(
            lambda pipe: [pipe.zcount(name, "-inf", f"({last[0]}") for name in names]
        )
        shards = [self._shard(*each, last, wanted) for each in zip(names, ranks, strict=True)]
        return heapq.merge(*shards)

    def _shard(
        self, name: str, rank: int, last: tuple[float, str], wanted: Filter
    ) -> Iterator[tuple[int, str]]:
        size = min(FIRST, PAGE)
        overlap = 1
        while True:
            # A task that arrives meanwhile shifts the ranks of all later tasks. So every page
            # overlaps the previous page; a page without an overlap is read again from further back.
            start = max(rank - overlap, 0)
            page = self._page(name, start, rank + size)
            if start and (not page or page[0] > last):
                overlap *= PAGE
                continue
            for entry in page:
                if wanted.due_before_ms is not None and entry[0] >= wanted.due_before_ms:
                    return
                if entry > last:
                    last = entry
                    yield entry
            if len(page) < rank + size - start:
                return
            rank, overlap, size = start + len(page), 1, min(2 * size, PAGE)

    def _kinds(self, wanted: Sequence[Filter]) -> list[Kind]:
        """Return the kinds of all waiting tasks; empty if no filter needs the kinds."""
        if not any(one.task is not None and one.job is None for one in wanted):
            return []
        return [counts.kind for counts in self.summary([0], ALL_KINDS).kinds]

    def _indexes(self, wanted: Filter, kinds: Sequence[Kind]) -> list[str]:
        """Return the keys of indexes that contain the tasks of a filter, and perhaps more tasks.

        Args:
            wanted: The filter.
            kinds: All kinds, if the filter names a task.
        """
        if wanted.job is not None or not wanted.is_of_kinds:  # a job has fewer tasks than a kind
            return self.names.due(None, wanted.job)
        chosen = kinds if wanted.kinds is None else sorted(wanted.kinds)
        named = (kind for kind in chosen if wanted.task in (None, kind.task))
        return [key for kind in named for key in self.names.due(kind)]

    def _page(self, name: str, start: int, end: int) -> list[tuple[int, str]]:
        """Return the due times and ids at these ranks."""
        (found,) = self.store.commands(
            lambda pipeline: pipeline.zrange(name, start, end - 1, withscores=True)
        )
        return [(int(score), task_id) for task_id, score in found]

    def _records(self, page: list[tuple[int, str]], wanted: Filter) -> list[Pending]:
        records = self.fields([task_id for _, task_id in page], *_SHOWN)
        tasks = [
            _pending(task_id, due_ms, kind, *shown)
            for (due_ms, task_id), (kind, *shown) in zip(page, records, strict=True)
            if kind is not None  # otherwise the task has arrived meanwhile
        ]
        return self.matching(tasks, wanted)

    def matching(self, tasks: Sequence[Pending], wanted: Filter) -> list[Pending]:
        """Return the tasks that a filter selects."""
        found = [task for task in tasks if wanted.matches(task)]
        if wanted.where_message is None or not found:
            return found
        messages = zip(found, self.short_messages([task.task_id for task in found]), strict=True)
        return [task for task, message in messages if wanted.where_message(task, message)]

    def fields(self, task_ids: Sequence[str], *fields: str) -> list[Answers]:
        """Read fields of tasks' records."""
        names = self.names.each("task", task_ids)
        return self.store.commands(lambda pipe: [pipe.hmget(name, *fields) for name in names])


#: The fields of a record that :func:`_pending` takes, in the order of its arguments.
_SHOWN: Final = ("kind", "key", "job", "sent")


def _pending(
    task_id: str, due_ms: int, kind: str, key: str | None, job: str | None, sent: str | None
) -> Pending:
    (task, queue), since = Kind.of(kind), instant_of(int(sent)) if sent else None
    return Pending(task_id, task, instant_of(due_ms), key or None, job or None, since, queue)


def _sum(counts: Sequence[KindCounts]) -> KindCounts:
    """Add up one kind's counts of all shards."""
    first_ms, next_ms = (
        min((each for each in dues if each is not None), default=None)
        for dues in zip(*((each.first_due_ms, each.next_due_ms) for each in counts), strict=True)
    )
    before = {instant: sum(each.before[instant] for each in counts) for instant in counts[0].before}
    total, cancelled = sum(each.total for each in counts), sum(each.cancelled for each in counts)
    return KindCounts(counts[0].kind, total, first_ms, next_ms, cancelled, before)


def _is_before(instant: datetime | None, end_ms: int | None) -> bool:
    return end_ms is None or instant is None or milliseconds_of(instant) < end_ms
