"""Declaring, verifying and deleting a topology on a broker, over any kombu connection.

As a function::

    declare(connection, topology)
    bind_destination(connection, topology, "reports")

As something that a kombu queue runs when it is declared, so that whoever declares the queue makes
it ready for delayed messages::

    Queue("reports", on_declared=on_declared(connection, topology))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from amqp.exceptions import NotFound, PreconditionFailed
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import LayoutConflict, TopologyIncomplete, TopologyNotEmpty
from celery_rabbitdelay.levels.entities import Binding
from celery_rabbitdelay.levels.topology import Topology

__all__ = [
    "Counts",
    "bind_destination",
    "connect",
    "declare",
    "delete",
    "ensure_complete",
    "ensure_declared",
    "ensure_destination",
    "forget",
    "look_at",
    "missing",
    "on_declared",
    "stands",
]


class Counts(NamedTuple):
    """What RabbitMQ tells of a queue.

    Attributes:
        messages: How many messages are ready.
        consumers: How many consumers it has.
    """

    messages: int
    consumers: int


def declare(connection: Connection, topology: Topology) -> None:
    """Declare every exchange, queue and binding of a topology; what stands already is left alone.

    Takes one to two seconds for the clock. :func:`ensure_declared` first looks whether that is
    needed.

    Args:
        connection: Any kombu connection to RabbitMQ; a channel of its own is opened and closed.
        topology: What to declare.

    Raises:
        LayoutConflict: Another layout stands under the same prefix.
    """
    with _channel(connection) as channel, _conflicts_explained(topology):
        topology.identity.guard(channel).declare()
        for exchange in topology.exchanges:
            exchange(channel).declare()
        for queue in topology.queues:
            queue(channel).queue_declare()
        for binding in topology.bindings:
            _bind(channel, binding)
        # Last, so that a process that dies before this line leaves nothing that looks complete.
        topology.identity.marker(channel).declare()


def ensure_declared(connection: Connection, topology: Topology) -> None:
    """Declare a topology unless it is in place; costs nothing the second time on a connection.

    Raises:
        LayoutConflict: Another layout stands under the same prefix.
    """
    seen = _mark(topology)
    if seen in _seen(connection):
        return
    if not stands(connection, topology):
        declare(connection, topology)
    _seen(connection).add(seen)


def ensure_complete(
    connection: Connection, topology: Topology, destination: Queue | None = None
) -> None:
    """Check a topology that operators have declared; costs nothing the second time.

    Guard and marker are ours alone and may be missing. Whether the destination is bound cannot be
    asked by AMQP.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        destination: The queue that a message is for, which has to be there too.

    Raises:
        TopologyIncomplete: An exchange or a queue is missing.
    """
    seen = _mark(topology)
    if seen not in _seen(connection):
        ours = {topology.identity.guard.name, topology.identity.marker.name}
        absent = tuple(name for name in missing(connection, topology) if name not in ours)
        if absent:
            raise TopologyIncomplete(topology.prefix, absent)
        _seen(connection).add(seen)
    if destination is not None and _mark(topology, destination) not in _seen(connection):
        if look_at(connection, destination) is None:
            raise TopologyIncomplete(topology.prefix, (destination.name,))
        _seen(connection).add(_mark(topology, destination))


def stands(connection: Connection, topology: Topology) -> bool:
    """Return whether a process has declared the whole of this topology on the broker."""
    return _exists(connection, topology.identity.marker)


def missing(connection: Connection, topology: Topology) -> tuple[str, ...]:
    """Return the names of the topology's exchanges and queues that are not on the broker.

    AMQP cannot tell whether a binding exists.
    """
    exchanges = [topology.identity.guard, *topology.exchanges, topology.identity.marker]
    absent = [exchange.name for exchange in exchanges if not _exists(connection, exchange)]
    absent += [queue.name for queue in topology.queues if look_at(connection, queue) is None]
    return tuple(absent)


def delete(connection: Connection, topology: Topology, *, force: bool = False) -> None:
    """Delete a topology from the broker; what is missing already is passed over.

    Stop the producers first: what they publish between the look for messages and the end of the
    deletion is lost. The look counts the messages that are ready. One that cannot go on at the
    moment, because the queue behind it is full or its leader away, is in the hands of the broker's
    dead-letter worker, and RabbitMQ counts it nowhere that AMQP can ask; it is deleted too.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: What to delete.
        force: Also delete queues in which messages wait.

    Raises:
        TopologyNotEmpty: Messages still wait, and ``force`` is False.
    """
    if not force:
        counts = {queue.name: look_at(connection, queue) for queue in topology.queues}
        waiting = {name: found.messages for name, found in counts.items() if found}
        waiting = {name: messages for name, messages in waiting.items() if messages}
        if waiting:
            raise TopologyNotEmpty(topology.prefix, waiting)
    with _channel(connection) as channel:
        # First, so that no other process takes the rest for complete.
        topology.identity.marker(channel).delete()
        for queue in topology.queues:
            queue(channel).delete()
        for exchange in (*reversed(topology.exchanges), topology.identity.guard):
            exchange(channel).delete()
    forget(connection)


def look_at(connection: Connection, queue: Queue) -> Counts | None:
    """Return what is in a queue now, None where there is no such queue."""
    with _channel(connection) as channel:
        try:
            _, messages, consumers = channel.queue_declare(queue.name, passive=True)
        except NotFound:
            return None
    return Counts(messages, consumers)


def bind_destination(connection: Connection, topology: Topology, queue_name: str) -> None:
    """Bind a queue to the delivery exchange, so that delayed messages reach it.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: A topology that stands on the broker.
        queue_name: A queue that stands on the broker.

    Raises:
        amqp.exceptions.NotFound: There is no such queue, or no such topology.
    """
    with _channel(connection) as channel:
        channel.queue_bind(
            queue=queue_name,
            exchange=topology.delivery.name,
            routing_key=topology.keys.destination_pattern(queue_name),
        )


def ensure_destination(connection: Connection, topology: Topology, queue: Queue) -> None:
    """Declare a topology and a queue and bind the queue; costs nothing the second time.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; declared unless it is in place.
        queue: The queue with its exchange and arguments. One that says ``no_declare`` is only
            bound.
    """
    seen = _mark(topology, queue)
    if seen in _seen(connection):
        return
    ensure_declared(connection, topology)
    with _channel(connection) as channel:
        queue(channel).declare()
    bind_destination(connection, topology, queue.name)
    _seen(connection).add(seen)


def on_declared(connection: Connection, topology: Topology) -> Callable[[str, int, int], None]:
    """Return a kombu ``on_declared`` hook that makes a queue ready for delayed messages.

    Args:
        connection: Where to; each call opens a connection of its own like it, so that the hook
            may run in any thread and beside any other use of the connection.
        topology: The topology; declared unless it is in place.
    """

    def make_ready(queue_name: str, message_count: int, consumer_count: int) -> None:
        with connection.clone() as own:
            ensure_declared(own, topology)
            bind_destination(own, topology, queue_name)

    return make_ready


def forget(connection: Connection) -> None:
    """Forget what is known to stand on the broker, so that it is looked for again."""
    _seen(connection).clear()


def connect(connection: Connection) -> None:
    """Open a connection unless it is open, to the first broker of its list that answers."""
    if not connection.connected:
        # Left to itself, kombu gives up after two brokers of a fail-over list.
        connection.ensure_connection(
            max_retries=max(len(connection.alt) - 1, 1), reraise_as_library_errors=False
        )


def _seen(connection: Connection) -> set[Any]:
    """What is known to stand; kombu empties it when the connection is opened anew."""
    declared: set[Any] = connection.declared_entities  # type: ignore[assignment]
    return declared


def _mark(topology: Topology, *queues: Queue) -> tuple[str, ...]:
    """What is noted on a connection where a topology stands, or a queue that is bound to it."""
    return (
        "rabbitdelay",
        topology.prefix,
        topology.identity.fingerprint,
        *(each.name for each in queues),
    )


def _channel(connection: Connection) -> Any:
    """A channel of its own: the broker answers what it does not find by closing the channel."""
    connect(connection)
    return connection.channel()


def _bind(channel: Any, binding: Binding) -> None:
    if binding.target_is_exchange:
        channel.exchange_bind(binding.target, binding.source, binding.pattern)
    else:
        channel.queue_bind(binding.target, binding.source, binding.pattern)


def _exists(connection: Connection, exchange: Exchange) -> bool:
    with _channel(connection) as channel:
        try:
            exchange(channel).declare(passive=True)
        except NotFound:
            return False
    return True


@contextmanager
def _conflicts_explained(topology: Topology) -> Iterator[None]:
    try:
        yield
    except PreconditionFailed as conflict:
        raise LayoutConflict(topology.prefix, str(conflict)) from conflict
