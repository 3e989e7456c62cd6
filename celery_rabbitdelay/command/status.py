"""``celery rabbitdelay status``: how many messages wait in each level, and the workers' modules."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from threading import Event
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.context import (
    BROKER_ERRORS,
    delays_of,
    fail,
    json_option,
    set_by_ctrl_c,
)
from celery_rabbitdelay.command.status_text import ASCII_BLOCKS, BLOCKS, status_lines
from celery_rabbitdelay.operations.status import Status, changes, status_of
from celery_rabbitdelay.publishing.shown_url import shown_broker

#: The exit status where a queue is missing.
QUEUES_MISSING: Final = 1

#: Seconds from one look to the next, and the messages that are read, unless the option says it.
WATCH, REASONS = 2.0, 1000


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
@click.option("--digits", "with_digits", is_flag=True, help="List each digit that is not empty.")
@click.option(
    "--reasons",
    "most_reasons",
    is_flag=False,
    flag_value=REASONS,
    default=0,
    type=click.IntRange(0),
    metavar="[NUMBER]",
    help="Count why messages are undeliverable; reads so many of them, 1,000 without a number.",
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=WATCH,
    type=click.FloatRange(min=0, min_open=True),
    metavar="[SECONDS]",
    help="Look again and again until Ctrl-C, with rates; every two seconds without a number.",
)
@click.pass_obj
def status(
    context: CLIContext,
    /,
    as_json: bool,
    timeout: float,
    with_digits: bool,
    most_reasons: int,
    watch: float | None,
) -> None:
    """Show how many messages wait in each level, and what the workers' modules do."""
    if as_json and watch is not None:
        raise click.UsageError("--json prints one object: it cannot be used with --watch")
    delays = delays_of(context)
    # The levels are where tasks are sent, which may be another broker than the consumers'.
    connection = context.app.connection_for_write()
    before = last = None
    stopping = Event()
    try:
        with connection, nullcontext() if watch is None else set_by_ctrl_c(stopping):
            while last is None or (watch is not None and not stopping.is_set()):
                before, last = last, status_of(delays, connection, timeout, most_reasons)
                if as_json:
                    click.echo(json.dumps(_as_json(last)))
                    continue
                rates = None if before is None else changes(before, last)
                lines = status_lines(
                    delays.topology, last, blocks=_blocks(), with_digits=with_digits, rates=rates
                )
                _show("\n".join(lines), watch is not None)
                if watch is not None:
                    stopping.wait(watch)
    except BROKER_ERRORS as error:
        message = f"cannot ask the broker {shown_broker(connection)}: {error}"
        fail(error, message, EX_UNAVAILABLE, as_json)
    if last is not None and last.backlog.missing:
        raise SystemExit(QUEUES_MISSING)


def _show(text: str, again: bool) -> None:
    if again:
        click.clear()  # on a terminal only
        text = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n"
    click.echo(text)


def _blocks() -> str:
    """Return the characters of the bars; none where the standard output is no terminal."""
    if not sys.stdout.isatty():
        return ""
    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return ASCII_BLOCKS
    return BLOCKS


def _as_json(found: Status) -> dict[str, Any]:
    backlog, next_due = found.backlog, found.next_due
    tracked = None if next_due.tracked is None else next_due.tracked.isoformat()
    return {
        **backlog._asdict(),
        "others": {name: counts._asdict() for name, counts in backlog.others.items()},
        "next_due": {**next_due._asdict(), "tracked": tracked},
        "undeliverable": None if found.reasons is None else found.reasons._asdict(),
        "workers": found.workers,
        "former_generations": found.former_generations,
    }
