"""What waits where, what comes due next, and what the workers' modules do: one look at it all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kombu import Connection

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.generations import former_generations
from celery_rabbitdelay.operations.undeliverable import undeliverable_messages
from celery_rabbitdelay.publishing.backlog import Backlog, backlog_of
from celery_rabbitdelay.worker.status import ARRIVALS, status_of_workers

#: Characters of a reason. It may come from a header, which any client can write.
MAX_REASON_LENGTH: Final = 200


class NextDue(NamedTuple):
    """When the next task comes due.

    Attributes:
        tracked: The due time of the next task that the registry tracks; None if there is none, or
            no registry.
        within_ms: Some message comes due within so many milliseconds, as the depths of the queues
            tell; None if nothing waits. It may be much earlier: a queue does not tell for how long
            its first message has waited.
        registry_error: Why the registry could not be asked; None if it could, or there is none.
    """

    tracked: datetime | None
    within_ms: int | None
    registry_error: str | None = None


class Reasons(NamedTuple):
    """Why messages are in ``undeliverable``.

    Attributes:
        read: How many messages were read.
        counts: How many of them are there for each reason, the most frequent first.
    """

    read: int
    counts: Mapping[str, int]


class Status(NamedTuple):
    """One look at a topology.

    Attributes:
        taken_at: When, in seconds of :func:`time.monotonic`.
        backlog: How many messages wait in which queue.
        next_due: When the next task comes due.
        workers: What each worker answers, by its name.
        reasons: Why messages are undeliverable; None if not read.
        former_generations: How many messages wait in each former generation that is declared, by
            its number.
    """

    taken_at: float
    backlog: Backlog
    next_due: NextDue
    workers: Mapping[str, Mapping[str, Any]]
    reasons: Reasons | None = None
    former_generations: Mapping[int, int] = MappingProxyType({})


def status_of(
    delays: RabbitDelay, connection: Connection, timeout: float = 1.0, most_reasons: int = 0
) -> Status:
    """Look at the topology of an application; nothing is declared or changed.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        timeout: Seconds to wait for the workers' answers.
        most_reasons: How many undeliverable messages are read at most, see :func:`reasons_of`.

    Raises:
        kombu.exceptions.OperationalError: The broker cannot be reached.
        amqp.exceptions.AMQPError: It refuses to answer.
    """
    topology = delays.topology
    backlog = backlog_of(connection, topology)
    taken_at = time.monotonic()
    reasons = None
    if most_reasons and topology.module_queues.undeliverable.name not in backlog.missing:
        reasons = reasons_of(connection, topology, most_reasons)
    workers = status_of_workers(delays.app, connection, timeout)
    former = former_generations(connection, topology)
    return Status(taken_at, backlog, _next_due(delays, backlog), workers, reasons, former)


def next_due_within(topology: Topology, backlog: Backlog) -> int | None:
    """Return the milliseconds within which some message comes due; None if nothing waits.

    A message in the queue of a digit waits for that digit at most, and then at most for the largest
    digits of all lower levels.
    """
    layout = topology.layout
    bounds = [
        (digit + 1) * level.place_ms - layout.tick_ms
        for level in layout.levels
        for digit, messages in backlog.digits[level.name].items()
        if messages
    ]
    meditating = backlog.others.get("meditation")
    if meditating is not None and meditating.messages:
        loop = topology.module_queues.meditation.queue_arguments or {}
        bounds.append(loop["x-message-ttl"] + layout.capacity_ms)
    return min(bounds, default=None)


def reasons_of(connection: Connection, topology: Topology, limit: int) -> Reasons:
    """Count the reasons of the messages in ``undeliverable``; all of them stay there.

    Messages that are read, and not all of them, stand behind the others afterwards.

    Args:
        connection: The broker.
        topology: The topology.
        limit: How many messages are read at most, oldest first.
    """
    counts: Counter[str] = Counter()
    for message in undeliverable_messages(connection, topology, limit):
        counts[_printable(message.found.reason)] += 1
    return Reasons(counts.total(), dict(counts.most_common()))


def changes(before: Status, after: Status) -> dict[str, float]:
    """Return by how much each level and module queue has grown a second between two looks.

    The key :data:`.ARRIVALS` has the delayed tasks that workers have received in a second; workers
    that did not answer both times are left out.
    """
    seconds = max(after.taken_at - before.taken_at, 1e-9)
    depths = [
        {**each.backlog.levels, **{name: own.messages for name, own in each.backlog.others.items()}}
        for each in (before, after)
    ]
    rates = {
        name: (depths[1][name] - depths[0][name]) / seconds for name in depths[1].keys() & depths[0]
    }
    received = [
        {
            worker: own[ARRIVALS]["received"]
            for worker, own in each.workers.items()
            if ARRIVALS in own
        }
        for each in (before, after)
    ]
    # A worker that has restarted counts from 0.
    arrived = sum(
        max(received[1][worker] - received[0][worker], 0)
        for worker in received[1].keys() & received[0]
    )
    return {**rates, ARRIVALS: arrived / seconds}


def _next_due(delays: RabbitDelay, backlog: Backlog) -> NextDue:
    within_ms = next_due_within(delays.topology, backlog)
    if not delays.has_registry:
        return NextDue(None, within_ms)
    try:
        # An overdue task in the list has lost its message, or is about to arrive.
        first = next(delays.pending(due_after=datetime.now(UTC)), None)
    except (RegistryUnavailable, OSError) as error:
        return NextDue(None, within_ms, str(error))
    return NextDue(None if first is None else first.due, within_ms)


def _printable(reason: str) -> str:
    text = "".join(each if each.isprintable() else "?" for each in reason)
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}..."
