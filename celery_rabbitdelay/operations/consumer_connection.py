"""A connection on which messages are consumed, and given back unless they are acknowledged.

AMQP has no method that looks at a message and leaves it in its queue. A message is delivered, stays
unacknowledged while it is looked at or published elsewhere, and is then acknowledged or requeued.
If the process dies meanwhile, the broker requeues it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

import amqp
from kombu import Connection

from celery_rabbitdelay.levels.quirks import ORDER_OF_REQUEUED, version_of
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.kombu_internals import conversation, drop_connection
from celery_rabbitdelay.publishing.wire import REQUEUE, Wire, settle_frames

#: How often the broker is asked something about the queues before the channel is closed, so that
#: they have received all acknowledgements by then: a channel passes only 32 of them at a time to a
#: quorum queue, and forgets the others when it is closed (measured on 3.10.8).
BARRIERS: Final = 3


class ConsumerConnection:
    """An open connection with one channel, on which messages arrive.

    Args:
        like: A connection to the broker; another one like it is opened.
        timeout: Seconds that an answer of the broker may take.

    Attributes:
        connection: The connection.
        channel: Its channel; the bodies of its messages are bytes.
        errors: The errors that mean that the connection, or its channel, is lost.
        version: The version of RabbitMQ.
        frame_max: The largest frame, in bytes.
        received: The messages that have arrived and were not looked at yet.

    Raises:
        OSError: The broker cannot be reached.
        amqp.AMQPError: It refuses the connection.
    """

    def __init__(self, like: Connection, timeout: float) -> None:
        # Without heartbeats: nothing may be read for longer than they allow.
        self.connection = like.clone(heartbeat=0)
        self._timeout = timeout
        reading_unreadable_properties(self.connection)
        connect(self.connection)  # where a channel of kombu's would try for ever
        self.errors: tuple[type[BaseException], ...] = (
            *self.connection.connection_errors,
            *self.connection.channel_errors,
        )
        self._wire = Wire(self.connection)
        self._wire.receive_ahead()
        self.frame_max = self._wire.frame_max
        properties = self.connection.connection.server_properties
        self.version = version_of(str(properties.get("version", "0")))
        self.received: deque[amqp.Message] = deque()
        self._last_tag = 0
        with self.answers_in_time():
            self.channel = cast(Any, self.connection.channel())
        self.channel.auto_decode = False

    @contextmanager
    def answers_in_time(self) -> Iterator[None]:
        """Bound each wait for an answer within the block by the time-out.

        If the block is interrupted, the connection is dropped.
        """
        with conversation(self.connection), self._wire.answers_within(self._timeout):
            yield

    def write(self, frames: bytes) -> None:
        """Write frames, within the time-out."""
        self._wire.write(frames, self._timeout)

    def receive(self, message: amqp.Message) -> None:
        """Add a message to those that have arrived."""
        self._last_tag = max(self._last_tag, cast(int, message.delivery_tag))
        self.received.append(message)

    def has_received(self, silence: float) -> bool:
        """Return whether a message has arrived; wait at most ``silence`` seconds for it."""
        with suppress(TimeoutError):
            while not self.received:
                self.connection.drain_events(timeout=silence)
        return bool(self.received)

    def give_back(self, holds_some: bool) -> None:
        """Requeue all messages that are not acknowledged, and close the channel.

        Args:
            holds_some: Whether there may be any.
        """
        # Where it keeps the order, because a closed channel may count as a failed delivery.
        if holds_some and self._last_tag and not ORDER_OF_REQUEUED.is_in(self.version):
            tags = [self._last_tag]
            self.write(settle_frames(self.channel.channel_id, REQUEUE, tags, multiple=True))
        self.channel.close()

    def drop(self) -> None:
        """Close the connection; the broker requeues what is not acknowledged."""
        with suppress(*self.errors):
            drop_connection(self.connection)
