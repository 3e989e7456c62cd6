"""The names of all keys, and the tracked tasks that wait, in the order of their due times."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.store import Answers, ScriptCall, Store, readable

#: How many hash tags there are.
SHARDS: Final = 32


#: What each key is about that has a name of its own: the record of a task; what it takes to send a
#: tracked task anew; the newest task that was sent with ``key=``; the one process at a time that
#: changes something; a job; a rate that several senders share; a schedule, the occurrence of it
#: that runs, and the one that runs next. The scripts write some of them.
KeyKind: TypeAlias = Literal[
    "task", "message", "key", "alone", "job", "rate", "schedule", "running", "queued"
]


class Names(NamedTuple):
    """The names of all keys under one prefix.

    Attributes:
        prefix: The first part of every name; the same as that of the levels.
    """

    prefix: str

    def of(self, kind: KeyKind, name: str) -> str:
        """Return the key of a task by its id, of a job by its name, ...; see :data:`KeyKind`."""
        return f"{self.prefix}:{{{shard_of(name)}}}:{kind}:{name}"

    def only(self, what: str) -> str:
        """Return a key of which there is one.

        Those are ``schedules``, their names; ``beat:`` and an application, which entries of beat it
        has; ``healing``, the worker that looks after the schedules; ``paused``, what is paused;
        ``complete-since``, since when the index is complete; and ``signed-out``, which sessions of
        the page were ended.
        """
        return f"{self.prefix}:{{0}}:{what}"

    def jobs(self) -> Iterator[str]:
        """Yield the keys of all shards' lists of jobs; ``job.lua`` writes the same names."""
        return (f"{self.prefix}:{{{shard}}}:jobs" for shard in range(SHARDS))

    def open_jobs(self) -> Iterator[str]:
        """Yield the keys of all shards' lists of open jobs; ``job.lua`` writes the same names."""
        return (f"{self.prefix}:{{{shard}}}:open" for shard in range(SHARDS))

    def due(self, shard: int, kind: Kind | None = None, job: str | None = None) -> str:
        """Return the key of one shard's index by due time: of all tasks, of a kind, of a job.

        The scripts write the same names, in ``shared.lua``.
        """
        index = f"{self.prefix}:{{{shard}}}:due"
        if kind is not None:
            return f"{index}:kind:{kind.text}"
        return index if job is None else f"{index}:job:{job}"

    def kinds(self) -> Iterator[str]:
        """Yield the keys of all shards' kinds; the scripts write the same names."""
        return (f"{self.prefix}:{{{shard}}}:kinds" for shard in range(SHARDS))

    def all_due(self, kind: Kind | None = None, job: str | None = None) -> Iterator[str]:
        """Yield the keys of all shards' indexes."""
        return (self.due(shard, kind, job) for shard in range(SHARDS))


def shard_of(name: str) -> int:
    """Return the number of the hash tag of a task id, a key or a job."""
    # A name may hold half of a surrogate pair, which strict UTF-8 refuses.
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % SHARDS


class Kind(NamedTuple):
    """The kind of a tracked task, by which it is indexed.

    Attributes:
        task: The task's name.
        queue: The queue that gets the task when it is due; empty if the exchange routes it.
    """

    task: str
    queue: str = ""

    @classmethod
    def of(cls, text: str) -> Self:
        """Read what :attr:`text` returns."""
        length, _, rest = text.partition(":")
        return cls(rest[int(length) :], rest[: int(length)])

    @property
    def text(self) -> str:
        """The kind in the keys and the records of the registry."""
        return f"{len(self.queue)}:{self.queue}{self.task}"


#: How many tasks of each shard are read at once; of those that come first, fewer.
PAGE: Final = 100
FIRST: Final = 8

#: How many kinds of tasks are counted one by one, unless a call says so; and all there may be.
MOST_KINDS: Final = 200
ALL_KINDS: Final = 1_000_000

#: How many bytes the message of a task may take that is read to be shown beside many others.
SHORT: Final = 65_536


