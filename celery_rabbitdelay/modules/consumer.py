"""A module on one connection: receive a message, publish its results, acknowledge it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import LaterVersion, UnprocessableMessage
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.attempts import Forwarder, ModuleStatistics, Received
from celery_rabbitdelay.modules.bounds import MAX_HELD_BYTES, WarningLimit
from celery_rabbitdelay.modules.deliveries import Deliveries
from celery_rabbitdelay.modules.destinations import SILENCE, MissingExchanges
from celery_rabbitdelay.modules.forwarding import Outgoing, Redelivery
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.incoming import seen_of
from celery_rabbitdelay.publishing.kombu_internals import find_exchanges
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES, WaitingMessage
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publish_loop import PublishLoop, unwrap_callers_errors
from celery_rabbitdelay.publishing.signature import SigningKeys
from celery_rabbitdelay.publishing.wire import ACK, REJECT, REQUEUE

logger = logging.getLogger(__name__)

#: Received messages that are unpacked in turns: one may be an envelope of many megabytes.
UNPACKED_AT_ONCE: Final = 4

#: The same for messages of at most this many bytes, so that those whose destination has no room at
#: the moment let others pass.
SMALL_UNPACKED_AT_ONCE: Final = 32
SMALL_BYTES: Final = 16_384

#: Messages of one envelope that are published before it is the next received message's turn.
MESSAGES_PER_TURN: Final = 100

#: Seconds before a message for the levels, or for ``undeliverable``, is sent again after a nack,
#: the step by which they grow, and their maximum.
NACK_PAUSES: Final = (0.1, 0.3, 3.0)

#: How many times as many messages are taken, and in flight, while the broker answers nothing: all
#: of them may be for one destination that does not answer, and the next ones for others.
MAX_GROWTH: Final = 8

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
        max_unconfirmed: How many messages may be in flight, unconfirmed.
        timeout: Seconds without any confirm until the connection is given up; and without the
            confirm of one message until that one is put into the levels, to be tried again.
        retry_for: Seconds during which a message that its destination does not take is tried
            again; after that, it is undeliverable.
        signing_keys: What signs the messages that wait to be tried again; None: nothing does.
        max_bytes: The largest message that is read. The broker dead-letters a larger one to
            ``undeliverable``; it never takes memory here.
        admit: Removes from a received message what its sender may not say; None: it may say all.
    """

    name: str
    topology: Topology
    queue: Queue
    receive: Callable[[amqp.Message], Iterator[Outgoing]]
    prefetch: int
    max_unconfirmed: int
    timeout: float
    retry_for: float
    signing_keys: SigningKeys | None = None
    max_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    admit: Callable[[amqp.Message], None] | None = None


class ConnectionStuck(Exception):
    """The broker reads nothing more from the connection, because of destinations that are away.

    They count as silent then, so that the next connection does not get stuck.
    """

    def __init__(self, destinations: Sequence[str]) -> None:
        super().__init__(destinations)
        self.destinations = destinations

    def __str__(self) -> str:
        names = ", ".join(self.destinations[:3])
        return f"the broker answers nothing because of {names}"


