"""``celery rabbitdelay undeliverable redrive``: publish what could not be delivered again."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any, cast

import click
from celery.bin.base import CLIContext

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.destinations import configured_queues
from celery_rabbitdelay.command.context import delays_of, json_option
from celery_rabbitdelay.command.undeliverable import (
    age_type,
    errors_told,
    filter_options,
    filter_with,
    limit_option,
    tell_removal,
)
from celery_rabbitdelay.exceptions import DelayTooLong, InvalidDelay, InvalidDestination
from celery_rabbitdelay.operations.moving.mover import Destinations, Place
from celery_rabbitdelay.operations.undeliverable.redrive import (
    bound_by,
    check_exists,
    redriving_for,
)
from celery_rabbitdelay.operations.undeliverable.redrive import redrive as redrive_messages
from celery_rabbitdelay.operations.undeliverable.redriving import MAX_ATTEMPTS
from celery_rabbitdelay.publishing.publication import PublishPolicy


@click.command()
@filter_options
@click.option("--delay", type=age_type, help="Each waits for at least this long: 90, 15m, 2h, 3d.")
@click.option("--to", metavar="QUEUE", help="To this queue, wherever they were meant to go.")
@click.option(
    "--allow",
    multiple=True,
    metavar="PATTERN",
    help="Also to queues and exchanges of this name or pattern, which the application lacks.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1),
    default=MAX_ATTEMPTS,
    show_default=True,
    help="A message that was redriven so often stays.",
)
@click.option(
    "--sign", is_flag=True, help="Also messages without a valid signature: they are signed."
)
@limit_option
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="NUMBER",
    help="At most this many messages a second.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@json_option
@click.pass_obj
def redrive(
    context: CLIContext,
    /,
    delay: timedelta | None,
    to: str | None,
    allow: tuple[str, ...],
    max_attempts: int,
    sign: bool,
    limit: int | None,
    rate: float | None,
    dry_run: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Publish messages into the levels again, and take them out of the queue."""
    delays = delays_of(context)
    settings, topology = delays.settings, delays.topology
    app = cast(Celery, context.app)  # it has delays
    app.loader.import_default_modules()
    connection = app.connection_for_write()
    may_declare = settings.declare == "auto" and not dry_run
    place = Place(connection, topology)
    destinations = Destinations(place, configured_queues(app), may_declare)
    try:
        redriving = redriving_for(
            app,
            delay=delay,
            to=to,
            allow=allow,
            max_attempts=max_attempts,
            ensure=bound_by(destinations),
            vouches=sign,
        )
    except (InvalidDelay, DelayTooLong, InvalidDestination) as wrong:
        raise click.UsageError(str(wrong)) from wrong
    with errors_told(connection, topology, as_json), connection, closing(destinations):
        if to is not None:
            check_exists(connection, to)
        report = redrive_messages(
            connection,
            topology,
            redriving,
            filter_with(filters).matches,
            limit=limit,
            rate=rate,
            dry_run=dry_run,
            policy=PublishPolicy(timeout=settings.confirm_timeout, window=settings.max_unconfirmed),
            declare=delays.declare,
            redeclare=delays.declare if settings.declare == "auto" else None,
        )
    tell_removal(report, "redriven", dry_run, as_json)
