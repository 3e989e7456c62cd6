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

#: How many tasks are postponed between two words about the progress.
BATCH: Final = 50

#: What is said of each outcome.
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
            fewer tasks than asked for, or none: :data:`MOST_READ` were read for it.
    """

    tasks: list[Pending]
    next: Place | None


def search(delays: RabbitDelay, wanted: Filter, most: int, after: Place | None = None) -> Found:
    """Return tracked tasks that wait, the next one first, without reading all of them.

    Args:
        delays: The application's delays.
        wanted: Which tasks.
        most: At most so many.
        after: Where to begin; None: at the first one.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    registry = delays.registry
    if wanted.key is not None:  # a key has one task that waits
        tasks = registry.index.tasks(registry.waiting_under(wanted.key))
        return Found([each for each in tasks if matches(each, wanted)], None)
    # The index of the task's name; the job is looked at here, so that the reading can end early.
    indexed = wanted._replace(job=None) if wanted.needs_records else wanted
    if after is not None:
        begin = max(wanted.due_after_ms or after.due_ms, after.due_ms)
        indexed = indexed._replace(due_after_ms=begin)
    tasks, last = [], after
    for read, each in enumerate(registry.index.pending(indexed), 1):
        place = Place(milliseconds_of(each.due), each.task_id)
        if after is not None and place <= after:
            continue
        if len(tasks) == most or read > MOST_READ:
            return Found(tasks, last)
        last = place
        if matches(each, wanted):
            tasks.append(each)
    return Found(tasks, None)


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
    found = search(delays, wanted, MOST_READ)
    return len(found.tasks), found.next is not None


def postpone_batches(
    delays: RabbitDelay, wanted: Filter, due: datetime, limit: int
) -> Iterator[int]:
    """Let all tasks that match run at another time; yield how many after each batch.

    If a batch fails partway, those that were decided are told before the error is raised.

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