class ModuleConsumer:
    """Serves a module on one connection.

    A message is acknowledged once all messages published for it are confirmed. If anything fails
    before, the broker delivers the message again. A message that its destination does not take goes
    back into the levels, so that no other message waits for it; see :class:`.Redelivery`.

    Starts with prefetch 1 and window 1 while messages are redelivered: if one of them crashes the
    worker, only its delivery count grows, until the delivery limit dead-letters it to
    ``undeliverable``.

    Args:
        module: The module.
        connection: A connection that is open.
        statistics: Where to count what is done.
        stopping: Set once no more messages are to be taken.
        silent: Destinations that have not answered on former connections; it is updated.
        careful: Whether to take one message at a time while messages are redelivered.
    """

    def __init__(
        self,
        module: Module,
        connection: Connection,
        statistics: ModuleStatistics,
        stopping: Event,
        silent: set[str | None] | None = None,
        careful: bool = True,
    ) -> None:
        self._module = module
        self._connection = connection
        self._statistics = statistics
        self._stopping = stopping
        self._careful = careful
        policy = PublishPolicy(module.timeout, None, NACK_PAUSES, module.max_unconfirmed)
        self._loop = PublishLoop(self._next, policy, self._done)
        self._loop.window = 1
        self._loop.write_timeout = module.timeout
        self._loop.use(ConfirmChannel(connection, self._loop.settled))
        self._wire = self._loop.channel.wire
        self._wire.receive_ahead()
        self._deliveries = Deliveries(
            connection, module.queue.name, module.timeout, self._on_message
        )
        self._waiting: deque[Received] = deque()
        self._unpacking: deque[Received] = deque()
        self._turn_left = MESSAGES_PER_TURN
        #: Whether there was nothing to publish when the loop last asked.
        self._is_idle = False
        #: Since when all messages that are unpacked wait for answers about their destinations.
        self._held_up_since: float | None = None
        undeliverable = module.topology.module_queues.undeliverable.exchange.name
        self._attempts = Forwarder(
            module.name,
            Redelivery(module.topology, module.retry_for, signing_keys=module.signing_keys),
            undeliverable,
            MissingExchanges(self._exists, frozenset(("", undeliverable))),
            statistics,
            module.timeout,
            self._wire.frame_max,
            set() if silent is None else silent,
        )
        unread = f"{module.name}: messages above rabbitdelay_max_message_bytes"
        self._unread = WarningLimit(logger, unread)
        self._unreadable = WarningLimit(logger, f"{module.name}: messages that cannot be read")
        self._growth = 1
        self._sampled_at = 0.0

    def serve(self) -> bool:
        """Consume until the service stops.

        If the connection is blocked when the service stops, return at once: an alarm of the broker
        may last for any time. The broker delivers unfinished messages again.

        Returns:
            Whether everything that was begun is finished.
        """
        with unwrap_callers_errors():
            return self._serve(self._deliveries)

    def _serve(self, deliveries: Deliveries) -> bool:
        deliveries.take(1)
        careful = True
        while True:
            stopping = self._stopping.is_set()
            if stopping and self._loop.channel.blocked is not None:
                return False
            if stopping and deliveries.consuming:
                deliveries.stop()
                while self._waiting:
                    deliveries.settle(self._waiting.popleft().message, REQUEUE)
            if stopping and not deliveries.unfinished:
                deliveries.write()
                return True
            if not stopping and careful and self._may_take_many():
                careful = False
                self._take(1)
            elif not stopping and not careful and self._is_stuck():
                self._take(self._growth * 2)
            else:
                deliveries.adapt()
            try:
                self._turn()
            except ChannelError as closed:
                self._after_close(closed)
            time.sleep(0)  # lets the other greenlets of gevent and eventlet run

    def _turn(self) -> None:
        """Publish what can be published, and read what the broker sends."""
        channel, began = self._loop.channel, time.monotonic()
        self._is_idle = False
        self._loop.send()
        channel.flush(self._module.timeout)
        self._deliveries.write()
        can_send = not self._is_idle and self._loop.has_room
        try:
            channel.read(0 if can_send else READ_TIMEOUT, FRAMES)
        except TimeoutError:
            # py-amqp may run out of time while it opens a channel that the broker has closed, and
            # then raises nothing about the close.
            if not (channel.open and self._deliveries.channel.is_open):
                raise
        self._deliveries.write()
        self._connection.heartbeat_check()
        if channel.blocked is None:
            self._loop.check_time()
            stuck = self._attempts.answer_times.give_up_if_stuck(self._loop.silent_for)
            if stuck:
                raise ConnectionStuck(stuck)
        else:
            # The end of the alarm is waited for, however long it takes.
            self._loop.excuse(time.monotonic() - began)
        self._sample()

    def _after_close(self, closed: ChannelError) -> None:
        """Go on with another channel if the broker has closed the one that publishes."""
        former = self._loop.channel
        self._loop.channel_closed(closed)
        former.close(self._module.timeout)
        with self._wire.answers_within(self._module.timeout):
            channel = ConfirmChannel(self._connection, self._loop.settled)
        channel.blocked = former.blocked
        self._loop.use(channel)

    def _may_take_many(self) -> bool:
        """Whether no message is redelivered any more, or one was published and is not answered."""
        return not self._careful or self._loop.silent_for >= SILENCE

    def _is_stuck(self) -> bool:
        """Whether nothing is answered, and as many messages are taken or in flight as may be."""
        if self._growth >= MAX_GROWTH or self._loop.silent_for < SILENCE * self._growth:
            return False
        taken = len(self._deliveries.unfinished) >= self._module.prefetch * self._growth
        return taken or self._loop.channel.in_flight >= self._loop.window

    def _take(self, growth: int) -> None:
        """Set prefetch and window."""
        self._growth = growth
        self._deliveries.take(self._module.prefetch * growth)
        self._loop.window = self._module.max_unconfirmed * growth

    def _on_message(self, message: amqp.Message) -> None:
        self._statistics.received += 1
        self._careful = self._careful and message.delivery_info["redelivered"]
        seen = seen_of(message)
        if seen.skipped_bytes is not None:
            self._reject_unread(message, seen.skipped_bytes)
            return
        if self._module.admit is not None:
            self._module.admit(message)
        if seen.marks:
            message.properties["application_headers"].update(seen.marks)
        self._waiting.append(Received(message, self._receive(message)))

    def _reject_unread(self, message: amqp.Message, size: int) -> None:
        """Let the broker put a message into ``undeliverable`` whose body was not kept."""
        if self._unread.allows(str(size)):
            logger.warning(
                "%s: a message of %s bytes is undeliverable: rabbitdelay_max_message_bytes is %s",
                self._module.name,
                f"{size:,}",
                f"{self._module.max_bytes:,}",
            )
        self._statistics.undeliverable += 1
        self._statistics.finished += 1
        self._deliveries.settle(message, REJECT)

    def _receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        unreadable = seen_of(message).unreadable
        if unreadable is not None:
            raise UnprocessableMessage(unreadable)
        yield from self._module.receive(message)

    def _next(self) -> Publication | None:
        """Return the next message to publish: the source of the publish loop."""
        waits = 0
        while True:
            if self._attempts.bytes_in_flight >= MAX_HELD_BYTES:
                self._is_idle = True
                return None
            while self._waiting and self._may_unpack(self._waiting[0]):
                self._unpacking.append(self._waiting.popleft())
            if waits >= len(self._unpacking):
                # No message is left, or each has to wait until its destination has answered others.
                if not waits:
                    self._held_up_since = None
                elif self._held_up():
                    waits = 0
                    continue
                self._is_idle = True
                return None
            if not self._turn_left:
                self._next_turn()
            self._turn_left -= 1
            received = self._unpacking[0]
            try:
                outgoing = received.next_outgoing()
            except StopIteration:
                self._unpacking.popleft()
                self._turn_left, waits = MESSAGES_PER_TURN, 0
                received.unpacked = True
                self._finish(received)
            except Exception as error:  # noqa: BLE001 - anybody may have written the message
                return self._give_up(received, error)
            else:
                publication = self._attempts.first(received, outgoing, self._loop.silent_for)
                if publication is None:
                    received.held = outgoing
                    self._next_turn()
                    waits += 1
                    continue
                self._held_up_since = None
                return publication

    def _held_up(self) -> bool:
        """Note which destinations hold up all others; return whether they do for too long."""
        now = time.monotonic()
        if self._held_up_since is None:
            self._held_up_since = now
        if now - self._held_up_since < SILENCE or not self._waiting:
            return False
        self._held_up_since = None
        for received in self._unpacking:
            if received.held is not None:
                self._attempts.note_slow(received.held)
        return True

    def _may_unpack(self, received: Received) -> bool:
        is_small = len(received.message.body) <= SMALL_BYTES
        return len(self._unpacking) < (SMALL_UNPACKED_AT_ONCE if is_small else UNPACKED_AT_ONCE)

    def _next_turn(self) -> None:
        self._unpacking.rotate(-1)
        self._turn_left = MESSAGES_PER_TURN

    def _give_up(self, received: Received, error: Exception) -> Publication:
        """Put a message into ``undeliverable``; into the levels if a later version can read it."""
        received.outgoing, as_it_came = iter(()), _as_it_came(received.message)
        if isinstance(error, LaterVersion):
            return self._attempts.until_upgraded(received, as_it_came, error.reason)
        if isinstance(error, UnprocessableMessage):
            reason = error.reason
        else:
            reason = shortened(error)
            if self._unreadable.allows(reason):
                logger.exception("%s: a message cannot be read", self._module.name)
        return self._attempts.give_up(received, as_it_came, reason)

    def _exists(self, exchange: str) -> bool:
        in_time = self._wire.answers_within(self._module.timeout)
        with in_time, self._connection.channel() as channel:
            try:
                return all(find_exchanges(channel, [exchange]))
            except AccessRefused as refused:
                if refused.method_sig != spec.Exchange.Declare:
                    raise  # it closes the channel that publishes
                return True  # it may exist nevertheless

    def _done(self, publication: Publication) -> None:
        """Handle a message that is settled: ``done`` of the publish loop."""
        in_its_place = self._attempts.settled(publication)
        if in_its_place is not None:
            self._loop.send_first(in_its_place)
        self._finish(publication.context.received)

    def _finish(self, received: Received) -> None:
        if received.unpacked and not received.pending:
            self._deliveries.settle(received.message, REJECT if received.rejected else ACK)
            self._statistics.finished += 1

    def _sample(self) -> None:
        channel = self._loop.channel
        if channel.blocked is not None or time.monotonic() - self._sampled_at < SAMPLE_EVERY:
            return
        self._sampled_at = time.monotonic()
        for limit in (*self._attempts.warning_limits, self._unread, self._unreadable):
            limit.log_count()
        declare = self._deliveries.channel.queue_declare
        try:
            with self._wire.answers_within(self._module.timeout):
                ready = declare(self._module.queue.name, passive=True).message_count
        except TimeoutError:
            if channel.blocked is None:
                raise
        else:
            self._statistics.sample(ready)


def _as_it_came(message: amqp.Message) -> Outgoing:
    info: Any = message.delivery_info
    left = WaitingMessage.unopened(message)
    return Outgoing(info["exchange"], info["routing_key"], left, is_authentic=False)
