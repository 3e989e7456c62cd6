"""Distribution: restores every due message, and publishes it to its final exchange.

This file opens no connection; the addition that it asks may open a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final, Protocol

import amqp

from celery_rabbitdelay.exceptions import InvalidEnvelope, LaterVersion, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import NEVER_EARLY, DelayHeaders, shortened
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import limits
from celery_rabbitdelay.modules.envelope import Item, OpenedEnvelope
from celery_rabbitdelay.modules.forwarding import Outgoing, into_levels, to_undeliverable
from celery_rabbitdelay.publishing.message import (
    DEFAULT_MAX_MESSAGE_BYTES,
    WaitingMessage,
    headers_of,
)
from celery_rabbitdelay.publishing.signature import NOT_SIGNED, SigningKeys

#: The last word of the routing keys of messages for distribution.
DISTRIBUTION_WORD: Final = encode_destination(DISTRIBUTION)

#: The headers that decide whether a message in an envelope is published.
DECISIVE: Final = frozenset(
    (
        header_names.VERSION,
        header_names.EXCHANGE,
        header_names.ROUTING_KEY,
        *header_names.SENDER_SELECTED,
    )
)


class Asked(Protocol):
    """An addition that decides about due messages; see :mod:`.app.seams`."""

    def envelope_arrived(
        self, inner: Sequence[DelayHeaders], due_ms: int
    ) -> int | Sequence[bool] | None:
        """Return which messages in an envelope to publish, or the end of the envelope's next wait.

        The result None publishes all messages.
        """

    def note_arrived(self, note: WaitingMessage) -> Due | None:
        """Handle a message for the addition itself; return its next due time, if there is one."""


@dataclass(frozen=True)
class Distribution:
    """Restores due messages, and finds their destinations.

    Attributes:
        topology: The levels that the messages come from.
        put_back: Returns the message to put back into the levels if it is early; see
            :class:`.EarlyMessages`.
        asked: Decides about the messages in an envelope; None to publish all of them.
        reach: The destinations that messages may go to.
        signing_keys: Verifies signatures; None to ignore signatures.
        is_signing_required: Whether messages without a valid signature are refused, if there are
            keys.
        max_message_bytes: The largest body of a message in an envelope.
    """

    topology: Topology
    put_back: Callable[[WaitingMessage], Outgoing | None] = lambda message: None
    asked: Asked | None = None
    reach: limits.AllowedDestinations = limits.ANYWHERE
    signing_keys: SigningKeys | None = None
    is_signing_required: bool = True
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES

    def receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        """Return the messages to publish for a due message; for an envelope, the messages in it.

        A message for one known queue is published to that queue through the default exchange, and
        its consumer restores exchange and routing key, as for a message straight from the levels.
        For any other message, the exchange, routing key, priority and expiration are restored here;
        its consumer gets the headers of :meth:`.DelayHeaders.for_consumer`.

        Raises:
            LaterVersion: Only a later version of this package can read the message.
            UnprocessableMessage: The message's destination is missing or not allowed, a header of
                this package is invalid, or the envelope is unreadable. No message was published for
                it.
        """
        given = headers_of(message)
        header_names.refuse_sender_selected(given)
        later = header_names.later_version(given, message.properties.get("content_type"))
        if later is not None:
            raise LaterVersion(later)
        limits.check_depth(given)
        headers, problems = header_names.parse(given)
        if problems:
            raise UnprocessableMessage("; ".join(problems.values()))
        received = WaitingMessage.of(message, headers)
        key: str = (message.delivery_info or {}).get("routing_key", "")
        word, unrouted = key.rpartition(".")[2], None
        if word != DISTRIBUTION_WORD and self.topology.keys.digits(key) is not None:
            # The queue that the message did not reach when it left the levels; empty if the routing
            # key holds only a hash of the queue's name.
            unrouted = decode_destination(word) or ""
        if unrouted is not None and self.topology.keys.has_no_digits(key):
            queue, delivery = unrouted or str(headers.queue), self.topology.delivery.name
            why = f", which is neither in the application's settings nor bound to {delivery}"
            reason = limits.not_allowed("", queue, why)
            returned = to_undeliverable(self.topology, Outgoing("", queue, received), reason)
            yield returned._replace(is_authentic=False)
            return
        is_authentic = self.signing_keys is None or self.signing_keys.verifies(*received)
        if self.is_signing_required and not is_authentic:
            raise UnprocessableMessage(NOT_SIGNED)
        is_envelope = message.properties.get("content_type") == header_names.ENVELOPE
        if unrouted is not None:
            _refuse_other_than_key(word, "in an envelope" if is_envelope else _named_by(headers))
        if header_names.COMMITTED in headers.registry:
            if self.asked is None:
                raise UnprocessableMessage(
                    "it is a record for the registry, but this worker has no registry"
                )
            again = self.asked.note_arrived(received)
            if again is not None:
                yield into_levels(self.topology, received, again)
            return
        one = None if is_envelope else self._outgoing(received, is_authentic, unrouted)
        single = self.put_back(received) or one
        found = self._unpacked(received, is_authentic) if single is None else iter([single])
        for outgoing in found:
            yield outgoing if is_authentic else outgoing._replace(is_authentic=False)

    def _outgoing(
        self, message: WaitingMessage, is_authentic: bool, unrouted: str | None = None
    ) -> Outgoing:
        """Return the message to publish for a message that is not an envelope.

        A queue that is not in the application's settings is reached by its binding to the delivery
        exchange. If the delivery exchange could not route the message, the queue is not bound at
        the moment: the message goes back into the levels, and later leaves them straight for its
        queue again.

        Args:
            message: The message, with its parsed headers.
            is_authentic: Whether its signature is valid, if there is a key.
            unrouted: The queue in its routing key, if the message did not reach that queue.
        """
        headers = message.headers
        if headers.exchange is None and unrouted:
            headers = headers._replace(exchange="", routing_key=unrouted)
        if headers.queue is None:
            exchange, routing_key = _destination(headers)
        else:
            exchange, routing_key = "", headers.queue
        restored = self._restored(message, headers.for_consumer(), is_authentic)
        outgoing = Outgoing(exchange, routing_key, restored)
        if self.reach.names(exchange, routing_key):
            return outgoing
        delivery = self.topology.delivery.name
        if unrouted is not None:
            obstacle = f"no queue {shortened(routing_key)} is bound to {delivery}"
            return outgoing._replace(obstacle=obstacle)
        return outgoing._replace(via=(delivery, self.topology.keys.key_without_digits(routing_key)))

    def _restored(
        self, message: WaitingMessage, left: DelayHeaders, is_authentic: bool
    ) -> WaitingMessage:
        """Restore a message's priority, expiration and headers for its consumer.

        Args:
            message: The message, with its priority and its expiration in the headers.
            left: The headers that its consumer gets.
            is_authentic: Whether its signature is valid, if there is a key. A message without a
                valid signature stays unsigned; otherwise, while signatures are not required, an
                attacker's message would get a valid signature.
        """
        body, properties, kept = message
        if kept.priority is not None:
            properties = {**properties, "priority": kept.priority}
        if kept.expiration is not None or "expiration" in properties:
            properties = {**properties, "expiration": kept.expiration}
        if left.due_ms is None and "compression" in left.others:
            # An attacker may omit the due time, by which a worker recognizes messages from the
            # levels. The worker applies its limit for decompression only to these messages.
            left = left._replace(due_ms=wall_clock.ms())
        restored = WaitingMessage(body, properties, left)
        # The worker verifies the exchange and key for retries, and the headers for the registry.
        is_verified = left.queue is not None or left.early.exchange is not None or left.registry
        if self.signing_keys is None or not (is_authentic and is_verified):
            return restored
        return self.signing_keys.sign(restored)

    def _unpacked(self, message: WaitingMessage, is_authentic: bool) -> Iterator[Outgoing]:
        """Return the messages to publish for an envelope.

        The envelope is read twice, and never held as a whole. The first pass checks every message:
        an invalid envelope goes to ``undeliverable`` before any of its messages is published.
        """
        read: list[DelayHeaders] = []
        try:
            envelope = OpenedEnvelope(message.body, self.max_message_bytes)
            is_shared_checked = False
            for item in envelope:
                # Whether the message overrides a shared field that determines how it is published.
                is_own = not DECISIVE.isdisjoint(item.headers) or "content_type" in item.properties
                if is_own or not is_shared_checked:
                    self._check(message.headers, envelope, item)
                    is_shared_checked |= not is_own
                if self.asked is not None:
                    inner, _ = header_names.parse({**envelope.headers, **item.headers})
                    read.append(_under(message.headers, inner))
        except InvalidEnvelope as invalid:
            raise UnprocessableMessage(f"the envelope cannot be opened: {invalid}") from invalid
        answer = None
        if self.asked is not None:
            answer = self.asked.envelope_arrived(read, message.headers.due_ms or 0)
        if isinstance(answer, int):
            yield into_levels(self.topology, message, Due.until(answer))
            return
        unpacked = self._messages(message.headers, envelope, is_authentic)
        yield from unpacked if answer is None else compress(unpacked, answer)

    def _check(self, outer: DelayHeaders, envelope: OpenedEnvelope, item: Item) -> None:
        """Refuse an envelope if distribution cannot read this message, or may not publish it."""
        given = {**envelope.headers, **item.headers}
        content_type = {**envelope.properties, **item.properties}.get("content_type")
        later = header_names.later_version(given, content_type)
        if later is not None:
            raise LaterVersion(later)
        header_names.refuse_sender_selected(given)
        inner, problems = header_names.parse(given)
        for name in DECISIVE & problems.keys():
            raise UnprocessableMessage(problems[name])
        self.reach.names(*_destination(_under(outer, inner)))

    def _messages(
        self, outer: DelayHeaders, envelope: OpenedEnvelope, is_authentic: bool
    ) -> Iterator[Outgoing]:
        """Return the messages of a checked envelope."""
        for item in envelope:
            inner, problems = header_names.parse({**envelope.headers, **item.headers})
            headers = _under(outer, inner)
            properties = item.properties_with(envelope.properties)
            message = WaitingMessage(item.body, properties, headers)
            if problems:
                left = message._replace(headers=headers.for_consumer())
                refused = Outgoing(*_destination(headers), left)
                yield to_undeliverable(self.topology, refused, "; ".join(problems.values()))
                continue
            yield self._outgoing(message, is_authentic)


def _under(outer: DelayHeaders, inner: DelayHeaders) -> DelayHeaders:
    """Return the headers of a message in an envelope, completed from the envelope's headers."""
    return inner._replace(
        due_ms=outer.due_ms,
        exchange=outer.exchange if inner.exchange is None else inner.exchange,
        routing_key=outer.routing_key if inner.routing_key is None else inner.routing_key,
        queue=None,
        priority=outer.priority if inner.priority is None else inner.priority,
        expiration=outer.expiration if inner.expiration is None else inner.expiration,
        early=NEVER_EARLY,
    )


