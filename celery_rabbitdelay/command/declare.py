"""``celery rabbitdelay declare``, ``delete``, ``export`` and ``permissions``: lay levels out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, get_args

import click
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.command.shared import rabbitdelay
from celery_rabbitdelay.exceptions import DelayTooLong, ManagementUnavailable
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations import permissions as needed
from celery_rabbitdelay.operations.export import definitions
from celery_rabbitdelay.operations.export.terraform import as_terraform
from celery_rabbitdelay.operations.verify.management import (
    TOTALS_AGE,
    held_messages,
    management_api,
)
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.declaration import Counts


@rabbitdelay.command()
@click.argument("role", type=click.Choice(get_args(needed.Role)))
@click.option("--user", required=True, help="The user of the broker.")
@click.option("--vhost", help="The virtual host; that of the application if omitted.")
@click.option(
    "--declare",
    "mode",
    type=click.Choice(("auto", "never")),
    help="Its rabbitdelay_declare; that of the application if omitted.",
)
@click.option(
    "--topics",
    is_flag=True,
    help="For a producer: also the topic permissions that let it reach only the application's "
    "queues.",
)
@shared.topology_options
def permissions(
    role: needed.Role, user: str, vhost: str | None, mode: str | None, topics: bool, **options: Any
) -> None:
    """Print the rabbitmqctl commands that give a user what its ROLE needs, and no more.

    The tasks' queues are those of task_queues, or Celery's default queue. No broker is asked.
    """
    if topics and role != "producer":
        raise click.UsageError("--topics is for the role producer")
    settings, app = shared.delays().settings, shared.app()
    topology = shared.topology(options)
    queues = list(app.amqp.Queues(app.conf.task_queues).values())
    may_declare = (mode or settings.declare) == "auto"
    rights = list(
        needed.rights(
            role, topology, queues, app.conf, may_declare=may_declare, modules=settings.modules
        )
    )
    keys = list(needed.topic_rights(topology, queues)) if topics else []
    host = vhost or app.connection_for_write().virtual_host or "/"
    configure, write, read = needed.patterns(rights)
    told = {"user": user, "vhost": host, "configure": configure, "write": write, "read": read}
    shared.answer(
        {**told, "topics": [each._asdict() for each in keys]},
        needed.commands(user, host, rights, keys),
    )


#: What writes each format, given the topology and the name of the virtual host.
FORMATS: Final[dict[str, Callable[[Topology, str], str]]] = {
    "terraform": as_terraform,
    "definitions": definitions.as_definitions,
    "mermaid": lambda topology, vhost: definitions.as_mermaid(topology),
}


@rabbitdelay.command()
@click.option(
    "-f",
    "--format",
    "format_name",
    type=click.Choice(list(FORMATS)),
    required=True,
    help="A Terraform module, a definitions file for RabbitMQ, or a Mermaid flow chart.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a file instead of the standard output.",
)
@click.option("--vhost", help="The virtual host; that of the application's broker if omitted.")
@click.option(
    "--max-delay",
    type=shared.delay_type,
    help="Only the levels that this delay needs: 86400, 30d. The applications then need another "
    "rabbitdelay_layout, which is printed.",
)
@shared.topology_options
def export(
    format_name: str,
    output: Path | None,
    vhost: str | None,
    max_delay: Fraction | None,
    **options: Any,
) -> None:
    """Write the topology in another format. No broker is asked, and nothing is declared."""
    topology = shared.topology(options)
    whole = topology.layout
    if max_delay is not None:
        with shared.usage_errors(DelayTooLong, of="--max-delay: "):
            topology = replace(topology, layout=definitions.cut(whole, max_delay))
    host = shared.app().connection_for_write().virtual_host or "/" if vhost is None else vhost
    text = FORMATS[format_name](topology, host)
    if output is not None:
        with shared.usage_errors(OSError, of="--output: "):
            output.write_text(text, encoding="utf-8")
    found = {
        "format": format_name,
        "prefix": topology.prefix,
        "vhost": host,
        "fingerprint": topology.identity.fingerprint,
        "layout": definitions.as_setting(topology.layout),
        "capacity_ms": topology.layout.capacity_ms,
        "output": None if output is None else str(output),
        "text": text if output is None else None,
    }
    shared.answer(found, [text.removesuffix("\n")] if output is None else [])
    if topology.layout != whole:
        setting = definitions.as_setting(topology.layout)
        click.echo(f"The applications need rabbitdelay_layout = {setting!r}", err=True)


#: The guard and the marker, which are exchanges too.
IDENTITY: Final = 2


@rabbitdelay.command()
@click.option(
    "--queues", "with_queues", is_flag=True, help="Also declare the queues of tasks, and bind them."
)
@click.option(
    "--dry-run", is_flag=True, help="Only say what is missing; exit with 1 if anything is."
)
@shared.topology_options
def declare(with_queues: bool, dry_run: bool, **options: Any) -> None:
    """Declare the levels on the broker, and say what was missing."""
    topology = shared.topology(options)
    # Each worker has its own exclusive queues, and a queue of its own for a broadcast.
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
            # kombu remembers declared queues on the connection, even if they were deleted since.
            declaration.forget(connection)
            for queue in queues:
                declaration.declare_destination(connection, topology, queue)
    missing_queues = [name for name, found in counts.items() if found is None]
    bound = [] if dry_run else list(counts)
    verb = "are" if dry_run else "were"
    total = len(topology.exchanges) + IDENTITY + len(topology.queues)
    named = f": {shared.first_of(missing)}" if missing else ""
    whole = f"{total} exchanges and queues of {topology.prefix}"
    lines = [f"{len(missing)} of {whole} {verb} missing{named}"]
    if not dry_run:
        lines.append(f"All of them exist now, with {len(topology.bindings)} bindings")
    for what, names in ((f"{verb} missing", missing_queues), ("are bound", bound)):
        if names:
            lines.append(f"{len(names)} queues of tasks {what}: {shared.first_of(names)}")
    told = {
        "prefix": topology.prefix,
        "fingerprint": topology.identity.fingerprint,
        "dry_run": dry_run,
        "missing": missing,
        "missing_queues": missing_queues,
        "bound": bound,
    }
    shared.answer(told, lines)
    if dry_run and (missing or missing_queues):
        raise SystemExit(shared.FAILED)


@rabbitdelay.command()
@click.option(
    "--force",
    is_flag=True,
    help="Also delete queues in which messages wait, or that workers serve: lose the messages.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@shared.management_option
@shared.topology_options
def delete(force: bool, yes: bool, dry_run: bool, management: str | None, **options: Any) -> None:
    """Delete the levels from the broker; the queues of tasks stay.

    Stop producers and workers first: a message that is published meanwhile is lost, and so is one
    that a worker holds. Messages that dead-lettering holds, because the queue of a task refuses
    them, are seen only where the management API answers.
    """
    if shared.as_json() and not (yes or dry_run):
        raise click.UsageError("--json cannot ask: give --yes or --dry-run")
    topology = shared.topology(options)
    with shared.broker() as connection:
        # Another layout under the prefix shares the queues of the modules with this one.
        declaration.check_layout(connection, topology)
        missing = declaration.missing_exchanges(connection, topology)
        exchanges = len(topology.exchanges) + IDENTITY - len(missing)
        found = declaration.queue_counts(connection, topology.queues)
        if not force:
            declaration.refuse_to_lose(topology, found)
        if any(found.values()):
            found = _with_held(connection, management, found)
        if not force:
            declaration.refuse_to_lose(topology, found)
        counts = {name: each for name, each in found.items() if each is not None}
        waiting = {name: each.messages for name, each in counts.items() if each.messages}
        messages = sum(waiting.values())
        consumers = sum(each.consumers for each in counts.values())
        exists = bool(exchanges or counts)
        if not shared.as_json() and not exists:
            click.echo(f"Nothing of {topology.prefix} exists")
        elif not shared.as_json():
            click.echo(f"{topology.prefix}: {exchanges} exchanges, {len(counts)} queues")
            if messages:
                click.echo(f"{messages:,} messages are lost: {shared.first_of(list(waiting))}")
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
    shared.answer(told, ["Deleted"] if deleted else [])


@rabbitdelay.command()
@click.option("--to-exchange", is_flag=True, help="TARGET is an exchange, and not a queue.")
@click.argument("source")
@click.argument("target")
@click.argument("key")
def unbind(to_exchange: bool, source: str, target: str, key: str) -> None:
    """Remove a binding that verify has found: of TARGET to the exchange SOURCE, with this KEY.

    rabbitmqctl has no command for it.
    """
    shared.delays()  # checks the application
    with shared.broker() as connection:
        channel: Any = connection.channel()
        remove = channel.exchange_unbind if to_exchange else channel.queue_unbind
        remove(target, source, key)
    told = {"source": source, "target": target, "key": key}
    shared.answer(told, [f"{target} is not bound to {source} with the key {key!r} any more"])


def _with_held(
    connection: Connection, management: str | None, counts: Mapping[str, Counts | None]
) -> dict[str, Counts | None]:
    """Return the counts with the messages that dead-lettering holds; warn if nobody says them."""
    held: Mapping[str, int] = {}
    try:
        api = management_api(connection, management)
        api.get("overview")
        time.sleep(TOTALS_AGE)  # what is held by now is in the figures then
        held = held_messages(api, connection.virtual_host or "/")
    except ManagementUnavailable as error:
        click.echo(
            "Warning: if the queue of a task refuses due messages, they are held in the levels, "
            f"and only the management API shows them; look before you delete. {error}",
            err=True,
        )
    return {
        name: each and each._replace(messages=each.messages + held.get(name, 0))
        for name, each in counts.items()
    }


def _ask(prefix: str, messages: int) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("the standard input is no terminal: give --yes or --dry-run")
    lost = f" and lose {messages:,} messages" if messages else ""
    click.confirm(f"Delete the levels of {prefix}{lost}?", abort=True, err=True)
