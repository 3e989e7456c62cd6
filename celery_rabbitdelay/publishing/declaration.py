"""Declaring, checking and deleting a topology on a broker, over any kombu connection.

As a function::

    declare(connection, topology)
    bind_destination(connection, topology, "reports")

As the hook that kombu calls when it has declared a queue, which declares the topology and binds the
queue to it::

    Queue("reports", on_declared=on_declared(connection, topology))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from operator import not_
from typing import Final, NamedTuple, cast

from amqp import spec
from amqp.exceptions import AccessRefused, NotFound, ResourceLocked
from kombu import Connection, Queue
from kombu.transport.pyamqp import Channel

from celery_rabbitdelay.exceptions import TopologyIncomplete, TopologyInUse, TopologyNotEmpty
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, Binding, Topology
from celery_rabbitdelay.publishing import kombu_internals
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.publishing.refusals import conflict_explained

#: Every 20th method waits for a reply; the others use ``nowait``. Fewer replies would do, but the
#: broker takes some 15 ms to declare a quorum queue, and each reply has to arrive within the
#: caller's timeout.
METHODS_PER_ANSWER: Final = 20


def declare(connection: Connection, topology: Topology) -> None:
    """Declare every exchange, queue and binding of a topology; existing ones are left alone.

    The first declaration of the clock takes two to three seconds, a repeated one a tenth of that.
    :func:`declare_if_missing` declares only if the marker is missing. What is known to be declared
    on the connection is forgotten: somebody may have deleted it.

    Args:
        connection: Any kombu connection to RabbitMQ; a channel of its own is opened and closed.
        topology: The topology to declare.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        amqp.exceptions.AccessRefused: The user lacks a permission; the message names the object.
    """
    forget(connection)
    with conflict_explained(topology), opened_channel(connection) as channel:
        _pipeline(
            topology.identity.guard(channel).declare,
            *(exchange(channel).declare for exchange in topology.exchanges),
            *(queue(channel).queue_declare for queue in (*topology.queues, topology.probe)),
            *(_bind_method(channel, each) for each in (*topology.bindings, topology.probe_binding)),
            # Last: the marker exists only if everything before it was declared.
            topology.identity.marker(channel).declare,
        )


def declare_if_missing(connection: Connection, topology: Topology) -> None:
    """Declare a topology unless its marker exists; checked once for each connection.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
    """
    key = _key(topology)
    if key in kombu_internals.declared_entities(connection):
        return
    if not is_declared(connection, topology):
        declare(connection, topology)
    kombu_internals.declared_entities(connection).add(key)


def check_complete(
    connection: Connection,
    topology: Topology,
    destination: Queue | None = None,
    *,
    by_marker: bool = False,
) -> None:
    """Check a topology that operators have declared; a connection is checked only once.

    Guard and marker are declared by this package alone, so they may be missing. AMQP has no method
    that says whether the destination is bound. What the user may not ask for counts as existing;
    see :mod:`~celery_rabbitdelay.publishing.refusals`.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        destination: The queue that a message is for; it has to exist as well.
        by_marker: Whether to look at the marker first, and no further if it exists, or may not be
            looked at. A producer needs no more: if a queue of the levels is missing, the alternate
            exchange puts the message into ``undeliverable``. If the exchange of the message's first
            digit is missing, publishing fails. If a later one is, the message is confirmed, and the
            quorum queue before it keeps it until the exchange is back, but a classic queue drops
            it; so for classic queues the exchanges are looked at as well.

    Raises:
        TopologyIncomplete: An exchange or a queue is missing.
    """
    known = kombu_internals.declared_entities(connection)
    if _key(topology) not in known:
        if absent := _absent(connection, topology, by_marker):
            raise TopologyIncomplete(topology.prefix, absent)
        known.add(_key(topology))
    if destination is not None and _key(topology, destination) not in known:
        if not _queue_exists(connection, destination):
            raise TopologyIncomplete(topology.prefix, (destination.name,))
        known.add(_key(topology, destination))


def _absent(connection: Connection, topology: Topology, by_marker: bool) -> tuple[str, ...]:
    """Return the names of what is missing, as far as the user may ask; see above."""
    ours = (topology.identity.guard.name, topology.identity.marker.name)
    with opened_channel(connection) as channel:
        if by_marker and exists_or_hidden(channel, topology.identity.marker.name):
            return tuple(
                exchange.name
                for exchange in topology.exchanges
                if topology.queue_type == "classic"
                and not topology.is_optional(exchange.name)
                and not exists_or_hidden(channel, exchange.name)
            )
        try:
            absent = missing(connection, topology)
        except AccessRefused:
            if not exists_or_hidden(channel, topology.identity.marker.name):
                raise
            return ()
    return tuple(name for name in absent if name not in ours and not topology.is_optional(name))


def exists_or_hidden(channel: Channel, exchange: str) -> bool:
    """Return whether an exchange exists, or the user has no permission on it."""
    try:
        return all(kombu_internals.find_exchanges(channel, [exchange]))
    except AccessRefused as refused:
        if refused.method_sig != spec.Exchange.Declare:
            raise  # it closes another channel of the connection
        return True  # py-amqp has opened the channel again


def is_declared(connection: Connection, topology: Topology) -> bool:
    """Return whether a process has declared the whole of this topology on the broker."""
    with opened_channel(connection) as channel:
        return all(kombu_internals.find_exchanges(channel, [topology.identity.marker.name]))


def is_complete(connection: Connection, topology: Topology) -> bool:
    """Return whether every exchange and queue of a topology exists, marker and guard included.

    :func:`missing` asks each queue's leader for its counts, and some leaders may be away after the
    crash of a node. Here the broker only looks whether the queue exists, except for one in
    :data:`METHODS_PER_ANSWER`. AMQP has no method that says whether a binding exists.
    """
    with opened_channel(connection) as channel:
        try:
            _pipeline(
                *(partial(each(channel).declare, passive=True) for each in topology.all_exchanges),
                *(partial(each(channel).queue_declare, passive=True) for each in topology.queues),
            )
        except NotFound as absent:
            if absent.method_sig not in (spec.Exchange.Declare, spec.Queue.Declare):
                raise  # it closes another channel of the connection
            return False
    return True


def missing(connection: Connection, topology: Topology) -> tuple[str, ...]:
    """Return the names of the topology's exchanges and queues that are not on the broker.

    AMQP has no method that says whether a binding exists.
    """
    exchanges = [exchange.name for exchange in topology.all_exchanges]
    queues = [queue.name for queue in topology.queues]
    with opened_channel(connection) as channel:
        exist = [
            *kombu_internals.find_exchanges(channel, exchanges),
            *kombu_internals.find_queues(channel, queues),
        ]
    return tuple(compress((*exchanges, *queues), map(not_, exist)))


def check_layout(connection: Connection, topology: Topology) -> None:
    """Check that no other layout is declared under the prefix; nothing is changed.

    AMQP cannot read an exchange's arguments. But declaring the guard again, where it exists,
    compares them.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
    """
    with conflict_explained(topology), opened_channel(connection) as channel:
        if all(kombu_internals.find_exchanges(channel, [topology.identity.guard.name])):
            topology.identity.guard(channel).declare()


def delete(
    connection: Connection,
    topology: Topology,
    *,
    force: bool = False,
) -> None:
    """Delete a topology from the broker; missing exchanges and queues are passed over.

    Stop the producers first: messages published between the check for waiting messages and the end
    of the deletion are lost. The check counts the messages that are ready. What a consumer has
    received and not acknowledged is in no count, so no queue may have a consumer; RabbitMQ cannot
    check it itself, because quorum queues do not support ``if-unused``. A message that cannot go
    on at the moment, because the queue behind it is full or its leader away, is held by the
    broker's dead-letter worker and in no count that AMQP can ask for; it is deleted too.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology to delete.
        force: Also delete queues in which messages wait, or that have consumers.

    Raises:
        TopologyNotEmpty: Messages still wait, and ``force`` is False.
        TopologyInUse: A queue has consumers, and ``force`` is False.
    """
    if not force:
        refuse_to_lose(topology, queue_counts(connection, topology.queues))
    with opened_channel(connection) as channel:
        _pipeline(
            # First, so that no other process takes the rest for complete.
            topology.identity.marker(channel).delete,
            *(queue(channel).delete for queue in (*topology.queues, topology.probe)),
            *(exchange(channel).delete for exchange in reversed(topology.exchanges)),
            topology.identity.guard(channel).delete,
        )
    forget(connection)


def refuse_to_lose(topology: Topology, counts: Mapping[str, Counts | None]) -> None:
    """Check that no message would be lost with a topology.

    Args:
        topology: The topology that is to be deleted.
        counts: What :func:`queue_counts` says of its queues.

    Raises:
        TopologyNotEmpty: Messages still wait.
        TopologyInUse: A queue has consumers, which may hold messages.
    """
    found = {name: each for name, each in counts.items() if each is not None}
    consumers = {name: each.consumers for name, each in found.items() if each.consumers}
    if consumers:
        raise TopologyInUse(topology.prefix, consumers)
    waiting = {name: each.messages for name, each in found.items() if each.messages}
    if waiting:
        raise TopologyNotEmpty(topology.prefix, waiting)


def queue_counts(connection: Connection, queues: Iterable[Queue]) -> dict[str, Counts | None]:
    """Return the counts of queues by their names; None for a queue that does not exist."""
    names = [queue.name for queue in queues]
    with opened_channel(connection) as channel:
        return dict(zip(names, kombu_internals.find_queues(channel, names), strict=True))


class Backlog(NamedTuple):
    """The messages that wait in a topology.

    Attributes:
        levels: The messages in each level's queues, by the level's name without prefix. A message
            that is just passing from one level to the next is not counted.
        digits: The messages of each digit, by the level's name and the digit; those of all shards
            together, and 0 for a queue that does not exist.
        others: The messages and consumers of the queues of ``check-in``, ``meditation``,
            ``distribution`` and ``undeliverable``.
        missing: The names of queues that do not exist.
    """

    levels: Mapping[str, int]
    digits: Mapping[str, Mapping[int, int]]
    others: Mapping[str, Counts]
    missing: tuple[str, ...]


def backlog_of(connection: Connection, topology: Topology) -> Backlog:
    """Ask the broker for the counts of every queue of a topology, in a few round trips.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; nothing is declared.
    """
    found = queue_counts(connection, topology.queues)
    messages = {name: counts.messages if counts else 0 for name, counts in found.items()}
    digits = {
        level: _by_digit(topology, [messages[queue.name] for queue in queues])
        for level, queues in topology.level_queues.items()
    }
    others = module_queues(topology).items()
    return Backlog(
        {level: sum(counts.values()) for level, counts in digits.items()},
        digits,
        {name: counts for name, queue in others if (counts := found[queue.name])},
        tuple(name for name, counts in found.items() if counts is None),
    )


def module_queues(topology: Topology) -> dict[str, Queue]:
    """Return the queues outside the levels, by the names in :attr:`Backlog.others`."""
    queues = topology.module_queues
    return {
        CHECK_IN: queues.checkin,
        "meditation": queues.meditation,
        DISTRIBUTE: queues.distribution,
        "undeliverable": queues.undeliverable,
        "paused": queues.paused,
    }


def _by_digit(topology: Topology, messages: list[int]) -> dict[int, int]:
    """Add up the messages of a level's queues, which are in the order of shards and digits."""
    first = 0 if topology.layout.zeros == "queue" else 1
    each = len(messages) // topology.shards
    return {first + place: sum(messages[place::each]) for place in range(each)}


