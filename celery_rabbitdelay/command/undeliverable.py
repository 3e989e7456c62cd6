"""``celery rabbitdelay undeliverable``: read, export and delete what could not be delivered."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from kombu import Connection

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command.context import delays_of, json_option
from celery_rabbitdelay.command.undeliverable_options import (
    errors_told,
    filter_options,
    filter_with,
    limit_option,
    printable,
    progress_of_removal,
    tell_removal,
)
from celery_rabbitdelay.command.undeliverable_redrive import redrive
from celery_rabbitdelay.operations.progress_bar import progress_bar
from celery_rabbitdelay.operations.purge import purge as purge_messages
from celery_rabbitdelay.operations.undeliverable import UndeliverableMessage, undeliverable_messages
from celery_rabbitdelay.operations.undeliverable_export import (
    as_record,
    new_file,
    shown_body,
    summary_of,
    write_records,
)
from celery_rabbitdelay.operations.undeliverable_filter import Contents, UndeliverableFilter
from celery_rabbitdelay.operations.undeliverable_reader import ready_messages
from celery_rabbitdelay.operations.undeliverable_summary import UndeliverableSummary

#: Messages that ``show`` prints at most: a task can have copies.
MOST_SHOWN: Final = 10

#: The exit status if there is no such message.
NOT_FOUND: Final = 1


@click.group()
def undeliverable() -> None:
    """Messages that could not be delivered."""


@contextmanager
def _messages(
    context: CLIContext, as_json: bool, label: str
) -> Iterator[Iterator[tuple[int, UndeliverableMessage]]]:
    """Yield an iterator over the messages with their numbers, from 1."""
    delays = delays_of(context)
    connection = context.app.connection_for_write()
    with errors_told(connection, delays.topology, as_json), connection:
        length = ready_messages(connection, delays.topology)
        with progress_bar(label, length) as show:

            def numbered() -> Iterator[tuple[int, UndeliverableMessage]]:
                messages = undeliverable_messages(connection, delays.topology)
                for number, message in enumerate(messages, start=1):
                    yield number, message
                    if number % 100 == 0:
                        show(number)

            yield numbered()


@undeliverable.command("list")
@filter_options
@click.option(
    "-n",
    "--messages",
    "most",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Print a line for each of the first NUMBER messages, instead of the reasons.",
)
@json_option
@click.pass_obj
def list_messages(context: CLIContext, /, most: int | None, as_json: bool, **filters: Any) -> None:
    """Count the messages by the reason why they could not be delivered."""
    wanted, summary = filter_with(filters), UndeliverableSummary()
    examined, shown = 0, list[dict[str, Any]]()
    with _messages(context, as_json, "reading") as messages:
        for examined, message in messages:
            if wanted.matches(message):
                summary.add(message)
                if len(shown) < (most or 0):
                    shown.append(summary_of(examined, message))
    if as_json:
        click.echo(json.dumps(_listed(examined, summary, shown)))
        return
    for line in _lines(shown) if most else _reasons(summary):
        click.echo(line)
    more = "" if summary.count == examined else f" of {examined:,}"
    click.echo(f"{summary.count:,}{more} undeliverable messages")


def _listed(examined: int, summary: UndeliverableSummary, shown: list[Any]) -> dict[str, Any]:
    return {
        "examined": examined,
        "count": summary.count,
        "reasons": [
            {
                "reason": reason,
                "count": group.count,
                "oldest": _iso(group.oldest),
                "newest": _iso(group.newest),
            }
            for reason, group in summary.by_count()
        ],
        "messages": shown,
    }


def _reasons(summary: UndeliverableSummary) -> Iterator[str]:
    for reason, group in summary.by_count():
        since = f" (since {_local(group.oldest)})" if group.oldest else ""
        yield f"{group.count:>9,}  {printable(reason)}{since}"


def _lines(shown: list[dict[str, Any]]) -> Iterator[str]:
    for each in shown:
        what = each["task"] or "no task"
        if each["envelope"]:
            what = f"an envelope of {each['envelope']:,} tasks"
        task_id = f" {each['task_id']}" if each["task_id"] else ""
        to = f" to {each['queue']}" if each["queue"] else ""
        yield printable(f"{each['number']:>6}  {what}{task_id}{to}: {each['reason']}")


@undeliverable.command()
@click.argument("message_id", metavar="ID")
@click.option(
    "--body-bytes",
    type=click.IntRange(0),
    default=2000,
    show_default=True,
    help="How much of the body to print at most.",
)
@json_option
@click.pass_obj
def show(context: CLIContext, /, message_id: str, body_bytes: int, as_json: bool) -> None:
    """Print a message with its headers and its body. ID is a task's id, or a number of `list`."""
    by_id: list[tuple[int, UndeliverableMessage]] = []
    by_number: list[tuple[int, UndeliverableMessage]] = []
    with _messages(context, as_json, "reading") as messages:
        for number, message in messages:
            if _has_id(message, message_id):
                if len(by_id) < MOST_SHOWN:
                    by_id.append((number, message))
            elif str(number) == message_id:
                by_number.append((number, message))
    found = [
        {
            **as_record(number, message),
            "envelope": Contents.of(message).messages,
            "body": shown_body(message.body, body_bytes),
        }
        for number, message in by_id or by_number
    ]
    if as_json:
        click.echo(json.dumps({"messages": found}))
    for each in () if as_json else found:
        click.echo("\n".join(_details(each)))
    if not found:
        if not as_json:
            click.echo(f"no undeliverable message has the id or number {message_id}", err=True)
        raise SystemExit(NOT_FOUND)


