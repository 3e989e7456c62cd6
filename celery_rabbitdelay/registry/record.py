"""The record of one task, read without changing it."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.registry import Registry

#: The fields of a record, as ``shared.lua`` names them.
_FIELDS = ("cancelled", "ran", "waits", "due", "not_before", "order", "name", "key", "job", "sent")


class TaskState(Enum):
    """The state of a task in the registry."""

    #: It waits, or should have arrived by now.
    WAITING = "waiting"

    #: It has arrived at a worker; a retry of it would wait.
    ARRIVED = "arrived"

    #: It was cancelled.
    CANCELLED = "cancelled"

    #: A newer task was sent under its key.
    SUPERSEDED = "superseded"

    #: It was postponed before anything else was known of it.
    NOTED = "noted"


class Record(NamedTuple):
    """The record of a task.

    Attributes:
        state: Its state.
        due_ms: When the first of its messages is due, in milliseconds since 1970-01-01 UTC; None if
            that is not known.
        postponed_ms: Until when it was postponed, likewise.
        name: Its name, if it is tracked and waits.
        key: The key that it was sent with, if it waits.
        job: The job that it was sent with, if it is tracked and waits.
        sent_ms: When it was sent, likewise, in milliseconds since 1970-01-01 UTC.
    """

    state: TaskState
    due_ms: int | None
    postponed_ms: int | None
    name: str | None
    key: str | None
    job: str | None
    sent_ms: int | None


def record_of(registry: Registry, task_id: str) -> Record | None:
    """Return what is noted about a task; None if that is nothing.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record cannot be read.
    """
    (found,) = registry.index.fields([task_id], *_FIELDS)
    *numbers, name, key, job, sent = found
    if not any(numbers):
        return None
    cancelled, ran, waits, due, not_before, order = numbers
    newest = registry.newest_under(key)[0] if key else ""
    try:
        latest = max(int(ran or 0), _life(waits) if waits else 0)
        if cancelled and latest <= int(cancelled):
            state = TaskState.CANCELLED
        elif waits and newest and int(order) < int(newest):
            state = TaskState.SUPERSEDED
        elif waits:
            state = TaskState.WAITING
        else:
            state = TaskState.ARRIVED if ran else TaskState.NOTED
        due_ms = int(due) if waits else None
        postponed_ms = int(not_before) if not_before else None
        sent_ms = int(sent) if sent else None
    except (TypeError, ValueError) as error:
        reason = f"the record of task {task_id} cannot be read: {error}"
        raise RegistryUnavailable(reason) from error
    return Record(state, due_ms, postponed_ms, name, key, job, sent_ms)


def holder_of(registry: Registry, key: str, unique_ms: int) -> str | None:
    """Return the id of the task that keeps others under its key from being sent; None for none.

    That is the newest task under the key while it waits, unless it is later than a task that comes
    late can be: then it may have been lost, with its queue.

    Args:
        registry: The registry.
        key: The key.
        unique_ms: For how many milliseconds after it was sent it is that also when it has arrived.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record of the task cannot be read.
    """
    while True:
        order, task_id = registry.newest_under(key)
        record = record_of(registry, task_id) if task_id else None
        if record is None or record.state is not TaskState.SUPERSEDED:
            break  # otherwise another one has become the newest meanwhile
    if record is None or record.state not in (TaskState.WAITING, TaskState.ARRIVED):
        return None
    if unique_ms:
        # Both orders are the time of a send, in microseconds by the clock of Redis.
        (ticket,) = registry.ask([("", key)])
        if ticket.order < int(order) + unique_ms * 1000:
            return task_id
    if record.state is TaskState.ARRIVED or record.due_ms is None:
        return None
    due_ms = max(record.due_ms, record.postponed_ms or 0)
    return task_id if due_ms >= registry.index.least_ms() else None


def _life(attempt: str) -> int:
    """Return how often the task of an attempt was sent anew; -1 if its sender could not ask."""
    found = re.match(r"(\d+)\.", attempt)
    return int(found[1]) if found else -1
