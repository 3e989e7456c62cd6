"""``celery rabbitdelay declare`` and ``delete``: the levels on the broker."""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from kombu.common import Broadcast

from celery_rabbitdelay.command.context import (
    REFUSED,
    broker_of,
    first_of,
    json_option,
    topology_of,
    topology_options,
)
from celery_rabbitdelay.publishing import declaration

#: The guard and the marker, which are exchanges too.
IDENTITY: Final = 2


@click.command()
@click.option(
    "--queues", "with_queues", is_flag=True, help="Also declare the queues of tasks, and bind them."
)
@click.option(
    "--dry-run", is_flag=True, help="Only say what is missing; exit with 1 if anything is."
)
@topology_options
@json_option
@click.pass_obj
def declare(
    context: CLIContext, /, with_queues: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Declare the levels on the broker, and say what was missing."""
    topology = topology_of(context, options)
    # Each worker has its own exclusive queues, and a queue of its own for a broadcast.
    queues = [
        queue
        for queue in (context.app.amqp.queues.values() if with_queues else ())
        if not queue.exclusive and not isinstance(queue, Broadcast)
    ]
    with broker_of(context, as_json) as connection:
        declaration.check_layout(connection, topology)
        missing = declaration.missing(connection, topology)
        counts = declaration.queue_counts(connection, queues)
        if not dry_run:
            declaration.declare(connection, topology)
            # kombu remembers declared queues on the connection, even if they were deleted since.
            declaration.forget(connection)
            for queue in queues:
                declaration.declare_destination(connection, topology, queue)
    missing_queues = [name for name, found in counts.items() if found is None]
    bound = [] if dry_run else list(counts)
    if as_json:
        told = {"prefix": topology.prefix, "fingerprint": topology.identity.fingerprint}
        found = {"missing": missing, "missing_queues": missing_queues, "bound": bound}
        click.echo(json.dumps({**told, "dry_run": dry_run, **found}))
    else:
        verb = "are" if dry_run else "were"
        total = len(topology.exchanges) + IDENTITY + len(topology.queues)
        whole = f"{total} exchanges and queues of {topology.prefix}"
        named = f": {first_of(missing)}" if missing else ""
        click.echo(f"{len(missing)} of {whole} {verb} missing{named}")
        if not dry_run:
            click.echo(f"All of them exist now, with {len(topology.bindings)} bindings")
        if missing_queues:
            named = first_of(missing_queues)
            click.echo(f"{len(missing_queues)} queues of tasks {verb} missing: {named}")
        if bound:
            click.echo(f"{len(bound)} queues of tasks are bound: {first_of(bound)}")
    if dry_run and (missing or missing_queues):
        raise SystemExit(REFUSED)


@click.command()
@click.option(
    "--force",
    is_flag=True,
    help="Also delete queues in which messages wait, or that workers serve: lose the messages.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@topology_options
@json_option
@click.pass_obj
def delete(
    context: CLIContext, /, force: bool, yes: bool, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Delete the levels from the broker; the queues of tasks stay.

    Stop producers and workers first: a message that is published meanwhile is lost, and so is one
    that a worker holds.
    """
    if as_json and not (yes or dry_run):
        raise click.UsageError("--json cannot ask: give --yes or --dry-run")
    topology = topology_of(context, options)
    with broker_of(context, as_json) as connection:
        # Another layout under the prefix shares the queues of the modules with this one.
        declaration.check_layout(connection, topology)
        missing = declaration.missing_exchanges(connection, topology)
        exchanges = len(topology.exchanges) + IDENTITY - len(missing)
        found = declaration.queue_counts(connection, topology.queues)
        if not force:
            declaration.refuse_to_lose(topology, found)
        counts = {name: each for name, each in found.items() if each is not None}
        waiting = {name: each.messages for name, each in counts.items() if each.messages}
        messages = sum(waiting.values())
        consumers = sum(each.consumers for each in counts.values())
        exists = bool(exchanges or counts)
        if not as_json and not exists:
            click.echo(f"Nothing of {topology.prefix} exists")
        elif not as_json:
            click.echo(f"{topology.prefix}: {exchanges} exchanges, {len(counts)} queues")
            if messages:
                click.echo(f"{messages:,} messages are lost: {first_of(list(waiting))}")
            if consumers:
                click.echo(
                    f"{consumers} consumers: workers run, and what they hold is lost. Those that "
                    "use these levels declare them again; stop them first"
                )
        deleted = exists and not dry_run
        if deleted and not yes:
            _ask(topology.prefix, messages)
        if deleted:
            declaration.delete(connection, topology, force=force)
    if as_json:
        told = {
            "prefix": topology.prefix,
            "fingerprint": topology.identity.fingerprint,
            "dry_run": dry_run,
            "deleted": deleted,
            "exchanges": exchanges,
            "queues": len(counts),
            "waiting": waiting,
            "consumers": consumers,
        }
        click.echo(json.dumps(told))
    elif deleted:
        click.echo("Deleted")


def _ask(prefix: str, messages: int) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("the standard input is no terminal: give --yes or --dry-run")
    lost = f" and lose {messages:,} messages" if messages else ""
    click.confirm(f"Delete the levels of {prefix}{lost}?", abort=True, err=True)
