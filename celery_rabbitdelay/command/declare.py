"""``celery rabbitdelay declare`` and ``delete``: the levels on the broker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.command.context import BROKER_ERRORS, fail, json_option
from celery_rabbitdelay.command.topology_options import topology_of, topology_options
from celery_rabbitdelay.exceptions import LayoutConflict, TopologyInUse, TopologyNotEmpty
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.declare import Declared, declare_everything, missing_entities
from celery_rabbitdelay.operations.delete import Contents, contents_of, delete_everything
from celery_rabbitdelay.operations.progress_bar import progress_bar
from celery_rabbitdelay.publishing.declaration import refuse_to_lose
from celery_rabbitdelay.publishing.shown_url import shown_broker

#: How many names the text shows; ``--json`` has all of them.
MAX_NAMED: Final = 5

#: The exit status where another layout is declared, something is missing, messages wait, or workers
#: may hold some.
REFUSED: Final = 1


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
    queues = list(context.app.amqp.queues.values()) if with_queues else []
    with _broker(context, as_json) as connection:
        if dry_run:
            found = missing_entities(connection, topology, queues)
        else:
            with progress_bar("declaring", 1) as show:
                found = declare_everything(
                    connection, topology, queues, lambda done, of: show(done, length=of)
                )
    if as_json:
        told = {"prefix": topology.prefix, "fingerprint": topology.identity.fingerprint}
        click.echo(json.dumps({**told, "dry_run": dry_run, **found._asdict()}))
    else:
        click.echo("\n".join(_declared(topology, found, dry_run)))
    if dry_run and (found.missing or found.missing_queues):
        raise SystemExit(REFUSED)


def _declared(topology: Topology, found: Declared, dry_run: bool) -> Iterator[str]:
    # The guard and the marker are exchanges too.
    total = len(topology.exchanges) + 2 + len(topology.queues)
    whole = f"{total} exchanges and queues of {topology.name_prefix}"
    if dry_run:
        yield f"{len(found.missing)} of {whole} are missing{_named(found.missing)}"
    else:
        yield f"{len(found.missing)} of {whole} were missing{_named(found.missing)}"
        yield f"All of them exist now, with {len(topology.bindings)} bindings"
    if found.missing_queues:
        verb = "are" if dry_run else "were"
        yield (
            f"{len(found.missing_queues)} queues of tasks {verb} missing"
            f"{_named(found.missing_queues)}"
        )
    if found.bound:
        yield f"{len(found.bound)} queues of tasks are bound{_named(found.bound)}"


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
    with _broker(context, as_json) as connection:
        contents = contents_of(connection, topology)
        if not force:
            refuse_to_lose(topology, contents.counts)
        if not as_json:
            click.echo("\n".join(_contents(topology, contents)))
        is_wanted = contents.exists and not dry_run
        if is_wanted and not yes:
            _ask(topology, contents)
        if is_wanted:
            with progress_bar("deleting", 1) as show:
                contents = delete_everything(
                    connection,
                    topology,
                    force=force,
                    progress=lambda done, of: show(done, length=of),
                )
    if as_json:
        told = {
            "prefix": topology.prefix,
            "name_prefix": topology.name_prefix,
            "fingerprint": topology.identity.fingerprint,
        }
        deleted = {"dry_run": dry_run, "deleted": is_wanted}
        click.echo(json.dumps({**told, **deleted, **_numbers(contents)}))
    elif is_wanted:
        click.echo("Deleted")


def _ask(topology: Topology, contents: Contents) -> None:
    lost = f" and lose {contents.messages:,} messages" if contents.messages else ""
    if not sys.stdin.isatty():
        raise click.UsageError("the standard input is no terminal: give --yes or --dry-run")
    click.confirm(f"Delete the levels of {topology.name_prefix}{lost}?", abort=True, err=True)


def _contents(topology: Topology, contents: Contents) -> Iterator[str]:
    if not contents.exists:
        yield f"Nothing of {topology.name_prefix} exists"
        return
    yield f"{topology.name_prefix}: {contents.exchanges} exchanges, {contents.queues} queues"
    if contents.messages:
        yield f"{contents.messages:,} messages are lost{_named(list(contents.waiting))}"
    if contents.consumers:
        yield (
            f"{contents.consumers} consumers: workers run, and what they hold is lost. Those that "
            "use these levels declare them again; stop them first"
        )


def _numbers(contents: Contents) -> dict[str, object]:
    return {
        "exchanges": contents.exchanges,
        "queues": contents.queues,
        "waiting": contents.waiting,
        "consumers": contents.consumers,
    }


def _fail_not_empty(error: TopologyNotEmpty, as_json: bool) -> None:
    waiting = error.waiting
    message = (
        f"{sum(waiting.values()):,} messages wait under the prefix {error.prefix!r}"
        f"{_named(list(waiting))}: wait until they are due, or lose them with --force"
    )
    fail(error, message, REFUSED, as_json)


def _fail_in_use(error: TopologyInUse, as_json: bool) -> None:
    consumers = error.consumers
    message = (
        f"{sum(consumers.values()):,} consumers take messages under the prefix {error.prefix!r}"
        f"{_named(list(consumers))}: stop the workers, or start them with --rabbitdelay-modules= "
        "meanwhile; or lose with --force what they hold"
    )
    fail(error, message, REFUSED, as_json)


@contextmanager
def _broker(context: CLIContext, as_json: bool) -> Iterator[Connection]:
    """Connect to the broker to which tasks are sent; end the command if that or the work fails."""
    connection = context.app.connection_for_write()
    try:
        with connection:
            yield connection
    except LayoutConflict as error:
        fail(error, str(error), REFUSED, as_json)
    except TopologyNotEmpty as error:
        _fail_not_empty(error, as_json)
    except TopologyInUse as error:
        _fail_in_use(error, as_json)
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {shown_broker(connection)}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)


def _named(names: Sequence[str]) -> str:
    """Return a colon and the first of some names."""
    if not names:
        return ""
    more = ", ..." if len(names) > MAX_NAMED else ""
    return f": {', '.join(names[:MAX_NAMED])}{more}"