class Filter(NamedTuple):
    """Which tracked tasks are meant; None means all.

    Attributes:
        task: The task's name.
        key: The key that they were sent with.
        job: The job that they were sent with.
        due_after_ms: They are due then or later, in milliseconds since 1970-01-01 UTC.
        due_before_ms: They are due earlier than that.
        sent_before_ms: They were sent earlier than that, by the clock of the Redis that has them.
        kinds: They are of one of these kinds.
        where: Returns whether a task is meant that all else allows.
        says: Returns likewise, by its stored message as well; empty if that is long or not known.
    """

    task: str | None = None
    key: str | None = None
    job: str | None = None
    due_after_ms: int | None = None
    due_before_ms: int | None = None
    sent_before_ms: int | None = None
    kinds: frozenset[Kind] | None = None
    where: Callable[[Pending], bool] | None = None
    says: Callable[[Pending, str], bool] | None = None

    @property
    def is_of_kinds(self) -> bool:
        """Whether only tasks of some kinds are meant."""
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
        """Return a filter by aware datetimes."""
        after, before = (
            None if each is None else milliseconds_of(each) for each in (due_after, due_before)
        )
        return cls(task, key, job, after, before)

    def scores(self, least_ms: int) -> tuple[int, str]:
        """Return the lowest and the highest score, as Redis takes them.

        Args:
            least_ms: The due time of the oldest task that still counts as waiting.
        """
        highest = "+inf" if self.due_before_ms is None else f"({self.due_before_ms}"
        return max(self.due_after_ms or least_ms, least_ms), highest

    @property
    def needs_records(self) -> bool:
        """Whether no index holds just these tasks, so that each task's record is read."""
        by_record = self.key, self.sent_before_ms, self.where, self.says
        return any(each is not None for each in by_record) or (
            self.is_of_kinds and self.job is not None
        )

    def matches(self, task: Pending) -> bool:
        """Return whether a task matches."""
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
    """What was read of the tasks that wait, at once.

    Attributes:
        tasks: Those that match.
        read: How many were read for that.
        last: The due time, in milliseconds, and the id of the last one that was read.
    """

    tasks: list[Pending]
    read: int
    last: tuple[int, str]


class Pending(NamedTuple):
    """A tracked task that waits.

    Attributes:
        task_id: Its id.
        task: Its name.
        due: When it is due.
        key: The key that it was sent with; None if it has none.
        job: The job that it was sent with, likewise.
        sent: When it was sent; None if a version noted it that did not say so.
        queue: The queue that gets it when it is due; empty if its exchange routes it.
    """

    task_id: str
    task: str
    due: datetime
    key: str | None
    job: str | None
    sent: datetime | None = None
    queue: str = ""


class KindCounts(NamedTuple):
    """How many tracked tasks of a kind wait.

    Attributes:
        kind: The kind.
        total: How many wait, overdue tasks included.
        first_due_ms: The due time of the first task, which may be long ago; None if none waits.
        next_due_ms: The due time of the next task, counted from the first instant of the call;
            None if no such task waits.
        cancelled: How many are cancelled, and their messages are not due at that instant.
        before: How many are due before each of those instants, by the instant.
    """

    kind: Kind
    total: int
    first_due_ms: int | None
    next_due_ms: int | None
    cancelled: int
    before: Mapping[int, int]


class Summary(NamedTuple):
    """How many tracked tasks of all kinds wait.

    Attributes:
        kinds: The kinds, that with the most tasks first.
        left_out: How many tasks are of further kinds, which are not counted one by one.
    """

    kinds: list[KindCounts]
    left_out: int


