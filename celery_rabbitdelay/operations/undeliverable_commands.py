"""``celery rabbitdelay undeliverable``: list, export, redrive and delete undeliverable messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Final

import click

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.operations import undeliverable as read
from celery_rabbitdelay.operations.move_commands import rate_option
from celery_rabbitdelay.operations.mover import Place
from celery_rabbitdelay.operations.redriving import MAX_ATTEMPTS, NOT_ALLOWED

_limit_option: Final = click.option(
    "--limit", type=click.IntRange(1), metavar="NUMBER", help="Stop after this many messages."
)

#: The options that choose messages.
_filter_options: Final = shared.as_one(
    "wanted",
    read.UndeliverableFilter,
    click.option("--task", "tasks", multiple=True, help="The name of the task, or a pattern."),
    click.option("--queue", "queues", multiple=True, help="The name of a queue, or a pattern."),
    click.option("--id", "ids", multiple=True, help="The id of the task."),
    click.option(
        "--reason",
        "reasons",
        multiple=True,
        help="Text in the reason; with * or ?, a pattern for the whole reason.",
    ),
    click.option(
        "--older-than", type=shared.duration_type, help="Undeliverable for at least this long."
    ),
    click.option(
        "--newer-than", type=shared.duration_type, help="Undeliverable for at most this long."
    ),
)


def _tell_removal(report: read.RemovalReport, done: str, dry_run: bool) -> None:
    """Print a report; end the command with status 1 if it is not complete.

    Args:
        report: The report.
        done: The action, as a participle: "deleted" or "redriven".
        dry_run: Whether the action was only simulated.
    """
    would = "would be " if dry_run else ""
    line = (
        f"{report.moved:,} of {report.matched:,} messages {would}{done} in "
        f"{report.seconds:.1f} s ({report.examined:,} read)"
    )
    shared.answer({**vars(report), "dry_run": dry_run}, [line])
    trouble = [
        f"{count:,} stay: {reason}{': name it with --allow' if NOT_ALLOWED in reason else ''}"
        for reason, count in report.left.most_common()
    ]
    if report.copies:
        trouble.append(f"{report.copies:,} may come twice: a connection was lost")
    if report.stopped is not None:
        trouble.append(f"stopped early: {report.stopped}")
    for line in trouble:
        click.echo(_printable(line), err=True)
    raise SystemExit(0 if report.is_complete else shared.FAILED)


def _printable(text: str) -> str:
    """Escape control characters and line feeds in an untrusted string."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


@shared.group
def undeliverable() -> None:
    """Messages that could not be delivered."""


@undeliverable.command("list")
@_filter_options
@click.option(
    "-n",
    "--messages",
    "most",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="List the first NUMBER messages instead of the reasons.",
)
def list_messages(most: int | None, wanted: read.UndeliverableFilter) -> None:
    """Count the messages by reason."""
    summary, examined, shown = read.UndeliverableSummary(), 0, list[dict[str, object]]()
    for examined, message in _messages():
        if wanted.matches(message):
            summary.add(message)
            if len(shown) < (most or 0):
                shown.append(read.summary_of(examined, message))
    more = "" if summary.count == examined else f" of {examined:,}"
    last = f"{summary.count:,}{more} undeliverable messages"
    reasons = [*map(vars, summary.by_count())]
    answer = {"examined": examined, "count": summary.count, "reasons": reasons, "messages": shown}
    shared.answer(answer, [*(_lines(shown) if most else _reasons(summary)), last])


def _messages() -> Iterator[tuple[int, read.UndeliverableMessage]]:
    """Yield all messages with their positions in the queue, from 1."""
    with shared.broker() as connection:
        messages = read.undeliverable_messages(connection, shared.delays().topology)
        yield from enumerate(messages, start=1)


def _reasons(summary: read.UndeliverableSummary) -> Iterator[str]:
    for each in summary.by_count():
        since = f" (since {shared.local(each.oldest)})" if each.oldest else ""
        yield f"{each.count:>9,}  {_printable(each.reason)}{since}"


def _lines(shown: list[dict[str, object]]) -> Iterator[str]:
    for each in shown:
        what = each["task"] or "no task"
        if each["envelope"]:
            what = f"an envelope of {each['envelope']:,} tasks"
        task_id = f" {each['task_id']}" if each["task_id"] else ""
        to = f" to {each['queue']}" if each["queue"] else ""
        yield _printable(f"{each['number']:>6}  {what}{task_id}{to}: {each['reason']}")


@undeliverable.command()
@_filter_options
def export(wanted: read.UndeliverableFilter) -> None:
    """Print every message as a line of JSON. The messages stay in the queue."""
    count = 0
    for number, each in _messages():
        if wanted.matches(each):
            click.echo(json.dumps(read.as_record(number, each)))
            count += 1
    click.echo(f"{count:,} undeliverable messages exported", err=True)


@undeliverable.command()
@_filter_options
@_limit_option
@click.option("--dry-run", is_flag=True, help="Count the messages, and delete none.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def purge(wanted: read.UndeliverableFilter, limit: int | None, dry_run: bool, yes: bool) -> None:
    """Delete the messages that match the options; without options, all messages."""
    if shared.as_json() and not (yes or dry_run):
        raise click.UsageError("--json cannot ask for confirmation: pass --yes or --dry-run")
    with shared.broker() as connection:
        place = Place(connection, shared.delays().topology)
        remove = partial(read.redrive, place, None, wanted.matches)
        if not (yes or dry_run):
            found = remove(limit=limit, dry_run=True)
            limit = found.moved
            if not limit:
                _tell_removal(found, "deleted", False)
            click.confirm(f"Delete {limit:,} undeliverable messages?", abort=True)
        report = remove(limit=limit, dry_run=dry_run)
    _tell_removal(report, "deleted", dry_run)


@undeliverable.command()
@_filter_options
@click.option("--delay", type=shared.delay_type, help="Delay every message by at least this long.")
@click.option("--to", metavar="QUEUE", help="Send all messages to this queue.")
@click.option(
    "--allow",
    multiple=True,
    metavar="PATTERN",
    help="Also allow queues and exchanges with this name or pattern.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    default=MAX_ATTEMPTS,
    show_default=True,
    help="Leave messages that were already redriven this often.",
)
@click.option(
    "--sign",
    "vouches",
    is_flag=True,
    help="Also redrive messages without a valid signature, and sign them.",
)
@_limit_option
@rate_option
@click.option("--dry-run", is_flag=True, help="Count the messages, and move none.")
def redrive(
    wanted: read.UndeliverableFilter,
    limit: int | None,
    rate: float,
    dry_run: bool,
    **options: object,
) -> None:
    """Move messages back into the levels."""
    delays = shared.delays()
    wrong = exceptions.InvalidDelay, exceptions.DelayTooLong, exceptions.InvalidDestination
    with shared.broker() as connection, shared.usage_errors(*wrong):
        report = read.redrive_application(
            delays, connection, wanted.matches, options, dry_run=dry_run, limit=limit, rate=rate
        )
    _tell_removal(report, "redriven", dry_run)
