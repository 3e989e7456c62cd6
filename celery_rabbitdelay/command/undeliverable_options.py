"""Shared by the commands of ``undeliverable``: filters, errors, and the report at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import click
from amqp.exceptions import NotFound
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.command.context import BROKER_ERRORS, REFUSED, fail
from celery_rabbitdelay.command.parameter_type import ParameterType
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.progress_bar import progress_bar
from celery_rabbitdelay.operations.removal import RemovalReport
from celery_rabbitdelay.operations.undeliverable_filter import UndeliverableFilter
from celery_rabbitdelay.operations.undeliverable_reader import ready_messages
from celery_rabbitdelay.publishing.shown_url import shown_broker

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
        click.option("--id", "ids", multiple=True, help="Of the task with this id."),
        click.option(
            "--queue", "queues", multiple=True, help="For queues of this name or pattern."
        ),
        click.option("--task", "tasks", multiple=True, help="Of tasks of this name or pattern."),
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


@contextmanager
def progress_of_removal(
    label: str, connection: Connection, topology: Topology
) -> Iterator[Callable[[RemovalReport], None]]:
    """Show how many messages were read, and how many have left the queue."""
    with progress_bar(label, ready_messages(connection, topology)) as show:
        yield lambda report: show(report.examined, f"{report.removed:,}")


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
