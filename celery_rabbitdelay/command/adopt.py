"""``celery rabbitdelay adopt``: adopt delayed messages of other mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import click
from celery.bin.base import CLIContext
from kombu import Queue

from celery_rabbitdelay.command.context import delays_of
from celery_rabbitdelay.command.migrate import Move, MoveOptions, move_options, run
from celery_rabbitdelay.levels.entities import DISTRIBUTE
from celery_rabbitdelay.operations.moving import adoption
from celery_rabbitdelay.operations.moving.migration import ready_in
from celery_rabbitdelay.operations.moving.mover import Convert, Destinations, Mover, Place, Target
from celery_rabbitdelay.publishing.declaration import check_complete, declare_if_missing
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher


@click.group()
def adopt() -> None:
    """Take over delayed messages that wait elsewhere on the application's broker.

    Each keeps its due time. A command can be ended at any time and started again.
    """


@adopt.command()
@click.option("--chain-prefix", default="", help="Celery's broker_native_delayed_delivery_prefix.")
@move_options
@click.pass_obj
def native(context: CLIContext, /, chain_prefix: str, options: MoveOptions) -> None:
    """Adopt the tasks in Celery's native delayed delivery.

    Deploy producers that use the levels first; tasks that others still send are adopted by
    --follow.
    """

    def convert(adopting: _Adopting) -> Convert:
        return adoption.NativeChain(adopting.tasks, adopting.queues.values()).convert

    _adopt(context, adoption.native_queues(chain_prefix), convert, options)


@adopt.command()
@click.option(
    "--version",
    type=click.IntRange(1, 2),
    default=2,
    show_default=True,
    help="Of NServiceBus's delay infrastructure: nsb.delay-level-* or nsb.v2.delay-level-*.",
)
@move_options
@click.pass_obj
def nservicebus(context: CLIContext, /, version: int, options: MoveOptions) -> None:
    """Adopt the messages in NServiceBus's delay infrastructure.

    They reach the same queues, through workers that serve distribution.
    """

    def convert(adopting: _Adopting) -> Convert:
        keys = adopting.delays.settings.signing_keys
        return adoption.NServiceBusChain(adopting.target.topology, version, keys).convert

    if DISTRIBUTE not in delays_of(context).settings.modules:
        raise click.UsageError("it needs distribution, which rabbitdelay_modules lacks")
    _adopt(context, adoption.nservicebus_queues(version), convert, options)


@adopt.command()
@click.argument("queues", nargs=-1, required=True, metavar="QUEUE...")
@move_options
@click.pass_obj
def eta(context: CLIContext, /, queues: Sequence[str], options: MoveOptions) -> None:
    """Adopt tasks with an eta that sit in task queues.

    A worker of this application does so whenever it receives one; use this for queues that have no
    worker at the moment. Other tasks stay in their queue, behind those that arrive meanwhile.
    """

    def convert(adopting: _Adopting) -> Convert:
        return adoption.EtaTasks(adopting.tasks, adopting.target.topology, adopting.queues).convert

    _adopt(context, queues, convert, options, expected=(adoption.KEEPS_OWN, adoption.NOT_DELAYED))


class _Adopting:
    """The application's levels, and a converter for tasks."""

    def __init__(self, context: CLIContext) -> None:
        self.delays = delays_of(context)
        self.target = Place(context.app.connection_for_write(), self.delays.topology)
        self.queues: dict[str, Queue] = context.app.amqp.queues
        self.may_declare = self.delays.settings.declare == "auto"
        self.destinations = Destinations(self.target, self.queues, self.may_declare)
        producer = DelayedProducer(
            Publisher(self.target.connection), **self.delays.settings.for_producer
        )
        tasks = context.app.tasks
        self.tasks = adoption.TaskMessages(
            producer,
            context.app.timezone,
            self.destinations.ensure,
            lambda name: not getattr(tasks.get(name), "rabbitdelay", True),
        )


def _adopt(
    context: CLIContext,
    queues: Sequence[str],
    convert: Callable[[_Adopting], Convert],
    options: MoveOptions,
    expected: Collection[str] = (adoption.KEEPS_OWN,),
) -> None:
    adopting = _Adopting(context)
    connection, topology = adopting.target
    declare = declare_if_missing if adopting.may_declare else check_complete
    target = Target(
        connection,
        topology.module_queues.undeliverable.exchange.name,
        lambda opened: declare(opened, topology),
        options.timeout,
    )

    def mover() -> Mover:
        return Mover(connection, queues, target, convert(adopting), rate=options.rate)

    def waiting() -> Mapping[str, int]:
        return ready_in(connection, [Queue(name) for name in queues])

    run(Move(waiting, mover, adopting.destinations, expected), options)
