"""Shared by ``migrate``, ``transfer`` and ``adopt``: options, the move, and the report after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple

import click
from celery.platforms import EX_UNAVAILABLE

from celery_rabbitdelay.command.context import BROKER_ERRORS, fail, json_option, set_by_ctrl_c
from celery_rabbitdelay.exceptions import LayoutConflict, SameTopology, TopologyIncomplete
from celery_rabbitdelay.operations.destinations import Destinations
from celery_rabbitdelay.operations.mover import Moved, Mover
from celery_rabbitdelay.operations.progress_bar import progress_bar

#: The exit status if messages are left, or wait for a queue that is not bound.
MESSAGES_LEFT: Final = 1

#: How many reasons and queues the text names; ``--json`` names all of them.
MAX_NAMED: Final = 10


class MoveOptions(NamedTuple):
    """The options that :func:`move_options` adds.

    Attributes:
        as_json: Whether to print one JSON object.
        dry_run: Whether to count the messages, and move none.
        follow: Whether to keep running when the queues are empty, until Ctrl-C.
        rate: The most messages that are moved in a second; None for no limit.
        timeout: Seconds in which a broker has to answer, or to come back.
    """

    as_json: bool
    dry_run: bool
    follow: bool
    rate: float | None
    timeout: float


def move_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all commands that move messages; the command gets them as ``options``."""

    @wraps(command)
    def with_options(*args: Any, **given: Any) -> None:
        options = MoveOptions(**{name: given.pop(name) for name in MoveOptions._fields})
        command(*args, options=options, **given)

    for option in (
        json_option,
        click.option("--dry-run", is_flag=True, help="Count the messages, and move none."),
        click.option(
            "--follow", is_flag=True, help="Keep running when all is moved, until Ctrl-C."
        ),
        click.option(
            "--rate",
            type=click.FloatRange(min=0, min_open=True),
            help="Move at most this many messages a second.",
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=60.0,
            show_default=True,
            help="Seconds in which a broker has to answer, or to come back.",
        ),
    ):
        with_options = option(with_options)
    return with_options


class Move(NamedTuple):
    """A move that has not begun.

    Attributes:
        waiting: Returns how many messages are in each queue that has some.
        mover: Makes the mover, given the function that shows its progress.
        destinations: Binds the queues that the messages are for; closed at the end.
        expected: The reasons for which messages may stay.
    """

    waiting: Callable[[], Mapping[str, int]]
    mover: Callable[[Callable[[int, int], None]], Mover]
    destinations: Destinations
    expected: Collection[str] = ()


def run(move: Move, options: MoveOptions) -> None:
    """Move the messages, or count them, and print the result.

    Args:
        move: The move.
        options: The options of the command.

    Raises:
        click.UsageError: The messages cannot be moved between these levels.
    """
    try:
        if options.dry_run:
            _tell_waiting(move.waiting(), options.as_json)
            return
        with progress_bar("messages", 1) as show:
            mover = move.mover(lambda moved, known: show(moved, length=max(known, moved, 1)))
            moved = _moved(mover, options)
    except (SameTopology, LayoutConflict, TopologyIncomplete) as error:
        raise click.UsageError(str(error)) from error
    except BROKER_ERRORS as error:
        fail(error, f"cannot reach a broker: {error}", EX_UNAVAILABLE, options.as_json)
    finally:
        move.destinations.close()
    _tell(moved, options.as_json, move.destinations)
    is_left = set(moved.left) - set(move.expected) or moved.undeliverable or not moved.finished
    if is_left or move.destinations.unnamed:
        raise SystemExit(MESSAGES_LEFT)


def _moved(mover: Mover, options: MoveOptions) -> Moved:
    """Move the messages; if a broker fails meanwhile, print how many were moved until then."""
    try:
        with set_by_ctrl_c(mover.stopping):
            return mover.move(follow=options.follow)
    except BROKER_ERRORS as error:
        text = f"{mover.moved:,} messages are moved, the others are where they were: {error}"
        fail(error, text, EX_UNAVAILABLE, options.as_json)


def _tell_waiting(found: Mapping[str, int], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"waiting": sum(found.values()), "queues": found}))
        return
    for name, messages in list(found.items())[:MAX_NAMED]:
        click.echo(f"  {name:40} {messages:12,}")
    if len(found) > MAX_NAMED:
        click.echo(f"  ... and {len(found) - MAX_NAMED} further queues")
    click.echo(f"{sum(found.values()):,} messages wait; nothing was moved")


def _tell(moved: Moved, as_json: bool, destinations: Destinations) -> None:
    missing_queues, unnamed_queues = sorted(destinations.missing), sorted(destinations.unnamed)
    if as_json:
        queues = {"missing_queues": missing_queues, "unnamed_queues": unnamed_queues}
        click.echo(json.dumps({**moved._asdict(), **queues}))
    else:
        click.echo("\n".join(_lines(moved, missing_queues, unnamed_queues)))


def _lines(
    moved: Moved, missing_queues: Sequence[str], unnamed_queues: Sequence[str]
) -> Iterator[str]:
    rate = moved.moved / moved.seconds if moved.seconds else 0
    yield f"{moved.moved:,} messages moved in {moved.seconds:,.1f} s ({rate:,.0f}/s)"
    for what, reasons in (("undeliverable", moved.undeliverable), ("left", moved.left)):
        for reason, number in list(reasons.items())[:MAX_NAMED]:
            yield f"  {number:,} {what}: {reason}"
    if moved.copies:
        yield f"  {moved.copies:,} may exist twice: a connection was lost"
    if not moved.finished:
        yield "  ended before all was moved; start it again to go on"
    if missing_queues:
        names = ", ".join(missing_queues[:MAX_NAMED])
        yield f"  these queues do not exist; distribution tries them later: {names}"
    if unnamed_queues:
        names = ", ".join(unnamed_queues[:MAX_NAMED])
        yield (
            "  not bound, because the application does not name them; their messages wait until "
            "these queues are bound, and are undeliverable rabbitdelay_retry_for (a day) after "
            "they are due. Start a worker that consumes from them, or call "
            f"celery_rabbitdelay.kombu.bind_destination; --allow binds further ones: {names}"
        )
