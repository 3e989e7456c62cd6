"""``celery rabbitdelay migrate`` and ``transfer``: move all waiting messages into these levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import click
from celery.bin.base import CLIContext
from kombu import Connection

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.destinations import configured_destinations, configured_queues
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.command.context import broker_at, delays_of
from celery_rabbitdelay.command.moving import Move, MoveOptions, move_options, run
from celery_rabbitdelay.command.topology_options import layout_type
from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.destinations import Destinations, Place
from celery_rabbitdelay.operations.migration import check_source, migration, waiting
from celery_rabbitdelay.operations.mover import Mover


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

    def mover(show: Callable[[int, int], None]) -> Mover:
        return migration(
            source,
            target,
            destinations,
            may_declare=may_declare,
            timeout=options.timeout,
            rate=options.rate,
            show=show,
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
