"""Search the tracked tasks that wait, some at a time, and decide about all that match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.levels.headers import is_digits
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import Filter, Pending
from celery_rabbitdelay.registry.pauses import LATEST_MS

#: How many tasks one page of a search reads at most, where no index holds just those that match.
MOST_READ: Final = 5_000

#: Returns when a task is to run, by its id and when it is due; None if it stays as it is.
Until: TypeAlias = Callable[[str, datetime], "datetime | None"]


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
        return Found([each for each in tasks if wanted.matches(each)], None)
    tasks, last, read = list[Pending](), after, 0
    for part in registry.index.parts(wanted, after, MOST_READ):
        for each in part.tasks:
            if len(tasks) == most:
                return Found(tasks, last)
            last = Place(milliseconds_of(each.due), each.task_id)
            tasks.append(each)
        read, last = read + part.read, Place(*part.last)
    return Found(tasks, last if read >= MOST_READ else None)


def count_at_least(delays: RabbitDelay, wanted: Filter) -> tuple[int, bool]:
    """Return how many tasks a search finds, and whether there may be more.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    if not wanted.needs_records:
        return delays.registry.index.count(wanted), False
    found = search(delays, wanted, MOST_READ)
    return len(found.tasks), found.next is not None


def postpone_batches(delays: RabbitDelay, wanted: Filter, until: Until) -> Iterator[int]:
    """Let all tasks that match run at another time; yield how many after each batch.

    If a batch fails partway, the number of its decided tasks is yielded before the error is raised.

    Args:
        delays: The application's delays.
        wanted: Which tasks.
        until: When they run. A task that has moved in the order meanwhile may come up twice.

    Raises:
        InvalidDelay: A task would wait for too long.
        NotTracked: A task is to run earlier, and its message is not known.
        RegistryUnavailable: Redis does not answer.
    """
    for part in delays.registry.index.parts(wanted):
        done = 0
        try:
            for each in part.tasks:
                if (eta := until(each.task_id, each.due)) is not None:
                    outcome = delays.postpone(each.task_id, eta=eta, also_future=False)
                    done += outcome is Outcome.DONE
        except Exception:
            yield done  # before it says why the rest of the batch was not decided
            raise
        yield done


def all_at(instant: datetime) -> Until:
    """Return what lets all tasks run at one instant."""
    instant = instant_of(milliseconds_of(instant))
    return lambda _, due: None if due == instant else instant


def each_by(delay: timedelta) -> Until:
    """Return what lets each task run that much later than it is due, or than now if it is late.

    A task that has moved comes up again at its new place in the order, and stays there.
    """
    moved = dict[str, datetime]()

    def until(task_id: str, due: datetime) -> datetime | None:
        while (passed := next(iter(moved), None)) is not None and moved[passed] < due:
            del moved[passed]  # in the order of due times, it does not come up again
        if task_id in moved:
            return None
        return moved.setdefault(task_id, max(due, wall_clock.now()) + delay)

    return until
