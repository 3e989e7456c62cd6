"""The route of a delayed message, explained: where it waits, for how long, and what comes next.

Pure: no broker is asked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.topology import Route, Topology


class Stop(NamedTuple):
    """A queue in which the message waits.

    Attributes:
        queue: The queue's name.
        ttl_ms: How long the message waits there each time, in milliseconds.
        times: How many times in a row: more than 1 only in meditation.
        next: The exchange that it is dead-lettered to.
    """

    queue: str
    ttl_ms: int
    times: int
    next: str


class ExplainedRoute(NamedTuple):
    """The whole route of a delayed message.

    Attributes:
        delay_ms: The delay that was asked for, in milliseconds; at least 0.
        total_ms: How long the message waits in all, in milliseconds: the delay, rounded up to
            ticks, or to fewer stops within the tolerance, and 1 ms for each pass-through queue.
        destination: The queue that gets the message when it is due.
        published: How the producer publishes it.
        entered: How it enters the levels. Above the capacity, check-in publishes it there after
            meditation; otherwise it is the same as ``published``.
        stops: The queues in which the message waits, in order; meditation comes first.
        delivery: The exchange that hands it to its destination.
        capacity_ms: The largest delay of one pass through the levels, in milliseconds.
    """

    delay_ms: int
    total_ms: int
    destination: str
    published: Route
    entered: Route
    stops: tuple[Stop, ...]
    delivery: str
    capacity_ms: int

    @property
    def meditations(self) -> int:
        """How many times the message passes through meditation, the overflow loop."""
        return self.stops[0].times if self.published.exchange != self.entered.exchange else 0


def explain(
    topology: Topology,
    delay: Delay,
    destination: str,
    *,
    tolerance: Delay = 0,
    task_id: str = "",
) -> ExplainedRoute:
    """Return the route of a message, meditation included.

    After meditation, check-in computes the remaining delay from the due time, so a message that had
    to wait for check-in skips as much of the levels.

    Args:
        topology: The topology, declared or not.
        delay: Seconds, or a timedelta; rounded up to ticks.
        destination: The name of the queue that gets the message when it is due.
        tolerance: Seconds, or a timedelta, that it may arrive later if that saves stops. Not used
            above the capacity.
        task_id: With several shards, it determines the shard.

    Raises:
        InvalidDelay: The delay or the tolerance is invalid.
    """
    layout, modules = topology.layout, topology.module_queues
    delay_ms = max(milliseconds(delay), 0)
    published = topology.route(delay, destination, task_id, tolerance)
    arguments = {queue.name: queue.queue_arguments or {} for queue in topology.queues}
    loop_ms: int = arguments[modules.meditation.name]["x-message-ttl"]
    times = -(-max(delay_ms - layout.capacity_ms, 0) // loop_ms)
    entered, stops = published, list[Stop]()
    if times:
        rest = timedelta(milliseconds=delay_ms - times * loop_ms)
        entered = topology.route(rest, destination, task_id)
        stops.append(Stop(modules.meditation.name, loop_ms, times, modules.meditated.name))
    for name in entered.stops:
        own = arguments[name]
        stops.append(Stop(name, own["x-message-ttl"], 1, own["x-dead-letter-exchange"]))
    return ExplainedRoute(
        delay_ms,
        sum(stop.ttl_ms * stop.times for stop in stops),
        destination,
        published,
        entered,
        tuple(stops),
        topology.delivery.name,
        layout.capacity_ms,
    )
