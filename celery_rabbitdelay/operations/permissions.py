"""``celery rabbitdelay permissions``: the permissions of a broker's users.

https://www.rabbitmq.com/docs/access-control
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import click
from celery.app.utils import Settings as Configuration
from kombu import Queue
from kombu.common import Broadcast

from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels.routing_key import encode_destination
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, PROBE, Topology
from celery_rabbitdelay.publishing.destination import bindings_of

#: The roles of a broker's users.
Role: TypeAlias = Literal["producer", "worker", "check-in", "operator"]

#: A pattern for the random part in the names of reply queues, and at the end of names of broadcast
#: queues.
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class Rights(NamedTuple):
    """The three arguments of ``rabbitmqctl set_permissions``, regular expressions of whole names.

    An empty string grants no permission.
    """

    configure: str
    write: str
    read: str


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
    only_delayed: bool = False,
    modules: Sequence[str] = (CHECK_IN, DISTRIBUTE, PROBE),
) -> Rights:
    """Return the permissions that a user needs.

    Args:
        role: The user's role.
        topology: The levels.
        queues: The queues of the tasks that the user sends or runs, with their exchanges. Queues
            with ``no_declare`` are declared elsewhere.
        conf: The configuration of the application, for Celery's own names.
        may_declare: Whether ``rabbitdelay_declare`` is "auto".
        only_delayed: Whether a producer sends no tasks without a delay. Celery itself sends tasks
            without a delay: it declares the queue, and publishes to the default exchange or, unless
            the queue's exchange is direct, to that exchange.
        modules: The modules that a worker serves.
    """
    prefix = re.escape(topology.prefix)
    everything = rf"{prefix}\..*"
    remote_control = rf"(.*\.)?{re.escape(conf.control_exchange)}\.pidbox"
    # A worker declares its own queue for a broadcast.
    lasting = [queue for queue in queues if not isinstance(queue, Broadcast)]
    # Patterns for all three permissions, and for a single permission.
    full, configure, write, read = list[str](), list[str](), list[str](), list[str]()
    match role:
        case "check-in":
            write.append(rf"{prefix}\.checkin")
        case "producer":
            if may_declare:
                full.append(everything)
            else:
                write += rf"{prefix}\.[^.]+\.x[0-9]+", rf"{prefix}\.delivery"
            if may_declare or not only_delayed:
                full += _declared(lasting)
                write += _to_declare(lasting, binds=may_declare)
                configure += _exchanges(queue for queue in queues if queue not in lasting)
            if not only_delayed:
                write += r"amq\.default", *_exchanges(queues)
        case "worker":
            if may_declare:
                full.append(everything)
            else:
                write.append(everything)
                read += map(re.escape, _served(topology, modules))
            events = re.escape(conf.event_queue_prefix)
            full += *_declared(queues), remote_control
            full += re.escape(conf.event_exchange), rf"{events}\..*"
            # Distribution publishes to queues, through the default exchange, and to exchanges.
            write += r"amq\.default", *_exchanges(queues)
            write += _to_declare(queues, binds=may_declare)
            read += map(_name, queues)
        case "operator":
            # Status asks the workers, and redrive publishes to the default exchange.
            full += everything, *_declared(lasting), remote_control
            write += r"amq\.default", *_to_declare(lasting, binds=True)
    if role == "producer" and str(conf.result_backend or "").partition(":")[0] == "rpc":
        # The reply queue, which workers reach through the default exchange.
        configure.append(_UUID)
        read.append(_UUID)
    return Rights(*(_whole([*full, *own]) for own in (configure, write, read)))


def _whole(names: Iterable[str]) -> str:
    either = "|".join(dict.fromkeys(names))
    return f"^({either})$" if either else ""


def topic_rights(topology: Topology, queues: Sequence[Queue]) -> Iterator[TopicRight]:
    r"""Yield the topic permissions of a producer that may delay tasks for some queues only.

    An exchange without a topic permission accepts every key, so every level needs one. The pattern
    requires one digit per level: a key that matches no binding would reach distribution, which
    reads the headers. The expressions end with ``\z``: ``$`` would also match before a line feed at
    the end of a key.
    """
    shard = r"s[0-9]+\." if topology.shards > 1 else ""
    # A broadcast is reached through distribution alone.
    names = (queue.name for queue in queues if not isinstance(queue, Broadcast))
    words = dict.fromkeys(re.escape(encode_destination(name)) for name in names)
    pattern = rf"^{shard}([0-9]+\.){{{len(topology.layout.levels)}}}({'|'.join(words)})\z"
    for exchange in topology.exchanges:
        if exchange.type == "topic":
            yield TopicRight(exchange.name, pattern)


def commands(
    user: str, virtual_host: str, given: Rights, topics: Iterable[TopicRight] = ()
) -> Iterator[str]:
    """Yield the shell commands that replace a user's permissions."""
    where = f"-p {shlex.quote(virtual_host)} {shlex.quote(user)}"
    yield f"rabbitmqctl set_permissions {where} {' '.join(map(_quoted, given))}"
    for exchange, write in topics:
        yield f"rabbitmqctl set_topic_permissions {where} {exchange} {_quoted(write)} ''"


