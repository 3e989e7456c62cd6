"""Converts messages of another topology, or of Celery's native delays, into delayed messages.

:class:`Migration` is for another topology of this package. :class:`NativeChain` is for Celery's
native delayed delivery (kombu's ``native_delayed_delivery``): a chain of 28 queues, one per bit of
the delay in seconds. A routing key there consists of these bits and the destination's own key, and
the headers of a message have its due time. Without a due time, the message waits for the longest
time that the remaining queues of its chain can take, so that it is never early.

A message keeps its due time, so it waits in the new levels for its remaining delay. Producers and
workers may run during the move: the old levels still deliver the messages that come due there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import tzinfo
from functools import partial
from typing import Final
from uuid import uuid4

import amqp
from amqp.exceptions import ResourceLocked
from kombu import Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import routing_key
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import UNREADABLE, shortened
from celery_rabbitdelay.levels.topology import PROBE_TYPE, Topology
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.mover import Place, Stay
from celery_rabbitdelay.operations.reasons import examine
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing import destination as destinations
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.signature import SigningKeys, signed


@dataclass(frozen=True)
class Migration:
    """Converts messages of the source into messages of the target. Opens no connection.

    ================ ================================================================
    a level's queue  the target's levels, for the rest of the delay
    meditation       the target's levels, for the rest of the delay
    distribution     the target's distribution, because it is due
    check-in         the target's check-in, as the client published it
    undeliverable    the target's ``undeliverable``, with the reason
    ================ ================================================================

    Attributes:
        source: The topology that the messages are in.
        target: The topology that the messages go to.
        ensure: Binds the destination queue with a given name to the target.
        signing_keys: The keys that verify and sign messages; None to leave signatures as they are.
        vouches: Whether to sign messages without a valid signature.
    """

    source: Topology
    target: Topology
    ensure: Callable[[str], None]
    signing_keys: SigningKeys | None = None
    vouches: bool = False

    def convert(self, message: amqp.Message, queue: str, until_ms: int | None = None) -> Outgoing:
        """Convert a message to the publication that replaces it.

        Args:
            message: The message.
            queue: The name of its queue.
            until_ms: When the message leaves the levels, in milliseconds since 1970-01-01 UTC; None
                for its due time.

        Raises:
            UnprocessableMessage: The message cannot come from these levels.
            Stay: The message's routing key belongs to another layout, or only a later version can
                read the message.
        """
        modules, given = self.source.module_queues, headers_of(message)
        info, kept = message.delivery_info or {}, WaitingMessage.unopened(message)
        key = info["routing_key"]
        if queue == modules.undeliverable.name:
            # The reason is kept, because the broker's headers, which show it, are removed.
            kept = kept.saying(reason=examine(given, self.source, key).reason)
            return Outgoing(self.target.module_queues.undeliverable.exchange.name, key, kept)
        why = header_names.later_version(given, message.properties.get("content_type"))
        if why is not None:
            raise Stay(why)
        if queue == modules.checkin.name and info["exchange"] != modules.meditated.name:
            return Outgoing(self.target.module_queues.checkin.exchange.name, key, kept)
        if queue in (modules.checkin.name, modules.meditation.name):
            return self._waiting(kept, key, until_ms)
        if message.properties.get("type") == PROBE_TYPE:
            # A probe is not a task: the target's queue of probes takes it.
            return Outgoing("", self.target.probe.name, kept)
        if self.source.keys.digits(key) is None:
            raise Stay("its routing key belongs to another layout: see the --from options")
        word, named = key.split(".")[-1], kept.headers.queue
        if word == routing_key.encode_destination(routing_key.DISTRIBUTION):
            return self._waiting(kept, routing_key.DISTRIBUTION, until_ms)
        name = routing_key.decode_destination(word) or named
        if name is None or routing_key.encode_destination(name) != word:
            raise exceptions.UnprocessableMessage(
                f"its queue is unknown: the header {header_names.QUEUE} ({shortened(named)}) does "
                "not match the hash in its routing key"
            )
        return self._waiting(kept, name, until_ms)

    def _waiting(self, kept: WaitingMessage, destination: str, until_ms: int | None) -> Outgoing:
        given = kept.headers.others
        refuse_unreadable(given)
        # With an expiration, the message could leave the levels before it is due.
        waiting = kept.having(expiration=None)
        due_ms = waiting.headers.due_ms
        if due_ms is None:
            raise exceptions.UnprocessableMessage(
                f"{header_names.DUE} is {shortened(given.get(header_names.DUE))}, "
                "not milliseconds since 1970"
            )
        is_authentic = self.vouches or (
            self.signing_keys is not None and self.signing_keys.verifies(*waiting)
        )
        if self.target.queue_type == "quorum":
            # Classic queues of the source may have kept a high priority.
            lowered = waiting.with_low_priority()
            if lowered is not waiting and waiting.headers.queue is not None:
                destination = routing_key.DISTRIBUTION
            waiting = lowered
        if destination:
            self.ensure(destination)
        due = Due.until(due_ms if until_ms is None else until_ms)
        if is_authentic:
            # Sign again with the first key, because the priority in the headers may have changed.
            waiting = signed(waiting, self.signing_keys)
        return forwarding.into_levels(self.target, waiting, due, destination)


def refuse_unreadable(headers: Mapping[str, object]) -> None:
    """Refuse a message whose properties cannot be read, or that has sender-selected queues.

    Raises:
        UnprocessableMessage: The message is refused.
    """
    if UNREADABLE in headers:
        why = shortened(headers[UNREADABLE])
        raise exceptions.UnprocessableMessage(f"it cannot be read: {why}")
    header_names.refuse_sender_selected(headers)


def check_places(source: Place, target: Place) -> None:
    """Check that two topologies share no queue.

    Raises:
        SameTopology: Both topologies have the same prefix in the same virtual host.
        OSError: A broker cannot be reached.
    """
    prefix = target.topology.prefix
    if source.topology.prefix != prefix:
        return
    name = f"{prefix}.same.{uuid4()}"  # a name that the user may declare
    one, other = source.connection, target.connection
    with one.clone(heartbeat=0) as first, other.clone(heartbeat=0) as second:
        connect(first)
        Queue(name, exclusive=True)(first.default_channel).queue_declare()
        # The queue is locked if both connections use one virtual host, even by different addresses.
        with suppress(ResourceLocked):
            if declaration.queue_counts(second, [Queue(name)])[name] is None:
                return
    raise exceptions.SameTopology(prefix)


def check_source(source: Place) -> None:
    """Check that a topology is declared, and has the expected layout.

    Raises:
        LayoutConflict: Another layout is declared under its prefix; the error lists differences.
        TopologyIncomplete: None of the topology's queues exists.
        OSError: The broker cannot be reached.
    """
    with source.connection.clone(heartbeat=0) as own:
        declaration.check_layout(own, source.topology)
        counts = declaration.queue_counts(own, source.topology.queues)
    if not any(counts.values()):
        raise exceptions.TopologyIncomplete(source.topology.prefix, tuple(counts))


#: The number of queues in a chain, and of bits in a routing key.
BITS: Final = 28

#: A reason why a task stays in the chain. ``adopt`` fails if a task stays for any other reason.
KEEPS_OWN: Final = "its task has rabbitdelay=False"

#: Milliseconds by which a due time may be earlier than the end of the chain, which counts whole
#: seconds from the arrival at the broker.
SLACK_MS: Final = 2000

_BITS = re.compile(rf"((?:[01]\.){{{BITS}}})(.*)", re.DOTALL)


def native_queues(prefix: str = "") -> list[str]:
    """Return the queues of Celery's native delayed delivery, the longest delay first.

    Args:
        prefix: Celery's setting ``broker_native_delayed_delivery_prefix``.
    """
    start = f"{prefix}_" if prefix else ""
    return [f"{start}celery_delayed_{level}" for level in reversed(range(BITS))]


@dataclass(frozen=True)
class NativeChain:
    """Converts the tasks in Celery's native delayed delivery into messages of the levels.

    Attributes:
        producer: Converts the tasks to messages; does not publish them.
        timezone: The application's time zone.
        queues: The queues that the application knows.
        ensure: Binds the destination queue with a given name to the levels.
        keeps_own: Returns whether the task with a given name has ``rabbitdelay=False``.
    """

    producer: DelayedProducer
    timezone: tzinfo
    queues: Sequence[Queue]
    ensure: Callable[[str], None]
    keeps_own: Callable[[str], bool]

    def convert(self, message: amqp.Message, queue: str) -> Outgoing:
        """Convert a message to the publication that replaces it.

        Raises:
            Stay: The message's destination is unknown, or the levels cannot hold the message.
        """
        headers = headers_of(message)
        eta = eta_of(headers.get("eta"), self.timezone)
        due, key = _end_of_chain(message, queue, None if eta is None else Due.at(eta))
        destination = _destination(self.queues, key)
        if self.keeps_own(str(headers.get("task"))):
            raise Stay(KEEPS_OWN)
        task = forwarding.delayed_task(message, destination, due.at_ms)
        outgoing = routed(self.producer, task, destination.queue, due)
        if destination.queue is not None:
            self.ensure(destination.queue.name)
        return outgoing


def _end_of_chain(message: amqp.Message, queue: str, due: Due | None) -> tuple[Due, str]:
    """Return when a message leaves its chain, and the routing key of its destination.

    Args:
        message: The message.
        queue: The chain's queue that held the message; its name ends with the level.
        due: The due time in its headers. If the due time is missing, or earlier than the end of the
            chain, the latest end of the chain replaces it.

    Raises:
        Stay: The routing key does not belong to a chain, or the message cannot be read.
    """
    if UNREADABLE in headers_of(message):
        raise Stay("its properties cannot be read")
    info = message.delivery_info or {}
    found = _BITS.fullmatch(info["routing_key"])
    if found is None:
        raise Stay("its routing key does not begin with 28 bits")
    level = int(queue.rpartition("_")[2])
    # The message has passed the higher levels.
    longest = int(found[1].replace(".", "")[-(level + 1) :], 2)
    least = max(longest - 2**level, 0)
    if due is None or due.delay_ms < least * 1000 - SLACK_MS:
        due = Due.after(longest)
    return due, found[2]


def routed(
    producer: DelayedProducer, message: WaitingMessage, queue: Queue | None, due: Due
) -> Outgoing:
    """Return a signed message with its route; see :meth:`.DelayedProducer.routed`.

    Raises:
        Stay: The message needs a module that no worker serves, or is too large for that module.
    """
    try:
        delayed = producer.routed(message, queue, due)
    except exceptions.NeedsDistribution as error:
        raise Stay("it needs distribution, which rabbitdelay_modules does not include") from error
    except (exceptions.DelayTooLong, exceptions.MessageTooLarge) as error:
        raise Stay(str(error)) from error
    address = partial(producer.address, delayed, due)
    return Outgoing(*address(), delayed.message, address)


def _destination(queues: Sequence[Queue], routing_key: str) -> destinations.Destination:
    """Find a task's destination from the bindings of the last exchange in Celery's chain.

    The patterns of these bindings begin with ``#``: see
    ``bind_queue_to_native_delayed_delivery_exchange``.
    """
    bound = [
        (exchange.name, key)
        for queue in queues
        for exchange, key in destinations.bindings_of(queue)
        if exchange.name and exchange.type != "direct"
    ]
    words = routing_key.split(".")
    exact = {exchange for exchange, key in bound if key == routing_key}
    found = exact or {
        exchange
        for exchange, key in bound
        if destinations.topic_matches(["#", *key.split(".")], words)
    }
    if len(found) != 1:
        which = "queues of several exchanges are" if found else "no queue of the application is"
        raise Stay(f"{which} bound with the routing key {shortened(routing_key)}")
    (exchange,) = found
    return destinations.resolve(exchange, routing_key, queues)
