"""``celery rabbitdelay permissions``: what each user of the broker needs, and whether one has it.

https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import amqp
import click
from amqp.exceptions import AccessRefused, ChannelError
from celery.app.utils import Settings as Configuration
from kombu import Connection, Exchange, Queue
from kombu.common import Broadcast

from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE, Topology
from celery_rabbitdelay.operations.checks import FoundRow
from celery_rabbitdelay.operations.inventory import Inventory
from celery_rabbitdelay.publishing.destination import bindings_of
from celery_rabbitdelay.publishing.kombu_internals import declared_arguments

#: The users of a broker.
Role: TypeAlias = Literal["producer", "worker", "check-in", "operator"]

#: The kinds of permissions, in the order of ``rabbitmqctl set_permissions``.
Permission: TypeAlias = Literal["configure", "write", "read"]

#: The names that kombu and Celery make up for queues: of replies, and at the end of broadcasts'.
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Right(NamedTuple):
    """A permission on all queues and exchanges whose whole names match a regular expression."""

    permission: Permission
    pattern: str


class TopicRight(NamedTuple):
    """A topic permission: the routing keys that a user may publish with to a topic exchange."""

    exchange: str
    write: str


def rights(
    role: Role,
    topology: Topology,
    queues: Sequence[Queue],
    conf: Configuration,
    *,
    may_declare: bool,
    modules: Sequence[str] = (CHECK_IN, DISTRIBUTE, PROBE),
) -> Iterator[Right]:
    """Yield what a user needs.

    Args:
        role: The user.
        topology: The levels.
        queues: The queues of the tasks that it sends or runs, with their exchanges. Those with
            ``no_declare`` are declared by somebody else.
        conf: The configuration of the application, for the names that Celery uses for itself.
        may_declare: Whether ``rabbitdelay_declare`` is "auto".
        modules: The modules that a worker serves.
    """
    prefix = re.escape(topology.prefix)
    everything = rf"{prefix}\..*"
    # Each worker has its own queue for a broadcast, and declares it.
    lasting = [queue for queue in queues if not isinstance(queue, Broadcast)]
    match role:
        case "check-in":
            yield Right("write", rf"{prefix}\.checkin")
        case "producer" if not may_declare:
            yield Right("write", rf"{prefix}\.[^.]+\.x[0-9]+")
            yield Right("write", rf"{prefix}\.delivery")
        case "producer":
            yield from _rights(everything)
            yield from _to_declare(lasting, binds=True)
            broadcasts = [queue for queue in queues if isinstance(queue, Broadcast)]
            yield from _rights(_exchanges(broadcasts), "configure")
        case "worker":
            if may_declare:
                yield from _rights(everything)
            else:
                yield Right("write", everything)
                yield Right("read", _either(_served(topology, modules)))
            # Distribution publishes to the queues, by the default exchange, and to the exchanges.
            yield Right("write", r"amq\.default")
            yield from _rights(_exchanges(queues), "write")
            yield Right("read", "|".join(map(_name, queues)))
            yield from _to_declare(queues, binds=may_declare)
            yield from _rights(_remote_control(conf))
            events = re.escape(conf.event_exchange), re.escape(conf.event_queue_prefix)
            yield from _rights(r"{}|{}\..*".format(*events))
        case "operator":
            yield from _rights(everything)
            yield from _to_declare(lasting, binds=True)
            yield Right("write", r"amq\.default")  # redrive publishes there
            yield from _rights(_remote_control(conf))  # status asks the workers
    if role == "producer" and str(conf.result_backend or "").partition(":")[0] == "rpc":
        # The queue of its results, to which workers publish over the default exchange.
        yield Right("configure", _UUID)
        yield Right("read", _UUID)


def topic_rights(topology: Topology, queues: Sequence[Queue]) -> Iterator[TopicRight]:
    r"""Yield the topic permissions of a producer that may delay tasks for some queues only.

    An exchange without a topic permission takes every key, so each of the levels has one. A key has
    as many digits as there are levels, because a key that matches no binding would reach
    distribution, which looks into the headers. The expressions end with ``\z``: ``$`` would also
    match before a line feed at the end of a key.
    """
    shard = r"s[0-9]+\." if topology.shards > 1 else ""
    # A broadcast is reached through distribution alone.
    names = (queue.name for queue in queues if not isinstance(queue, Broadcast))
    words = _either(map(encode_destination, names))
    pattern = rf"^{shard}([0-9]+\.){{{len(topology.layout.levels)}}}({words})\z"
    for exchange in topology.exchanges:
        if exchange.type == "topic":
            yield TopicRight(exchange.name, pattern)


def patterns(given: Iterable[Right]) -> list[str]:
    """Return the three arguments of ``rabbitmqctl set_permissions``; empty for no permission."""
    wanted: dict[str, dict[str, None]] = {each: {} for each in get_args(Permission)}
    for permission, pattern in given:
        wanted[permission][pattern] = None
    return [f"^({'|'.join(each)})$" if each else "" for each in wanted.values()]


def commands(
    user: str, virtual_host: str, given: Iterable[Right], topics: Iterable[TopicRight] = ()
) -> Iterator[str]:
    """Yield the commands for a shell that give a user permissions, in place of all former ones."""
    where = f"-p {shlex.quote(virtual_host)} {shlex.quote(user)}"
    yield f"rabbitmqctl set_permissions {where} {' '.join(map(_quoted, patterns(given)))}"
    for exchange, write in topics:
        yield f"rabbitmqctl set_topic_permissions {where} {exchange} {_quoted(write)} ''"


def _quoted(pattern: str) -> str:
    quoted = shlex.quote(pattern)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


def _rights(pattern: str, *permissions: Permission) -> Iterator[Right]:
    """Yield permissions, or all of them, for a pattern that is not empty."""
    if pattern:
        for permission in permissions or get_args(Permission):
            yield Right(permission, pattern)


def _to_declare(queues: Sequence[Queue], *, binds: bool) -> Iterator[Right]:
    """Yield what declares queues with their exchanges, and binds them to the levels.

    Where a queue names a dead-letter exchange, or an exchange an alternate one, the broker requires
    write permission on that when it is declared for the first time.
    """
    declared = [queue for queue in queues if not getattr(queue, "no_declare", False)]
    exchanges = [each for queue in declared for each, _ in bindings_of(queue) if each.name]
    names = [*map(_name, declared), *(re.escape(each.name) for each in exchanges)]
    yield from _rights("|".join(dict.fromkeys(names)))
    behind = [
        *((queue.queue_arguments or {}).get("x-dead-letter-exchange") for queue in declared),
        *((each.arguments or {}).get("alternate-exchange") for each in exchanges),
    ]
    targets = _either(name or "amq.default" for name in behind if name is not None)
    yield from _rights(targets, "write")
    if binds:
        yield from _rights(_either(each.name for each in queues if each not in declared), "write")


def _served(topology: Topology, modules: Sequence[str]) -> Iterator[str]:
    """Yield the queues that a worker consumes from, besides those of its tasks."""
    queues = topology.module_queues
    served = {CHECK_IN: queues.checkin, DISTRIBUTE: queues.distribution, PROBE: topology.probe}
    yield from (queue.name for module, queue in served.items() if module in modules)
    yield queues.paused.name


def _remote_control(conf: Configuration) -> str:
    return rf"(.*\.)?{re.escape(conf.control_exchange)}\.pidbox"


def _name(queue: Queue) -> str:
    """Return the expression for a queue's name, in which a broadcast may have a UUID."""
    bare = re.sub(f"{_UUID}$", "", queue.name) if isinstance(queue, Broadcast) else queue.name
    return re.escape(bare) + (_UUID if bare != queue.name else "")