def bind_destination(connection: Connection, topology: Topology, queue_name: str) -> None:
    """Bind a queue to the delivery exchange, so that delayed messages reach it.

    Args:
        connection: Any kombu connection to RabbitMQ. An exclusive queue can be bound only over the
            connection that declared it.
        topology: A topology that is declared on the broker.
        queue_name: A queue that exists on the broker.

    Raises:
        amqp.exceptions.NotFound: The queue or the topology does not exist.
    """
    with opened_channel(connection) as channel:
        _bind_destination(channel, topology, queue_name)


def declare_destination(connection: Connection, topology: Topology, queue: Queue) -> None:
    """Declare a topology and a queue and bind the queue; done only once on a connection.

    An exclusive queue is not declared, because it would then belong to this connection. It is
    bound if it belongs to this connection already; otherwise its consumer has to bind it.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; declared unless its marker is there.
        queue: The queue with its exchange and arguments. A queue with ``no_declare`` is only bound.

    Raises:
        amqp.exceptions.NotFound: The queue is exclusive, and nobody has declared it.
    """
    key = _key(topology, queue)
    if key in kombu_internals.declared_entities(connection):
        return
    declare_if_missing(connection, topology)
    with opened_channel(connection) as channel:
        if not queue.exclusive:
            queue(channel).declare()
        with suppress(ResourceLocked):  # it is exclusive, and belongs to another connection
            _bind_destination(channel, topology, queue.name)
    kombu_internals.declared_entities(connection).add(key)


