"""A module on one connection: receive a message, publish its results, acknowledge it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, NamedTuple, cast

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotFound
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import MessageNacked, MessageRefused, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    encoded,
    to_undeliverable,
    without_headers,
)
from celery_rabbitdelay.modules.statistics import ModuleStatistics
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.message import headers_of, shortened
from celery_rabbitdelay.publishing.policy import PublishPolicy
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publish_loop import PublishLoop, unwrap_callers_errors
from celery_rabbitdelay.publishing.wire import ack_frames, requeue_frames

__all__ = ["Module", "ModuleConsumer"]

logger = logging.getLogger(__name__)

#: Received messages that are unpacked in turns: one may be an envelope of many megabytes.
UNPACKED_AT_ONCE: Final = 4

#: Messages of one envelope that are published before it is the next received message's turn.
MESSAGES_PER_TURN: Final = 100

#: Publish attempts for a message that the broker keeps nacking, and seconds between them: long
#: enough for a leader election, but short, since a waiting resend takes a place in the window.
ATTEMPTS: Final = 10
NACK_PAUSE: Final = 3.0

#: Maximum frames read per iteration; a delivery has three.
FRAMES: Final = 300

#: Seconds that the thread waits for a frame before it checks whether it is to stop.
READ_TIMEOUT: Final = 0.2

#: Seconds between two samples of how many messages are ready.
SAMPLE_EVERY: Final = 2.0


@dataclass(frozen=True)
class Module:
    """A module, as a worker serves it.

    Attributes:
        name: Its name.
        topology: The topology that its queue belongs to.
        queue: The queue.
        receive: Takes a message; returns the messages to publish for it.
        prefetch: How many messages are taken from the queue before the first is acknowledged.
        window: How many messages may be in flight, unconfirmed.
        timeout: Seconds without any confirm until the connection is given up.
    """

    name: str
    topology: Topology
    queue: Queue
    receive: Callable[[amqp.Message], Iterator[Outgoing]]
    prefetch: int
    window: int
    timeout: float


class _Received:
    """A received message, and what is left to do about it."""

    __slots__ = ("message", "outgoing", "pending", "unpacked")

    def __init__(self, message: amqp.Message, outgoing: Iterator[Outgoing]) -> None:
        self.message = message
        self.outgoing = outgoing
        #: Unconfirmed messages published for it.
        self.pending = 0
        #: Whether all messages to publish for it are known.
        self.unpacked = False


class _Origin(NamedTuple):
    """Links a publication to its received message."""

    received: _Received
    outgoing: Outgoing


class ModuleConsumer:
    """Serves a module on one connection.

    A message is acknowledged once all messages published for it are confirmed. If anything fails
    before, the broker delivers the message again.

    Starts with prefetch 1 and window 1 while messages are redelivered: if one of them crashes the
    worker, only its delivery count grows, until the delivery limit dead-letters it to
    ``undeliverable``.

    Args:
        module: The module.
        connection: A connection that is open.
        statistics: Where to count what is done.
        stopping: Set once no more messages are to be taken.
    """

    def __init__(
        self,
        module: Module,
        connection: Connection,
        statistics: ModuleStatistics,
        stopping: Event,
    ) -> None:
        self._module = module
        self._connection = connection
        self._statistics = statistics
        self._stopping = stopping
        self._careful = True
        # The time-out is for the broker as a whole: a single message has no deadline.
        policy = PublishPolicy(
            module.timeout, ATTEMPTS - 1, (NACK_PAUSE, 0.0, NACK_PAUSE), module.window
        )
        self._loop = PublishLoop(self._next, policy, self._done)
        self._loop.window = 1
        self._loop.use(ConfirmChannel(connection, self._loop.settled))
        self._wire = self._loop.channel.wire
        self._consuming = cast(Any, connection.channel())
        # Bodies stay bytes.
        self._consuming.auto_decode = False
        self._consumer_tag = ""
        self._waiting: deque[_Received] = deque()
        self._unpacking: deque[_Received] = deque()
        self._turn_left = MESSAGES_PER_TURN
        self._undeliverable = module.topology.module_queues.undeliverable.exchange.name
        self._existing_exchanges = {"", self._undeliverable}
        self._unfinished = 0
        self._to_acknowledge: list[int] = []
        self._sampled_at = 0.0

    def serve(self) -> bool:
        """Consume until the service stops.

        A broker that has blocked the connection may not answer for any length of time. Messages
        that are not finished then are delivered to another worker.

        Returns:
            Whether everything that was begun is finished.
        """
        with unwrap_callers_errors():
            return self._serve()

    def _serve(self) -> bool:
        self._consume(1)
        careful = consuming = True
        while True:
            stopping = self._stopping.is_set()
            if stopping and self._loop.channel.blocked is not None:
                return False
            if stopping and consuming:
                self._cancel()
                consuming = False
                self._requeue_waiting()
            if not consuming and not self._unfinished:
                return True
            if consuming and careful and not self._careful:
                # AMQP cannot raise the prefetch of a consumer.
                careful = False
                self._cancel()
                self._consume(self._module.prefetch)
                self._loop.window = self._module.window
            try:
                self._turn()
            except ChannelError as closed:
                self._after_close(closed)
            time.sleep(0)  # lets the other greenlets of gevent and eventlet run

    def _turn(self) -> None:
        """Publish what can be published, and read what the broker sends."""
        channel = self._loop.channel
        self._loop.send()
        channel.flush(self._module.timeout)
        self._acknowledge()
        can_send = bool(self._unpacking or self._waiting) and self._loop.has_room
        try:
            channel.read(0 if can_send else READ_TIMEOUT, FRAMES)
        except TimeoutError:
            # py-amqp may run out of time while it opens a channel that the broker has closed, and
            # then raises nothing about the close.
            if not (channel.open and self._consuming.is_open):
                raise
        self._acknowledge()
        self._connection.heartbeat_check()
        self._loop.check_time()
        self._sample()

    def _after_close(self, closed: ChannelError) -> None:
        """Go on with another channel if the broker has closed the one that publishes."""
        former = self._loop.channel
        self._loop.channel_closed(closed)
        former.close(self._module.timeout)
        with self._answers():
            channel = ConfirmChannel(self._connection, self._loop.settled)
        channel.blocked = former.blocked
        self._loop.use(channel)

    def _consume(self, prefetch: int) -> None:
        with self._answers():
            self._consuming.basic_qos(0, prefetch, False)
            queue = self._module.queue.name
            self._consumer_tag = self._consuming.basic_consume(queue, callback=self._on_message)

    def _cancel(self) -> None:
        with self._answers():
            self._consuming.basic_cancel(self._consumer_tag)

    def _answers(self) -> Any:
        """Bound the wait for an answer, so that a silent broker does not hold the thread."""
        return self._wire.answers_within(self._module.timeout)

    def _requeue_waiting(self) -> None:
        """Requeue received messages that were not begun."""
        tags = [cast(int, received.message.delivery_tag) for received in self._waiting]
        self._waiting.clear()
        self._unfinished -= len(tags)
        self._wire.write(requeue_frames(self._consuming.channel_id, tags), self._module.timeout)

    def _on_message(self, message: amqp.Message) -> None:
        self._unfinished += 1
        self._statistics.received += 1
        self._careful = self._careful and message.delivery_info["redelivered"]
        self._waiting.append(_Received(message, self._receive(message)))

    def _receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        unreadable = headers_of(message).get(header_names.UNREADABLE)
        if unreadable is not None:
            raise UnprocessableMessage(f"its properties cannot be read: {unreadable}")
        yield from self._module.receive(message)

    def _next(self) -> Publication | None:
        """Return the next message to publish: the source of the publish loop."""
        while True:
            while self._waiting and len(self._unpacking) < UNPACKED_AT_ONCE:
                self._unpacking.append(self._waiting.popleft())
            if not self._unpacking:
                return None
            if not self._turn_left:
                self._unpacking.rotate(-1)
                self._turn_left = MESSAGES_PER_TURN
            self._turn_left -= 1
            received = self._unpacking[0]
            try:
                outgoing = next(received.outgoing)
            except StopIteration:
                self._unpacking.popleft()
                self._turn_left = MESSAGES_PER_TURN
                received.unpacked = True
                self._finish(received)
            except Exception as error:
                if not isinstance(error, UnprocessableMessage):
                    logger.exception("%s: a message cannot be read", self._module.name)
                received.outgoing = iter(())
                reason = (
                    error.reason if isinstance(error, UnprocessableMessage) else shortened(error)
                )
                return self._refuse(received, _as_it_came(received.message), reason)
            else:
                return self._publication(received, outgoing)

    def _publication(self, received: _Received, outgoing: Outgoing) -> Publication:
        # Counted first: while the broker is asked for the exchange, other messages are settled.
        received.pending += 1
        try:
            content = encoded(outgoing, self._wire.frame_max)
            if not self._exists(outgoing.exchange):
                raise UnprocessableMessage(f"there is no exchange {outgoing.exchange!r}")
        except UnprocessableMessage as refused:
            received.pending -= 1
            return self._refuse(received, outgoing, refused.reason)
        address = outgoing.exchange, outgoing.routing_key
        return Publication(content, lambda: address, _Origin(received, outgoing))

    def _exists(self, exchange: str) -> bool:
        if exchange in self._existing_exchanges:
            return True
        # Publishing to an exchange that does not exist closes the channel, with all in flight.
        with self._answers(), self._connection.channel() as channel:
            try:
                Exchange(exchange)(channel).declare(passive=True)
            except (NotFound, AccessRefused) as refused:
                if refused.method_sig != spec.Exchange.Declare:
                    raise  # it closes the channel that publishes
                if isinstance(refused, NotFound):
                    return False
                # The exchange may exist nevertheless.
        self._existing_exchanges.add(exchange)
        return True

    def _refuse(self, received: _Received, outgoing: Outgoing, reason: str) -> Publication:
        """Return the publication that puts a message into ``undeliverable``."""
        logger.warning("%s: a message is undeliverable: %s", self._module.name, reason)
        self._statistics.undeliverable += 1
        topology = self._module.topology
        refused = to_undeliverable(topology, outgoing, reason)
        try:
            content = encoded(refused, self._wire.frame_max)
        except UnprocessableMessage:
            refused = without_headers(topology, outgoing.message, reason)
            content = encoded(refused, self._wire.frame_max)
        received.pending += 1
        address = refused.exchange, refused.routing_key
        return Publication(content, lambda: address, _Origin(received, refused))

    def _done(self, publication: Publication) -> None:
        """Count a message that is settled: ``done`` of the publish loop."""
        origin: _Origin = publication.subject
        received, outgoing = origin
        error = publication.error
        if error is None:
            self._statistics.published += 1
        elif outgoing.exchange == self._undeliverable:
            raise error
        else:
            if isinstance(error, MessageNacked):
                reason = f"the broker nacked it {ATTEMPTS} times"
            elif isinstance(error, MessageRefused):
                reason = f"the broker does not take it: {error.reason}"
            elif isinstance(error.__cause__, NotFound):
                # Those behind it are refused without closing the channel.
                self._existing_exchanges.discard(outgoing.exchange)
                reason = f"there is no exchange {outgoing.exchange!r}"
            else:
                where = f"the exchange {outgoing.exchange!r}" if outgoing.exchange else "there"
                reason = f"{where} has no queue for the key {outgoing.routing_key!r}"
            self._loop.send_first(self._refuse(received, outgoing, reason))
        received.pending -= 1
        self._finish(received)

    def _finish(self, received: _Received) -> None:
        if received.unpacked and not received.pending:
            self._to_acknowledge.append(cast(int, received.message.delivery_tag))
            self._unfinished -= 1
            self._statistics.finished += 1

    def _acknowledge(self) -> None:
        if self._to_acknowledge:
            frames = ack_frames(self._consuming.channel_id, self._to_acknowledge)
            self._to_acknowledge.clear()
            self._wire.write(frames, self._module.timeout)

    def _sample(self) -> None:
        channel = self._loop.channel
        if channel.blocked is not None or time.monotonic() - self._sampled_at < SAMPLE_EVERY:
            return
        self._sampled_at = time.monotonic()
        try:
            with self._answers():
                answer = self._consuming.queue_declare(self._module.queue.name, passive=True)
        except TimeoutError:
            if channel.blocked is None:
                raise
        else:
            self._statistics.sample(answer.message_count)


def _as_it_came(message: amqp.Message) -> Outgoing:
    info: Any = message.delivery_info
    return Outgoing(info["exchange"], info["routing_key"], message)
