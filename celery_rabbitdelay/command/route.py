"""``celery rabbitdelay route``: where a delayed task would wait. Asks no broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from typing import Any, NamedTuple

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import delays_of, json_option
from celery_rabbitdelay.command.topology_options import delay_type, topology_of, topology_options
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.delay_text import TAKES, written
from celery_rabbitdelay.levels.topology import Route, Topology


@click.command(epilog=f"DELAY {TAKES}.")
@click.argument("delay", type=delay_type)
@click.option("-Q", "--queue", help="The task's queue; the application's default queue if omitted.")
@click.option(
    "--tolerance",
    type=delay_type,
    default="0",
    help="How much later it may arrive, if that saves stops; written like DELAY.",
)
@click.option("--task-id", default="", help="With several shards, it determines the shard.")
@topology_options
@json_option
@click.pass_obj
def route(
    context: CLIContext,
    /,
    delay: Fraction,
    queue: str | None,
    tolerance: Fraction,
    task_id: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Show in which queues a task waits that is sent with a DELAY. No broker is asked."""
    topology = topology_of(context, options)
    destination = context.app.conf.task_default_queue if queue is None else queue
    if not destination:
        raise click.UsageError("--queue '': takes the name of a queue")
    found = explain(topology, delay, destination, tolerance=tolerance, task_id=task_id)
    if as_json:
        click.echo(json.dumps(_as_json(topology, destination, found)))
        return
    has_checkin = "check-in" in delays_of(context).settings.modules
    words = _words(topology, destination, found, has_checkin)
    click.echo("\n".join([*words, "", *_table(destination, found)]))


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
        meditations: How many times the message passes through meditation, the overflow loop.
        published: How the producer publishes it.
        entered: How it enters the levels. Above the capacity, check-in publishes it there after
            meditation; otherwise it is the same as ``published``.
        stops: The queues in which the message waits, in order; meditation comes first.
    """

    delay_ms: int
    meditations: int
    published: Route
    entered: Route
    stops: tuple[Stop, ...]

    @property
    def total_ms(self) -> int:
        """How long the message waits in all.

        This is the delay, rounded up to ticks, or to fewer stops within the tolerance, and 1 ms for
        each pass-through queue.
        """
        return sum(stop.ttl_ms * stop.times for stop in self.stops)


def explain(
    topology: Topology,
    delay: Delay,
    destination: str,
    *,
    tolerance: Delay = 0,
    task_id: str = "",
) -> ExplainedRoute:
    """Return the route of a message, meditation included; no broker is asked.

    After meditation, check-in computes the remaining delay from the due time, so a message that had
    to wait for check-in skips as much of the levels. The tolerance is not used above the capacity.
    See :meth:`.Topology.route` for the arguments.

    Raises:
        InvalidDelay: The delay or the tolerance is invalid.
    """
    queues = {queue.name: queue.queue_arguments or {} for queue in topology.queues}
    loop = topology.module_queues.meditation.name
    delay_ms = max(milliseconds(delay), 0)
    published = entered = topology.route(delay, destination, task_id, tolerance)
    loop_ms: int = queues[loop]["x-message-ttl"]
    times = -(-max(delay_ms - topology.layout.capacity_ms, 0) // loop_ms)
    if times:
        rest = timedelta(milliseconds=delay_ms - times * loop_ms)
        entered = topology.route(rest, destination, task_id)
    waits = [*([(loop, times)] if times else []), *((name, 1) for name in entered.stops)]
    stops = (
        Stop(name, queues[name]["x-message-ttl"], count, queues[name]["x-dead-letter-exchange"])
        for name, count in waits
    )
    return ExplainedRoute(delay_ms, times, published, entered, tuple(stops))


def _as_json(topology: Topology, destination: str, found: ExplainedRoute) -> dict[str, Any]:
    published, entered = (
        {"exchange": each.exchange, "routing_key": each.routing_key}
        for each in (found.published, found.entered)
    )
    return {
        "delay_ms": found.delay_ms,
        "total_ms": found.total_ms,
        "destination": destination,
        "layout": topology.layout.name,
        "capacity_ms": topology.layout.capacity_ms,
        "meditations": found.meditations,
        "published": published,
        "entered": entered,
        "stops": [stop._asdict() for stop in found.stops],
        "delivery": topology.delivery.name,
    }


def _words(
    topology: Topology, destination: str, found: ExplainedRoute, has_checkin: bool
) -> Iterator[str]:
    """The route in sentences."""
    waits = written(found.total_ms)
    if found.total_ms != found.delay_ms:
        waits += f" ({written(found.delay_ms)}, rounded up)"
    stops = sum(stop.times for stop in found.stops)
    yield f"{waits} to the queue {destination}: {stops} stop{'s' if stops != 1 else ''}"
    yield (
        f"The producer publishes to the exchange {found.published.exchange} "
        f"with the routing key {found.published.routing_key}"
    )
    if found.meditations:
        times = "once" if found.meditations == 1 else f"{found.meditations:,} times"
        yield (
            f"The delay is above the capacity of {written(topology.layout.capacity_ms)}, so the "
            f"message meditates: it waits {written(found.stops[0].ttl_ms)} in "
            f"{found.stops[0].queue} {times}. Then check-in publishes it to "
            f"{found.entered.exchange} with the routing key {found.entered.routing_key}"
        )
        if not has_checkin:
            yield "rabbitdelay_modules lacks 'check-in', so producers refuse the delay"
    yield f"When it is due, {topology.delivery.name} hands it to the queue {destination}"


def _table(destination: str, found: ExplainedRoute) -> Iterator[str]:
    rows = [("stop", "queue", "waits", "goes on to")]
    for number, stop in enumerate(found.stops, start=1):
        times = f"{stop.times:,} x " if stop.times > 1 else ""
        rows.append((str(number), stop.queue, f"{times}{written(stop.ttl_ms)}", stop.next))
    rows.append(("due", destination, "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
