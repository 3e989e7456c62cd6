"""Declaring, checking and deleting a topology on a broker, over any kombu connection.

With functions::

    declare(connection, topology)
    bind_destination(connection, topology, "reports")

With a hook, which declares the topology and binds a queue after kombu has declared the queue::

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

#: Every 20th method waits for a reply; the other methods use ``nowait``. The interval is short
#: because the broker takes some 15 ms to declare a quorum queue, and every reply has to arrive
#: within the caller's timeout.
METHODS_PER_ANSWER: Final = 20


def declare(connection: Connection, topology: Topology) -> None:
    """Declare every exchange, queue and binding of a topology; leave existing entities alone.

    Declaring the layout ``clock`` takes two to three seconds, declaring it again a tenth of that.
    :func:`declare_if_missing` declares only if the marker is missing. This function also clears the
    connection's cache of declared entities, some of which may have been deleted since.

    Args:
        connection: Any kombu connection to RabbitMQ; a new channel is opened and closed.
        topology: The topology to declare.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
        amqp.exceptions.AccessRefused: The user lacks a permission; the error names the exchange or
        queue.
    """
    forget(connection)
    with conflict_explained(topology), opened_channel(connection) as channel:
        _pipeline(
            topology.identity.guard(channel).declare,
            *(exchange(channel).declare for exchange in topology.exchanges),
            *(queue(channel).queue_declare for queue in (*topology.queues, topology.probe)),
            *(_bind_method(channel, each) for each in (*topology.bindings, topology.probe_binding)),
            # The marker is last, so it exists only if everything else was declared.
            topology.identity.marker(channel).declare,
        )


def declare_if_missing(connection: Connection, topology: Topology) -> None:
    """Declare a topology unless its marker exists; check only once per connection.

    The marker is the exchange that is declared last.

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
    """Check that a topology is complete; check only once per connection.

    Operators may declare a topology without guard and marker, so these may be missing. Bindings
    cannot be checked: AMQP has no method for it. An exchange or queue that the user may not check
    counts as existing; see :mod:`~celery_rabbitdelay.publishing.refusals`.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology.
        destination: The message's queue, which has to exist too.
        by_marker: Whether the check ends at the marker, if the marker exists or the user may not
            check it, and the highest level's exchange exists. For a producer, this partial check
            suffices. If a queue of the levels is missing, the alternate exchange puts the message
            into ``undeliverable``. If the exchange of the message's first level is missing,
            publishing fails. If the exchange of a lower level is missing, the message is confirmed;
            a quorum queue keeps it until the exchange exists again, but a classic queue drops it.
            With classic queues, all exchanges are therefore checked.

    Raises:
        TopologyIncomplete: An exchange or a queue is missing.
    """
    known = kombu_internals.declared_entities(connection)
    if _key(topology) not in known:
        if absent := _absent(connection, topology, by_marker):
            raise TopologyIncomplete(topology.prefix, absent)
        known.add(_key(topology))
    if destination is not None and _key(topology, destination) not in known:
        # Either the queue is exclusive to another connection, or the user may not check the queue.
        with suppress(ResourceLocked, AccessRefused):
            if queue_counts(connection, [destination])[destination.name] is None:
                raise TopologyIncomplete(topology.prefix, (destination.name,))
        known.add(_key(topology, destination))


def _absent(connection: Connection, topology: Topology, by_marker: bool) -> tuple[str, ...]:
    """Return the names of missing entities that the user may check; see :func:`check_complete`."""
    marker = topology.identity.marker.name
    with opened_channel(connection) as channel:
        if by_marker and exists_or_hidden(channel, marker):
            # RabbitMQ 4.3 hides the marker from a producer that may only write to the levels.
            is_classic = topology.queue_type == "classic"
            checked = topology.exchanges if is_classic else topology.level_exchanges[:1]
            absent = [each.name for each in checked if not exists_or_hidden(channel, each.name)]
        else:
            try:
                absent = [*missing(connection, topology)]
            except AccessRefused:
                if not exists_or_hidden(channel, marker):
                    raise
                absent = []
    # The queue ``paused`` may be missing: paused tasks then wait in the levels.
    optional = topology.identity.guard.name, marker, topology.module_queues.paused.name
    return tuple(name for name in absent if name not in optional)


