"""Moves messages from queues to another place: publish, wait for the confirm, acknowledge.

If the process dies, the broker gives back what was not acknowledged. Some of it may have been
confirmed already and exists twice then; nothing is lost, and the move can be started again.

What a consumer of a quorum queue holds does not expire. The time that a message still has to wait
is therefore computed when it is published, from its due time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Final, NamedTuple, TypeAlias, TypeVar

import amqp
from kombu import Connection

from celery_rabbitdelay.exceptions import PublishError, UnprocessableMessage
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded, to_undeliverable
from celery_rabbitdelay.operations.source import Source, SourceLost, SourceRefused, Taken
from celery_rabbitdelay.publishing.message import shortened
from celery_rabbitdelay.publishing.policy import PublishPolicy
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publisher import Declaration, Publisher

__all__ = ["Convert", "Moved", "Mover", "Stay", "Target"]

#: Messages that are taken from all queues together before one is acknowledged; at a limited rate,
#: those of a second. A message that comes due meanwhile is late by the time that these take.
TAKEN_AHEAD: Final = 4000

#: Messages that are taken from each queue at least.
TAKEN_OF_A_QUEUE: Final = 10

#: How many messages may stay in their queues. They are taken, and given back in the end.
MOST_STAYING: Final = 200_000

#: Seconds after which empty queues are asked once more: a message may be between two of them.
SETTLE: Final = 2.0

#: Acknowledgements that are written together, and seconds for which one waits for others. What is
#: confirmed and not acknowledged exists twice if the process dies.
ACKNOWLEDGED_TOGETHER: Final = 100
ACKNOWLEDGED_AFTER: Final = 0.02

#: Seconds of a pause that are caught up with, at a limited rate.
CATCH_UP: Final = 0.1

#: Rounds in which no message comes from queues that have some, until the move ends: another
#: consumer may have them for itself.
MOST_IDLE_ROUNDS: Final = 3

#: Lost connections to the source, with nothing moved in between, until the move ends.
MOST_LOSSES: Final = 5

#: Seconds between two attempts to connect to the source again.
RECONNECT_EVERY: Final = 1.0

_Result = TypeVar("_Result")


class Stay(Exception):
    """Raised by a conversion: the message stays in its queue. The text says why."""


#: Takes a message and the name of its queue; returns what to publish for it. It raises ``Stay``, or
#: :class:`.UnprocessableMessage` if the message goes to ``undeliverable``.
Convert: TypeAlias = Callable[[amqp.Message, str], Outgoing]


class Target(NamedTuple):
    """Where messages are moved to.

    Attributes:
        connection: The broker; another connection like it is opened.
        undeliverable: The name of its exchange for messages that cannot be converted.
        declare: Called with each connection, to declare what is missing.
        timeout: Seconds in which it has to confirm a message.
        window: How many messages are in flight, unconfirmed, at the most.
    """

    connection: Connection
    undeliverable: str
    declare: Declaration | None = None
    timeout: float = 30.0
    window: int = 1000


class Moved(NamedTuple):
    """What was moved.

    Attributes:
        moved: How many messages the target has confirmed, those that went to ``undeliverable``
            among them.
        undeliverable: How many went to ``undeliverable``, by the reason.
        left: How many are still in their queues, by the reason.
        copies: How many of those moved may still be in their queues as well: the source was lost
            before they were acknowledged.
        seconds: How long it took.
        finished: Whether the queues were empty in the end, except for what is left; with
            ``follow``, always.
    """

    moved: int
    undeliverable: Mapping[str, int]
    left: Mapping[str, int]
    copies: int
    seconds: float
    finished: bool


class Mover:
    """Empties queues. For one call of :meth:`move`.

    Args:
        source: The broker that the queues are on; another connection like it is opened.
        queues: The names of the queues; those that do not exist are passed over.
        target: Where the messages go.
        convert: Returns what to publish for a message.
        rate: How many messages are moved a second at the most; None for no limit.
        show: Called with how many are moved, and how many there are as far as is known.

    Attributes:
        moved: How many messages are moved so far.
        stopping: Set to end the move; what is in flight is confirmed first.
    """

    def __init__(
        self,
        source: Connection,
        queues: Sequence[str],
        target: Target,
        convert: Convert,
        *,
        rate: float | None = None,
        show: Callable[[int, int], None] = lambda moved, all_known: None,
    ) -> None:
        self.moved = 0
        self.stopping = Event()
        self._source = Source(source, target.timeout)
        self._queues = list(queues)
        self._publisher = Publisher(target.connection.clone(heartbeat=0))
        self._target = target
        self._policy = PublishPolicy(target.timeout, window=target.window)
        self._convert = convert
        self._interval = 0.0 if rate is None else 1 / rate
        self._ahead = TAKEN_AHEAD if rate is None else min(max(int(rate), 1), TAKEN_AHEAD)
        self._next_at = self._acknowledge_at = 0.0
        self._show = show
        self._known = 0
        #: Why the connection to the source is lost; None while it is open.
        self._lost: Exception | None = None
        self._copies = self._taken = 0
        #: How often the source was lost since something was moved, and how much was moved then.
        self._losses = self._moved_before = 0
        self._undeliverable: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def move(self, *, follow: bool = False) -> Moved:
        """Move messages until all queues are empty, or ``stopping`` is set.

        Args:
            follow: Keep running when they are empty, to move what producers still publish. It ends
                once a message stays: what is held does not expire.

        Raises:
            PublishError: The target takes no messages any more.
            OSError: A broker cannot be reached, its connection was lost, or it refuses to let a
                queue be read. Messages that are not moved remain in their queues.
            amqp.AMQPError: A broker refuses the connection, or what has to be declared.
        """
        began, idle_rounds, finished = time.monotonic(), 0, False
        was_empty = False
        try:
            self._source.open()
            while not self.stopping.is_set() and not self._is_full:
                ready = self._with_source(lambda: self._source.ready(self._queues))
                taken = self._taken
                if ready and idle_rounds < MOST_IDLE_ROUNDS:
                    self._move_ready(ready)
                    idle_rounds = 0 if self._taken > taken else idle_rounds + 1
                elif ready:
                    self._left["no message comes, another consumer may have it"] += sum(
                        ready.values()
                    )
                    break
                elif was_empty and not (follow and not self._left):
                    finished = True
                    break
                if self._taken == taken:
                    self.stopping.wait(SETTLE)
                was_empty = not ready
        finally:
            self._source.close()
            self._publisher.close()
        seconds = time.monotonic() - began
        return Moved(
            self.moved, self._undeliverable, self._left, self._copies, seconds, finished or follow
        )

    @property
    def _is_full(self) -> bool:
        return self._left.total() >= MOST_STAYING

    def _move_ready(self, ready: Mapping[str, int]) -> None:
        self._known = self.moved + sum(ready.values())
        # At a low rate, the other queues have their turn in the next rounds.
        queues = list(ready) if self._ahead == TAKEN_AHEAD else list(ready)[: self._ahead]
        least = TAKEN_OF_A_QUEUE if self._ahead == TAKEN_AHEAD else 1
        prefetch = max(self._ahead // len(queues), least)
        self._with_source(lambda: self._source.consume(queues, prefetch))
        self._publish()
        self._try_source(self._source.acknowledge)
        self._try_source(self._source.cancel)
        # Messages that had come before the consumers were cancelled.
        self._publish()
        self._try_source(self._source.acknowledge)
        self._show(self.moved, self._known)

    def _publish(self) -> None:
        declare, done = self._target.declare, self._done
        self._publisher.publish_all(self._publications(), self._policy, declare=declare, done=done)

    def _publications(self) -> Iterator[Publication]:
        """Yield what to publish, until no message has come for a while."""
        while not self.stopping.is_set() and not self._is_full:
            self._acknowledge_some()
            taken = self._try_source(self._source.take)
            if taken is None:
                # If the source is lost, what is in flight is confirmed first.
                return
            self._taken += 1
            publication = self._publication(taken)
            if publication is not None:
                self._keep_to_the_rate()
                yield publication

    def _publication(self, taken: Taken) -> Publication | None:
        """Return what to publish for a message; None if it stays in its queue."""
        try:
            outgoing, reason = self._converted(taken)
            content = encoded(outgoing, self._source.frame_max)
        except (Stay, UnprocessableMessage) as stay:
            self._left[str(stay)] += 1
            return None
        address = outgoing.reroute or partial(_address, outgoing.exchange, outgoing.routing_key)
        return Publication(content, address, (taken, reason))

    def _converted(self, taken: Taken) -> tuple[Outgoing, str]:
        """Return what to publish for a message, and why it is undeliverable; empty if it is not."""
        try:
            return self._convert(taken.message, taken.queue), ""
        except (Stay, OSError, amqp.AMQPError):
            raise
        except UnprocessableMessage as error:
            outgoing = Outgoing("", "", taken.message)
            return to_undeliverable(self._target.undeliverable, outgoing, str(error)), str(error)
        except Exception as error:
            # One message, which anybody may have written, does not end the move.
            raise Stay(f"it cannot be converted: {shortened(error)}") from error

    def _acknowledge_some(self) -> None:
        number, now = len(self._source.to_acknowledge), time.monotonic()
        if number >= ACKNOWLEDGED_TOGETHER or (number and now >= self._acknowledge_at):
            self._try_source(self._source.acknowledge)
            self._acknowledge_at = now + ACKNOWLEDGED_AFTER

    def _keep_to_the_rate(self) -> None:
        now = time.monotonic()
        # After a pause, it catches up a little.
        self._next_at = max(self._next_at, now - CATCH_UP) + self._interval
        if self._next_at > now:
            self.stopping.wait(self._next_at - now)

    def _done(self, publication: Publication) -> None:
        taken, reason = publication.subject
        if publication.error is not None:
            self._left[_why_left(publication.error)] += 1
            return
        self.moved += 1
        if reason:
            self._undeliverable[reason] += 1
        if self._lost is None and taken.connection == self._source.number:
            self._source.to_acknowledge.append(taken.message.delivery_tag)
        else:
            self._copies += 1
        if not self.moved % 1000:
            self._show(self.moved, self._known)

    def _try_source(self, call: Callable[[], _Result]) -> _Result | None:
        """Call the source unless it is lost; note if it is lost now."""
        if self._lost is None:
            try:
                return call()
            except (SourceLost, TimeoutError) as lost:
                self._lost = lost
        return None

    def _with_source(self, call: Callable[[], _Result]) -> _Result:
        """Call the source; if it is lost, connect again first, as long as a time-out takes."""
        until = time.monotonic() + self._target.timeout
        while True:
            try:
                if self._lost is not None:
                    self._count_loss()
                    self._copies += len(self._source.to_acknowledge)
                    self._source.open()
                    # The broker has given back all that was taken; it is delivered again.
                    self._left.clear()
                    self._lost = None
                return call()
            except SourceRefused:
                raise
            except (OSError, amqp.AMQPError) as lost:
                is_over = time.monotonic() >= until or self._losses > MOST_LOSSES
                if is_over or self.stopping.is_set():
                    raise OSError(f"the connection to the source is lost: {lost}") from lost
                self._lost = lost
                self.stopping.wait(RECONNECT_EVERY)

    def _count_loss(self) -> None:
        self._losses = self._losses + 1 if self.moved == self._moved_before else 1
        self._moved_before = self.moved


def _address(exchange: str, routing_key: str) -> tuple[str, str]:
    return exchange, routing_key


def _why_left(error: PublishError) -> str:
    return f"the target does not take it ({type(error).__name__})"