def _exchanges(queues: Iterable[Queue]) -> str:
    """Return the expression for the exchanges that queues are bound to."""
    return _either(each.name for queue in queues for each, _ in bindings_of(queue) if each.name)


def _either(names: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(map(re.escape, names)))


@shared.command()
@click.argument("role", type=click.Choice(get_args(Role)))
@click.option("--user", required=True, help="The user of the broker.")
@click.option("--vhost", help="The virtual host; that of the application if omitted.")
@click.option(
    "--declare",
    "mode",
    type=click.Choice(("auto", "never")),
    help="Its rabbitdelay_declare; that of the application if omitted.",
)
@click.option(
    "--topics",
    is_flag=True,
    help="For a producer: also the topic permissions that let it reach only the application's "
    "queues.",
)
@shared.topology_options
def permissions(
    role: Role, user: str, vhost: str | None, mode: str | None, topics: bool, **options: object
) -> None:
    """Print the rabbitmqctl commands that give a user what its ROLE needs, and no more.

    The tasks' queues are those of task_queues, or Celery's default queue. No broker is asked.
    """
    if topics and role != "producer":
        raise click.UsageError("--topics is for the role producer")
    settings, app = shared.delays().settings, shared.app()
    topology = shared.topology(options)
    queues = list(app.amqp.Queues(app.conf.task_queues).values())
    may_declare = (mode or settings.declare) == "auto"
    needed = list(
        rights(role, topology, queues, app.conf, may_declare=may_declare, modules=settings.modules)
    )
    keys = list(topic_rights(topology, queues)) if topics else []
    host = vhost or app.connection_for_write().virtual_host or "/"
    configure, write, read = patterns(needed)
    told = {"user": user, "vhost": host, "configure": configure, "write": write, "read": read}
    shared.answer(
        {**told, "topics": [each._asdict() for each in keys]},
        commands(user, host, needed, keys),
    )


