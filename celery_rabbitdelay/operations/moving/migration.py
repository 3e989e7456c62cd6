"""Moves delayed messages from the levels of one topology to another, on the same broker or not.

A message keeps its due time, and so waits in the new levels for the rest of its delay. Producers
and workers may run meanwhile: messages that come due in the old levels reach their queues from
there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import amqp
from amqp.exceptions import NotFound, ResourceLocked
from kombu import Connection

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import routing_key
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.layout import NAMED
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing, into_levels
from celery_rabbitdelay.modules.probe import PROBE_TYPE
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.operations.moving.mover import Place, Stay
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import SigningKeys


@dataclass(frozen=True)
class Migration:
    """Converts messages of the source into messages of the target. Opens no connection.

    ================ ================================================================
    a level's queue  the target's levels, for the rest of the delay
    meditation       the target's levels, likewise
    distribution     the target's distribution, because it is due
    check-in         the target's check-in, as the client published it
    undeliverable    the target's ``undeliverable``, with the reason
    ================ ================================================================

    Attributes:
        source: The topology that the messages are in.
        target: The topology that they go to.
        ensure: Called with the name of each destination queue.
        signing_keys: What verifies and signs messages; None: signatures stay as they are.
        vouches: Whether messages without a valid signature are signed.
    """

    source: Topology
    target: Topology
    ensure: Callable[[str], None]
    signing_keys: SigningKeys | None = None
    vouches: bool = False

    def convert(self, message: amqp.Message, queue: str, until_ms: int | None = None) -> Outgoing:
        """Return what to publish for a message.

        Args:
            message: The message.
            queue: The queue that it was in.
            until_ms: Until when it waits in the levels, in milliseconds since 1970-01-01 UTC; None
                for its due time.

        Raises:
            UnprocessableMessage: The message cannot be one of these levels.
            Stay: Its routing key belongs to other levels, or only a later version can read it.
        """
        modules, given = self.source.module_queues, headers_of(message)
        info: Any = message.delivery_info
        key = info["routing_key"]
        if queue == modules.undeliverable.name:
            # The broker's headers, which give the reason, are removed.
            reason = examine(given, self.source, key).reason
            kept = WaitingMessage.unopened(message).saying(reason=reason)
            return Outgoing(self.target.module_queues.undeliverable.exchange.name, key, kept)
        why = header_names.later_version(given, message.properties.get("content_type"))
        if why is not None:
            raise Stay(why)
        if queue == modules.checkin.name and info["exchange"] != modules.meditated.name:
            kept = WaitingMessage.unopened(message)
            return Outgoing(self.target.module_queues.checkin.exchange.name, key, kept)
        if queue in (modules.checkin.name, modules.meditation.name):
            return self._waiting(message, key, until_ms)
        if message.properties.get("type") == PROBE_TYPE:
            # It is no task, and is dropped there.
            return Outgoing("", self.target.probe.name, WaitingMessage.unopened(message))
        if self.source.keys.digits(key) is None:
            raise Stay("its routing key is of another layout: see the --from options")
        word = key.split(".")[-1]
        if word == routing_key.encode_destination(routing_key.DISTRIBUTION):
            return self._waiting(message, routing_key.DISTRIBUTION, until_ms)
        return self._waiting(message, self._queue_of(word, message), until_ms)

    @staticmethod
    def _queue_of(word: str, message: amqp.Message) -> str:
        """Return the name of the queue that the last word of a routing key encodes."""
        name = routing_key.decode_destination(word)
        if name is None:
            # The word is a hash of the name.
            name = headers_of(message).get(header_names.QUEUE)
            if not isinstance(name, str) or routing_key.encode_destination(name) != word:
                raise exceptions.UnprocessableMessage(
                    f"its routing key has a hash of its queue's name, and {header_names.QUEUE} is "
                    f"{header_names.shortened(name)}"
                )
        return name

    def _waiting(self, message: amqp.Message, destination: str, until_ms: int | None) -> Outgoing:
        given = headers_of(message)
        if header_names.UNREADABLE in given:
            why = header_names.shortened(given[header_names.UNREADABLE])
            raise exceptions.UnprocessableMessage(f"it cannot be read: {why}")
        header_names.refuse_sender_selected(given)
        # A message in the levels has no expiration, so that they drop none before it is due.
        waiting = WaitingMessage.unopened(message).having(expiration=None)
        due_ms = waiting.headers.due_ms
        if due_ms is None:
            raise exceptions.UnprocessableMessage(
                f"{header_names.DUE} is {header_names.shortened(given.get(header_names.DUE))}, "
                "not milliseconds since 1970"
            )
        is_authentic = self.vouches or (
            self.signing_keys is not None and self.signing_keys.verifies(*waiting)
        )
        if self.target.queue_type == "quorum":
            # A priority that classic queues have taken.
            lowered = waiting.with_low_priority()
            if lowered is not waiting and waiting.headers.queue is not None:
                destination = routing_key.DISTRIBUTION
            waiting = lowered
        if destination:
            self.ensure(destination)
        due_ms = due_ms if until_ms is None else until_ms
        due = Due(due_ms * NS_PER_MS, 0, is_instant=True)
        if self.signing_keys is not None and is_authentic:
            # It may have another priority in its headers; and the first key signs.
            waiting = self.signing_keys.sign(waiting)
        return into_levels(self.target, waiting, due, destination)


def check_places(source: Place, target: Place) -> None:
    """Check that two topologies share no queue.

    Raises:
        SameTopology: They have the same prefix, in the same virtual host of the same broker.
        OSError: A broker cannot be reached.
    """
    if source.topology.prefix != target.topology.prefix:
        return
    if _are_the_same(source.connection, target.connection, target.topology.prefix):
        raise exceptions.SameTopology(source.topology.prefix)


def _are_the_same(one: Connection, other: Connection, prefix: str) -> bool:
    """Return whether two connections are to the same virtual host, whatever its address."""
    with one.clone(heartbeat=0) as first, other.clone(heartbeat=0) as second:
        declaration.connect(first)
        declaration.connect(second)
        channel: Any = first.default_channel
        name = f"{prefix}.same.{uuid4()}"  # which the user may declare
        channel.queue_declare(name, exclusive=True)
        channel = second.default_channel
        try:
            channel.queue_declare(name, passive=True)
        except ResourceLocked:
            return True
        except NotFound:
            return False
    return True


def check_source(source: Place) -> None:
    """Check that a topology is declared as it is described.

    Raises:
        LayoutConflict: Another layout is declared under its prefix; it says which options name it.
        TopologyIncomplete: None of its queues exists.
        OSError: The broker cannot be reached.
    """
    with source.connection.clone(heartbeat=0) as own:
        try:
            declaration.check_layout(own, source.topology)
        except exceptions.LayoutConflict as conflict:
            found = declaration.declared_parts(source.topology, conflict.reply)
            described = declaration.parts_of(source.topology.identity.fingerprint)
            options = [
                _option(part, value)
                for part, value in found.items()
                if value != described[part] and part in _OPTIONS
            ]
            if not options:
                raise
            advice = f"found {' '.join(options)}"
            raise exceptions.LayoutConflict(conflict.prefix, conflict.reply, advice) from conflict
        counts = declaration.queue_counts(own, source.topology.queues)
    if not any(counts.values()):
        raise exceptions.TopologyIncomplete(source.topology.prefix, tuple(counts))


#: The options of the command line for the parts of a fingerprint that are settings.
_OPTIONS: Final = {
    "layout": "--from-layout",
    "queue_type": "--from-queue-type",
    "shards": "--from-shards",
}


def _option(part: str, value: str) -> str:
    """Return the option that gives levels that part of their fingerprint."""
    if part != "layout":
        return f"{_OPTIONS[part]} {value}"
    name = value.rpartition("-")[0]
    for tick in (0.1, 1.0, 0.01, 0.001):
        with suppress(KeyError, exceptions.InvalidLayout):
            if NAMED[name](tick).fingerprint == value:
                return f"--from-layout {name} --from-tick {tick:g}"
    return f"--from-layout with the JSON of their rabbitdelay_layout, a {name!r} of other options"