def on_declared(connection: Connection, topology: Topology) -> Callable[[str, int, int], None]:
    """Return a kombu ``on_declared`` hook that declares the topology and binds the queue to it.

    Not for exclusive queues, which no other connection can bind: call :func:`bind_destination` with
    the connection that declared the queue.

    Args:
        connection: The broker. Each call opens a new connection with the same parameters, so that
            the hook may run in any thread while the connection is used elsewhere.
        topology: The topology; declared unless its marker is there.
    """

    def declare_and_bind(queue_name: str, message_count: int, consumer_count: int) -> None:
        with kombu_internals.closing(connection.clone()) as own:
            declare_if_missing(own, topology)
            bind_destination(own, topology, queue_name)

    return declare_and_bind


def forget(connection: Connection) -> None:
    """Forget what is known to be declared on the broker, so that the next call asks again."""
    kombu_internals.declared_entities(connection).clear()


def _key(topology: Topology, *queues: Queue) -> tuple[str, ...]:
    """Return the key of a topology, or of queues bound to it, in :func:`declared_entities`."""
    return (
        "rabbitdelay",
        topology.prefix,
        topology.identity.fingerprint,
        *(each.name for each in queues),
    )


@contextmanager
def opened_channel(connection: Connection) -> Iterator[Channel]:
    """Open a channel for a block, and the connection if needed; the channel is closed at its end.

    A channel of its own, because the broker closes the channel on which it refuses a method. If the
    block is interrupted, the connection is dropped.
    """
    with kombu_internals.conversation(connection):
        kombu_internals.connect(connection)
        channel = cast("Channel", connection.channel())
        with kombu_internals.conversation(connection, channel.close):
            yield channel