def exists_or_hidden(channel: Channel, exchange: str) -> bool:
    """Return whether an exchange exists, or the user has no permission on it."""
    try:
        return all(kombu_internals.find_exchanges(channel, [exchange]))
    except AccessRefused as refused:
        if refused.method_sig != spec.Exchange.Declare:
            raise  # the error is for another channel of the connection
        return True  # py-amqp has reopened the channel


def is_declared(connection: Connection, topology: Topology) -> bool:
    """Return whether this package has declared the whole topology on the broker."""
    with opened_channel(connection) as channel:
        return all(kombu_internals.find_exchanges(channel, [topology.identity.marker.name]))


def is_complete(connection: Connection, topology: Topology) -> bool:
    """Return whether all exchanges of a topology, including marker and guard, and its queues exist.

    :func:`missing` asks the leader of every queue, and some leaders may be down after the crash of
    a node. With ``nowait``, the broker only checks that the queue exists, so only one queue in
    :data:`METHODS_PER_ANSWER` needs its leader. AMQP has no method to check bindings.
    """
    with opened_channel(connection) as channel:
        try:
            _pipeline(
                *(partial(each(channel).declare, passive=True) for each in topology.all_exchanges),
                *(partial(each(channel).queue_declare, passive=True) for each in topology.queues),
            )
        except NotFound as absent:
            if absent.method_sig not in (spec.Exchange.Declare, spec.Queue.Declare):
                raise  # the error is for another channel of the connection
            return False
    return True


def missing(connection: Connection, topology: Topology) -> tuple[str, ...]:
    """Return the names of the topology's exchanges and queues that are not on the broker.

    Bindings are not checked: AMQP has no method for it.
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
    """Check that no other layout is declared under the prefix, without declaring anything.

    AMQP cannot read an exchange's arguments, but the broker compares them when an existing guard is
    declared again.

    Raises:
        LayoutConflict: Another layout is declared under the same prefix.
    """
    with conflict_explained(topology), opened_channel(connection) as channel:
        if all(kombu_internals.find_exchanges(channel, [topology.identity.guard.name])):
            topology.identity.guard(channel).declare()


def delete(connection: Connection, topology: Topology, *, force: bool = False) -> None:
    """Delete a topology from the broker; missing exchanges and queues are ignored.

    Stop the producers first: messages published between the check for waiting messages and the end
    of the deletion are lost. AMQP counts only ready messages, not unacknowledged ones, so queues
    with consumers are refused; RabbitMQ itself cannot refuse them, because quorum queues do not
    support ``if-unused``. Messages that the broker's dead-letter workers hold, while the next queue
    is full or its leader is down, are not counted either, and are deleted too.

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
            # The marker is first, so that no other process regards the rest as complete.
            topology.identity.marker(channel).delete,
            *(queue(channel).delete for queue in (*topology.queues, topology.probe)),
            *(exchange(channel).delete for exchange in reversed(topology.exchanges)),
            topology.identity.guard(channel).delete,
        )
    forget(connection)


def refuse_to_lose(topology: Topology, counts: Mapping[str, Counts | None]) -> None:
    """Refuse to delete a topology if messages would be lost.

    Args:
        topology: The topology.
        counts: The counts of its queues, from :func:`queue_counts`.

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
        levels: The messages per level, keyed by level name without prefix. A message that is
            moving from one level to the next is not counted.
        digits: The messages per digit, summed over all shards, by level name and digit; 0 for a
            queue that does not exist.
        others: The messages and consumers of the module queues, as in :func:`module_queues`.
        missing: The names of queues that do not exist.
    """

    levels: Mapping[str, int]
    digits: Mapping[str, Mapping[int, int]]
    others: Mapping[str, Counts]
    missing: tuple[str, ...]


