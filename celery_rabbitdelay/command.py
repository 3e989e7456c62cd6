"""``celery -A proj rabbitdelay COMMAND``: the delay levels of an application, at the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.backlog import Backlog, backlog_of
from celery_rabbitdelay.rabbitdelay import RabbitDelay

__all__ = ["rabbitdelay"]

#: How many of the missing queues are named.
NAMED: Final = 5


@click.group()
def rabbitdelay() -> None:
    """The delays that wait in RabbitMQ."""


@rabbitdelay.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for programs.")
@click.option(
    "--timeout",
    default=1.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for the answers of the workers.",
)
@click.pass_obj
def status(context: CLIContext, as_json: bool, timeout: float) -> None:
    """What waits where, and what the workers' modules do."""
    delays = _delays(context)
    with context.app.connection_for_read() as connection:
        backlog = backlog_of(connection, delays.topology)
        inspect = context.app.control.inspect(timeout=timeout, connection=connection)
        workers: Any = inspect._request("rabbitdelay_status") or {}
    if as_json:
        counts = {name: each._asdict() for name, each in backlog.others.items()}
        click.echo(json.dumps({**backlog._asdict(), "others": counts, "workers": workers}))
        return
    for line in (*_of_backlog(delays, backlog), *_of_workers(workers)):
        click.echo(line)


def _delays(context: CLIContext) -> RabbitDelay:
    delays = getattr(context.app, "rabbitdelay", None)
    if not isinstance(delays, RabbitDelay):
        raise click.UsageError(
            f"the delays of {context.app!r} are not in RabbitMQ: make it a "
            "celery_rabbitdelay.Celery, or call celery_rabbitdelay.install(app)"
        )
    if not delays.available:
        raise click.UsageError(f"the broker of {context.app!r} is not RabbitMQ")
    return delays


def _of_backlog(delays: RabbitDelay, backlog: Backlog) -> Iterator[str]:
    topology = delays.topology
    yield f"{topology.prefix}: {topology.layout.name}, {len(topology.digit_queues)} digit queues"
    for level, messages in backlog.levels.items():
        yield f"  {level:16} {messages:10,} waiting"
    for name, counts in backlog.others.items():
        consumers = f", {counts.consumers} consumers" if counts.consumers else ""
        yield f"  {name:16} {counts.messages:10,} waiting{consumers}"
    if backlog.missing:
        more = "" if len(backlog.missing) <= NAMED else ", ..."
        names = ", ".join(backlog.missing[:NAMED]) + more
        yield f"  {len(backlog.missing)} queues are missing: {names}"


def _of_workers(workers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    if not workers:
        yield "no worker has answered"
    for worker, modules in sorted(workers.items()):
        yield worker if modules else f"{worker}: serves no module"
        for name, seen in modules.items():
            yield (
                f"  {name:16} {seen['received']:10,} received ({seen['received_per_second']:,}/s), "
                f"{seen['published']:,} published ({seen['published_per_second']:,}/s), "
                f"{seen['undeliverable']:,} undeliverable"
            )
