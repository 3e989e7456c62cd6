"""What waits where, what comes due next, and what the workers' modules do: one look at it all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from kombu import Connection

from celery_rabbitdelay.app.control import ARRIVALS, status_of_workers
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.undeliverable.messages import undeliverable_messages
from celery_rabbitdelay.publishing.backlog import Backlog, backlog_of
from celery_rabbitdelay.registry.pauses import Paused

#: Characters of a reason. It may come from a header, which any client can write.
MAX_REASON_LENGTH: Final = 200


class Status(NamedTuple):
    """One look at a topology.

    Attributes:
        taken_at: When, in seconds of :func:`time.monotonic`.
        backlog: How many messages wait in which queue.
        workers: What each worker answers, by its name.
        due_within_ms: Some message comes due within this many milliseconds, as the depths of the
            queues show; None if nothing waits. It may be much earlier: a queue does not show how
            long its first message has waited.
        next_due: The due time of the next task that the registry tracks; None if there is none, or
            no registry.
        paused: The due tasks that wait until they are resumed.
        registry_error: Why the registry could not be asked; None if it could, or there is none.
        is_blocked: Whether the broker blocks publishers; then the workers are not asked.
        reasons: How many messages are undeliverable for each reason, the most frequent first; None
            if they were not read.
    """

    taken_at: float
    backlog: Backlog
    workers: Mapping[str, Mapping[str, Any]]
    due_within_ms: int | None = None
    next_due: datetime | None = None
    registry_error: str | None = None
    paused: Sequence[Paused] = ()
    reasons: Mapping[str, int] | None = None
    is_blocked: bool = False


def status_of(
    delays: RabbitDelay, connection: Connection, timeout: float = 1.0, most_reasons: int = 0
) -> Status:
    """Look at the topology of an application; nothing is declared or changed.

    Args:
        delays: The application's delays.
        connection: The broker that tasks are sent to.
        timeout: Seconds to wait for the workers' answers; 0: they are not asked.
        most_reasons: How many undeliverable messages are read at most. All of them stay.

    Raises:
        kombu.exceptions.OperationalError: The broker cannot be reached.
        amqp.exceptions.AMQPError: It refuses to answer.
    """
    topology = delays.topology
    backlog = backlog_of(connection, topology)
    taken_at = time.monotonic()
    reasons = None
    if most_reasons and topology.module_queues.undeliverable.name not in backlog.missing:
        messages = undeliverable_messages(connection, topology, most_reasons)
        counts = Counter(_printable(message.found.reason) for message in messages)
        reasons = dict(counts.most_common())
    is_blocked, workers = delays.is_blocked(), {}
    if timeout and not is_blocked:  # they are asked by messages
        workers = status_of_workers(delays.app, connection, timeout)
    next_due, registry_error, paused = None, None, []
    if delays.has_registry:
        try:
            # An overdue task in the list has lost its message, or is about to arrive.
            first = next(delays.pending(due_after=wall_clock.now()), None)
            next_due, paused = first and first.due, delays.paused()
        except (RegistryUnavailable, OSError) as error:
            registry_error = str(error)
    return Status(
        taken_at,
        backlog,
        workers,
        due_within(topology, backlog),
        next_due,
        registry_error,
        paused,
        reasons,
        is_blocked,
    )


def due_within(topology: Topology, backlog: Backlog) -> int | None:
    """Return the milliseconds within which some message comes due; None if nothing waits.

    A message in the queue of a digit waits for that digit at most, and then at most for the largest
    digits of all lower levels.
    """
    return min((within_ms for within_ms, _ in _bounds(topology, backlog)), default=None)


def due_at_least(topology: Topology, backlog: Backlog, within_ms: int) -> int:
    """Return how many messages come due within some milliseconds, at least.

    These are the messages in queues that they cannot stay in, and behind, for longer. Of all other
    queues, nobody knows how long their messages have waited.
    """
    return sum(messages for bound, messages in _bounds(topology, backlog) if bound <= within_ms)


def _bounds(topology: Topology, backlog: Backlog) -> Iterator[tuple[int, int]]:
    """Yield for each queue that is not empty how long its messages wait at most, and their number.

    The time is in milliseconds.
    """
    layout = topology.layout
    for level in layout.levels:
        for digit, messages in backlog.digits[level.name].items():
            if messages:
                yield (digit + 1) * level.place_ms - layout.tick_ms, messages
    meditating = backlog.others.get("meditation")
    if meditating is not None and meditating.messages:
        loop = topology.module_queues.meditation.queue_arguments or {}
        yield loop["x-message-ttl"] + layout.capacity_ms, meditating.messages


def rates_between(before: Status, after: Status) -> dict[str, float]:
    """Return by how much each level and module queue has grown a second between two looks.

    The key :data:`.ARRIVALS` has the delayed tasks that workers have received in a second; workers
    that did not answer both times are left out.
    """
    seconds = max(after.taken_at - before.taken_at, 1e-9)
    (depths, received), (later_depths, later_received) = map(_counts, (before, after))
    # A worker that has restarted counts from 0.
    arrived = sum(
        max(later_received[worker] - received[worker], 0)
        for worker in later_received.keys() & received
    )
    grown = {name: later_depths[name] - depths[name] for name in later_depths.keys() & depths}
    return {name: count / seconds for name, count in {**grown, ARRIVALS: arrived}.items()}


def _counts(status: Status) -> tuple[dict[str, int], dict[str, int]]:
    """Return the messages in each level and module queue, and those that each worker received."""
    others = {name: counts.messages for name, counts in status.backlog.others.items()}
    received = {
        worker: modules[ARRIVALS]["received"]
        for worker, modules in status.workers.items()
        if ARRIVALS in modules
    }
    return {**status.backlog.levels, **others}, received


def _printable(reason: str) -> str:
    text = "".join(each if each.isprintable() else "?" for each in reason)
    return text if len(text) <= MAX_REASON_LENGTH else f"{text[:MAX_REASON_LENGTH]}..."
