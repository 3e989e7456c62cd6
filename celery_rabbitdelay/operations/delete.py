"""``celery rabbitdelay delete``: delete empty levels from the broker."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Final

import click
from kombu import Connection

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.operations.management import management_api, management_option
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.kombu_internals import Counts

#: Seconds until totals are current: a quorum queue reports its totals every five seconds
#: (``quorum_tick_interval``).
TOTALS_AGE: Final = 6.0


@shared.command()
@click.option(
    "--force",
    is_flag=True,
    help="Also delete queues with messages or consumers; the messages are lost.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@management_option
@shared.topology_options()
def delete(
    force: bool, yes: bool, dry_run: bool, management: str | None, **options: object
) -> None:
    """Delete the levels from the broker; task queues stay.

    Stop producers and workers first: messages that are published during the command, or that a
    worker holds, are lost. Only the management API shows messages that dead-lettering holds because
    a task queue refuses them.
    """
    if shared.as_json() and not (yes or dry_run):
        raise click.UsageError("--json cannot ask for confirmation: pass --yes or --dry-run")
    topology = shared.topology(options)
    with shared.broker() as connection:
        # Another layout under the prefix uses the same queues of the modules.
        declaration.check_layout(connection, topology)
        missing = declaration.missing(connection, topology)
        exchanges = sum(each.name not in missing for each in topology.all_exchanges)
        found = declaration.queue_counts(connection, topology.queues)
        if not force:
            declaration.refuse_to_lose(topology, found)
        if any(found.values()):
            found = _with_held(connection, management, found)
        if not force:
            declaration.refuse_to_lose(topology, found)
        counts = {name: each for name, each in found.items() if each is not None}
        waiting = {name: each.messages for name, each in counts.items() if each.messages}
        consumers = sum(each.consumers for each in counts.values())
        lines = [f"The delay levels of {topology.prefix} do not exist"]
        if deleted := bool(exchanges or counts):
            lines = [f"{topology.prefix}: {exchanges} exchanges, {len(counts)} queues"]
            if messages := sum(waiting.values()):
                lines.append(f"deleting loses {messages:,} messages: {shared.first_of([*waiting])}")
            if consumers:
                lines.append(
                    f"{consumers} consumers: stop the workers first. Messages that they hold are "
                    "lost, and running workers declare the delay levels again"
                )
            deleted = not dry_run
            if deleted and not yes:
                click.echo("\n".join(lines))
                lines = []
                _ask(topology.prefix, messages)
        if deleted:
            declaration.delete(connection, topology, force=force)
            lines.append("Deleted")
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
    shared.answer(told, lines)


def _with_held(
    connection: Connection, management: str | None, counts: Mapping[str, Counts | None]
) -> dict[str, Counts | None]:
    """Add the messages that dead-lettering holds to the counts; warn if they are unknown.

    These messages are due, but their queue has not accepted them yet, or refuses them. AMQP counts
    ready messages only.
    """
    held: dict[str, int] = {}
    try:
        api = management_api(connection, management)
        api.get("overview")
        time.sleep(TOTALS_AGE)  # until the totals include what is held now
        totals = api.get(
            *("queues", connection.virtual_host or "/"),
            disable_stats="true",
            enable_queue_totals="true",
        )
        for each in totals:
            if "messages" in each:  # absent if the queue's node is down
                counted = each["messages_ready"] + each["messages_unacknowledged"]
                held[each["name"]] = each["messages"] - counted
    except ManagementUnavailable as error:
        click.echo(
            "Warning: cannot count the due messages that the delay levels hold because a task "
            "queue refuses them; check before you delete that no task queue has reached its length "
            f"limit. {error}",
            err=True,
        )
    return {
        name: each and each._replace(messages=each.messages + held.get(name, 0))
        for name, each in counts.items()
    }


def _ask(prefix: str, messages: int) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("the standard input is not a terminal: pass --yes or --dry-run")
    lost = f" and lose {messages:,} messages" if messages else ""
    click.confirm(f"Delete the delay levels of {prefix}{lost}?", abort=True, err=True)
