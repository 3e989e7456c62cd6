"""Which messages the broker has not confirmed yet, and the channel that they were sent on.

RabbitMQ takes responsibility for a message with ``basic.ack``
(https://www.rabbitmq.com/docs/confirms); until then it may be lost with the connection, and nobody
else tells.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any, Final, TypeAlias

import amqp
from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned, PublishError
from celery_rabbitdelay.publishing.wire import METHOD, Content, publishing

__all__ = ["ConfirmChannel", "Sent", "SentMessages"]

#: How many bytes are written at once: enough that writing costs little, and few enough that the
#: broker begins at once.
WRITE_SIZE: Final = 65_536

#: Seconds that one look at the socket takes where there is nothing.
LOOK: Final = 0.001

#: How the method ``basic.ack`` begins; then the tag, and whether it means all up to it.
ACK: Final = struct.pack(">HH", 60, 80)
_ACKED: Final = struct.Struct(">Q?")


class Sent:
    """A message that was sent, and what became of it.

    Attributes:
        exchange: The exchange that it was sent to.
        routing_key: Its routing key.
        content: What was sent.
        subject: Whatever the sender wants to find again.
        settled: Whether the broker has said its last word about it.
        error: What that word was, None where it is a confirm.
        then: Called with this once it is settled; None for nothing.
    """

    __slots__ = ("content", "error", "exchange", "routing_key", "settled", "subject", "then")

    def __init__(
        self,
        exchange: str,
        routing_key: str,
        content: Content,
        then: Then | None = None,
        subject: Any = None,
    ) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.content = content
        self.then = then
        self.subject = subject
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


#: What is called with a message that is settled.
Then: TypeAlias = Callable[[Sent], None]


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

    def subjects(self) -> list[Any]:
        """Return the subjects of those that are not settled, in the order of sending."""
        return [sent.subject for sent in self._unsettled.values()]

    def forget(self, subjects: Collection[Any]) -> None:
        """Wait for some of them no more; what the broker still says of them is passed over."""
        gone = [tag for tag, sent in self._unsettled.items() if sent.subject in subjects]
        for tag in gone:
            del self._unsettled[tag]

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
        content = Content.of(message)
        same = (sent for sent in there if sent.content == content)
        returned = next(same, next(iter(there), None))
        if returned is not None:
            returned.error = MessageReturned(exchange, routing_key, str(reply))

    def _settle(self, tag: int, multiple: bool) -> list[Sent]:
        # Tags grow, and so does the order of the dict.
        tags = list(takewhile(tag.__ge__, self._unsettled)) if multiple else [tag]
        return [self._unsettled.pop(each) for each in tags if each in self._unsettled]


class ConfirmChannel:
    """A channel in confirm mode.

    Messages are collected and written many at a time. After any exception the broker may count
    otherwise than we do: use the channel no more.

    Args:
        connection: Where to open it; the connection is opened if it is not.

    Attributes:
        blocked: Why the broker takes no messages at the moment; None where it does.
        unsettled: The messages that it has not said its last word about.
    """

    def __init__(self, connection: Connection) -> None:
        self.blocked: str | None = None
        self.unsettled = SentMessages()
        transport: Any = connection.connection
        self._transport = transport
        self._collected: list[bytes] = []
        self._collected_bytes = 0
        channel: Any = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self.unsettled.ack)
        channel.events["basic_nack"].add(self.unsettled.nack)
        channel.events["basic_return"].add(self.unsettled.returned)
        self._channel = channel
        self._number: int = channel.channel_id
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
        return len(self.unsettled)

    def send(
        self,
        content: Content,
        exchange: str,
        routing_key: str,
        timeout: float,
        then: Then | None = None,
        subject: Any = None,
    ) -> Sent:
        """Send a message; what becomes of it is told while :meth:`drain` runs.

        Args:
            content: The message.
            exchange: Where to.
            routing_key: With which key.
            timeout: Seconds that writing may take.
            then: Called with what is returned once it is settled, inside of :meth:`drain`.
            subject: Whatever the caller wants to find again.

        Raises:
            amqp.exceptions.FrameSyntaxError: Headers and properties are too long for a frame.
            struct.error: Exchange or routing key are too long. In both cases, nothing is sent.
        """
        frames = publishing(self._number, exchange, routing_key, content, self._transport.frame_max)
        sent = Sent(exchange, routing_key, content, then, subject)
        self.unsettled.add(sent)
        self._collected.append(frames)
        self._collected_bytes += len(frames)
        if self._collected_bytes >= WRITE_SIZE:
            self.flush(timeout)
        return sent

    def flush(self, timeout: float) -> None:
        """Write what was collected, unless the broker takes nothing at the moment."""
        if not self._collected or self.blocked is not None:
            return
        frames, self._collected, self._collected_bytes = b"".join(self._collected), [], 0
        with self.answers_within(timeout):
            self._transport.transport.write(frames)
        self._transport.bytes_sent += 1  # py-amqp counts writes, for its heartbeat

    def drain(self, until: Callable[[], bool], deadline: float) -> bool:
        """Write what was sent, and take in what the broker says until ``until()``.

        Args:
            until: Asked after every frame.
            deadline: On the clock of :func:`time.monotonic`.

        Returns:
            False when time ran out.
        """
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self.flush(remaining)
            try:
                self.take_in(remaining)
            except TimeoutError:
                return until()
        return True

    def look(self, timeout: float) -> None:
        """Write what was sent, and take in what the broker has said already.

        Args:
            timeout: Seconds that writing may take.
        """
        self.flush(timeout)
        self.hear()

    def hear(self) -> None:
        """Take in what the broker has said already."""
        with suppress(TimeoutError):
            while True:
                self.take_in(LOOK)

    def take_in(self, timeout: float, most: int = 1) -> None:
        """Take in a frame of the connection, also of another channel, and those behind it.

        Args:
            timeout: Seconds to wait for the first one.
            most: How many frames at the most; the further ones are not waited for.

        Raises:
            TimeoutError: None came.
        """
        self._take_in_one(timeout)
        with suppress(TimeoutError):
            for _ in range(most - 1):
                self._take_in_one(0)

    def _take_in_one(self, timeout: float) -> None:
        transport = self._transport
        with transport.transport.having_timeout(timeout):
            frame = transport.transport.read_frame()
        kind, channel, payload = frame
        if kind == METHOD and channel == self._number and payload[:4] == ACK:
            # What nearly every frame is, handled without py-amqp's way through callbacks.
            transport.bytes_recv += 1
            self.unsettled.ack(*_ACKED.unpack_from(payload, 4))
        else:
            transport.on_inbound_frame(frame)

    @contextmanager
    def answers_within(self, seconds: float) -> Iterator[None]:
        """Bound every wait for an answer on this connection; without it there is none."""
        told: AMQPError | None = None
        try:
            with self._transport.transport.having_timeout(seconds):
                try:
                    yield
                except AMQPError as error:
                    told = error
                    raise
        except OSError:
            if told is not None:
                # The broker has said why it closes the connection; py-amqp then fails to set the
                # time limit of a socket that is closed.
                raise told from told.__cause__
            raise

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
