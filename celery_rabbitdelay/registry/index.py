"""The names of all keys, and the tracked tasks that wait, in the order of their due times."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.connection import Store

#: How many hash tags there are.
SHARDS: Final = 32


class Names(NamedTuple):
    """The names of all keys under one prefix.

    Attributes:
        prefix: The first part of every name; the same as that of the levels.
    """

    prefix: str

    def task(self, task_id: str) -> str:
        """Return the key of a task's record."""
        return f"{self._tagged(task_id)}:task:{task_id}"

    def message(self, task_id: str) -> str:
        """Return the key of what it takes to send a tracked task anew; ``shared.lua`` writes it."""
        return f"{self._tagged(task_id)}:message:{task_id}"

    def id_of(self, record: str) -> str:
        """Return the id of the task whose record has a key."""
        return record.partition("}:task:")[2]

    def key(self, key: str) -> str:
        """Return the key of what is known about the tasks that were sent with ``key=``."""
        return f"{self._tagged(key)}:key:{key}"

    def sending(self, key: str) -> str:
        """Return the key that one sender has at a time, with ``key=`` and ``unique="first"``."""
        return f"{self._tagged(key)}:sending:{key}"

    def job(self, job: str) -> str:
        """Return the key of a job."""
        return f"{self._tagged(job)}:job:{job}"

    def rate(self, name: str) -> str:
        """Return the key of a rate that several senders share."""
        return f"{self._tagged(name)}:rate:{name}"

    def due(self, shard: int, task: str | None = None, job: str | None = None) -> str:
        """Return the key of one shard's index by due time: of all tasks, of a task's, of a job's.

        The scripts write the same names, in ``shared.lua``.
        """
        index = f"{self.prefix}:{{{shard}}}:due"
        if task is not None:
            return f"{index}:task:{task}"
        return index if job is None else f"{index}:job:{job}"

    def schedule(self, name: str) -> str:
        """Return the key of a schedule."""
        return f"{self._tagged(name)}:schedule:{name}"

    def schedules(self) -> str:
        """Return the key of the names of all schedules."""
        return f"{self.prefix}:{{0}}:schedules"

    def beat(self, application: str) -> str:
        """Return the key that says which entries of beat an application has."""
        return f"{self.prefix}:{{0}}:beat:{application}"

    def running(self, name: str) -> str:
        """Return the key that the occurrence of a schedule has which runs."""
        return f"{self._tagged(name)}:running:{name}"

    def queued(self, name: str) -> str:
        """Return the key that the occurrence of a schedule has which runs next."""
        return f"{self._tagged(name)}:queued:{name}"

    def healing(self) -> str:
        """Return the key that the worker has which looks after the schedules."""
        return f"{self.prefix}:{{0}}:healing"

    def paused(self) -> str:
        """Return the key of what is paused."""
        return f"{self.prefix}:{{0}}:paused"

    def complete_since(self) -> str:
        """Return the key that says since when the index is complete."""
        return f"{self.prefix}:{{0}}:complete-since"

    def _tagged(self, name: str) -> str:
        return f"{self.prefix}:{{{shard_of(name)}}}"

    def all_due(self, task: str | None = None, job: str | None = None) -> Iterator[str]:
        """Yield the keys of all shards' indexes."""
        return (self.due(shard, task, job) for shard in range(SHARDS))


def shard_of(name: str) -> int:
    """Return the number of the hash tag of a task id, a key or a job."""
    # A name may hold half of a surrogate pair, which strict UTF-8 refuses.
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % SHARDS


