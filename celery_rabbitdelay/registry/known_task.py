"""What is known of one task that waits: by its record and its message, in the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.registry.record import Record, TaskState, record_of
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.stored_message import restored, tolerance_of

#: Celery's headers that say how a task is shown.
SHOWN: Final = ("shadow", "argsrepr", "kwargsrepr")

#: Milliseconds that a message may take to the broker, or from one queue to the next.
SLACK_MS: Final = 2000


class Said(NamedTuple):
    """What the stored message of a tracked task says; None where it does not.

    Attributes:
        shadow: The name under which Celery shows the task, if that is another one than its own.
        args, kwargs, queue, exchange, routing_key, priority: See :class:`KnownTask`.
        tolerance_ms: How many milliseconds later it may arrive.
    """

    shadow: str | None = None
    args: str | None = None
    kwargs: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    tolerance_ms: int | None = None

    @classmethod
    def by(cls, message: str | None) -> Said:
        """Read a message as the registry has it; empty or None if it is not known."""
        if not message:
            return cls()
        try:
            waiting, tolerance_ms = restored(message, "").message, tolerance_of(message)
        except Exception:  # noqa: BLE001 - of a task whose message cannot be read the rest is shown
            return cls()
        headers, others = waiting.headers, waiting.headers.others
        shadow, args, kwargs = (others.get(each) or None for each in SHOWN)
        where = headers.queue, headers.exchange, headers.routing_key
        priority = headers.priority or waiting.properties.get("priority")
        return cls(shadow, args, kwargs, *where, priority, tolerance_ms)


@dataclass(frozen=True)
class KnownTask:
    """A task as the registry and the broker know it now; None where they know nothing.

    Attributes:
        task_id: Its id.
        state: ``waiting``, ``arrived`` (at a worker), ``cancelled``, ``superseded``, or ``noted``
            (it was postponed before anything else was known of it).
        due: When it is due, if it waits.
        postponed: Until when it was postponed.
        sent: When it was sent, if it is tracked and waits.
        key: The key that it was sent with, if it waits.
        job: The job that it was sent with. This, and what follows, is known of tracked tasks that
            wait.
        job_state: ``open``, ``committed`` or ``aborted``; None if there is no such job any more.
        task: Its name.
        args: Its positional arguments as text: Celery's ``argsrepr``.
        kwargs: Its keyword arguments, likewise.
        queue: The queue that gets it when it is due; None if the exchange routes it.
        exchange: The exchange that it would have been published to without a delay.
        routing_key: The routing key that it would have been published with.
        priority: Its priority.
        may_be_in: If it waits, the queues in which its message may be, as ``status`` names them,
            and how many messages each has, without those that are empty. Of a tracked task it is
            one, or two when it goes from one to the next, by when it was sent, its due time and
            the layout; of others, all that last so long. Once it is due, it may have left them.
        missing: If it waits, the queues of the levels and modules that the broker does not have.
    """

    task_id: str
    state: str
    due: datetime | None
    postponed: datetime | None
    sent: datetime | None
    key: str | None
    job: str | None
    job_state: str | None
    task: str | None
    args: str | None
    kwargs: str | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    priority: int | None
    may_be_in: Mapping[str, int]
    missing: tuple[str, ...]


def known_task(
    registry: Registry, task_id: str, layout: Layout, backlog: Callable[[], Backlog]
) -> KnownTask | None:
    """Return what is known of a task; None if that is nothing.

    Args:
        registry: The registry.
        task_id: Its id.
        layout: The levels in which it waits.
        backlog: Asks the broker what waits in them; called if the task waits.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record of the task or of its job cannot be
            read.
    """
    record = record_of(registry, task_id)
    if record is None:
        return None
    said = Said.by(registry.index.messages([task_id])[0])
    job = registry.jobs.state(record.job) if record.job else None
    known_ms = [each for each in (record.due_ms, record.postponed_ms) if each is not None]
    waits = record.state is TaskState.WAITING
    found = backlog() if waits else None
    tolerance_ms = said.tolerance_ms
    if record.due_ms is not None and (record.postponed_ms or 0) > record.due_ms <= wall_clock.ms():
        # Its message was put back for the rest when the first due time came.
        record = record._replace(sent_ms=record.due_ms, due_ms=record.postponed_ms)
        tolerance_ms = 0
    return KnownTask(
        task_id,
        record.state.value,
        instant_of(max(known_ms)) if waits else None,
        _instant(record.postponed_ms),
        _instant(record.sent_ms),
        record.key,
        record.job,
        None if job is None else job.value,
        said.shadow or record.name,
        said.args,
        said.kwargs,
        said.queue,
        said.exchange,
        said.routing_key,
        said.priority,
        {} if found is None else dict(_may_be_in(layout, record, tolerance_ms, found)),
        () if found is None else found.missing,
    )


def _instant(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else instant_of(at_ms)


def _may_be_in(
    layout: Layout, record: Record, tolerance_ms: int | None, backlog: Backlog
) -> Iterator[tuple[str, int]]:
    """Yield the queues in which a message may be, and their messages; see :class:`KnownTask`."""
    due_ms, now_ms = record.due_ms or 0, wall_clock.ms()
    others = [CHECK_IN, "meditation"]
    digits = layout.may_wait_in(due_ms - now_ms)
    if record.sent_ms is not None and tolerance_ms is not None:
        delay_ms, passed_ms = due_ms - record.sent_ms, now_ms - record.sent_ms
        # If it is late, something has put it back.
        if delay_ms <= layout.capacity_ms and passed_ms <= delay_ms + tolerance_ms + SLACK_MS:
            others, digits = [], layout.waits_in(delay_ms, passed_ms, tolerance_ms, SLACK_MS)
    if due_ms <= now_ms:
        others += [DISTRIBUTE, "paused"]
    for name in others:
        if (counts := backlog.others.get(name)) and counts.messages:
            yield name, counts.messages
    for level, digit in digits:
        if messages := backlog.digits[level.name].get(digit):
            yield level.queue_name(digit), messages
