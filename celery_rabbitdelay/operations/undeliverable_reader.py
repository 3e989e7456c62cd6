"""A reader takes messages from ``undeliverable``; those that are to leave it, for good.

AMQP has no way to look at a message that stays in its queue. So the messages are delivered and not
acknowledged, on a connection of their own, and given back to their queue in the end. Until then no
other consumer gets them; if the reader dies, the broker gives them back.

A quorum queue keeps the order of what one consumer gives back, but not of what ``basic.get`` has
taken (measured on RabbitMQ 3.10.8, 4.0.5 and 4.3.6). So a read uses one consumer, which is
cancelled and starts again under its tag with a larger prefetch count: the broker never sends more
than :data:`AHEAD` messages ahead of the reader. After a read of only some messages, these stand
behind others that were read before.

Messages that leave the queue are acknowledged between two such consumers only. Each
acknowledgement makes room for another message, and if that is on its way while the consumer is
cancelled, the broker gives it back to the end of the queue (measured, likewise).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, cast

import amqp
from amqp.exceptions import AccessRefused, RecoverableConnectionError
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.wire import (
    Wire,
    ack_all_frame,
    ack_frames,
    requeue_all_frame,
)

__all__ = ["Reader", "reading", "ready_messages"]

#: Messages that the broker sends before the reader asks for more.
AHEAD: Final = 1000

#: Messages that are taken under one consumer tag; AMQP's prefetch count has 16 bits.
MOST_OF_A_TAG: Final = 65 * AHEAD

#: The reader's priority; that of other consumers is 0, so a message goes to them if they take it.
PRIORITY: Final = -10

#: Seconds without a message until the queue is asked whether it is empty.
SILENCE: Final = 0.5

#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

#: Seconds after which the broker may take the messages back: less than its ``consumer_timeout`` of
#: 30 minutes (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout).
MOST_SECONDS: Final = 1500.0

#: Messages that are taken before those that leave the queue are acknowledged. If the program dies,
#: so many, and those in flight, may be both published and still there.
AHEAD_OF_REMOVAL: Final = 250

#: How often the broker is asked something before the channel is closed, so that it has carried out
#: all acknowledgements by then: a channel passes only 32 of them at a time to a quorum queue, and
#: forgets the others when it is closed.
BARRIERS: Final = 3

#: Seconds that the broker gets to put back what it was given back.
PUT_BACK_TIMEOUT: Final = 5.0

#: Seconds between two looks whether it has.
LOOK_EVERY: Final = 0.02


def ready_messages(connection: Connection, topology: Topology) -> int | None:
    """Return how many messages are in ``undeliverable``; None if the user may not ask.

    From RabbitMQ 4.3 on, it takes the permission to configure the queue.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    with reading(connection, topology) as reader:
        return reader.ready()


@contextmanager
def reading(
    connection: Connection,
    topology: Topology,
    *,
    is_removing: bool = False,
    rate: float | None = None,
) -> Iterator[Reader]:
    """Open a connection, and take messages from ``undeliverable`` on it.

    At the end, all messages go back that were not acknowledged.

    Args:
        connection: Where; the messages are read on another connection like it.
        topology: The topology whose messages are read.
        is_removing: Whether messages are acknowledged, which had better not wait for long.
        rate: How many of them in a second, if that is limited.

    Raises:
        OSError: The broker cannot be reached.
    """
    # Without heartbeats: the caller may pause between two messages for longer than they allow.
    own = connection.clone(heartbeat=0)
    reading_unreadable_properties(own)
    try:
        own.connect()  # tries once, where a channel of kombu's would try for ever
        reader = Reader(own, topology, is_removing, rate)
        try:
            yield reader
        finally:
            reader.give_back()
    finally:
        own.release()


