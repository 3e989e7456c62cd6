"""``celery rabbitdelay migrate`` and ``transfer``, and what they share with ``adopt``: the move."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Final, NamedTuple, cast

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.destinations import configured_destinations, configured_queues
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command.context import (
    BROKER_ERRORS,
    broker_at,
    delays_of,
    fail,
    json_option,
    layout_type,
    set_by_ctrl_c,
)
from celery_rabbitdelay.exceptions import (
    InvalidSetting,
    LayoutConflict,
    SameTopology,
    TopologyIncomplete,
)
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.moving.migration import check_source, migration, waiting
from celery_rabbitdelay.operations.moving.mover import Destinations, Moved, Mover, Place

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
        mover: Makes the mover.
        destinations: Binds the queues that the messages are for; closed at the end.
        expected: The reasons for which messages may stay.
    """

    waiting: Callable[[], Mapping[str, int]]
    mover: Callable[[], Mover]
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
        moved = _moved(move.mover(), options)
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


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe the levels that are emptied."""
    for option in (
        click.option("--from-shards", type=int, help="Their rabbitdelay_shards."),
        click.option("--from-queue-type", help="Their rabbitdelay_queue_type."),
        click.option("--from-tick", type=float, help="Their rabbitdelay_tick."),
        click.option(
            "--from-layout", type=layout_type, help="Their rabbitdelay_layout: a name, or JSON."
        ),
        click.option("--from-prefix", help="Their rabbitdelay_prefix."),
        click.option(
            "--allow",
            multiple=True,
            metavar="PATTERN",
            help="Also bind queues of this name or pattern, which the application does not name.",
        ),
        click.option(
            "--sign", is_flag=True, help="Sign messages that have no valid signature, too."
        ),
        click.option(
            "--ignore-registry",
            is_flag=True,
            help="Move even if the registry's prefix differs; cancelled tasks then run.",
        ),
    ):
        command = option(command)
    return command


@click.command()
@_source_options
@click.option("--from-vhost", help="Their virtual host.")
@move_options
@click.pass_obj
def migrate(
    context: CLIContext,
    /,
    from_vhost: str | None,
    options: MoveOptions,
    **source_options: Any,
) -> None:
    """Move all messages that wait in other levels of this broker into the application's.

    The --from options describe the levels that are emptied; omitted ones default to the
    application's settings. Producers and workers may run meanwhile. The command can be ended at any
    time and started again.
    """
    delays = delays_of(context)
    here = context.app.connection_for_write()
    there = here if from_vhost is None else here.clone(virtual_host=from_vhost)
    _migrate(context, delays, there, options, **source_options)


@click.command()
@click.option(
    "--from",
    "from_url",
    required=True,
    envvar="RABBITDELAY_FROM",
    help="The URL of the broker that is emptied; or the environment variable RABBITDELAY_FROM.",
)
@_source_options
@move_options
@click.pass_obj
def transfer(
    context: CLIContext, /, from_url: str, options: MoveOptions, **source_options: Any
) -> None:
    """Move all messages that wait on another broker into the application's levels.

    Works between any two versions of RabbitMQ. Otherwise it behaves like migrate. The connection to
    an amqps:// URL uses the application's broker_use_ssl, that to an amqp:// URL is not encrypted.
    """
    delays = delays_of(context)
    there = broker_at(context, from_url)
    _migrate(context, delays, there, options, **source_options)


def _migrate(
    context: CLIContext,
    delays: RabbitDelay,
    there: Connection,
    options: MoveOptions,
    *,
    ignore_registry: bool,
    allow: tuple[str, ...],
    sign: bool,
    **source_options: Any,
) -> None:
    source = Place(there, _source_topology(delays, source_options))
    target = Place(context.app.connection_for_write(), delays.topology)
    if not ignore_registry:
        _check_registry(delays, source.topology.prefix)
    may_declare = delays.settings.declare == "auto"
    app = cast(Celery, context.app)  # it has delays
    app.loader.import_default_modules()
    named = configured_destinations(app)
    allowed = dataclasses.replace(named, patterns=(*named.patterns, *allow))
    destinations = Destinations(
        target,
        configured_queues(app),
        may_declare,
        lambda name: allowed.includes("", name),
    )

    def waiting_there() -> Mapping[str, int]:
        check_source(source)
        return waiting(source)

    def mover() -> Mover:
        return migration(
            source,
            target,
            destinations,
            may_declare=may_declare,
            timeout=options.timeout,
            rate=options.rate,
            signing_keys=delays.settings.signing_keys,
            vouches=sign,
        )

    run(Move(waiting_there, mover, destinations), options)


def _source_topology(delays: RabbitDelay, options: dict[str, Any]) -> Topology:
    given = {
        name.removeprefix("from_"): value for name, value in options.items() if value is not None
    }
    try:
        return dataclasses.replace(delays.settings, **given).topology
    except InvalidSetting as wrong:
        raise click.UsageError(f"of the levels that are emptied: {wrong}") from wrong


def _check_registry(delays: RabbitDelay, prefix: str) -> None:
    settings = delays.settings
    if settings.registry_url is None:
        return
    known = settings.registry_prefix or settings.prefix
    if known != prefix:
        raise click.UsageError(
            f"the registry of this application has the prefix {known!r}, and knows nothing of the "
            f"tasks that were sent under {prefix!r}: those that are cancelled would run. Set "
            f"rabbitdelay_registry_prefix = {prefix!r}, or say --ignore-registry"
        )
