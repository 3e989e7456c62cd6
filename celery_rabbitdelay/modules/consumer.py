"""A module on one connection: receive a message, publish its results, acknowledge it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Event
from typing import Final

from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError
from kombu import Connection

from celery_rabbitdelay.modules.attempts import Forwarder
from celery_rabbitdelay.modules.bounds import MAX_HELD_BYTES
from celery_rabbitdelay.modules.deliveries import Deliveries, Received
from celery_rabbitdelay.modules.destinations import SILENCE
from celery_rabbitdelay.modules.module import Module, ModuleStatistics
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import find_exchanges
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.publish_loop import (
    PublishLoop,
    PublishPolicy,
    unwrap_callers_errors,
)

#: Received messages that are unpacked in turns: one may be an envelope of many megabytes.
UNPACKED_AT_ONCE: Final = 4

#: The same for messages of at most this many bytes, so that those whose destination has no room at
#: the moment let others pass.
SMALL_UNPACKED_AT_ONCE: Final = 32
SMALL_BYTES: Final = 16_384

#: Messages that are published before it is the next received message's turn.
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

#: Seconds that a sample may take; if no answer comes by then, it is left out.
SAMPLE_TIMEOUT: Final = 1.0


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
        connection: A connection that is open; see :func:`.reading_unreadable_properties`.
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
        self._loop.use(ConfirmChannel(connection, self._loop.settled))
        self._wire = self._loop.channel.wire
        self._wire.receive_ahead()
        self._deliveries = Deliveries(connection, module, statistics)
        #: Received messages for which messages are published, in turns.
        self._unpacking: deque[Received] = deque()
        self._published = 0
        #: Since when all of these wait for answers about their destinations.
        self._held_up_since: float | None = None
        self._attempts = Forwarder(
            module,
            statistics,
            self._exists,
            self._wire.frame_max,
            set() if silent is None else silent,
        )
        #: What the module's prefetch and window are multiplied by; 0: one message at a time.
        self._growth = 0
        self._sampled_at = 0.0

    @unwrap_callers_errors()
    def serve(self) -> bool:
        """Consume until the service stops.

        If the connection is blocked when the service stops, return at once: an alarm of the broker
        may last for any time. The broker delivers unfinished messages again.

        Returns:
            Whether everything that was begun is finished.
        """
        deliveries = self._deliveries
        deliveries.take(1)
        while True:
            if self._stopping.is_set():
                if self._loop.channel.blocked is not None:
                    return False
                if deliveries.consuming:
                    deliveries.stop()
                if not deliveries.unfinished:
                    deliveries.write()
                    return True
            elif not self._growth or self._loop.silent_for >= SILENCE:
                self._grow(self._loop.silent_for)
            deliveries.adapt()
            try:
                self._turn()
            except ChannelError as closed:
                self._after_close(closed)
            time.sleep(0)  # lets the other greenlets of gevent and eventlet run

    def _turn(self) -> None:
        """Publish what can be published, and read what the broker sends."""
        channel, began = self._loop.channel, time.monotonic()
        can_send = self._loop.send(self._module.timeout)
        channel.flush(self._module.timeout)
        self._deliveries.write()
        with suppress(TimeoutError):
            channel.read(0 if can_send else READ_TIMEOUT, FRAMES)
        self._deliveries.write()
        self._connection.heartbeat_check()
        if channel.blocked is None:
            self._loop.check_time()
            # Only after the read: answers may lie in the socket if other greenlets ran for long.
            silent_for, answer_times = self._loop.silent_for, self._attempts.answer_times
            if silent_for >= SILENCE and (stuck := answer_times.give_up_if_stuck(silent_for)):
                raise ConnectionStuck(stuck)
        else:
            # The end of the alarm is waited for, however long it takes.
            self._loop.excuse(time.monotonic() - began)
        if time.monotonic() - self._sampled_at >= SAMPLE_EVERY and channel.blocked is None:
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

    def _grow(self, silent_for: float) -> None:
        """Take as many messages as the module may; more if all of those get no answer.

        While messages are redelivered, that begins with the first that gets no answer.
        """
        deliveries, growth = self._deliveries, self._growth
        if not growth:
            may_grow = not (self._careful and deliveries.are_redelivered) or silent_for >= SILENCE
        else:
            is_used_up = (
                deliveries.unfinished >= self._module.prefetch * growth
                or len(self._loop.channel.unconfirmed) >= self._loop.window
            )
            may_grow = growth < MAX_GROWTH and silent_for >= SILENCE * growth and is_used_up
        if not may_grow or (silent_for >= SILENCE and self._attempts.answer_times.overloaded):
            return
        self._growth = growth * 2 or 1
        deliveries.take(self._module.prefetch * self._growth)
        self._loop.window = self._module.max_unconfirmed * self._growth

    def _next(self) -> Publication | None:
        """Return the next message to publish: the source of the publish loop."""
        waiting, unpacking, waits = self._deliveries.waiting, self._unpacking, 0
        while self._attempts.bytes_in_flight < MAX_HELD_BYTES:
            while waiting:
                is_small = len(waiting[0].message.body) <= SMALL_BYTES
                if len(unpacking) >= (SMALL_UNPACKED_AT_ONCE if is_small else UNPACKED_AT_ONCE):
                    break
                unpacking.append(waiting.popleft())
            if waits >= len(unpacking):
                # No message is left, or each has to wait until its destination has answered others.
                if not waits or not self._held_up():
                    return None
                waits = 0
            received = unpacking[0]
            try:
                outgoing = received.held or next(received.outgoing)
            except StopIteration:
                unpacking.popleft()
                received.pending -= 1
                self._deliveries.settle(received)
                waits, self._held_up_since = 0, None
            except Exception as error:  # noqa: BLE001 - anybody may have written the message
                return self._attempts.refuse(received, error)
            else:
                publication = self._attempts.first(received, outgoing, self._loop.silent_for)
                if publication is not None:
                    self._published += 1
                    if self._published % MESSAGES_PER_TURN == 0:
                        unpacking.rotate(-1)
                    self._held_up_since = None
                    return publication
                unpacking.rotate(-1)
                waits += 1
        return None

    def _held_up(self) -> bool:
        """Note which destinations hold up all others; return whether they do for too long."""
        now = time.monotonic()
        if self._held_up_since is None:
            self._held_up_since = now
        if now - self._held_up_since < SILENCE or not self._deliveries.waiting:
            return False
        self._held_up_since = None
        for received in self._unpacking:
            if received.waits_for is not None:
                self._attempts.answer_times.note_slow(received.waits_for)
        return True

    def _exists(self, exchange: str) -> bool:
        in_time = self._wire.answers_within(self._module.timeout)
        with in_time, opened_channel(self._connection) as channel:
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
        self._deliveries.settle(publication.context.received)

    def _sample(self) -> None:
        self._sampled_at = time.monotonic()
        channel = self._deliveries.channel
        try:
            with self._wire.answers_within(SAMPLE_TIMEOUT):
                ready = channel.queue_declare(self._module.queue.name, passive=True).message_count
        except TimeoutError:
            # Not an error: a longer wait would hide that the connection is stuck, and py-amqp drops
            # a late answer. But time may have run out while it opened a closed channel again.
            if not (self._loop.channel.open and channel.is_open):
                raise
        else:
            self._statistics.sample(ready)