@dataclass(frozen=True)
class Index:
    """Reads which tracked tasks wait.

    Attributes:
        store: Where they are kept.
        names: The names of all keys.
        margin_ms: For how many milliseconds a task may be late. What has not arrived by then,
            because its queue was purged for example, does not count as waiting.
        paused_since_ms: Returns since when tasks are held back by a pause, and may be late; None if
            nothing is paused.
    """

    store: Store
    names: Names
    margin_ms: int
    paused_since_ms: Callable[[], int | None]

    def complete_since(self) -> datetime:
        """Return since when the index is complete: older tasks may have been lost with Redis."""
        key = self.names.only("complete-since")
        now = milliseconds_of(wall_clock.now())

        _, since = self.store.commands(lambda pipe: (pipe.set(key, now, nx=True), pipe.get(key)))
        return instant_of(int(since))

    def summary(self, instants_ms: Sequence[int], most: int = MOST_KINDS) -> Summary:
        """Count the tasks that wait, by their kinds, in one round trip.

        Args:
            instants_ms: Instants in milliseconds since 1970-01-01 UTC, at least one; of the first
                one, more is told. See :class:`KindCounts`.
            most: How many kinds are counted one by one at most.
        """
        in_order = sorted({*instants_ms})
        arguments = [(self.least_ms(), most, instants_ms[0], *in_order)]
        calls = [ScriptCall("summary", [name], arguments) for name in self.names.kinds()]
        found: dict[str, list[KindCounts]] = {}
        left_out = 0
        # A call for each, so that Redis answers others in between.
        for (answer,) in self.store.of_each(*calls):
            others, kinds = readable("the index", answer)
            left_out += others
            for text, total, first, following, cancelled, before in kinds:
                first_ms, next_ms = (int(each) if each else None for each in (first, following))
                of_instants = dict(zip(in_order, before, strict=True))
                counts = KindCounts(Kind.of(text), total, first_ms, next_ms, cancelled, of_instants)
                found.setdefault(text, []).append(counts)
        kinds = sorted(map(_sum, found.values()), key=lambda each: -each.total)
        left_out += sum(each.total for each in kinds[most:])
        return Summary(kinds[:most], left_out)

    def pending(self, wanted: Filter) -> Iterator[Pending]:
        """Yield the tasks in the order in which they are due, reading some at a time."""
        for part in self.parts(wanted):
            yield from part.tasks

    def parts(
        self, wanted: Filter, after: tuple[int, str] | None = None, most: int | None = None
    ) -> Iterator[Part]:
        """Yield the tasks in the order in which they are due, part by part.

        Args:
            wanted: Which tasks.
            after: Those behind this due time, in milliseconds, and id.
            most: How many are read at most, whether they match or not; None: all.
        """
        entries, read = self._due(wanted, after), 0
        while page := list(islice(entries, PAGE if most is None else min(PAGE, most - read))):
            read += len(page)
            yield Part(self._records(page, wanted), len(page), page[-1])

    def tasks(self, task_ids: Sequence[str]) -> list[Pending]:
        """Return those of some tasks that are tracked and wait."""
        records = self.fields(task_ids, *_SHOWN, "due", "not_before")
        return [
            _pending(task_id, max(int(due), int(later or 0)), kind, *shown)
            for task_id, (kind, *shown, due, later) in zip(task_ids, records, strict=True)
            if kind is not None
        ]

    def messages(self, task_ids: Sequence[str]) -> list[str | None]:
        """Return what it takes to send tasks anew.

        None for those that do not wait any more or are not tracked, empty if it is not known.
        """
        names = [self.names.of("message", task_id) for task_id in task_ids]
        return self.store.commands(lambda pipe: [pipe.get(name) for name in names])

    def short_messages(self, task_ids: Sequence[str]) -> list[str]:
        """Return the same of those that take at most :data:`SHORT` bytes; empty for all others."""
        names = [self.names.of("message", task_id) for task_id in task_ids]
        found = self.store.commands(lambda pipe: [pipe.getrange(name, 0, SHORT) for name in names])
        return [each if len(each) <= SHORT else "" for each in found]

    def count(self, wanted: Filter) -> int:
        """Return how many tasks wait."""
        if wanted.needs_records:
            return sum(1 for _ in self.pending(wanted))
        (count,) = self.counts([wanted])
        return count

    def counts(self, wanted: Sequence[Filter]) -> list[int]:
        """Return how many tasks of each filter wait, in one round trip; none may need records."""
        least_ms, kinds = self.least_ms(), self._kinds(wanted)
        ranges = [
            [(name, *each.scores(least_ms)) for name in self._indexes(each, kinds)]
            for each in wanted
        ]
        counts = self.store.commands(
            lambda pipe: [pipe.zcount(*each) for of_one in ranges for each in of_one]
        )
        found = iter(counts)
        return [sum(islice(found, len(of_one))) for of_one in ranges]

    def due_of_jobs(
        self, jobs: Sequence[str], before_ms: int, most: int
    ) -> list[tuple[Pending, float]]:
        """Return the tasks of some jobs that are due before an instant, each with 1.

        If there are more than ``most``, return about so many of them, of each job and shard the
        first ones, each with how many it stands for.
        """
        of_jobs = [
            (name, self.least_ms(), f"({before_ms}")
            for job in jobs
            for name in self.names.all_due(None, job)
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
        return [(each, stands_for[each.task_id][1]) for each in self._records(due, Filter())]

    def least_ms(self) -> int:
        """Return when a task that still waits was due at the earliest, as far as tasks come."""
        now_ms, paused_ms = milliseconds_of(wall_clock.now()), self.paused_since_ms()
        return min(now_ms, now_ms if paused_ms is None else paused_ms) - self.margin_ms

    def _due(self, wanted: Filter, after: tuple[int, str] | None) -> Iterator[tuple[int, str]]:
        """Yield due times and ids in order; each shard is read page by page."""
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
            # Tasks that have arrived meanwhile shift the ranks of those behind them: so each page
            # begins with a task that was read before, or is read again from further back.
            start = max(rank - overlap, 0)
            page = self._page(name, start, rank + size)
            if start and (not page or page[0] > last):
                overlap *= PAGE
                continue
            for each in page:
                if wanted.due_before_ms is not None and each[0] >= wanted.due_before_ms:
                    return
                if each > last:
                    last = each
                    yield each
            if len(page) < rank + size - start:
                return
            rank, overlap, size = start + len(page), 1, min(2 * size, PAGE)

    def _kinds(self, wanted: Sequence[Filter]) -> list[Kind]:
        """Return all kinds of which tasks wait; none if that does not matter."""
        if not any(each.task is not None and each.job is None for each in wanted):
            return []
        return [each.kind for each in self.summary([0], ALL_KINDS).kinds]

    def _indexes(self, wanted: Filter, kinds: Sequence[Kind]) -> list[str]:
        """Return the keys of the indexes that have the tasks of a filter, and perhaps others.

        Args:
            wanted: The filter.
            kinds: All kinds, if it has a name of tasks.
        """
        if wanted.job is not None or not wanted.is_of_kinds:  # a job is rarer than a kind
            return [*self.names.all_due(None, wanted.job)]
        chosen = kinds if wanted.kinds is None else sorted(wanted.kinds)
        named = (each for each in chosen if wanted.task in (None, each.task))
        return [key for kind in named for key in self.names.all_due(kind)]

    def _page(self, name: str, start: int, end: int) -> list[tuple[int, str]]:
        """Return the tasks of these ranks."""
        (found,) = self.store.commands(
            lambda pipeline: pipeline.zrange(name, start, end - 1, withscores=True)
        )
        return [(int(score), task_id) for task_id, score in found]

    def _records(self, page: list[tuple[int, str]], wanted: Filter) -> list[Pending]:
        records = self.fields([task_id for _, task_id in page], *_SHOWN)
        tasks = [
            _pending(task_id, due_ms, kind, *shown)
            for (due_ms, task_id), (kind, *shown) in zip(page, records, strict=True)
            if kind is not None  # otherwise it has arrived meanwhile
        ]
        return self.matching(tasks, wanted)

    def matching(self, tasks: Sequence[Pending], wanted: Filter) -> list[Pending]:
        """Return those of some tasks that match."""
        found = [each for each in tasks if wanted.matches(each)]
        if wanted.says is None or not found:
            return found
        messages = zip(found, self.short_messages([each.task_id for each in found]), strict=True)
        return [task for task, message in messages if wanted.says(task, message)]

    def fields(self, task_ids: Sequence[str], *fields: str) -> list[Answers]:
        """Return fields of the records of tasks."""
        names = [self.names.of("task", task_id) for task_id in task_ids]
        return self.store.commands(lambda pipe: [pipe.hmget(name, *fields) for name in names])


#: The fields of a record that :func:`_pending` takes, in its order.
_SHOWN: Final = ("kind", "key", "job", "sent")


def _pending(
    task_id: str, due_ms: int, kind: str, key: str | None, job: str | None, sent: str | None
) -> Pending:
    (task, queue), since = Kind.of(kind), instant_of(int(sent)) if sent else None
    return Pending(task_id, task, instant_of(due_ms), key or None, job or None, since, queue)


def _sum(counts: Sequence[KindCounts]) -> KindCounts:
    """Return the sum of the counts of one kind."""
    first_ms, next_ms = (
        min((each for each in dues if each is not None), default=None)
        for dues in zip(*((each.first_due_ms, each.next_due_ms) for each in counts), strict=True)
    )
    before = {instant: sum(each.before[instant] for each in counts) for instant in counts[0].before}
    total, cancelled = sum(each.total for each in counts), sum(each.cancelled for each in counts)
    return KindCounts(counts[0].kind, total, first_ms, next_ms, cancelled, before)


def _is_before(instant: datetime | None, end_ms: int | None) -> bool:
    return end_ms is None or instant is None or milliseconds_of(instant) < end_ms
