"""``celery rabbitdelay migrate`` and ``transfer``: move all that waits into these levels."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import click
from celery.bin.base import CLIContext
from celery.platforms import EX_UNAVAILABLE
from kombu import Connection

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command.context import (
    BROKER_ERRORS,
    delays_of,
    fail,
    json_option,
    set_by_ctrl_c,
)
from celery_rabbitdelay.exceptions import (
    InvalidSetting,
    LayoutConflict,
    SameTopology,
    TopologyIncomplete,
)
from celery_rabbitdelay.operations.migration import (
    Destinations,
    Place,
    check_source,
    migration,
    waiting,
)
from celery_rabbitdelay.operations.mover import Moved, Mover
from celery_rabbitdelay.operations.progress_bar import progress_bar

__all__ = ["migrate", "move_options", "moved_and_told", "tell", "tell_waiting", "transfer"]

#: The exit status where messages are left.
MESSAGES_LEFT: Final = 1

#: How many reasons and queues the text names; ``--json`` names all of them.
MAX_NAMED: Final = 10


def move_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all commands that move messages."""
    for option in (
        json_option,
        click.option("--dry-run", is_flag=True, help="Count what waits, and move nothing."),
        click.option("--follow", is_flag=True, help="Go on when all is moved, until Ctrl-C."),
        click.option(
            "--rate", type=click.FloatRange(min=0, min_open=True), help="Messages a second at most."
        ),
        click.option(
            "--timeout",
            type=click.FloatRange(min=0, min_open=True),
            default=60.0,
            show_default=True,
            help="Seconds in which a broker has to answer, or to come back.",
        ),
    ):
        command = option(command)
    return command


def _source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe the levels that are emptied."""
    for option in (
        click.option("--from-generation", type=int, help="Their rabbitdelay_generation."),
        click.option("--from-shards", type=int, help="Their rabbitdelay_shards."),
        click.option("--from-queue-type", help="Their rabbitdelay_queue_type."),
        click.option("--from-tick", type=float, help="Their rabbitdelay_tick."),
        click.option("--from-layout", help="Their rabbitdelay_layout: a name, or JSON."),
        click.option("--from-prefix", help="Their rabbitdelay_prefix."),
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
def migrate(context: CLIContext, /, from_vhost: str | None, **options: Any) -> None:
    """Move all that waits in other levels of this broker into the application's.

    The --from options describe the levels that are emptied; omitted ones default to the
    application's settings. Producers and workers may run meanwhile. The command can be ended at any
    time and started again.
    """
    delays = delays_of(context)
    here = context.app.connection_for_write()
    there = here if from_vhost is None else here.clone(virtual_host=from_vhost)
    _migrate(context, delays, there, **options)


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
def transfer(context: CLIContext, /, from_url: str, **options: Any) -> None:
    """Move all that waits on another broker into the levels of the application's broker.

    Works between any two versions of RabbitMQ. Otherwise it behaves like migrate.
    """
    delays = delays_of(context)
    there = context.app.connection_for_write(url=from_url)
    _migrate(context, delays, there, **options)


def _migrate(
    context: CLIContext,
    delays: RabbitDelay,
    there: Connection,
    *,
    as_json: bool,
    dry_run: bool,
    follow: bool,
    rate: float | None,
    timeout: float,
    ignore_registry: bool,
    **source_options: Any,
) -> None:
    source = Place(there, _source_settings(delays, source_options).topology)
    target = Place(context.app.connection_for_write(), delays.topology)
    if not ignore_registry:
        _check_registry(delays, source.topology.prefix)
    may_declare = delays.settings.declare == "auto"
    destinations = Destinations(target, context.app.amqp.queues, may_declare)
    try:
        if dry_run:
            check_source(source)
            tell_waiting(waiting(source), as_json)
            return
        with progress_bar("messages", 1) as show:
            mover = migration(
                source,
                target,
                destinations,
                may_declare=may_declare,
                timeout=timeout,
                rate=rate,
                show=lambda moved, known: show(moved, length=max(known, moved, 1)),
            )
            moved = moved_and_told(mover, follow, as_json)
    except (SameTopology, LayoutConflict, TopologyIncomplete) as error:
        raise click.UsageError(str(error)) from error
    except BROKER_ERRORS as error:
        fail(error, f"cannot reach a broker: {error}", EX_UNAVAILABLE, as_json)
    finally:
        destinations.close()
    tell(moved, as_json, missing_queues=sorted(destinations.missing))


def _source_settings(delays: RabbitDelay, options: dict[str, Any]) -> Any:
    given = {
        name.removeprefix("from_"): value for name, value in options.items() if value is not None
    }
    layout = given.get("layout", "")
    if layout[:1] in ("{", "["):
        try:
            given["layout"] = json.loads(layout)
        except ValueError as wrong:
            text = f"{layout!r} is not JSON: {wrong}"
            raise click.BadParameter(text, param_hint="--from-layout") from wrong
    try:
        return dataclasses.replace(delays.settings, **given)
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


def moved_and_told(mover: Mover, follow: bool, as_json: bool) -> Moved:
    """Move, and say how much was moved if a broker fails in between."""
    try:
        with set_by_ctrl_c(mover.stopping):
            return mover.move(follow=follow)
    except BROKER_ERRORS as error:
        text = f"{mover.moved:,} messages are moved, the others are where they were: {error}"
        fail(error, text, EX_UNAVAILABLE, as_json)


def tell_waiting(found: Mapping[str, int], as_json: bool) -> None:
    """Print how many messages are in which queue."""
    if as_json:
        click.echo(json.dumps({"waiting": sum(found.values()), "queues": found}))
        return
    for name, messages in list(found.items())[:MAX_NAMED]:
        click.echo(f"  {name:40} {messages:12,}")
    if len(found) > MAX_NAMED:
        click.echo(f"  ... and {len(found) - MAX_NAMED} further queues")
    click.echo(f"{sum(found.values()):,} messages wait; nothing was moved")


def tell(
    moved: Moved, as_json: bool, *, missing_queues: Sequence[str], expected: Collection[str] = ()
) -> None:
    """Print what was moved; end with the status 1 if some are left or undeliverable.

    Args:
        moved: What was moved.
        as_json: Whether to print it as JSON.
        missing_queues: The queues that messages are for and that do not exist.
        expected: The reasons for which messages are meant to stay.
    """
    if as_json:
        click.echo(json.dumps({**moved._asdict(), "missing_queues": missing_queues}))
    else:
        click.echo("\n".join(_lines(moved, missing_queues)))
    if set(moved.left) - set(expected) or moved.undeliverable or not moved.finished:
        raise SystemExit(MESSAGES_LEFT)


def _lines(moved: Moved, missing_queues: Sequence[str]) -> Iterator[str]:
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
