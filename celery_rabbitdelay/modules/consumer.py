"""What a courier does on one connection: it takes messages and publishes what becomes of each."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Final, cast

import amqp
from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotFound
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import ConfirmTimeout, MessageNacked, Refused
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing, bare, undeliverable, written
from celery_rabbitdelay.modules.statistics import Tally
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, Sent
from celery_rabbitdelay.publishing.message import headers_of, shortened
from celery_rabbitdelay.publishing.wire import acknowledging

__all__ = ["Module", "Session"]

logger = logging.getLogger(__name__)

#: How many messages are opened at once: one may be an envelope, and hold many megabytes.
OPEN: Final = 4

#: How many messages of one parcel are published before the next one has its turn.
SLICE: Final = 100

#: How often a message is published that the broker refuses, and seconds between two times: as many
#: as a leader may be away, and no more, since all others wait for it.
ATTEMPTS: Final = 10
PAUSE: Final = 3.0

#: How many frames are taken in before what they have brought is published; a message is three.
FRAMES: Final = 300

#: Seconds that the thread waits for the broker before it looks whether it is to stop.
TURN: Final = 0.2

#: Seconds between two looks at how many messages are waiting.
LOOK: Final = 2.0


@dataclass(frozen=True)
class Module:
    """A module, as a worker serves it.

    Attributes:
        name: Its name.
        topology: The topology that its queue belongs to.
        queue: The queue.
        receive: Says what becomes of a message.
        prefetch: How many messages are taken from the queue before they are done.
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


class _Parcel:
    """A message that was received, and what has become of it so far."""

    __slots__ = ("message", "outgoing", "pending", "unpacked")

    def __init__(self, message: amqp.Message, outgoing: Iterator[Outgoing]) -> None:
        self.message = message
        self.outgoing = outgoing
        self.pending = 0
        self.unpacked = False


