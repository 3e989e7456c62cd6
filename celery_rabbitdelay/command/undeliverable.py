"""``celery rabbitdelay undeliverable``: read, export and delete what could not be delivered."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click
from amqp.exceptions import NotFound
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command.context import (
    BROKER_ERRORS,
    REFUSED,
    ParameterType,
    delays_of,
    fail,
    json_option,
)
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels.shown_url import shown_broker
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.undeliverable.messages import (
    Contents,
    UndeliverableFilter,
    UndeliverableMessage,
    UndeliverableSummary,
    as_record,
    new_file,
    shown_body,
    summary_of,
    undeliverable_messages,
    write_records,
)
from celery_rabbitdelay.operations.undeliverable.redrive import RemovalReport
from celery_rabbitdelay.operations.undeliverable.redrive import purge as purge_messages

#: The seconds of each unit that an age or a delay may be written in.
UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}

#: The exit status if chosen messages stay.
INCOMPLETE: Final = 1

#: The most reasons that the text names; ``--json`` names all of them.
MOST_REASONS: Final = 20

_AGE: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def _age(text: str, what: str) -> timedelta:
    """Read a length of time: seconds, or a number with one of the units s, m, h and d."""
    read = _AGE.fullmatch(text)
    if read is None:
        raise ValueError(f"{text!r} is neither a number of seconds nor one with s, m, h or d")
    try:
        return timedelta(seconds=float(read[1]) * UNITS[read[2]])
    except OverflowError as wrong:
        raise ValueError(f"{text!r} is too long") from wrong


age_type: Final = ParameterType("age", _age)

limit_option: Final = click.option(
    "--limit", type=click.IntRange(1), metavar="NUMBER", help="At most this many messages."
)


def filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that choose messages."""
    for option in (
        click.option(
            "--newer-than",
            type=age_type,
            help="Undeliverable for at most this long: 90, 15m, 2h, 3d.",
        ),
        click.option("--older-than", type=age_type, help="Undeliverable for at least this long."),
        click.option(
            "--reason",
            "reasons",
            multiple=True,
            help="With this text in their reason; with * or ?, a pattern for the whole reason.",
        ),
        click.option("--id", "ids", multiple=True, help="The task with this id."),
        click.option(
            "--queue", "queues", multiple=True, help="For queues of this name or pattern."
        ),
        click.option("--task", "tasks", multiple=True, help="Tasks of this name or pattern."),
    ):
        command = option(command)
    return command


def filter_with(options: dict[str, Any]) -> UndeliverableFilter:
    """Return the filter that the options of :func:`filter_options` describe."""
    return UndeliverableFilter(**options)


@contextmanager
def errors_told(connection: Connection, topology: Topology, as_json: bool) -> Iterator[None]:
    """End the command with one line if the broker cannot be reached, or the queue is missing."""
    try:
        yield
    except NotFound as error:
        name = topology.module_queues.undeliverable.name
        fail(error, f"the queue {name} does not exist: declare the levels", REFUSED, as_json)
    except RabbitDelayError as error:
        fail(error, str(error), REFUSED, as_json)
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {shown_broker(connection)}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)


def tell_removal(report: RemovalReport, done: str, dry_run: bool, as_json: bool) -> None:
    """Print a report; end the command with status 1 if it is not complete.

    Args:
        report: The report.
        done: The action, as a participle: "deleted" or "redriven".
        dry_run: Whether the action was left out.
        as_json: Whether to print JSON.
    """
    if as_json:
        click.echo(json.dumps({**vars(report), "dry_run": dry_run}))
    else:
        would = "would be " if dry_run else ""
        click.echo(
            f"{report.removed:,} of {report.matched:,} messages {would}{done} in "
            f"{report.seconds:.1f} s ({report.examined:,} read)"
        )
    for line in _trouble(report):
        click.echo(line, err=True)
    raise SystemExit(0 if report.is_complete else INCOMPLETE)


def _trouble(report: RemovalReport) -> Iterator[str]:
    by_count = sorted(report.left.items(), key=lambda each: -each[1])
    for reason, count in by_count[:MOST_REASONS]:
        yield f"{count:,} stay: {printable(reason)}"
    if len(by_count) > MOST_REASONS:
        rest = sum(count for _, count in by_count[MOST_REASONS:])
        yield f"{rest:,} stay for other reasons"
    if report.uncertain:
        yield f"{report.uncertain:,} may come twice: a connection was lost"
    if report.stopped is not None:
        yield f"stopped early: {printable(report.stopped)}"


def printable(text: str) -> str:
    """Return a text without control characters of a terminal: anybody may have written it."""
    return "".join(
        each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text
    )


#: How many messages ``list --full`` prints, and how many bytes of each body.
FULL_MESSAGES: Final = 10
FULL_BODY: Final = 2000


@click.group()
def undeliverable() -> None:
    """Messages that could not be delivered."""


@contextmanager
def _messages(
    context: CLIContext, as_json: bool
) -> Iterator[Iterator[tuple[int, UndeliverableMessage]]]:
    """Yield an iterator over the messages with their numbers, from 1."""
    delays = delays_of(context)
    connection = context.app.connection_for_write()
    with errors_told(connection, delays.topology, as_json), connection:
        yield enumerate(undeliverable_messages(connection, delays.topology), start=1)


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
@click.option(
    "--full",
    is_flag=True,
    help="Print the messages with their headers and the beginning of their bodies, at most "
    f"{FULL_MESSAGES} unless -n says more.",
)
@json_option
@click.pass_obj
def list_messages(
    context: CLIContext, /, most: int | None, full: bool, as_json: bool, **filters: Any
) -> None:
    """Count the messages by the reason why they could not be delivered."""
    wanted, summary = filter_with(filters), UndeliverableSummary()
    most = most or (FULL_MESSAGES if full else 0)
    examined, shown = 0, list[dict[str, Any]]()
    with _messages(context, as_json) as messages:
        for examined, message in messages:
            if wanted.matches(message):
                summary.add(message)
                if len(shown) < most:
                    shown.append((_full if full else summary_of)(examined, message))
    if as_json:
        click.echo(json.dumps(_listed(examined, summary, shown)))
        return
    if full:
        for each in shown:
            click.echo("\n".join([*_details(each), ""]))
    for line in () if full else _lines(shown) if most else _reasons(summary):
        click.echo(line)
    more = "" if summary.count == examined else f" of {examined:,}"
    click.echo(f"{summary.count:,}{more} undeliverable messages")


def _full(number: int, message: UndeliverableMessage) -> dict[str, Any]:
    return {
        **as_record(number, message),
        "envelope": Contents.of(message).messages,
        "body": shown_body(message.body, FULL_BODY),
    }


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
    with _messages(context, as_json) as messages:
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
        report = purge_messages(
            connection, delays.topology, wanted.matches, limit=limit, dry_run=dry_run
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
