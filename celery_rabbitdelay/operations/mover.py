"""Moves messages from queues to another place: publish, wait for the confirm, acknowledge.

The commands migrate, transfer, adopt, redrive and purge each supply a conversion. If the process
dies, the broker requeues the unacknowledged messages. Messages that the target has already
confirmed then exist twice. No message is lost, and the move can be started again.

Messages that a consumer of a quorum queue holds do not expire. Therefore the remaining delay of a
message is computed from its due time when it is published. :class:`Destinations` binds the
destination queues.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from threading import Event
from typing import Final, NamedTuple, TypeAlias, cast

import amqp
from amqp.exceptions import NotFound, PreconditionFailed, ResourceLocked
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded, to_undeliverable
from celery_rabbitdelay.operations.source import LOST, MOST_IDLE_ROUNDS, Source
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.message import Publication, WaitingMessage
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher


class Place(NamedTuple):
    """A topology on a broker.

    Attributes:
        connection: The broker, with its virtual host.
        topology: The topology.
        may_declare: Whether the topology may be declared, and queues declared and bound.
    """

    connection: Connection
    topology: Topology
    may_declare: bool = True

    def declare(self, opened: Connection) -> None:
        """Declare the topology over an open connection, or check that it is complete.

        A deleted level may be the reason why messages are undeliverable.
        """
        declare = declaration.declare if self.may_declare else declaration.check_complete
        declare(opened, self.topology)


@dataclass
class Destinations:
    """Binds destination queues of messages to the levels of the target, once per queue.

    Attributes:
        target: The target.
        known: The queues that the application knows, keyed by name, declared with the
            application's arguments.
        may_bind: Returns whether another queue may be bound. Any client may have written the
            queue's name into a routing key, and every producer can reach a bound queue.
        missing: Destination queues that do not exist or cannot be bound. Distribution tries to
            deliver their messages when they are due.
        unnamed: Destination queues that may not be bound. Their messages wait until the queue is
            bound by a worker that consumes from it, or by a producer; but no longer than
            ``rabbitdelay_retry_for`` after they are due.
    """

    target: Place
    known: Mapping[str, Queue]
    may_bind: Callable[[str], bool] = lambda name: True
    missing: set[str] = field(default_factory=set, init=False)
    unnamed: set[str] = field(default_factory=set, init=False)
    _seen: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._connection = self.target.connection.clone(heartbeat=0)

    def ensure(self, name: str) -> None:
        """Bind a queue to the levels; declare it first if the application knows it.

        Raises:
            OSError: The broker cannot be reached.
            amqp.exceptions.AccessRefused: The user lacks a permission.
        """
        if name in self._seen or not self.target.may_declare:
            return
        if name not in self.known and not self.may_bind(name):
            self.unnamed.add(name)
            return
        connect(self._connection)
        given, queue = (self._connection, self.target.topology), self.known.get(name)
        declaration.declare_if_missing(*given)
        # The queue may exist with other arguments than the application's.
        bindings = [partial(declaration.bind_destination, *given, name)]
        if queue is not None and not getattr(queue, "no_declare", False):
            bindings.insert(0, partial(declaration.declare_destination, *given, queue))
        for bind in bindings:
            with suppress(NotFound, PreconditionFailed, ResourceLocked):
                bind()
                break
        else:
            self.missing.add(name)
        self._seen.add(name)

    def close(self) -> None:
        """Close the connection."""
        with suppress(*self._connection.connection_errors, *self._connection.channel_errors):
            self._connection.release()


#: The maximum prefetch over all queues; a limited rate prefetches only the messages of one second.
#: A message that comes due during a move is late by the time that the move takes.
TAKEN_AHEAD: Final = 2000

#: The maximum number of messages that may stay in their queues. These messages are held
#: unacknowledged until the end; the broker needs some 200 bytes per message (measured on
#: RabbitMQ 3.10.8, 4.0.5 and 4.3.6).
MOST_STAYING: Final = 1_000_000

#: Seconds after which empty queues are checked again, because a message may be moving from one
#: queue to another.
SETTLE: Final = 2.0

#: The maximum messages, and the maximum seconds, of a batch: the messages that are published before
#: the next acknowledgement to the source. If the process dies, the messages of two batches may
#: exist twice: the batch that is published, and the batch before. RabbitMQ passes acknowledgements
#: on to a busy quorum queue only when the queue has answered (quorum_commands_soft_limit).
BATCH: Final = 100
BATCH_SECONDS: Final = 0.05

#: After a pause, a limited rate catches up on at most this many seconds.
CATCH_UP: Final = 0.1

#: The maximum number of reasons that are counted separately, because any client can invent reasons.
#: All other reasons are counted together.
MOST_REASONS: Final = 200
OTHER_REASONS: Final = "other reasons"


class Stay(Exception):
    """Raised by a conversion to leave a message in its queue.

    The text of the error is the reason; without a text, the message is not counted.
    """


#: Called with a message and the name of its queue; returns the publication that replaces it, or
#: None to delete it. The function raises ``Stay``, or :class:`.UnprocessableMessage` if the message
#: goes to ``undeliverable``.
Convert: TypeAlias = Callable[[amqp.Message, str], Outgoing | None]


@dataclass
class Moved:
    """The result of a move.

    Attributes:
        moved: How many messages have left their queues: confirmed by the target, including its
            ``undeliverable``, or deleted.
        undeliverable: How many messages went to ``undeliverable``, per reason.
        left: How many messages are still in their queues, per reason.
        copies: How many messages may be at the target and still be in their queues, because the
            move ended before they were confirmed or acknowledged.
        seconds: The duration of the move.
        finished: Whether the queues were empty at the end, except for the messages in ``left``.
    """

    moved: int = 0
    undeliverable: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    copies: int = 0
    seconds: float = 0.0
    finished: bool = False


def counted_as(reason: str, known: Collection[str]) -> str:
    """Return the reason, or :data:`OTHER_REASONS` if there are too many reasons already."""
    return reason if reason in known or len(known) < MOST_REASONS else OTHER_REASONS


@dataclass
class Mover:
    """Empties queues in one call of :meth:`move`.

    Attributes:
        source: A connection to the broker of the queues; the mover opens a clone of it.
        queues: The names of the queues; missing queues are skipped.
        target: Where the messages go.
        convert: Converts a message to the publication that replaces it.
        timeout: Seconds for an answer of a broker, and for the target to confirm a message.
        rate: The maximum number of messages to publish per second.
        limit: The maximum number of messages to move; None for all.
        looked_at: The maximum number of messages to read, so that a message that comes back at once
            is not moved twice; None for all.
        dry_run: Whether to count the messages without publishing them.
        result: The counts of the messages moved so far.
        stopping: Set this event to end the move; messages in flight are confirmed first.
    """

    source: Connection
    queues: Sequence[str]
    target: Place
    convert: Convert
    _: KW_ONLY
    timeout: float = 30.0
    rate: float = math.inf
    limit: int | None = None
    looked_at: int | None = None
    dry_run: bool = False
    result: Moved = field(default_factory=Moved)
    stopping: Event = field(default_factory=Event, init=False)

    def __post_init__(self) -> None:
        self._publisher = Publisher(self.target.connection.clone(heartbeat=0))
        #: The publisher calls this function once per connection, and has only a weak reference to
        #: it; so the mover keeps a reference.
        self._declare = self.target.declare
        self._ahead = int(min(max(self.rate, 1), TAKEN_AHEAD))
        self._limit = math.inf if self.limit is None else self.limit
        self._next_at = 0.0
        #: Why the connection to the source was lost while messages are in flight.
        self._lost: Exception | None = None
        #: How many messages to take before the move ends, how many were taken, how many of them
        #: were converted, and how many are in flight.
        self._end = math.inf if self.looked_at is None else self.looked_at
        self._taken = self._tried = self._in_flight = 0

    def move(self) -> Moved:
        """Move messages until all queues are empty, or ``stopping`` is set.

        Raises:
            PublishError: The target accepts no more messages.
            OSError: A broker cannot be reached, a connection was lost, or the broker refuses access
                to a queue. Messages that are not moved remain in their queues.
            amqp.AMQPError: A broker refuses the connection or a declaration.
        """
        began = time.monotonic()
        self._source = Source(self.source, self.timeout)
        try:
            self.result.finished = self._move_until_empty()
        finally:
            self._source.close()
            self._publisher.close()
            # If the move was interrupted, the target may have the messages in flight.
            self.result.copies += self._in_flight + len(self._source.to_acknowledge)
            self.result.seconds = time.monotonic() - began
        return self.result

    def _move_until_empty(self) -> bool:
        """Move messages in rounds; return whether the queues were empty twice in a row."""
        was_empty, idle_rounds = self.looked_at is not None, 0
        while not self.stopping.is_set() and not self._is_full:
            taken_before = self._taken
            ready = self._source.ready(self.queues)
            if not ready and was_empty:
                return True
            if ready and idle_rounds == MOST_IDLE_ROUNDS:
                why = "the broker delivers no messages: another consumer may hold them"
                self.result.left[why] += sum(ready.values())
                return False
            if ready:
                self._move_ready(ready)
            was_empty = not ready
            if self._taken > taken_before:
                idle_rounds = 0
            else:
                idle_rounds += bool(ready)
                self.stopping.wait(SETTLE)
        return self._is_done

    @property
    def _is_done(self) -> bool:
        return self._tried >= self._limit or self._taken >= self._end

    @property
    def _is_full(self) -> bool:
        return self._is_done or self.result.left.total() >= MOST_STAYING

    def _move_ready(self, ready: Mapping[str, int]) -> None:
        # At a low rate, the remaining queues are consumed in later rounds.
        queues = list(ready)[: self._ahead]
        self._source.consume(queues, self._ahead // len(queues))
        self._publish()
        self._source.cancel()
        # Publish messages that arrived before the consumers were cancelled.
        self._publish()

    def _publish(self) -> None:
        """Publish in batches, until no message has come for a while."""
        policy = PublishPolicy(self.timeout)
        taken = -1
        while self._taken > taken:
            taken, batch = self._taken, self._batch()
            # Without a message, the target is not contacted.
            for first in batch:
                self._publisher.publish_all(
                    chain([first], batch),
                    policy,
                    declare=self._declare,
                    redeclare=self._declare if self.target.may_declare else None,
                    done=self._done,
                )
            if self._lost is not None:
                raise self._lost
            self._source.acknowledge()

    def _batch(self) -> Iterator[Publication]:
        """Yield the publications of one batch."""
        until, last = time.monotonic() + BATCH_SECONDS, self._taken + BATCH
        while not self.stopping.is_set() and not self._is_full:
            if self._taken == last or time.monotonic() > until:
                return
            try:
                message = self._source.take()
            except LOST as lost:
                self._lost = lost  # raised once the messages in flight are confirmed
                return
            if message is None:
                return
            self._taken += 1
            publication = self._publication(message)
            if publication is not None:
                self._keep_to_the_rate()
                self._in_flight += 1
                yield publication

    def _publication(self, message: amqp.Message) -> Publication | None:
        """Return the publication that replaces a message; None if it stays, or is deleted.

        The publication's context is the message, and the reason if the message is undeliverable,
        else "".
        """
        content, reason = None, ""
        try:
            try:
                outgoing = self.convert(message, (message.delivery_info or {})["queue"])
            except UnprocessableMessage as error:
                reason, kept = str(error), Outgoing("", "", WaitingMessage.unopened(message))
                outgoing = to_undeliverable(self.target.topology, kept, reason)
            if outgoing is not None:
                content = encoded(outgoing, self._source.frame_max)
        except (Stay, UnprocessableMessage) as stay:
            self._leave(str(stay))
            return None
        except LOST:
            raise
        except Exception as error:  # noqa: BLE001 - any client may have published it
            # A single message does not end the move.
            self._leave(f"it cannot be converted: {shortened(error)}")
            return None
        self._tried += 1
        if self.dry_run:
            self.result.moved += 1
            return None
        if outgoing is None or content is None:
            self._moved(message)
            return None
        address = outgoing.address
        return Publication(content, outgoing.reroute or (lambda: address), (message, reason))

    def _keep_to_the_rate(self) -> None:
        now = time.monotonic()
        # After a pause, catch up on a short part of the pause.
        self._next_at = max(self._next_at, now - CATCH_UP) + 1 / self.rate
        if self._next_at > now:
            self.stopping.wait(self._next_at - now)

    def _done(self, publication: Publication) -> None:
        self._in_flight -= 1
        message, reason = publication.context
        if publication.error is not None:
            self._leave(f"the target refuses it ({type(publication.error).__name__})")
            self.result.copies += publication.error.may_have_arrived
            return
        if reason:
            self.result.undeliverable[reason] += 1
        self._moved(message)

    def _moved(self, message: amqp.Message) -> None:
        self.result.moved += 1
        self._source.to_acknowledge.append(cast(int, message.delivery_tag))

    def _leave(self, reason: str) -> None:
        if reason:
            self.result.left[counted_as(reason, self.result.left)] += 1
