"""Which messages the broker has not confirmed yet, and the channel that they were sent on.

RabbitMQ takes responsibility for a message with ``basic.ack``
(https://www.rabbitmq.com/docs/confirms); until then it may be lost with the connection, and nobody
else tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, TypeAlias

import amqp
from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned, PublishError
from celery_rabbitdelay.parcel import body_of

__all__ = ["ConfirmChannel", "Sent", "SentMessages"]


class Sent:
    """A message that was sent, and what became of it.

    Attributes:
        exchange: The exchange that it was sent to.
        routing_key: Its routing key.
        message: What was sent.
        settled: Whether the broker has said its last word about it.
        error: What that word was, None where it is a confirm.
        then: Called with this once it is settled; None for nothing.
    """

    __slots__ = ("error", "exchange", "message", "routing_key", "settled", "then")

    def __init__(
        self, exchange: str, routing_key: str, message: amqp.Message, then: Then | None = None
    ) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.message = message
        self.then = then
        self.settled = False
        self.error: PublishError | None = None

    def settle(self) -> None:
        """Note the broker's last word."""
        self.settled = True
        if self.then is not None:
            self.then(self)

    def has_address(self, exchange: str, routing_key: str) -> bool:
        """Return whether it was sent to this exchange with this key."""
        return (self.exchange, self.routing_key) == (exchange, routing_key)

    def equals(self, message: amqp.Message) -> bool:
        """Return whether a message that the broker has sent back has the same content."""
        return _content(self.message) == _content(message)


#: What is called with a message that is settled.
Then: TypeAlias = Callable[[Sent], None]


def _content(message: amqp.Message) -> tuple[bytes, dict[str, Any]]:
    # What is None was not written.
    return body_of(message), {
        name: value for name, value in message.properties.items() if value is not None
    }


class SentMessages:
    """The messages of one channel that are not settled, by their delivery tags; pure."""

    def __init__(self) -> None:
        self._last_tag = 0
        self._unsettled: dict[int, Sent] = {}

    def __len__(self) -> int:
        return len(self._unsettled)

    def add(self, sent: Sent) -> None:
        """Note a message; the broker counts them in the order of sending, from 1."""
        self._last_tag += 1
        self._unsettled[self._last_tag] = sent

    def ack(self, tag: int, multiple: bool) -> None:
        """The broker has confirmed a message, or all up to it."""
        for sent in self._settle(tag, multiple):
            sent.settle()

    def nack(self, tag: int, multiple: bool) -> None:
        """The broker has refused a message, or all up to it."""
        for sent in self._settle(tag, multiple):
            reason = "the broker refused the message: a queue is full, or its leader is away"
            sent.error = MessageNacked(sent.exchange, sent.routing_key, reason)
            sent.settle()

    def returned(
        self, reply: AMQPError, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        """No queue takes a message; its ack follows, since the broker has done all it can.

        It has no tag. But what it is says which of those in flight it is: among equal ones it does
        not matter. AMQP may have changed the type of a header on the way; then it is the first.
        """
        there = [
            sent
            for sent in self._unsettled.values()
            if sent.error is None and sent.has_address(exchange, routing_key)
        ]
        returned = next((sent for sent in there if sent.equals(message)), next(iter(there), None))
        if returned is not None:
            returned.error = MessageReturned(exchange, routing_key, str(reply))

    def _settle(self, tag: int, multiple: bool) -> list[Sent]:
        # Tags grow, and so does the order of the dict.
        tags = list(takewhile(tag.__ge__, self._unsettled)) if multiple else [tag]
        return [self._unsettled.pop(each) for each in tags if each in self._unsettled]


class ConfirmChannel:
    """A channel in confirm mode.

    Args:
        connection: Where to open it; the connection is opened if it is not.

    Attributes:
        blocked: Why the broker takes no messages at the moment; None where it does.
    """

    def __init__(self, connection: Connection) -> None:
        self.blocked: str | None = None
        transport: Any = connection.connection
        self._transport = transport
        self._sent = SentMessages()
        channel: Any = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self._sent.ack)
        channel.events["basic_nack"].add(self._sent.nack)
        channel.events["basic_return"].add(self._sent.returned)
        self._channel = channel
        self._callers_callbacks = (self._transport.on_blocked, self._transport.on_unblocked)
        self._transport.on_blocked = self._on_blocked
        self._transport.on_unblocked = self._on_unblocked

    @property
    def open(self) -> bool:
        """Whether the channel can be used."""
        return self._channel.connection is not None and bool(self._channel.is_open)

    @property
    def in_flight(self) -> int:
        """How many messages are not settled."""
        return len(self._sent)

    def send(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        timeout: float,
        then: Then | None = None,
    ) -> Sent:
        """Write a message to the socket; what becomes of it is told while :meth:`drain` runs.

        After any exception the broker may count otherwise than we do: use the channel no more.

        Args:
            message: The message.
            exchange: Where to.
            routing_key: With which key.
            timeout: Seconds that writing may take.
            then: Called with what is returned once it is settled, inside of :meth:`drain`.
        """
        sent = Sent(exchange, routing_key, message, then)
        # The class's own method: where a connection asks for confirm_publish, the instance's
        # would wait for any ack, which may be another message's.
        amqp.Channel.basic_publish(
            self._channel, message, exchange, routing_key, mandatory=True, timeout=timeout
        )
        # Counted once it is written. Before writing, py-amqp looks what the broker says, and
        # whoever is told of that may send something else, which then is the earlier one.
        self._sent.add(sent)
        return sent

    def drain(self, until: Callable[[], bool], deadline: float) -> bool:
        """Take in what the broker says until ``until()``; return False when time ran out.

        Args:
            until: Asked after every frame.
            deadline: On the clock of :func:`time.monotonic`.
        """
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                self._transport.drain_events(timeout=remaining)
            except TimeoutError:
                return until()
        return True

    @contextmanager
    def answers_within(self, seconds: float) -> Iterator[None]:
        """Bound every wait for an answer on this connection; without it there is none."""
        with self._transport.transport.having_timeout(seconds):
            yield

    def close(self, timeout: float) -> None:
        """Close the channel, and give the connection back as it was."""
        self._transport.on_blocked, self._transport.on_unblocked = self._callers_callbacks
        if self.open:
            with self.answers_within(timeout):
                self._channel.close()

    def _on_blocked(self, reason: str) -> None:
        self.blocked = reason
        callback = self._callers_callbacks[0]
        if callback:
            callback(reason)

    def _on_unblocked(self) -> None:
        self.blocked = None
        callback = self._callers_callbacks[1]
        if callback:
            callback()