#: How many tasks of each shard are read at once.
PAGE: Final = 100

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
    """

    task: str | None = None
    key: str | None = None
    job: str | None = None
    due_after_ms: int | None = None
    due_before_ms: int | None = None

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
        return self.key is not None or (self.task is not None and self.job is not None)


class Pending(NamedTuple):
    """A tracked task that waits.

    Attributes:
        task_id: Its id.
        task: Its name.
        due: When it is due.
        key: The key that it was sent with; None if it has none.
        job: The job that it was sent with, likewise.
    """

    task_id: str
    task: str
    due: datetime
    key: str | None
    job: str | None


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
        key = self.names.complete_since()
        now = milliseconds_of(wall_clock.now())

        _, since = self.store.commands(lambda pipe: (pipe.set(key, now, nx=True), pipe.get(key)))
        return instant_of(int(since))

    def pending(self, wanted: Filter) -> Iterator[Pending]:
        """Yield the tasks in the order in which they are due, reading some at a time."""
        page: list[tuple[int, str]] = []
        for each in self._due(wanted):
            page.append(each)
            if len(page) == PAGE:
                yield from self._records(page, wanted)
                page = []
        yield from self._records(page, wanted)

    def tasks(self, task_ids: Sequence[str]) -> list[Pending]:
        """Return those of some tasks that are tracked and wait."""
        found = []
        records = self._fields(task_ids, "name", "key", "job", "due", "not_before")
        for task_id, (name, key, job, due, later) in zip(task_ids, records, strict=True):
            if name is not None:
                due_ms = max(int(due), int(later or 0))
                found.append(Pending(task_id, name, instant_of(due_ms), key or None, job or None))
        return found

    def messages(self, task_ids: Sequence[str]) -> list[str | None]:
        """Return what it takes to send tasks anew.

        None for those that do not wait any more or are not tracked, empty if it is not known.
        """
        names = [self.names.message(task_id) for task_id in task_ids]
        return self.store.commands(lambda pipe: [pipe.get(name) for name in names])

    def short_messages(self, task_ids: Sequence[str]) -> list[str]:
        """Return the same of those that take at most :data:`SHORT` bytes; empty for all others."""
        names = [self.names.message(task_id) for task_id in task_ids]
        found = self.store.commands(lambda pipe: [pipe.getrange(name, 0, SHORT) for name in names])
        return [each if len(each) <= SHORT else "" for each in found]

    def count(self, wanted: Filter) -> int:
        """Return how many tasks wait."""
        if wanted.needs_records:
            return sum(1 for _ in self.pending(wanted))
        scores = wanted.scores(self.least_ms())
        names = self.names.all_due(wanted.task, wanted.job)
        counts = self.store.commands(lambda pipe: [pipe.zcount(name, *scores) for name in names])
        return sum(counts)

    def counts_before(self, instants_ms: Sequence[int]) -> list[int]:
        """Return how many tasks are due before each of some instants, in one round trip."""
        least_ms, names = self.least_ms(), [*self.names.all_due()]
        counts = self.store.commands(
            lambda pipe: [
                pipe.zcount(name, least_ms, f"({each}") for each in instants_ms for name in names
            ]
        )
        return [sum(counts[start : start + SHARDS]) for start in range(0, len(counts), SHARDS)]

    def forecast(self, wanted: Filter, start_ms: int, step_ms: int) -> Iterator[tuple[int, int]]:
        """Yield for each step in which tasks are due its start in milliseconds, and how many.

        Args:
            wanted: Which tasks.
            start_ms: The start of the first step. What is due earlier counts as due in that step.
            step_ms: The length of a step.
        """
        begin, count = start_ms, 0
        for due_ms in self._due_times(wanted):
            of_this = start_ms + max(due_ms - start_ms, 0) // step_ms * step_ms
            if of_this != begin:
                if count:
                    yield begin, count
                begin, count = of_this, 0
            count += 1
        if count:
            yield begin, count

    def least_ms(self) -> int:
        """Return when a task that still waits was due at the earliest, as far as tasks come."""
        now_ms, paused_ms = milliseconds_of(wall_clock.now()), self.paused_since_ms()
        return min(now_ms, now_ms if paused_ms is None else paused_ms) - self.margin_ms

    def _due_times(self, wanted: Filter) -> Iterator[int]:
        if wanted.needs_records:
            return (milliseconds_of(each.due) for each in self.pending(wanted))
        return (due_ms for due_ms, _ in self._due(wanted))

    def _due(self, wanted: Filter) -> Iterator[tuple[int, str]]:
        """Yield due times and ids in order; each shard is read page by page."""
        names = self.names.all_due(wanted.task, None if wanted.task else wanted.job)
        shards = [self._shard(name, wanted) for name in names]
        return heapq.merge(*shards)

    def _shard(self, name: str, wanted: Filter) -> Iterator[tuple[int, str]]:
        least_ms, _ = wanted.scores(self.least_ms())
        (rank,) = self.store.commands(
            lambda pipeline: pipeline.zcount(name, "-inf", f"({least_ms}")
        )
        last: tuple[float, str] = (least_ms - 0.5, "")
        overlap = 1
        while True:
            # Tasks that have arrived meanwhile shift the ranks of those behind them: so each page
            # begins with a task that was read before, or is read again from further back.
            start = max(rank - overlap, 0)
            page = self._page(name, start, rank + PAGE)
            if start and (not page or page[0] > last):
                overlap *= PAGE
                continue
            for each in page:
                if wanted.due_before_ms is not None and each[0] >= wanted.due_before_ms:
                    return
                if each > last:
                    last = each
                    yield each
            if len(page) < rank + PAGE - start:
                return
            rank, overlap = start + len(page), 1

    def _page(self, name: str, start: int, end: int) -> list[tuple[int, str]]:
        """Return the tasks of these ranks."""
        (found,) = self.store.commands(
            lambda pipeline: pipeline.zrange(name, start, end - 1, withscores=True)
        )
        return [(int(score), task_id) for task_id, score in found]

    def _records(self, page: list[tuple[int, str]], wanted: Filter) -> Iterator[Pending]:
        if not page:
            return
        records = self._fields([task_id for _, task_id in page], "name", "key", "job")
        for (due_ms, task_id), (name, key, job) in zip(page, records, strict=True):
            if name is None:
                continue  # it has arrived meanwhile
            if wanted.key not in (None, key) or wanted.job not in (None, job):
                continue
            yield Pending(task_id, name, instant_of(due_ms), key or None, job or None)

    def _fields(self, task_ids: Sequence[str], *fields: str) -> list[list[Any]]:
        """Return fields of the records of tasks."""
        names = [self.names.task(task_id) for task_id in task_ids]
        return self.store.commands(lambda pipe: [pipe.hmget(name, *fields) for name in names])