def _has_id(message: UndeliverableMessage, wanted: str) -> bool:
    properties = map(message.properties.get, ("correlation_id", "message_id"))
    return wanted in properties or wanted in Contents.of(message).ids


def _details(record: dict[str, Any]) -> Iterator[str]:
    body = record.pop("body")
    headers, properties = record.pop("headers"), record.pop("properties")
    for part in (record, properties, headers):
        for name, value in part.items():
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value)
                indent = "" if part is record else "  "
                yield printable(f"{indent}{name}: {text}")
        if part is not headers:
            yield "properties:" if part is record else "headers:"
    yield f"body, {body['size']:,} bytes{', cut off' if body['is_cut_off'] else ''}:"
    yield printable(body["text"] if body["text"] is not None else body["base64"])


@undeliverable.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path))
@filter_options
@json_option
@click.pass_obj
def export(context: CLIContext, /, file: Path, as_json: bool, **filters: Any) -> None:
    """Write the messages as lines of JSON to FILE, or to the standard output ("-")."""
    to_output = str(file) == "-"
    if to_output and as_json:
        raise click.UsageError("--json prints one object, and - prints the messages")
    if not to_output and file.exists():
        raise click.UsageError(f"{file} exists already")
    wanted = filter_with(filters)
    with _messages(context, as_json, "exporting") as messages:
        chosen = ((number, each) for number, each in messages if wanted.matches(each))
        if to_output:
            count = write_records(sys.stdout, chosen)
        else:
            with new_file(file) as written:
                count = write_records(written, chosen)
    if as_json:
        click.echo(json.dumps({"file": str(file), "count": count}))
    else:
        click.echo(f"{count:,} undeliverable messages written to {file}", err=to_output)


@undeliverable.command()
@filter_options
@limit_option
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def purge(
    context: CLIContext,
    /,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Delete messages."""
    if as_json and not (yes or dry_run):
        raise click.UsageError("--json does not ask: give --yes or --dry-run")
    delays, wanted = delays_of(context), filter_with(filters)
    connection = context.app.connection_for_write()
    with errors_told(connection, delays.topology, as_json), connection:
        if not (yes or dry_run):
            limit = _asked(delays, connection, wanted, limit)
        with progress_of_removal("purge", connection, delays.topology) as progress:
            report = purge_messages(
                connection,
                delays.topology,
                wanted.matches,
                limit=limit,
                dry_run=dry_run,
                progress=progress,
            )
    tell_removal(report, "deleted", dry_run, as_json)


def _asked(
    delays: RabbitDelay, connection: Connection, wanted: UndeliverableFilter, limit: int | None
) -> int:
    """Return how many messages to delete, which the user has agreed to."""
    found = purge_messages(connection, delays.topology, wanted.matches, limit=limit, dry_run=True)
    if not found.removed:
        tell_removal(found, "deleted", False, False)
    click.confirm(f"Delete {found.removed:,} undeliverable messages?", abort=True)
    return found.removed


def _local(instant: datetime) -> str:
    return instant.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


undeliverable.add_command(redrive)
