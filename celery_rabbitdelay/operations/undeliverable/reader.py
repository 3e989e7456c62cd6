"""Reads the messages in ``undeliverable``, and removes some of them from the queue.

The messages are delivered, not acknowledged, and requeued at the end of the read; see
:mod:`.consumer_connection`. Until then no other consumer receives them.

A quorum queue keeps the order of messages that one consumer requeues, but not of messages that were
taken by ``basic.get`` (measured on RabbitMQ 3.10.8, 4.0.5 and 4.3.6). Therefore a read uses one
consumer, which is cancelled and starts again under its tag with a larger prefetch count: the broker
never sends more than :data:`AHEAD` messages ahead of the reader. After a partial read, the messages
that were read stand behind those of earlier reads.

Messages that leave the queue are acknowledged between two such consumers only. Each
acknowledgement makes room for another message, and if that is on its way while the consumer is
cancelled, the broker requeues it at the end of the queue (measured on the same versions).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Self, cast

import amqp
from amqp.exceptions import AccessRefused, RecoverableConnectionError
from kombu import Connection

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels.entities import CONSUMER_TAG
from celery_rabbitdelay.levels.quirks import SAME_CONSUMER_TAG
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.consumer_connection import BARRIERS, ConsumerConnection
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import closing
from celery_rabbitdelay.publishing.wire import ACK, settle_frames

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

#: Messages that are taken before those that leave the queue are acknowledged. If the process dies,
#: this number, and those in flight, may be published and still be in the queue.
AHEAD_OF_REMOVAL: Final = 250

#: Seconds in which requeued messages have to be ready again.
PUT_BACK_TIMEOUT: Final = 5.0

#: Seconds between two looks whether they are.
LOOK_EVERY: Final = 0.02


class Reader(ConsumerConnection):
    """Takes messages, acknowledges some of them, and requeues the others.

    At the end of its context, all messages that were not acknowledged are requeued.

    Args:
        like: A connection to the broker; another one like it is opened.
        topology: The topology whose messages are read.
        is_removing: Whether messages are acknowledged, which should not be delayed for long.
        rate: The most messages that are acknowledged in a second; None for no limit.

    Attributes:
        to_acknowledge: Messages whose acknowledgements are not written yet.

    Raises:
        OSError: The broker cannot be reached.
    """

    def __init__(
        self,
        like: Connection,
        topology: Topology,
        *,
        is_removing: bool = False,
        rate: float | None = None,
    ) -> None:
        super().__init__(like, ANSWER_TIMEOUT)
        self._queue = topology.module_queues.undeliverable.name
        self._is_lost = False
        self._restarts = (
            not SAME_CONSUMER_TAG.is_in(self.version) and topology.queue_type == "quorum"
        )
        self._ahead = AHEAD
        if rate is not None:
            self._ahead = max(1, min(int(rate), AHEAD_OF_REMOVAL))
        elif is_removing and (self._restarts or topology.queue_type == "classic"):
            # Elsewhere each consumer has a tag of its own, and many of them lose the order.
            self._ahead = min(AHEAD, AHEAD_OF_REMOVAL)
        self._taken = self._acknowledged = 0
        #: How many messages were acknowledged when the queue had received all acknowledgements.
        self._finished_at = 0
        self.to_acknowledge: list[amqp.Message] = []
        #: All messages up to this delivery tag are acknowledged.
        self._all_up_to = 0
        self._began = time.monotonic()
        #: The consumer's number, and how many messages it has taken that are not acknowledged.
        self._number = self._of_consumer = 0
        self._is_consuming = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with closing(self.connection):
            self._put_back()

    def ready(self) -> int | None:
        """Return how many messages are ready in the queue; None if the user may not ask.

        From RabbitMQ 4.3 on, this takes one of the three permissions on the queue.

        Raises:
            amqp.exceptions.NotFound: The queue does not exist.
        """
        channel: Any
        within = self.answers_in_time()
        with within, suppress(AccessRefused), opened_channel(self.connection) as channel:
            count: int = channel.queue_declare(self._queue, passive=True).message_count
            return count
        return None

    def messages(self, limit: int) -> Iterator[amqp.Message]:
        """Yield messages until the queue is empty.

        Args:
            limit: How many messages to read at most.

        Raises:
            ReadTooLong: Reading took so long that the broker may have requeued messages.
        """
        while self._taken < limit:
            wanted = min(self._ahead, limit - self._taken)
            end = self._taken + wanted
            self._consume(wanted)
            while self._taken < end and self._arrived():
                yield self._next()
            self._cancel()
            while self.received:
                yield self._next()
            if self._taken < end:
                # Silence proves nothing: the broker may be slow.
                if not self._get():
                    return
                self._of_consumer -= 1
                yield self._next()

    def _get(self) -> bool:
        """Ask for a message; return whether the queue had one."""
        with self._answers():
            message = self.channel.basic_get(self._queue)
        if message is not None:
            self.receive(message)
        return message is not None

    def acknowledge(self, message: amqp.Message) -> None:
        """Remove a message from the queue, a little later.

        Args:
            message: A message that was yielded and is not acknowledged yet.
        """
        self.to_acknowledge.append(message)
        if not self._is_consuming:
            self._acknowledge()

    def _acknowledge(self) -> None:
        """Write the pending acknowledgements in few frames."""
        messages = self.to_acknowledge
        if not messages:
            return
        with self._answers():
            self.write(self._frames_for(messages))
        # Messages that are held fill up the prefetch count of their consumer.
        held_by = [each.delivery_info.get("consumer_tag") for each in messages]
        self._of_consumer -= held_by.count(self._tag)
        self._acknowledged += len(messages)
        self.to_acknowledge = []

    def _frames_for(self, messages: list[amqp.Message]) -> bytes:
        tags = deque(sorted(cast(int, each.delivery_tag) for each in messages))
        before = self._all_up_to
        while tags and tags[0] == self._all_up_to + 1:
            self._all_up_to = tags.popleft()
        channel, first = self.channel.channel_id, b""
        if self._all_up_to > before:
            first = settle_frames(channel, ACK, [self._all_up_to], multiple=True)
        return first + settle_frames(channel, ACK, tags)

    def _consume(self, wanted: int) -> None:
        if not self._restarts or self._of_consumer + wanted > MOST_OF_A_TAG:
            self._number, self._of_consumer = self._number + 1, 0
        with self._answers():
            self.channel.basic_qos(0, self._of_consumer + wanted, False)
            self.channel.basic_consume(
                self._queue, self._tag, callback=self.receive, arguments={"x-priority": PRIORITY}
            )
        self._is_consuming = True

    def _arrived(self) -> bool:
        """Return whether another message has arrived; wait up to :data:`SILENCE` seconds for it."""
        with self._answers():
            return self.has_received(SILENCE)

    def _next(self) -> amqp.Message:
        held = time.monotonic() - self._began
        if held > MOST_SECONDS:
            raise ReadTooLong(self._taken, held)
        self._taken += 1
        self._of_consumer += 1
        return self.received.popleft()

    def _cancel(self) -> None:
        with self._answers():
            self.channel.basic_cancel(self._tag)
        self._is_consuming = False
        self._acknowledge()

    def finish(self) -> None:
        """Stop reading, and wait until the queue has received all acknowledgements."""
        if self._is_consuming:
            self._cancel()
        if self._finished_at == self._acknowledged:
            return
        for _ in range(BARRIERS):
            # The queue answers it after everything that it was sent before.
            self._get()
        self._finished_at = self._acknowledged

    def _put_back(self) -> None:
        """Requeue all other messages; if the connection is lost, the broker has done so already."""
        with suppress(*self.errors):
            self.finish()
            held = self._taken + len(self.received) - self._acknowledged
            with self._answers():
                self.give_back(held > 0)
            self._wait_until_back(held)

    def _wait_until_back(self, number: int) -> None:
        """Wait until requeued messages are ready, so that the next read finds them.

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
        # RabbitMQ 3.10.8 requeues the messages of a closed channel by the names of its consumers,
        # in their order up to 32 of them (measured).
        return f"{CONSUMER_TAG}{self._number:06}"

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Bound the wait for an answer; once the channel is lost, raise at once.

        The broker has requeued all messages then. py-amqp may have opened the channel again, where
        delivery tags begin anew.
        """
        if self._is_lost:
            raise RecoverableConnectionError("the connection, or its channel, is lost")
        try:
            with self.answers_in_time():
                yield
        except BaseException:
            self._is_lost = True
            raise