class Session:
    """Serves a module on one connection.

    A message is acknowledged once everything that it became is confirmed. Whatever goes wrong
    before, the broker delivers it again.

    It begins carefully, since one message may be why the last connection was lost, or the last
    process: what was delivered before is taken one at a time, and what becomes of it published one
    at a time. So only that message counts as delivered in vain, until the broker puts it into
    ``undeliverable``; and what the broker closes the channel for is known.

    Args:
        module: The module.
        connection: A connection that is open.
        tally: Where to count what is done.
        stopping: Set once no more messages are to be taken.
    """

    def __init__(
        self, module: Module, connection: Connection, tally: Tally, stopping: Event
    ) -> None:
        self._module = module
        self._tally = tally
        self._stopping = stopping
        self._careful = True
        self._last: tuple[_Parcel, Outgoing] | None = None
        self._tag = ""
        self._connection = connection
        self._transport: Any = connection.connection
        self._publishing = ConfirmChannel(connection)
        self._taking = cast(Any, connection.channel())
        # A body stays the bytes that it is.
        self._taking.auto_decode = False
        self._waiting: deque[_Parcel] = deque()
        self._open: deque[_Parcel] = deque()
        self._again: deque[tuple[float, _Parcel, Outgoing, int]] = deque()
        self._undeliverable = module.topology.modules.undeliverable.exchange.name
        self._known = {"", self._undeliverable}
        self._unfinished = 0
        self._finished: list[int] = []
        self._progress = time.monotonic()
        self._looked = 0.0

    def serve(self) -> bool:
        """Take messages until it is to stop; return whether all begun are finished.

        A broker that has blocked the connection answers nothing, and for how long, nobody knows:
        what is not finished then is delivered to another worker.
        """
        self._consume(1)
        careful = taking = True
        while True:
            stopping = self._stopping.is_set()
            if stopping and self._publishing.blocked is not None:
                return False
            if stopping and taking:
                self._cancel()
                taking = False
                self._return_what_was_not_begun()
            if not taking and not self._unfinished:
                return True
            if taking and careful and not self._careful:
                # AMQP has no way to let a consumer take more.
                careful = False
                self._cancel()
                self._consume(self._module.prefetch)
            try:
                self._turn()
            except ChannelError as closed:
                self._blame(closed)
            time.sleep(0)  # gevent and eventlet: the others' turn

    def _turn(self) -> None:
        self._publish()
        self._publishing.flush(self._module.timeout)
        self._acknowledge()
        try:
            self._publishing.take_in(0 if self._has_room() else TURN, FRAMES)
        except TimeoutError:
            # py-amqp may run out of time while it opens a channel that the broker has closed; then
            # nobody is told that it was.
            if not (self._publishing.open and self._taking.is_open):
                raise
        self._acknowledge()
        self._connection.heartbeat_check()
        self._check_progress()
        self._look()

    def _blame(self, closed: ChannelError) -> None:
        """Refuse the message that the broker has closed the channel for, where it is known."""
        if self._last is None or not self._careful or self._publishing.in_flight != 1:
            raise closed
        parcel, outgoing = self._last
        if closed.method_sig != spec.Basic.Publish or outgoing.exchange == self._undeliverable:
            raise closed
        blocked = self._publishing.blocked
        self._publishing.close(self._module.timeout)
        with self._answers():
            self._publishing = ConfirmChannel(self._connection)
        self._publishing.blocked = blocked
        self._refuse(parcel, outgoing, f"the broker does not take it: {closed}")
        parcel.pending -= 1

    def _consume(self, prefetch: int) -> None:
        with self._answers():
            self._taking.basic_qos(0, prefetch, False)
            self._tag = self._taking.basic_consume(self._module.queue.name, callback=self._came)

    def _cancel(self) -> None:
        with self._answers():
            self._taking.basic_cancel(self._tag)

    def _answers(self) -> Any:
        """Bound the wait for an answer, so that a connection that says nothing does not hold us."""
        return self._publishing.answers_within(self._module.timeout)

    def _return_what_was_not_begun(self) -> None:
        while self._waiting:
            parcel = self._waiting.popleft()
            self._taking.basic_reject(parcel.message.delivery_tag, requeue=True)
            self._unfinished -= 1

    def _came(self, message: amqp.Message) -> None:
        self._unfinished += 1
        self._tally.received += 1
        self._careful = self._careful and message.delivery_info["redelivered"]
        self._waiting.append(_Parcel(message, self._receive(message)))

    def _receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        unreadable = headers_of(message).get(names.UNREADABLE)
        if unreadable is not None:
            raise Refused(f"its properties cannot be read: {unreadable}")
        yield from self._module.receive(message)

    def _has_room(self) -> bool:
        """Whether there is something to publish at once."""
        publishing, window = self._publishing, self._module.window
        return (
            bool(self._open or self._waiting)
            and publishing.blocked is None
            and publishing.in_flight + len(self._again) < (1 if self._careful else window)
        )

    def _publish(self) -> None:
        while self._again and self._again[0][0] <= time.monotonic():
            if self._publishing.blocked is not None:
                return
            _, parcel, outgoing, attempt = self._again.popleft()
            self._send(parcel, outgoing, attempt)
            parcel.pending -= 1
        for _ in range(SLICE):
            if not self._has_room():
                return
            while self._waiting and len(self._open) < OPEN:
                self._open.append(self._waiting.popleft())
            self._next(self._open[0])
        self._open.rotate(-1)

    def _next(self, parcel: _Parcel) -> None:
        try:
            outgoing = next(parcel.outgoing)
        except StopIteration:
            self._open.remove(parcel)
            parcel.unpacked = True
            self._finish(parcel)
        except Exception as error:
            if not isinstance(error, Refused):
                logger.exception("%s: a message cannot be read", self._module.name)
            parcel.outgoing = iter(())
            reason = error.reason if isinstance(error, Refused) else shortened(error)
            self._refuse(parcel, self._as_it_came(parcel.message), reason)
        else:
            self._send(parcel, outgoing)

    @staticmethod
    def _as_it_came(message: amqp.Message) -> Outgoing:
        info: Any = message.delivery_info
        return Outgoing(info["exchange"], info["routing_key"], message)

    def _send(self, parcel: _Parcel, outgoing: Outgoing, attempt: int = 1) -> None:
        # Counted first: whoever waits for the broker lets other messages of the parcel settle.
        parcel.pending += 1
        try:
            content = written(outgoing, self._transport.frame_max)
            if not self._exists(outgoing.exchange):
                raise Refused(f"there is no exchange {outgoing.exchange!r}")
        except Refused as refused:
            self._refuse(parcel, outgoing, refused.reason)
            parcel.pending -= 1
            return
        self._last = parcel, outgoing
        self._publishing.send(
            content,
            outgoing.exchange,
            outgoing.routing_key,
            self._module.timeout,
            partial(self._settled, parcel, outgoing, attempt),
        )

    def _exists(self, exchange: str) -> bool:
        if exchange in self._known:
            return True
        # Publishing to an exchange that does not exist closes the channel, with all in flight.
        with self._answers(), self._connection.channel() as channel:
            try:
                Exchange(exchange)(channel).declare(passive=True)
            except NotFound:
                return False
            except AccessRefused:
                pass  # it may be there all the same
        self._known.add(exchange)
        return True

    def _refuse(self, parcel: _Parcel, outgoing: Outgoing, reason: str) -> None:
        logger.warning("%s: a message is undeliverable: %s", self._module.name, reason)
        self._tally.undeliverable += 1
        topology = self._module.topology
        refused = undeliverable(topology, outgoing, reason)
        try:
            written(refused, self._transport.frame_max)
        except Refused:
            refused = bare(topology, outgoing.message, reason)
        parcel.pending += 1
        # Not at once: whoever is told what became of a message must not send another one.
        self._again.appendleft((0.0, parcel, refused, 1))

    def _settled(self, parcel: _Parcel, outgoing: Outgoing, attempt: int, sent: Sent) -> None:
        self._progress = time.monotonic()
        if sent.error is None:
            self._tally.published += 1
        elif isinstance(sent.error, MessageNacked) and attempt < ATTEMPTS:
            parcel.pending += 1
            self._again.append((time.monotonic() + PAUSE, parcel, outgoing, attempt + 1))
        elif outgoing.exchange == self._undeliverable:
            raise sent.error
        elif isinstance(sent.error, MessageNacked):
            self._refuse(parcel, outgoing, f"the broker refused it {ATTEMPTS} times")
        else:
            where = f"the exchange {outgoing.exchange!r}" if outgoing.exchange else "there"
            key = outgoing.routing_key
            self._refuse(parcel, outgoing, f"{where} has no queue for the key {key!r}")
        parcel.pending -= 1
        self._finish(parcel)

    def _finish(self, parcel: _Parcel) -> None:
        if parcel.unpacked and not parcel.pending:
            self._finished.append(cast(int, parcel.message.delivery_tag))
            self._unfinished -= 1
            self._tally.finished += 1

    def _acknowledge(self) -> None:
        if self._finished:
            frames = acknowledging(self._taking.channel_id, self._finished)
            self._finished.clear()
            with self._answers():
                self._transport.transport.write(frames)
            self._transport.bytes_sent += 1

    def _check_progress(self) -> None:
        publishing = self._publishing
        if not publishing.in_flight or publishing.blocked is not None:
            self._progress = time.monotonic()
        elif time.monotonic() - self._progress > self._module.timeout:
            raise ConfirmTimeout("", "", "the broker did not confirm in time")

    def _look(self) -> None:
        if self._publishing.blocked is None and time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            name = self._module.queue.name
            try:
                with self._answers():
                    answer = self._taking.queue_declare(name, passive=True)
            except TimeoutError:
                if self._publishing.blocked is None:
                    raise
            else:
                self._tally.look(answer.message_count)