class Reader:
    """Takes messages, acknowledges some of them, and gives the others back.

    Args:
        connection: An open connection of its own.
        topology: The topology.
        is_removing: Whether messages are acknowledged.
        rate: How many of them in a second, if that is limited.

    Attributes:
        errors: The errors that mean that the connection, or its channel, is lost.
    """

    def __init__(
        self,
        connection: Connection,
        topology: Topology,
        is_removing: bool = False,
        rate: float | None = None,
    ) -> None:
        self._connection = connection
        self.errors: tuple[type[BaseException], ...] = (
            *connection.connection_errors,
            *connection.channel_errors,
        )
        self._queue: Queue = topology.module_queues.undeliverable
        self._wire = Wire(connection)
        self._is_lost = False
        with self._answers():
            self._channel = cast(Any, connection.channel())
        # Bodies stay bytes.
        self._channel.auto_decode = False
        version = str(connection.connection.server_properties.get("version", "0"))
        self._is_4 = int(version.partition(".")[0]) >= 4
        # RabbitMQ 3.10.8 fails if a consumer of a quorum queue starts again under its tag while it
        # has messages (measured).
        self._restarts = self._is_4 and topology.queue_type == "quorum"
        self._ahead = AHEAD
        if rate is not None:
            self._ahead = max(1, min(int(rate), AHEAD_OF_REMOVAL))
        elif is_removing and (self._restarts or topology.queue_type == "classic"):
            # Elsewhere each consumer has a tag of its own, and many of them lose the order.
            self._ahead = min(AHEAD, AHEAD_OF_REMOVAL)
        self._received: deque[amqp.Message] = deque()
        self._taken = self._acknowledged = 0
        self._last_tag = 0
        #: How many were acknowledged when the broker had last carried out all of them.
        self._finished_at = 0
        self._to_acknowledge: list[amqp.Message] = []
        #: All messages up to this delivery tag are acknowledged.
        self._all_up_to = 0
        self._began = time.monotonic()
        #: The consumer's number, and how many messages it has taken that are not acknowledged.
        self._number = self._of_consumer = 0
        self._is_consuming = False

    @property
    def frame_max(self) -> int:
        """The largest frame of the connection, in bytes."""
        return self._wire.frame_max

    def ready(self) -> int | None:
        """Return how many messages are in the queue; None if the user may not ask.

        From RabbitMQ 4.3 on, it takes the permission to configure the queue.

        Raises:
            amqp.exceptions.NotFound: The queue does not exist.
        """
        channel: Any
        within = self._wire.answers_within(ANSWER_TIMEOUT)
        with within, suppress(AccessRefused), self._connection.channel() as channel:
            count: int = channel.queue_declare(self._queue.name, passive=True).message_count
            return count
        return None

    def messages(self, limit: int) -> Iterator[amqp.Message]:
        """Yield messages until the queue is empty.

        Args:
            limit: How many to read at most.

        Raises:
            ReadTooLong: Reading took so long that the broker may have taken messages back.
        """
        while self._taken < limit:
            wanted = min(self._ahead, limit - self._taken)
            end = self._taken + wanted
            self._consume(wanted)
            while self._taken < end and self._arrived():
                yield self._next()
            self._cancel()
            while self._received:
                yield self._next()
            if self._taken < end:
                # Silence proves nothing: the broker may be slow.
                with self._answers():
                    message = self._channel.basic_get(self._queue.name)
                if message is None:
                    return
                self._of_consumer -= 1
                self._received.append(message)
                yield self._next()

    def acknowledge(self, message: amqp.Message) -> None:
        """Take a message out of the queue for good, a little later.

        Args:
            message: One of those that were yielded, and only once.
        """
        self._to_acknowledge.append(message)
        if not self._is_consuming:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Write what was acknowledged, in few frames."""
        messages = self._to_acknowledge
        if not messages:
            return
        with self._answers():
            self._wire.write(self._frames_for(messages), ANSWER_TIMEOUT)
        # Messages that are held fill up the prefetch count of their consumer.
        held_by = [each.delivery_info.get("consumer_tag") for each in messages]
        self._of_consumer -= held_by.count(self._tag)
        self._acknowledged += len(messages)
        self._to_acknowledge = []

    def _frames_for(self, messages: list[amqp.Message]) -> bytes:
        tags = deque(sorted(cast(int, each.delivery_tag) for each in messages))
        before = self._all_up_to
        while tags and tags[0] == self._all_up_to + 1:
            self._all_up_to = tags.popleft()
        channel = self._channel.channel_id
        first = ack_all_frame(channel, self._all_up_to) if self._all_up_to > before else b""
        return first + ack_frames(channel, tags)

    def _consume(self, wanted: int) -> None:
        if not self._restarts or self._of_consumer + wanted > MOST_OF_A_TAG:
            self._number, self._of_consumer = self._number + 1, 0
        with self._answers():
            self._channel.basic_qos(0, self._of_consumer + wanted, False)
            self._channel.basic_consume(
                self._queue.name,
                self._tag,
                callback=self._received.append,
                arguments={"x-priority": PRIORITY},
            )
        self._is_consuming = True

    def _arrived(self) -> bool:
        """Return whether there is another message; wait for it for a while."""
        with self._answers(), suppress(TimeoutError):
            while not self._received:
                self._connection.drain_events(timeout=SILENCE)
        return bool(self._received)

    def _next(self) -> amqp.Message:
        held = time.monotonic() - self._began
        if held > MOST_SECONDS:
            raise ReadTooLong(self._taken, held)
        message = self._received.popleft()
        self._taken += 1
        self._of_consumer += 1
        self._last_tag = message.delivery_info["delivery_tag"]
        return message

    def _cancel(self) -> None:
        with self._answers():
            self._channel.basic_cancel(self._tag)
        self._is_consuming = False
        self._acknowledge()

    @property
    def not_acknowledged(self) -> int:
        """How many messages are to be acknowledged, and are not."""
        return len(self._to_acknowledge)

    def finish(self) -> None:
        """Stop reading, and wait until the broker has carried out all acknowledgements."""
        if self._is_consuming:
            self._cancel()
        if self._finished_at == self._acknowledged:
            return
        for _ in range(BARRIERS):
            # The queue answers it after all that it was told before.
            with self._answers():
                message = self._channel.basic_get(self._queue.name)
            if message is not None:
                self._received.append(message)
        self._finished_at = self._acknowledged

    def give_back(self) -> None:
        """Give all others back; if the connection is lost, the broker has done so already."""
        with suppress(*self.errors):
            self.finish()
            if self._received:
                self._last_tag = self._received[-1].delivery_info["delivery_tag"]
            held = self._taken + len(self._received) - self._acknowledged
            if held and self._is_4:
                # On RabbitMQ 4.3, a closed channel counts as a failed delivery, and this does not.
                # On 3.10.8, this would change the order (measured).
                frame = requeue_all_frame(self._channel.channel_id, self._last_tag)
                with self._answers():
                    self._wire.write(frame, ANSWER_TIMEOUT)
            with self._answers():
                self._channel.close()
            self._wait_until_back(held)

    def _wait_until_back(self, number: int) -> None:
        """Wait until messages that were given back can be read again, so that the next read does.

        Another consumer may have taken them, so the wait is short.
        """
        deadline = time.monotonic() + PUT_BACK_TIMEOUT
        while number and time.monotonic() < deadline:
            ready = self.ready()
            if ready is None or ready >= number:
                return
            time.sleep(LOOK_EVERY)

    @property
    def _tag(self) -> str:
        # RabbitMQ 3.10.8 gives the messages of a closed channel back by the names of consumers, in
        # their order up to 32 of them (measured).
        return f"undeliverable-{self._number:06}"

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Bound the wait for an answer; once the channel is lost, raise at once.

        The broker has taken all messages back then. py-amqp may have opened the channel again,
        where delivery tags begin anew.
        """
        if self._is_lost:
            raise RecoverableConnectionError("the connection, or its channel, is lost")
        try:
            with self._wire.answers_within(ANSWER_TIMEOUT):
                yield
        except self.errors:
            self._is_lost = True
            raise
