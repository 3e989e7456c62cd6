"""The names of all keys, and the tracked tasks that wait, in the order of their due times."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from typing import Final, Literal, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.store import Answers, Store

#: How many hash tags there are.
SHARDS: Final = 32


#: What each key is about that has a name of its own: the record of a task; what it takes to send a
#: tracked task anew; the newest task that was sent with ``key=``; the one sender at a time with
#: ``key=`` and ``unique="first"``; a job; a rate that several senders share; a schedule, the
#: occurrence of it that runs, the one that runs next, and those that have run. The scripts write
#: some of them as well.
Kind: TypeAlias = Literal[
    "task", "message", "key", "sending", "job", "rate", "schedule", "running", "queued", "ran"
]


class Names(NamedTuple):
    """The names of all keys under one prefix.

    Attributes:
        prefix: The first part of every name; the same as that of the levels.
    """

    prefix: str

    def of(self, kind: Kind, name: str) -> str:
        """Return the key of a task by its id, of a job by its name, and so on; see :data:`Kind`."""
        return f"{self.prefix}:{{{shard_of(name)}}}:{kind}:{name}"

    def only(self, what: str) -> str:
        """Return a key of which there is one.

        Those are ``schedules``, their names; ``beat:`` and an application, which entries of beat it
        has; ``healing``, the worker that looks after the schedules; ``paused``, what is paused;
        ``complete-since``, since when the index is complete; and ``signed-out``, which sessions of
        the page were ended.
        """
        return f"{self.prefix}:{{0}}:{what}"

    def open_jobs(self) -> Iterator[str]:
        """Yield the keys of all shards' lists of open jobs; ``job.lua`` writes the same names."""
        return (f"{self.prefix}:{{{shard}}}:open-jobs" for shard in range(SHARDS))

    def due(self, shard: int, task: str | None = None, job: str | None = None) -> str:
        """Return the key of one shard's index by due time: of all tasks, of a task's, of a job's.

        The scripts write the same names, in ``shared.lua``.
        """
        index = f"{self.prefix}:{{{shard}}}:due"
        if task is not None:
            return f"{index}:task:{task}"
        return index if job is None else f"{index}:job:{job}"

    def all_due(self, task: str | None = None, job: str | None = None) -> Iterator[str]:
        """Yield the keys of all shards' indexes."""
        return (self.due(shard, task, job) for shard in range(SHARDS))


def shard_of(name: str) -> int:
    """Return the number of the hash tag of a task id, a key or a job."""
    # A name may hold half of a surrogate pair, which strict UTF-8 refuses.
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % SHARDS


#: How many tasks of each shard are read at once; of those that come first, fewer.
PAGE: Final = 100
FIRST: Final = 8

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
        key_start: The text that their keys begin with.
        sent_before_ms: They were sent earlier than that, by the clock of the Redis that has them.
    """

    task: str | None = None
    key: str | None = None
    job: str | None = None
    due_after_ms: int | None = None
    due_before_ms: int | None = None
    key_start: str | None = None
    sent_before_ms: int | None = None

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
        by_record = self.key, self.key_start, self.sent_before_ms
        return by_record != (None, None, None) or None not in (self.task, self.job)

    def matches(self, task: Pending) -> bool:
        """Return whether a task matches."""
        return (
            self.task in (None, task.task)
            and self.key in (None, task.key)
            and self.job in (None, task.job)
            and (self.key_start is None or _begins(task.key, self.key_start))
            and (self.due_after_ms is None or milliseconds_of(task.due) >= self.due_after_ms)
            and _is_before(task.due, self.due_before_ms)
            and _is_before(task.sent, self.sent_before_ms)
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
    """

    task_id: str
    task: str
    due: datetime
    key: str | None
    job: str | None
    sent: datetime | None = None


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
            yield Part([*self._records(page, wanted)], len(page), page[-1])

    def tasks(self, task_ids: Sequence[str]) -> list[Pending]:
        """Return those of some tasks that are tracked and wait."""
        records = self.fields(task_ids, *_SHOWN, "due", "not_before")
        return [
            _pending(task_id, max(int(due), int(later or 0)), name, *shown)
            for task_id, (name, *shown, due, later) in zip(task_ids, records, strict=True)
            if name is not None
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
        least_ms = self.least_ms()
        ranges = [
            (name, *each.scores(least_ms))
            for each in wanted
            for name in self.names.all_due(each.task, each.job)
        ]
        found = self.store.commands(lambda pipe: [pipe.zcount(*each) for each in ranges])
        return [sum(found[start : start + SHARDS]) for start in range(0, len(found), SHARDS)]

    def forecast(self, wanted: Filter, start_ms: int, step_ms: int) -> Iterator[tuple[int, int]]:
        """Yield for each step in which tasks are due its start in milliseconds, and how many.

        Args:
            wanted: Which tasks.
            start_ms: The start of the first step. What is due earlier counts as due in that step.
            step_ms: The length of a step.
        """
        instants = (
            (milliseconds_of(each.due) for each in self.pending(wanted))
            if wanted.needs_records
            else (due_ms for due_ms, _ in self._due(wanted, None))
        )
        steps = (max(due_ms - start_ms, 0) // step_ms for due_ms in instants)
        for step, tasks in groupby(steps):
            yield start_ms + step * step_ms, sum(1 for _ in tasks)

    def least_ms(self) -> int:
        """Return when a task that still waits was due at the earliest, as far as tasks come."""
        now_ms, paused_ms = milliseconds_of(wall_clock.now()), self.paused_since_ms()
        return min(now_ms, now_ms if paused_ms is None else paused_ms) - self.margin_ms

    def _due(self, wanted: Filter, after: tuple[int, str] | None) -> Iterator[tuple[int, str]]:
        """Yield due times and ids in order; each shard is read page by page."""
        # Of a name and a job, the job is the rarer one.
        names = [*self.names.all_due(None if wanted.job else wanted.task, wanted.job)]
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

    def _page(self, name: str, start: int, end: int) -> list[tuple[int, str]]:
        """Return the tasks of these ranks."""
        (found,) = self.store.commands(
            lambda pipeline: pipeline.zrange(name, start, end - 1, withscores=True)
        )
        return [(int(score), task_id) for task_id, score in found]

    def _records(self, page: list[tuple[int, str]], wanted: Filter) -> Iterator[Pending]:
        records = self.fields([task_id for _, task_id in page], *_SHOWN)
        for (due_ms, task_id), (name, *shown) in zip(page, records, strict=True):
            if name is None:
                continue  # it has arrived meanwhile
            task = _pending(task_id, due_ms, name, *shown)
            if wanted.matches(task):
                yield task

    def fields(self, task_ids: Sequence[str], *fields: str) -> list[Answers]:
        """Return fields of the records of tasks."""
        names = [self.names.of("task", task_id) for task_id in task_ids]
        return self.store.commands(lambda pipe: [pipe.hmget(name, *fields) for name in names])


#: The fields of a record that :func:`_pending` takes, in its order.
_SHOWN: Final = ("name", "key", "job", "sent")


def _pending(
    task_id: str, due_ms: int, name: str, key: str | None, job: str | None, sent: str | None
) -> Pending:
    since = instant_of(int(sent)) if sent else None
    return Pending(task_id, name, instant_of(due_ms), key or None, job or None, since)


def _is_before(instant: datetime | None, end_ms: int | None) -> bool:
    return end_ms is None or instant is None or milliseconds_of(instant) < end_ms


def _begins(key: str | None, start: str) -> bool:
    return key is not None and key.startswith(start)
