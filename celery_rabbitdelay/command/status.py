"""``celery rabbitdelay status``: how many messages wait in each level, and the workers' modules."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.context import BROKER_ERRORS, delays_of, fail, json_option
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.backlog import Backlog, backlog_of
from celery_rabbitdelay.worker.status import ARRIVALS, status_of_workers

__all__ = ["status"]

#: How many missing queues the text names; ``--json`` names all of them.
MAX_MISSING_NAMED: Final = 5

#: The exit status where a queue is missing.
QUEUES_MISSING: Final = 1


@click.command()
@json_option
@click.option(
    "-t",
    "--timeout",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for the workers' answers.",
)
@click.pass_obj
def status(context: CLIContext, /, as_json: bool, timeout: float) -> None:
    """Show how many messages wait in each level, and what the workers' modules do."""
    topology = delays_of(context).topology
    # The levels are where tasks are sent, which may be another broker than the consumers'.
    connection = context.app.connection_for_write()
    try:
        with connection:
            backlog = backlog_of(connection, topology)
            workers = status_of_workers(context.app, connection, timeout)
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {connection.as_uri()}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)
    if as_json:
        click.echo(_as_json(backlog, workers))
    else:
        click.echo("\n".join([*_backlog_lines(topology, backlog), *_worker_lines(workers)]))
    if backlog.missing:
        raise SystemExit(QUEUES_MISSING)


def _as_json(backlog: Backlog, workers: Mapping[str, Any]) -> str:
    others = {name: counts._asdict() for name, counts in backlog.others.items()}
    return json.dumps({**backlog._asdict(), "others": others, "workers": workers})


def _backlog_lines(topology: Topology, backlog: Backlog) -> Iterator[str]:
    yield f"{topology.prefix}: {topology.layout.name}, {len(topology.digit_queues)} digit queues"
    for level, messages in backlog.levels.items():
        yield f"  {level:16} {messages:10,} waiting"
    for name, counts in backlog.others.items():
        consumers = f", {counts.consumers} consumers" if counts.consumers else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}"
    if backlog.missing:
        names = list(backlog.missing[:MAX_MISSING_NAMED])
        if len(backlog.missing) > MAX_MISSING_NAMED:
            names.append("...")
        yield f"  {len(backlog.missing)} queues are missing: {', '.join(names)}"


def _worker_lines(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if not workers:
        yield "no worker has answered"
    for worker, modules in sorted(workers.items()):
        if "error" in modules:
            yield f"{worker}: cannot answer: {modules['error']}"
            continue
        yield worker if modules.keys() - {ARRIVALS} else f"{worker}: serves no module"
        for name, counts in modules.items():
            if name == ARRIVALS:
                yield (
                    f"  {name:16} {counts['received']:10,} delayed ones received, at most "
                    f"{counts['latest']:,.1f} s late in the last ten minutes"
                )
                continue
            yield (
                f"  {name:16} {counts['received']:10,} received "
                f"({counts['received_per_second']:,}/s), {counts['published']:,} published "
                f"({counts['published_per_second']:,}/s), "
                f"{counts.get('redelivered', 0):,} put back, "
                f"{counts['undeliverable']:,} undeliverable"
            )