#: A binding key that nobody uses: the bindings that are removed do not exist.
NO_KEY: Final = "rabbitdelay.verify"

#: A permission, what it is for, as ``queue`` and a name, and a method that needs it.
_Question: TypeAlias = tuple[str, str, str, Callable[[amqp.Channel], object]]


def check_permissions(
    connection: Connection, settings: Settings, queues: Sequence[Queue], inventory: Inventory
) -> Iterator[FoundRow]:
    """Find permissions that producers and workers need and this user does not have.

    Args:
        connection: An open connection of the user.
        settings: The application's settings.
        queues: The queues of its tasks.
        inventory: What exists; nothing else is asked for.
    """
    exist = {"exchange": inventory.exchanges, "queue": inventory.queues}
    user = connection.userid or "guest"
    channel = cast(amqp.Channel, connection.channel())
    for permission, kind, name, method in _questions(settings, queues):
        try:
            if name in exist[kind]:
                method(channel)
                # Answered behind the method, or not at all if the broker has refused it. A
                # declaration that waited for its own answer would have the broker ask the queue's
                # leader.
                channel.basic_qos(0, 1, False)
        except AccessRefused as refused:  # py-amqp has opened the channel again
            # A method may need several permissions.
            if f"{kind} '{name}'" in str(refused):
                told = {"user": user, "permission": permission}
                yield "permission-missing", f"{kind} {name}", told
        except ChannelError:
            pass
    channel.close()


def _questions(settings: Settings, queues: Sequence[Queue]) -> Iterator[_Question]:
    topology, modules = settings.topology, settings.topology.module_queues
    delivery = topology.delivery.name
    if settings.declare == "auto":
        declared = [queue for queue in queues if not getattr(queue, "no_declare", False)]
        for each in topology.all_exchanges:
            declare = methodcaller("exchange_declare", each.name, each.type, **_arguments(each))
            yield "configure", "exchange", each.name, declare
        for queue in (*topology.queues, *declared):
            declare = methodcaller("queue_declare", queue.name, **_arguments(queue))
            yield "configure", "queue", queue.name, declare
        for queue in declared:
            unbind = methodcaller("queue_unbind", queue.name, delivery, NO_KEY)
            yield "write", "queue", queue.name, unbind
            yield "read", "exchange", delivery, unbind
    for exchange in topology.exchanges:
        if exchange != modules.meditated:
            source = modules.undeliverable.name if exchange.name == delivery else delivery
            unbind = methodcaller("exchange_unbind", exchange.name, source, NO_KEY)
            yield "write", "exchange", exchange.name, unbind
    for name in _served(topology, settings.modules):
        yield "read", "queue", name, partial(_consume_nothing, name)


def _arguments(entity: Exchange | Queue) -> dict[str, Any]:
    """Return how an entity is declared; kombu's own method would call a queue's on_declared."""
    own = declared_arguments(entity) if isinstance(entity, Queue) else entity.arguments
    flags = {"durable": entity.durable, "auto_delete": entity.auto_delete, "nowait": True}
    return {**flags, "arguments": own}


def _consume_nothing(name: str, channel: amqp.Channel) -> None:
    # Should a broker take it after all, it gets one message and gives it back.
    channel.basic_qos(0, 1, False)
    tag = channel.basic_consume(name, arguments={"x-priority": "refused"})
    channel.basic_cancel(tag)
    channel.basic_recover(requeue=True)
