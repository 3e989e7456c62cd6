"""``celery rabbitdelay route``: where a delayed task would wait. Asks no broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.command.context import delays_of, json_option
from celery_rabbitdelay.command.topology_options import delay_type, topology_of, topology_options
from celery_rabbitdelay.levels.delay_text import TAKES, written
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.route import ExplainedRoute, explain

#: The module that brings a message back from meditation.
CHECK_IN: Final = "check-in"


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
        click.echo(json.dumps(_as_json(topology, found)))
        return
    served = CHECK_IN in delays_of(context).settings.modules
    click.echo("\n".join([*_words(found, served), "", *_table(found)]))


def _as_json(topology: Topology, found: ExplainedRoute) -> dict[str, Any]:
    return {
        "delay_ms": found.delay_ms,
        "total_ms": found.total_ms,
        "destination": found.destination,
        "layout": topology.layout.name,
        "capacity_ms": found.capacity_ms,
        "meditations": found.meditations,
        "published": {
            "exchange": found.published.exchange,
            "routing_key": found.published.routing_key,
        },
        "entered": {"exchange": found.entered.exchange, "routing_key": found.entered.routing_key},
        "stops": [stop._asdict() for stop in found.stops],
        "delivery": found.delivery,
    }


def _words(found: ExplainedRoute, is_checkin_served: bool) -> Iterator[str]:
    """The route in sentences."""
    waits = written(found.total_ms)
    if found.total_ms != found.delay_ms:
        waits += f" ({written(found.delay_ms)}, rounded up)"
    stops = sum(stop.times for stop in found.stops)
    yield f"{waits} to the queue {found.destination}: {stops} stop{'s' if stops != 1 else ''}"
    yield (
        f"The producer publishes to the exchange {found.published.exchange} "
        f"with the routing key {found.published.routing_key}"
    )
    if found.meditations:
        times = "once" if found.meditations == 1 else f"{found.meditations:,} times"
        yield (
            f"The delay is above the capacity of {written(found.capacity_ms)}, so the message "
            f"meditates: it waits {written(found.stops[0].ttl_ms)} in {found.stops[0].queue} "
            f"{times}. Then check-in publishes it to {found.entered.exchange} with the routing key "
            f"{found.entered.routing_key}"
        )
        if not is_checkin_served:
            yield (
                f"rabbitdelay_modules lacks {CHECK_IN!r}: this application's producers refuse the "
                "delay"
            )
    yield f"When it is due, {found.delivery} hands it to the queue {found.destination}"


def _table(found: ExplainedRoute) -> Iterator[str]:
    rows = [("stop", "queue", "waits", "goes on to")]
    for number, stop in enumerate(found.stops, start=1):
        times = f"{stop.times:,} x " if stop.times > 1 else ""
        rows.append((str(number), stop.queue, f"{times}{written(stop.ttl_ms)}", stop.next))
    rows.append(("due", found.destination, "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