def backlog_of(connection: Connection, topology: Topology) -> Backlog:
    """Return the counts of all queues of a topology, in a few round trips.

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
    """Return the queues outside the levels, keyed by the names in :attr:`Backlog.others`."""
    queues = topology.module_queues
    return {
        CHECK_IN: queues.checkin,
        "meditation": queues.meditation,
        DISTRIBUTE: queues.distribution,
        "undeliverable": queues.undeliverable,
        "paused": queues.paused,
    }


def unserved_modules(others: Mapping[str, Counts | None]) -> dict[str, int]:
    """Return the number of waiting messages of each module that no worker serves.

    Args:
        others: The counts of the module queues, as in :attr:`Backlog.others`.
    """
    counts = {name: others.get(name) for name in (CHECK_IN, DISTRIBUTE)}
    return {
        name: each.messages
        for name, each in counts.items()
        if each and each.messages and not each.consumers
    }


def _by_digit(topology: Topology, messages: list[int]) -> dict[int, int]:
    """Return the messages per digit, summed over all shards; ``messages`` is in shard order."""
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
    """Declare a topology and a queue, and bind the queue; only once per connection.

    An exclusive queue is not declared, because it would then belong to this connection. The queue
    is bound if it already belongs to this connection; otherwise its consumer has to bind it.

    Args:
        connection: Any kombu connection to RabbitMQ.
        topology: The topology; declared unless its marker, the exchange that is declared last,
            exists.
        queue: The queue with its exchange and arguments. A queue with ``no_declare`` is only bound.

    Raises:
        amqp.exceptions.NotFound: The queue is exclusive and not declared.
    """
    key = _key(topology, queue)
    if key in kombu_internals.declared_entities(connection):
        return
    declare_if_missing(connection, topology)
    with opened_channel(connection) as channel:
        if not queue.exclusive:
            queue(channel).declare()
        with suppress(ResourceLocked):  # the exclusive queue of another connection
            _bind_destination(channel, topology, queue.name)
    kombu_internals.declared_entities(connection).add(key)


def on_declared(connection: Connection, topology: Topology) -> Callable[[str, int, int], None]:
    """Return a kombu ``on_declared`` hook that declares the topology and binds the queue to it.

    Only the connection that declared an exclusive queue can bind it: for such a queue, call
    :func:`bind_destination` with that connection instead.

    Args:
        connection: A connection to the broker. Every call opens a new connection with the same
            parameters, so the hook may run in any thread while ``connection`` is in use.
        topology: The topology; declared unless its marker, the exchange that is declared last,
            exists.
    """

    def declare_and_bind(queue_name: str, message_count: int, consumer_count: int) -> None:
        with kombu_internals.closing(connection.clone()) as own:
            declare_if_missing(own, topology)
            bind_destination(own, topology, queue_name)

    return declare_and_bind


def forget(connection: Connection) -> None:
    """Clear the connection's cache of declared entities, so that the next call checks again."""
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
    """Open a channel for a block, and the connection if needed.

    The channel is new, because the broker closes the channel on which it refuses a method. If the
    block is interrupted, the connection is dropped.
    """
    with kombu_internals.conversation(connection):
        kombu_internals.connect(connection)
        channel = cast("Channel", connection.channel())
        with kombu_internals.conversation(connection, channel.close):
            yield channel


def _pipeline(*methods: Callable[..., object]) -> None:
    """Call methods of one channel; wait for the answers to every 20th and to the last method.

    The broker executes the methods of a channel in order. If the broker refuses a method, it closes
    the channel and ignores the following methods, so the error at the next answer belongs to the
    refused method. This side and the broker cannot block each other: a method with ``nowait`` has
    no answer, so the broker's socket does not fill up while this side is writing.
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
