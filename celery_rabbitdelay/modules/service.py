"""The thread that serves a module: it receives, publishes and acknowledges, and reconnects."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Final

from amqp.exceptions import ChannelError
from kombu import Connection

from celery_rabbitdelay.exceptions import PermissionMissing, PublishError
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.modules.answer_times import SILENCE, AnswerTimes
from celery_rabbitdelay.modules.deliveries import MAX_HELD_BYTES, Deliveries, Module, Received
from celery_rabbitdelay.modules.failures import Forwarder
from celery_rabbitdelay.publishing import publish_loop
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.declaration import exists_or_hidden, opened_channel
from celery_rabbitdelay.publishing.kombu_internals import connect, drop_connection
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.refusals import permissions_named
from celery_rabbitdelay.publishing.wire import Wire, read_unreadable_properties

logger = logging.getLogger(__name__)

#: The maximum number of received messages that are unpacked in turns, because each message may be
#: an envelope of many megabytes.
UNPACKED_AT_ONCE: Final = 4

#: The maximum number of small messages (at most :data:`SMALL_BYTES`) that are unpacked in turns: a
#: higher number, so that messages for a full destination do not hold up other messages.
SMALL_UNPACKED_AT_ONCE: Final = 32
SMALL_BYTES: Final = 16_384

#: The maximum number of messages published for one received message in its turn.
MESSAGES_PER_TURN: Final = 100

#: The pauses before a message for the levels or for ``undeliverable`` is resent after a nack: the
#: first pause, the increment, and the maximum, in seconds.
NACK_PAUSES: Final = (0.1, 0.3, 3.0)

#: The maximum factor by which prefetch count and window grow while the broker sends no answer. They
#: grow because all messages in flight may be for one silent destination, and the next messages for
#: other destinations.
MAX_GROWTH: Final = 8

#: Maximum frames read per iteration; a delivery has three frames.
FRAMES: Final = 300

#: Seconds that the thread waits for a frame before it checks whether to stop.
READ_TIMEOUT: Final = 0.2


#: Seconds that a stopping worker waits for the thread to finish its messages.
STOP_TIMEOUT: Final = 10.0

#: The first and the longest pause before reconnecting, in seconds.
RECONNECT_PAUSES: Final = (0.5, 10.0)


class ConnectionStuck(Exception):
    """The broker has stopped reading from the connection, because of silent destinations.

    The destinations are marked as silent, so that the next connection does not get stuck.
    """


#: Errors that are logged without a traceback, in addition to errors of the connection and its
#: channels.
EXPECTED: Final = (PermissionMissing, PublishError, ConnectionStuck)


class ModuleConsumer:
    """Serves a module on one connection.

    A message is acknowledged once all messages published for it are confirmed. If anything fails
    before that, the broker redelivers the message. A message that its destination does not accept
    goes back into the levels, so that it does not hold up other messages; see :class:`.Redelivery`.

    While messages are redelivered, prefetch count and window are 1. If one of the messages crashes
    the worker, the delivery count of this message alone grows, until the delivery limit
    dead-letters it to ``undeliverable``.

    Args:
        service: The service of the module.
        connection: An open connection; see :func:`.read_unreadable_properties`.
        careful: Whether to take one message at a time while messages are redelivered.
    """

    def __init__(
        self, service: ModuleService, connection: Connection, careful: bool = True
    ) -> None:
        self._module = module = service.module
        self._connection = connection
        self._stopping = service.stopping
        self._careful = careful
        policy = publish_loop.PublishPolicy(
            module.timeout, None, NACK_PAUSES, module.max_unconfirmed
        )
        self._loop = publish_loop.PublishLoop(self._next, policy, self._done)
        self._loop.window = 1
        self._loop.use(ConfirmChannel(connection, self._loop.settled))
        self._wire = self._loop.channel.wire
        self._wire.receive_ahead()
        self._deliveries = Deliveries(connection, module)
        #: The received messages that are unpacked in turns.
        self._unpacking: deque[Received] = deque()
        self._published = 0
        #: The time since which all messages in ``_unpacking`` wait for full destinations.
        self._held_up_since: float | None = None
        self._forwarder = Forwarder(
            module, self._exists, self._wire.frame_max, service.answer_times
        )
        #: The factor of the module's prefetch count and window; 0: one message at a time.
        self._growth = 0

    @publish_loop.unwrap_callers_errors()
    def serve(self) -> bool:
        """Consume until the service stops.

        If the connection is blocked when the service stops, return at once: a resource alarm may
        last indefinitely. The broker redelivers unfinished messages.

        Returns:
            Whether all received messages are settled.
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
        """Publish waiting messages, and read the broker's frames."""
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
            # Read first: if other greenlets ran for long, unread answers may be in the socket.
            silent_for, answer_times = self._loop.silent_for, self._forwarder.answer_times
            if silent_for >= SILENCE and (stuck := answer_times.give_up_if_stuck(silent_for)):
                names = ", ".join(stuck[:3])
                raise ConnectionStuck(f"the broker stopped reading: no confirms for {names}")
        else:
            # A resource alarm does not count as silence.
            self._loop.excuse(time.monotonic() - began)

    def _after_close(self, closed: ChannelError) -> None:
        """Open a new channel after the broker has closed the channel that publishes."""
        former = self._loop.channel
        self._loop.channel_closed(closed)
        former.close(self._module.timeout)
        with self._wire.answers_within(self._module.timeout):
            channel = ConfirmChannel(self._connection, self._loop.settled)
        channel.blocked = former.blocked
        self._loop.use(channel)

    def _grow(self, silent_for: float) -> None:
        """Raise prefetch count and window to the module's values; without answers, even higher.

        While messages are redelivered, the first raise waits until a message gets no answer.
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
        if not may_grow or (silent_for >= SILENCE and self._forwarder.answer_times.overloaded):
            return
        self._growth = growth * 2 or 1
        deliveries.take(self._module.prefetch * self._growth)
        self._loop.window = self._module.max_unconfirmed * self._growth

    def _next(self) -> Publication | None:
        """Return the next message to publish, for the publish loop."""
        waiting, unpacking, waits = self._deliveries.waiting, self._unpacking, 0
        while self._forwarder.bytes_in_flight < MAX_HELD_BYTES:
            while waiting:
                is_small = len(waiting[0].message.body) <= SMALL_BYTES
                if len(unpacking) >= (SMALL_UNPACKED_AT_ONCE if is_small else UNPACKED_AT_ONCE):
                    break
                unpacking.append(waiting.popleft())
            if waits >= len(unpacking):
                # No message is left, or all remaining messages wait for full destinations.
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
            except Exception as error:  # noqa: BLE001 - the message may be invalid in any way
                return self._forwarder.refuse(received, error)
            else:
                publication = self._forwarder.first(received, outgoing, self._loop.silent_for)
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
        """Return whether full destinations hold up all messages for too long; mark them as slow."""
        now = time.monotonic()
        if self._held_up_since is None:
            self._held_up_since = now
        if now - self._held_up_since < SILENCE or not self._deliveries.waiting:
            return False
        self._held_up_since = None
        for received in self._unpacking:
            if received.waits_for is not None:
                self._forwarder.answer_times.note_slow(received.waits_for)
        return True

    def _exists(self, exchange: str) -> bool:
        in_time = self._wire.answers_within(self._module.timeout)
        with in_time, opened_channel(self._connection) as channel:
            return exists_or_hidden(channel, exchange)

    def _done(self, publication: Publication) -> None:
        """Handle a settled publication, for the publish loop."""
        in_its_place = self._forwarder.settled(publication)
        if in_its_place is not None:
            self._loop.send_first(in_its_place)
        self._deliveries.settle(publication.context[0])


@dataclass(eq=False, repr=False)
class Service(ABC):
    """A thread with its own connection, which is reopened after a loss.

    Attributes:
        name: The service's name, for the log.
        timeout: Maximum seconds for an answer of the broker.
        max_bytes: The largest message that is read.
        connection: The template of its connections.
        declare: Called with every new connection, to declare the queues that it needs.
        on_lost: Called when an open connection is lost, or serving on it fails.
        stopping: Set this event to stop receiving messages.
    """

    connection: Connection
    declare: Callable[[Connection], None]
    on_lost: Callable[[], None]
    name: str = field(init=False)
    timeout: float = field(init=False)
    max_bytes: int = field(init=False)
    stopping: Event = field(init=False, default_factory=Event)
    #: The error that ended the last connection.
    _lost: Exception | None = field(init=False, default=None)

    def start(self) -> None:
        """Start the thread."""
        self._thread = Thread(target=self._run, name=f"rabbitdelay-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop receiving, finish the unacknowledged messages, and end the thread."""
        self.stopping.set()
        self._thread.join(STOP_TIMEOUT)

    @abstractmethod
    def status(self) -> dict[str, object]:
        """Return the counts of the service, for the worker's status."""

    @property
    @abstractmethod
    def _progress(self) -> int:
        """A count that grows while the service works."""

    @abstractmethod
    def _serve_on(self, connection: Connection) -> bool:
        """Serve on an open connection; return whether all received messages are settled."""

    def _run(self) -> None:
        losses = WarningLimit(logger, f"rabbitdelay {self.name}: lost connections")
        shortest, longest = RECONNECT_PAUSES
        pause = shortest
        while not self.stopping.is_set():
            progress = self._progress
            try:
                with self.connection.clone() as connection:
                    self._serve(connection)
            except Exception as lost:
                self._lost = lost
                if self._progress > progress or isinstance(lost, ConnectionStuck):
                    pause = shortest
                    losses.forget()
                errors = self.connection.recoverable_connection_errors
                # All errors of an unreachable broker count as one kind.
                if losses.allows(OSError if isinstance(lost, errors) else type(lost)):
                    expected = (*errors, *self.connection.channel_errors, *EXPECTED)
                    logger.warning(
                        "rabbitdelay %s: reconnecting: %s",
                        self.name,
                        lost if isinstance(lost, PermissionMissing) else repr(lost),
                        exc_info=None if isinstance(lost, expected) else lost,
                    )
                self.stopping.wait(pause)
                pause = min(pause * 2, longest)

    def _serve(self, connection: Connection) -> None:
        finished = False
        try:
            connect(connection)
            read_unreadable_properties(connection, self.max_bytes)
            try:
                with Wire(connection).answers_within(self.timeout):
                    self.declare(connection)
                finished = self._serve_on(connection)
            except Exception:
                self.on_lost()
                raise
        finally:
            if not finished:
                # Skip AMQP's close handshake, because the broker may not be answering.
                drop_connection(connection)


@dataclass(eq=False, repr=False)
class ModuleService(Service):
    """The service of a module.

    Attributes:
        module: The module.
        answer_times: The state of destinations, kept across connections.
    """

    module: Module
    answer_times: AnswerTimes = field(default_factory=AnswerTimes)

    def __post_init__(self) -> None:
        self.name, self.timeout = self.module.name, self.module.timeout
        self.max_bytes = self.module.max_bytes

    def status(self) -> dict[str, object]:
        """Return the counts of the module's messages."""
        return self.module.statistics.status()

    @property
    def _progress(self) -> int:
        return self.module.statistics.finished

    def _serve_on(self, connection: Connection) -> bool:
        logger.info("rabbitdelay %s: serving the queue %s.", self.name, self.module.queue.name)
        # If messages are redelivered, one of them may have crashed a worker.
        careful = not isinstance(self._lost, ConnectionStuck)
        with permissions_named():
            return ModuleConsumer(self, connection, careful).serve()