def _quoted(pattern: str) -> str:
    quoted = shlex.quote(pattern)
    return quoted if quoted.startswith("'") else f"'{quoted}'"


def _declared(queues: Sequence[Queue]) -> list[str]:
    """Return the names of the queues that may be declared, and of their exchanges."""
    declared = [queue for queue in queues if not getattr(queue, "no_declare", False)]
    return [*map(_name, declared), *_exchanges(declared)]


def _to_declare(queues: Sequence[Queue], *, binds: bool) -> Iterator[str]:
    """Yield other names that need write permission when queues are declared and bound.

    To declare a queue with a dead-letter exchange, or an exchange with an alternate exchange, the
    broker requires write permission on that exchange.
    """
    for queue in queues:
        if getattr(queue, "no_declare", False):
            if binds:
                yield re.escape(queue.name)
            continue
        exchanges = [each for each, _ in bindings_of(queue) if each.name]
        behind = [
            (queue.queue_arguments or {}).get("x-dead-letter-exchange"),
            *((each.arguments or {}).get("alternate-exchange") for each in exchanges),
        ]
        yield from (re.escape(name or "amq.default") for name in behind if name is not None)


def _served(topology: Topology, modules: Sequence[str]) -> Iterator[str]:
    """Yield the queues that a worker consumes besides its task queues."""
    queues = topology.module_queues
    served = {CHECK_IN: queues.checkin, DISTRIBUTE: queues.distribution, PROBE: topology.probe}
    yield from (queue.name for module, queue in served.items() if module in modules)
    yield queues.paused.name


def _name(queue: Queue) -> str:
    """Return the expression for a queue's name; a broadcast's name may end with a UUID."""
    bare = re.sub(f"{_UUID}$", "", queue.name) if isinstance(queue, Broadcast) else queue.name
    return re.escape(bare) + (_UUID if bare != queue.name else "")


def _exchanges(queues: Iterable[Queue]) -> Iterator[str]:
    """Yield the names of the exchanges that queues are bound to."""
    for queue in queues:
        yield from (re.escape(each.name) for each, _ in bindings_of(queue) if each.name)


@shared.command()
@click.argument("role", type=click.Choice(get_args(Role)))
@click.option("--user", required=True, help="The user of the broker.")
@click.option("--vhost", help="The virtual host; by default the application's.")
@click.option(
    "--declare",
    "mode",
    type=click.Choice(("auto", "never")),
    help="The user's rabbitdelay_declare; by default the application's.",
)
@click.option(
    "--topics",
    is_flag=True,
    help="For a producer of delayed tasks only: also the topic permissions that let it reach only "
    "the application's queues.",
)
@shared.topology_options()
def permissions(
    role: Role, user: str, vhost: str | None, mode: str | None, topics: bool, **options: object
) -> None:
    """Print the rabbitmqctl commands that give a user exactly the permissions for its ROLE.

    The task queues are task_queues, or Celery's default queue. No broker is contacted.
    """
    if topics and role != "producer":
        raise click.UsageError("--topics is only for the role producer")
    settings, app = shared.delays().settings, shared.app()
    topology = shared.topology(options)
    queues = list(app.amqp.Queues(app.conf.task_queues).values())
    may_declare = (mode or settings.declare) == "auto"
    needed = rights(
        role,
        topology,
        queues,
        app.conf,
        may_declare=may_declare,
        only_delayed=topics,
        modules=settings.modules,
    )
    keys = list(topic_rights(topology, queues)) if topics else []
    host = vhost or app.connection_for_write().virtual_host or "/"
    answer = {"user": user, "vhost": host, **needed._asdict()}
    shared.answer(
        {**answer, "topics": [each._asdict() for each in keys]}, commands(user, host, needed, keys)
    )
