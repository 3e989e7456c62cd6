"""Search the tracked tasks that wait, some at a time, and decide about all that match."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Final, NamedTuple, Self

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.levels.headers import is_digits
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import Filter, Pending
from celery_rabbitdelay.registry.pauses import LATEST_MS

#: How many tasks one page of a search reads at most, where no index holds just those that match.
MOST_READ: Final = 20_000

#: The same if each task's record is read, for the start of its key.
MOST_RECORDS: Final = 5_000

#: How many tasks are postponed between two words about the progress.
BATCH: Final = 50

#: How each outcome is shown to people.
WORDS: Final = {
    Outcome.DONE: "done",
    Outcome.NOTED: "noted; nothing is known of it, and it may have arrived at a worker already",
    Outcome.UNKNOWN: "unknown: nothing waits under it",
    Outcome.RELEASED: "it has arrived at a worker already",
    Outcome.CANCELLED: "it was cancelled or superseded before",
}


class Place(NamedTuple):
    """A place in the order of the tasks that wait: behind one of them.

    Attributes:
        due_ms: When that task is due, in milliseconds since 1970-01-01 UTC.
        task_id: Its id.
    """

    due_ms: int
    task_id: str

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Read what ``str`` returns; None if it is something else."""
        due_ms, colon, task_id = text.partition(":")
        return cls(int(due_ms), task_id) if colon and is_digits(due_ms, LATEST_MS) else None

    def __str__(self) -> str:
        return f"{self.due_ms}:{self.task_id}"


class Found(NamedTuple):
    """One page of a search.

    Attributes:
        tasks: The tasks, the next one first.
        next: Where the next page begins; None if this is the last one. With it, a page may have
            fewer tasks than asked for, or none: as many were read for it as are read at once.
    """

    tasks: list[Pending]
    next: Place | None


def search(
    delays: RabbitDelay,
    wanted: Filter,
    most: int,
    after: Place | None = None,
    key_start: str | None = None,
) -> Found:
    """Return tracked tasks that wait, the next one first, without reading all of them.

    Args:
        delays: The application's delays.
        wanted: Which tasks.
        most: At most so many.
        after: Where to begin; None: at the first one.
        key_start: What their keys begin with; None: anything, and tasks without a key.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    registry = delays.registry
    if wanted.key is not None:  # a key has one task that waits
        tasks = registry.index.tasks(registry.waiting_under(wanted.key))
        return Found([each for each in tasks if matches(each, wanted)], None)
    tasks, last, read = list[Pending](), after, 0
    bound = MOST_READ if key_start is None else min(MOST_RECORDS, MOST_READ)
    for part in registry.index.parts(wanted, after, bound):
        for each in part.tasks:
            if key_start is not None and (each.key is None or not each.key.startswith(key_start)):
                continue
            if len(tasks) == most:
                return Found(tasks, last)
            last = Place(milliseconds_of(each.due), each.task_id)
            tasks.append(each)
        read, last = read + part.read, Place(*part.last)
    return Found(tasks, last if read >= bound else None)


def matches(task: Pending, wanted: Filter) -> bool:
    """Return whether a task is one of those that a filter wants."""
    due_ms = milliseconds_of(task.due)
    return (
        wanted.task in (None, task.task)
        and wanted.key in (None, task.key)
        and wanted.job in (None, task.job)
        and due_ms >= (wanted.due_after_ms or due_ms)
        and (wanted.due_before_ms is None or due_ms < wanted.due_before_ms)
    )


def count_at_least(delays: RabbitDelay, wanted: Filter) -> tuple[int, bool]:
    """Return how many tasks a search finds, and whether there may be more.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    if not wanted.needs_records:
        return delays.registry.index.count(wanted), False
    if wanted.key is None:
        return delays.registry.index.count_of_both(wanted, MOST_READ)
    return len(search(delays, wanted, 1).tasks), False


def postpone_batches(
    delays: RabbitDelay, wanted: Filter, due: datetime, limit: int
) -> Iterator[int]:
    """Let all tasks that match run at another time; yield how many after each batch.

    If a batch fails partway, the number of its decided tasks is yielded before the error is raised.

    Args:
        delays: The application's delays.
        wanted: Which tasks.
        due: When they run; none of them twice, although they move in the order meanwhile.
        limit: At most so many, the next ones.

    Raises:
        NotTracked: A task is to run earlier, and its message is not known.
        RegistryUnavailable: Redis does not answer.
    """
    moved_to = instant_of(milliseconds_of(due))
    waiting = (each for each in delays.registry.index.pending(wanted) if each.due != moved_to)
    tasks = islice(waiting, limit)
    while batch := list(islice(tasks, BATCH)):
        done = 0
        try:
            for each in batch:
                outcome = delays.postpone(each.task_id, eta=moved_to, also_future=False)
                done += outcome is Outcome.DONE
        except Exception:
            yield done  # before it says why the rest of the batch was not decided
            raise
        yield done
