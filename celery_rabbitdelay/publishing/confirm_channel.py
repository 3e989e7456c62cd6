"""A channel in confirm mode, and its unconfirmed messages.

RabbitMQ takes responsibility for a message with ``basic.ack``
(https://www.rabbitmq.com/docs/confirms). Until then the message may be lost with the connection.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeAlias

import amqp
from amqp.exceptions import AMQPError
from kombu import Connection

from celery_rabbitdelay.exceptions import MessageNacked, MessageReturned
from celery_rabbitdelay.publishing.message import Content, Publication
from celery_rabbitdelay.publishing.wire import Callback, Wire, publish_frames

#: The bytes in a batch for one write: enough to save system calls, few enough that the broker
#: starts early.
WRITE_SIZE: Final = 65_536

#: Timeout for reading frames that have already arrived, in seconds.
NO_WAIT: Final = 0.001

#: Called with a publication once the broker has acked, nacked or returned it.
OnSettled: TypeAlias = Callable[[Publication], None]


class Unconfirmed(dict[int, Publication]):
    """The unconfirmed publications of one channel, by delivery tag, in the order of sending.

    Opens no connection.

    Args:
        on_settled: Called with each publication once it is settled.
    """

    def __init__(self, on_settled: OnSettled) -> None:
        super().__init__()
        self.on_settled = on_settled

    def forget(self, publications: Collection[Publication]) -> None:
        """Stop waiting for some publications; late answers about them are ignored."""
        gone = [tag for tag, each in self.items() if each in publications]
        for tag in gone:
            del self[tag]

    def settle(self, tag: int, multiple: bool, is_nack: bool = False) -> None:
        """Handle ``basic.ack`` or ``basic.nack``; an ack keeps the error of a returned message."""
        # Tags grow, and a dict keeps the order in which they were added.
        tags = list(takewhile(tag.__ge__, self)) if multiple else [tag]
        for publication in [self.pop(each) for each in tags if each in self]:
            if is_nack:
                address = publication.exchange, publication.routing_key
                reason = "the broker nacked the message: a queue is full, or its leader is down"
                publication.error = MessageNacked(*address, reason)
            self.on_settled(publication)

    def returned(
        self, reply: AMQPError, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        """Record that a message was returned; the broker acks the message next.

        ``basic.return`` has no delivery tag, so the publication is found by its content; among
        equal publications, any one will do. If the broker has changed the type of a header, the
        first publication with the same address is chosen.
        """
        candidates = [
            each
            for each in self.values()
            if each.error is None and (each.exchange, each.routing_key) == (exchange, routing_key)
        ]
        content = Content.of(message)
        equal = (each for each in candidates if each.content == content)
        publication = next(equal, next(iter(candidates), None))
        if publication is not None:
            publication.error = MessageReturned(exchange, routing_key, str(reply))


class ConfirmChannel:
    """A channel in confirm mode.

    Messages are written in batches. Do not use the channel after any exception, because the
    broker's delivery tags may then differ from the tags counted here.

    Args:
        connection: The connection of the channel; opened if needed.
        on_settled: Called with each publication once it is settled, while frames are read.

    Attributes:
        wire: The connection's socket.
        blocked: Why the broker blocks the connection; None if it is not blocked.
        unconfirmed: The publications that are not settled.
    """

    def __init__(self, connection: Connection, on_settled: OnSettled) -> None:
        self.wire: Wire = Wire(connection)
        self.blocked: str | None = None
        self.unconfirmed: Unconfirmed = Unconfirmed(on_settled)
        #: The number of publications sent, which is the delivery tag of the last publication.
        self._sent = 0
        self._collected: list[bytes] = []
        self._collected_bytes = 0
        channel: Any = connection.channel()
        channel.confirm_select()
        channel.events["basic_ack"].add(self.unconfirmed.settle)
        channel.events["basic_nack"].add(partial(self.unconfirmed.settle, is_nack=True))
        channel.events["basic_return"].add(self.unconfirmed.returned)
        self._channel = channel
        self._number: int = channel.channel_id
        callbacks = self._callers_callbacks = self.wire.on_blocked
        self.wire.on_blocked = tuple(partial(self._note_blocked, each) for each in callbacks)

    @property
    def open(self) -> bool:
        """Whether the channel can be used."""
        return self._channel.connection is not None and bool(self._channel.is_open)

    @property
    def unanswered(self) -> list[Publication]:
        """The unanswered publications that were written at least in part."""
        written = self._sent - len(self._collected)
        # A returned publication already has an error; only its ack is missing.
        return [each for tag, each in self.unconfirmed.items() if tag <= written and not each.error]

    def send(self, publication: Publication, timeout: float) -> None:
        """Send a message to the exchange and key that its ``address()`` returns now.

        Args:
            publication: The message.
            timeout: The maximum seconds for writing.

        Raises:
            amqp.exceptions.FrameSyntaxError: Headers and properties are too long for a frame.
            struct.error: The exchange's name or the routing key is too long. Nothing is sent after
                either error.
        """
        publication.resent += bool(publication.exchange or publication.routing_key)
        publication.exchange, publication.routing_key = publication.address()
        frames = publish_frames(
            self._number,
            publication.exchange,
            publication.routing_key,
            publication.content,
            self.wire.frame_max,
        )
        self._sent += 1
        self.unconfirmed[self._sent] = publication
        self._collected.append(frames)
        self._collected_bytes += len(frames)
        if self._collected_bytes >= WRITE_SIZE:
            self.flush(timeout)

    def flush(self, timeout: float) -> None:
        """Write the batch, unless the broker blocks the connection."""
        if not self._collected or self.blocked is not None:
            return
        frames, self._collected, self._collected_bytes = b"".join(self._collected), [], 0
        self.wire.write(frames, timeout)

    def drain(self, until: Callable[[], bool], deadline: float) -> bool:
        """Write the batch, and read frames until ``until()`` is true.

        Args:
            until: Called after every frame.
            deadline: When to stop, by :func:`time.monotonic`.

        Returns:
            False if the deadline passed.
        """
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self.flush(remaining)
            try:
                self.read(remaining)
            except TimeoutError:
                return until()
        return True

    def give_up(self) -> None:
        """Drop the batch, and ignore late answers about written messages."""
        self._sent -= len(self._collected)
        self._collected, self._collected_bytes = [], 0
        self.unconfirmed.clear()

    def read_all(self) -> None:
        """Read the frames that have arrived already."""
        with suppress(TimeoutError):
            self.read(NO_WAIT, sys.maxsize)

    def read(self, timeout: float, max_frames: int = 1) -> None:
        """Read one frame of any channel, then other frames that have already arrived.

        Args:
            timeout: Seconds to wait for the first frame.
            max_frames: The maximum number of frames to read.

        Raises:
            TimeoutError: No frame arrived.
        """
        for number in range(max_frames):
            try:
                ack = self.wire.read(0 if number else timeout, self._number)
            except TimeoutError:
                if not number:
                    raise
                return
            if ack is not None:
                self.unconfirmed.settle(*ack)

    def close(self, timeout: float) -> None:
        """Close the channel, and restore the connection's callbacks."""
        self.wire.on_blocked = self._callers_callbacks
        if self.open:
            with self.wire.answers_within(timeout):
                self._channel.close()

    def _note_blocked(self, callback: Callback | None, *reason: str) -> None:
        self.blocked = reason[0] if reason else None
        if callback is not None:
            callback(*reason)