def _refuse_other_than_key(word: str, named: object) -> None:
    """Refuse a message unless the destination in its headers is the queue in its routing key.

    The broker checks the routing key against the sender's topic permissions, but cannot check the
    headers (https://www.rabbitmq.com/docs/access-control#topic-authorisation).

    Args:
        word: The queue in the last word of the routing key; the message did not reach this queue.
        named: The destination in the headers, as :func:`_named_by` returns it.

    Raises:
        UnprocessableMessage: The destination in the headers is not this queue.
    """
    queue = decode_destination(word)
    if named is None or (isinstance(named, str) and named == queue):
        return
    if isinstance(named, str) and queue is None and encode_destination(named) == word:
        return
    raise UnprocessableMessage(
        f"its destination {shortened(named)} does not match the queue "
        f"{shortened(word if queue is None else queue)} in its routing key"
    )


def _named_by(headers: DelayHeaders) -> str | tuple[str, str | None] | None:
    """Return the destination in a message's headers: a queue, or an exchange and a routing key.

    None if the headers have no destination. If the headers name a queue, their exchange and routing
    key are only the destination of the task's retries, which the worker checks.
    """
    if headers.queue is not None or headers.exchange is None:
        return headers.queue
    exchange, routing_key = headers.exchange, headers.routing_key
    return routing_key if exchange == "" else (exchange, routing_key)


def _destination(headers: DelayHeaders) -> tuple[str, str]:
    if headers.exchange is None or headers.routing_key is None:
        raise UnprocessableMessage(
            f"its destination is missing: {header_names.EXCHANGE} is {headers.exchange!r}, "
            f"{header_names.ROUTING_KEY} is {headers.routing_key!r}"
        )
    return headers.exchange, headers.routing_key