def _pipeline(*methods: Callable[..., object]) -> None:
    """Call methods of one channel with few answers: the broker answers every 20th, and the last.

    The broker executes the methods of a channel in their order. When it refuses one, it closes the
    channel and ignores those behind it, so the error is that of the refused method, although it is
    raised at the next answer. Neither side can block the other: a method with ``nowait`` has no
    answer, so the broker's socket never fills up while this side is still writing.
    """
    for number, method in enumerate(methods, start=1):
        waits = number % METHODS_PER_ANSWER == 0 or number == len(methods)
        method(nowait=not waits)


def _bind_method(channel: Channel, binding: Binding) -> Callable[..., object]:
    bind = channel.exchange_bind if binding.target_is_exchange else channel.queue_bind
    return partial(bind, binding.target, binding.source, binding.pattern)


def _bind_destination(channel: Channel, topology: Topology, queue_name: str) -> None:
    pattern = topology.keys.destination_pattern(queue_name)
    channel.queue_bind(queue_name, topology.delivery.name, pattern)


def _queue_exists(connection: Connection, queue: Queue) -> bool:
    try:
        return queue_counts(connection, [queue])[queue.name] is not None
    except (ResourceLocked, AccessRefused):
        return True  # it is an exclusive queue of another connection, or it may exist
