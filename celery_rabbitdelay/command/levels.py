"""``celery rabbitdelay declare`` and ``route``: declare the levels, and show a delay's route."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from typing import Any

import click
from kombu.common import Broadcast

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels.delay import TAKES, Delay, duration_text, milliseconds
from celery_rabbitdelay.levels.topology import CHECK_IN, Topology
from celery_rabbitdelay.publishing import declaration


@shared.command()
@click.option(
    "--queues", "with_queues", is_flag=True, help="Also declare the queues of tasks, and bind them."
)
@click.option(
    "--dry-run", is_flag=True, help="Only list what is missing; exit with 1 if anything is."
)
@shared.topology_options()
def declare(with_queues: bool, dry_run: bool, **options: object) -> None:
    """Declare the levels on the broker, and list what was missing."""
    topology = shared.topology(options)
    # Each worker declares its own exclusive queues, and its own queue for a broadcast.
    queues = [
        queue
        for queue in (shared.app().amqp.queues.values() if with_queues else ())
        if not queue.exclusive and not isinstance(queue, Broadcast)
    ]
    with shared.broker() as connection:
        declaration.check_layout(connection, topology)
        missing = declaration.missing(connection, topology)
        counts = declaration.queue_counts(connection, queues)
        if not dry_run:
            declaration.declare(connection, topology)
            for queue in queues:
                declaration.declare_destination(connection, topology, queue)
    missing_queues = [name for name, found in counts.items() if found is None]
    bound = [] if dry_run else list(counts)
    verb = "are" if dry_run else "were"
    total = len(topology.all_exchanges) + len(topology.queues)
    named = f": {shared.first_of(missing)}" if missing else ""
    whole = f"{total} exchanges and queues of {topology.prefix}"
    lines = [f"{len(missing)} of {whole} {verb} missing{named}"]
    if not dry_run:
        lines.append(f"All of them exist now, with {len(topology.bindings)} bindings")
    for what, names in ((f"{verb} missing", missing_queues), ("are bound", bound)):
        if names:
            lines.append(f"{len(names)} queues of tasks {what}: {shared.first_of(names)}")
    found = {
        "prefix": topology.prefix,
        "fingerprint": topology.identity.fingerprint,
        "dry_run": dry_run,
        "missing": missing,
        "missing_queues": missing_queues,
        "bound": bound,
    }
    shared.answer(found, lines)
    if dry_run and (missing or missing_queues):
        raise SystemExit(shared.FAILED)


@shared.command(epilog=f"DELAY {TAKES}.")
@click.argument("delay", type=shared.delay_type)
@click.option("-Q", "--queue", help="The task's queue; the application's default queue if omitted.")
@click.option(
    "--tolerance",
    type=shared.duration_type,
    default="0",
    help="How late the task may arrive, if that saves stops.",
)
@click.option("--task-id", default="", help="Selects the shard, if there are several.")
@shared.topology_options()
def route(
    delay: Fraction, queue: str | None, tolerance: timedelta, task_id: str, **options: object
) -> None:
    """Show the queues in which a task with a DELAY waits, without connecting to the broker."""
    topology = shared.topology(options)
    destination = shared.app().conf.task_default_queue if queue is None else queue
    if not destination:
        raise click.UsageError("--queue is empty: pass the name of a queue")
    found = explain(topology, delay, destination, tolerance=tolerance, task_id=task_id)
    modules = shared.delays().settings.modules
    shared.answer(found, _lines(found, CHECK_IN in modules))


def explain(
    topology: Topology, delay: Delay, destination: str, *, tolerance: Delay = 0, task_id: str = ""
) -> dict[str, Any]:
    """Return the route of a message, meditation included, as the option ``--json`` prints it.

    After meditation, check-in computes the remaining delay from the due time, so a message that
    waited in check-in's queue waits less in the levels. The tolerance is not used above the
    capacity. See :meth:`.Topology.route` for the arguments.

    Raises:
        InvalidDelay: The delay or the tolerance is invalid.
    """
    layout = topology.layout
    queues = {queue.name: queue.queue_arguments or {} for queue in topology.queues}
    loop = topology.module_queues.meditation.name
    loop_ms: int = queues[loop]["x-message-ttl"]
    delay_ms = milliseconds(delay)
    published = entered = topology.route(delay, destination, task_id, tolerance)
    meditations = -(-max(delay_ms - layout.capacity_ms, 0) // loop_ms)
    waits = [(each, 1) for each in entered.stops]
    if meditations:
        rest = timedelta(milliseconds=delay_ms - meditations * loop_ms)
        entered = topology.route(rest, destination, task_id)
        waits = [(loop, meditations), *((each, 1) for each in entered.stops)]
    stops = [
        {
            "queue": name,
            "ttl_ms": queues[name]["x-message-ttl"],
            "times": times,
            "next": queues[name]["x-dead-letter-exchange"],
        }
        for name, times in waits
    ]
    return {
        "delay_ms": delay_ms,
        # The delay, rounded up to ticks, or to fewer stops within the tolerance, plus 1 ms for each
        # pass-through queue.
        "total_ms": sum(stop["ttl_ms"] * stop["times"] for stop in stops),
        "destination": destination,
        "layout": layout.name,
        "capacity_ms": layout.capacity_ms,
        "meditations": meditations,
        "published": {"exchange": published.exchange, "routing_key": published.routing_key},
        # Above the capacity, check-in publishes the message to this exchange after meditation.
        "entered": {"exchange": entered.exchange, "routing_key": entered.routing_key},
        "stops": stops,
        "delivery": topology.delivery.name,
    }


def _lines(found: dict[str, Any], has_checkin: bool) -> Iterator[str]:
    """Yield the route in sentences, and the table of its stops."""
    published, entered, queue = found["published"], found["entered"], found["destination"]
    waits = duration_text(found["total_ms"])
    if found["total_ms"] != found["delay_ms"]:
        waits += f" ({duration_text(found['delay_ms'])}, rounded up)"
    stops = sum(stop["times"] for stop in found["stops"])
    yield f"{waits} to the queue {queue}: {stops} stop{'s' if stops != 1 else ''}"
    yield (
        f"The producer publishes to the exchange {published['exchange']} "
        f"with the routing key {published['routing_key']}"
    )
    if found["meditations"]:
        yield (
            f"The delay is above the capacity of {duration_text(found['capacity_ms'])}, so the "
            f"message meditates first. Then check-in publishes it to {entered['exchange']} with "
            f"the routing key {entered['routing_key']}"
        )
    yield f"When it is due, {found['delivery']} routes it to the queue {queue}"
    if found["meditations"] and not has_checkin:
        yield "rabbitdelay_modules lacks 'check-in': this application's producers refuse the delay"
    yield ""
    rows = [("stop", "queue", "waits", "next exchange")]
    for number, stop in enumerate(found["stops"], start=1):
        times = f"{stop['times']:,} x " if stop["times"] > 1 else ""
        waits = f"{times}{duration_text(stop['ttl_ms'])}"
        rows.append((str(number), stop["queue"], waits, stop["next"]))
    yield from shared.aligned([*rows, ("due", queue, "", "")])
