"""Which messages the broker has not confirmed yet, and the channel that they were sent on.

RabbitMQ takes responsibility for a message with ``basic.ack``
(https://www.rabbitmq.com/docs/confirms); until then it may be lost with the connection, and nobody
else tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned, PublishError

__all__ = ["ConfirmChannel", "Sent", "SentMessages"]


class Sent:
    """A message that was sent, and what became of it.

    Attributes:
        exchange: The exchange that it was sent to.
        routing_key: Its routing key.
        settled: Whether the broker has said its last word about it.
        error: What that word was, None where it is a confirm.
    """

    __slots__ = ("error", "exchange", "routing_key", "settled")

    def __init__(self, exchange: str, routing_key: str) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.settled = False
        self.error: PublishError | None = None


class SentMessages:
    """The messages of one channel that are not settled, by their delivery tags; pure."""

    def __init__(self) -> None:
        self._last_tag = 0
        self._unsettled: dict[int, Sent] = {}

    def add(self, exchange: str, routing_key: str) -> Sent:
        """Note a message; the broker counts them in the order of sending, from 1."""
        self._last_tag += 1
        sent = self._unsettled[self._last_tag] = Sent(exchange, routing_key)
        return sent

    def ack(self, tag: int, multiple: bool) -> None:
        """The broker has confirmed a message, or all up to it."""
        for sent in self._settle(tag, multiple):
            sent.settled = True

    def nack(self, tag: int, multiple: bool) -> None:
        """The broker has refused a message, or all up to it."""
        for sent in self._settle(tag, multiple):
            sent.settled = True
            reason = "the broker refused the message: a queue is full, or its leader is away"
            sent.error = MessageNacked(sent.exchange, sent.routing_key, reason)

    def returned(
        self, reply: AMQPError, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        """No queue takes a message; its ack follows, since the broker has done all it can."""
        for sent in self._unsettled.values():
            if (sent.exchange, sent.routing_key, sent.error) == (exchange, routing_key, None):
                sent.error = MessageReturned(exchange, routing_key, str(reply))
                return

    def _settle(self, tag: int, multiple: bool) -> list[Sent]:
        tags = [earlier for earlier in self._unsettled if earlier <= tag] if multiple else [tag]
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

    def send(self, message: amqp.Message, exchange: str, routing_key: str, timeout: float) -> Sent:
        """Write a message to the socket; what becomes of it is told while :meth:`drain` runs.

        After any exception the broker may count otherwise than we do: use the channel no more.
        """
        sent = self._sent.add(exchange, routing_key)
        # The class's own method: where a connection asks for confirm_publish, the instance's
        # would wait for any ack, which may be another message's.
        amqp.Channel.basic_publish(
            self._channel, message, exchange, routing_key, mandatory=True, timeout=timeout
        )
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
