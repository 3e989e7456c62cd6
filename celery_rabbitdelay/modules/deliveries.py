"""What a module takes from its queue: each message is checked, counted and settled here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.topology import CONSUMER_TAG, Topology
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.publishing import wire
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES
from celery_rabbitdelay.publishing.signature import SigningKeys

logger = logging.getLogger(__name__)

#: The maximum prefetch count of AMQP, a 16-bit number.
MAX_PREFETCH: Final = 65_535

#: Bytes of received messages that a module holds, and bytes that it has in flight, unless a single
#: message has more.
MAX_HELD_BYTES: Final = 64 * 2**20

#: How many times their bytes the headers of a message take at most, once Python has read them
#: (measured with tracemalloc: a table of names of two characters, without values, takes 22 times).
HEADER_EXPANSION: Final = 25

#: The messages of which the largest one says how many are taken ahead.
LATEST: Final = 200


@dataclass(eq=False)
class ModuleStatistics:
    """Counts what a module does.

    Attributes:
        received: How many messages the module has received.
        finished: How many of these it has acknowledged.
        published: How many messages it has published, confirmed.
        redelivered: How many messages it has put into the levels because their destination did not
            take them.
        undeliverable: How many messages it has put into ``undeliverable``, confirmed.
    """

    received: int = 0
    finished: int = 0
    published: int = 0
    redelivered: int = 0
    undeliverable: int = 0

    def status(self) -> dict[str, object]:
        """Return the counts that the worker's status shows."""
        return {name: count for name, count in vars(self).items() if name != "finished"}


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
        statistics: The counts of its messages.
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
    statistics: ModuleStatistics = field(default_factory=ModuleStatistics)


@dataclass(slots=True, eq=False, repr=False)
class Received:
    """A received message, and what is left to do about it.

    Attributes:
        message: The message.
        outgoing: The messages to publish for it.
        cost: The bytes of memory that it takes at most.
        held: The next message to publish, if it has to wait for its destination.
        waits_for: That destination.
        pending: How many things have to happen before it is settled: each message that was
            published for it has to be, and ``outgoing`` has to be exhausted.
        settlement: How it is settled then.
    """

    message: amqp.Message
    outgoing: Iterator[Outgoing]
    cost: int = 0
    held: Outgoing | None = None
    waits_for: str | None = None
    pending: int = 1
    settlement: wire.Settlement = wire.ACK


class HeldBytes:
    """The bytes of the messages that a consumer has taken and not finished.

    RabbitMQ has no prefetch in bytes (https://www.rabbitmq.com/docs/specification). So a prefetch
    count is derived from the largest of the latest messages.

    Args:
        budget: The bytes that may be held.

    Attributes:
        held: The bytes that are held.
    """

    def __init__(self, budget: int = MAX_HELD_BYTES) -> None:
        self.held = 0
        self._budget = budget
        self._latest = deque([1], maxlen=LATEST)

    def take(self, cost: int) -> bool:
        """Return whether a message that has arrived is held; a single one always is."""
        self._latest.append(cost)
        has_room = not self.held or self.held + cost <= self._budget
        if has_room:
            self.held += cost
        return has_room

    @property
    def may_go_on(self) -> bool:
        """Whether half of the budget is free again."""
        return self.held * 2 <= self._budget

    @property
    def fitting(self) -> int:
        """How many messages of the largest size lately seen fit into half of the budget."""
        return max(self._budget // 2 // max(*self._latest, 1), 1)


class Deliveries:
    """Consumes a module's queue on a channel of its own, and settles what it has taken.

    If the messages that are held take more than the budget of bytes, further ones are given back at
    once, and the consumer is cancelled until half of the budget is free. It goes on with a prefetch
    count that fits the largest of the latest messages, and raises it again once they are smaller:
    cancelled and begun anew, as AMQP cannot raise the prefetch of a consumer.

    Args:
        connection: A connection that is open.
        module: The module.

    Attributes:
        waiting: The messages that were taken, and for which nothing was published yet.
        unfinished: How many messages were taken and are not settled.
        are_redelivered: Whether each message so far was delivered before.
        consuming: Whether messages are to be taken.
        channel: The channel.
    """

    def __init__(self, connection: Connection, module: Module) -> None:
        self.waiting: deque[Received] = deque()
        self.unfinished = 0
        self.are_redelivered = True
        self.consuming = False
        self.channel = cast(Any, connection.channel())
        # Bodies stay bytes.
        self.channel.auto_decode = False
        self._unread = WarningLimit(
            logger, f"{module.name}: messages above rabbitdelay_max_message_bytes"
        )
        self._wire = wire.Wire(connection)
        self._module = module
        self._statistics = module.statistics
        self._held = HeldBytes()
        #: The prefetch count that is wanted, and the one that is set, which fits the budget.
        self._wanted = self._prefetch = 1
        self._consumers = 0
        self._tag: str | None = None
        self._former_tag: str | None = None
        #: The delivery tags that are settled with the next :meth:`write`, by how.
        self._settled: dict[wire.Settlement, list[int]] = {
            wire.ACK: [],
            wire.REJECT: [],
            wire.REQUEUE: [],
        }

    def take(self, prefetch: int) -> None:
        """Take at most this many messages ahead, from now on."""
        self._wanted, self.consuming = min(prefetch, MAX_PREFETCH), True
        self._cancel()
        self._consume()

    def stop(self) -> None:
        """Take no more messages, and give back those for which nothing was published yet."""
        self.consuming = False
        self._cancel()
        self.unfinished -= len(self.waiting)
        while self.waiting:
            self._settled[wire.REQUEUE].append(
                cast(int, self.waiting.popleft().message.delivery_tag)
            )

    def adapt(self) -> None:
        """Go on if there is room again; raise the prefetch count if the messages are smaller."""
        if not self.consuming:
            return
        doubled = min(self._prefetch * 2, self._wanted)
        if self._tag is None:
            if self._held.may_go_on:
                self._consume()
        elif self._prefetch < doubled <= self._held.fitting:
            self._cancel()
            self._consume()

    def settle(self, received: Received) -> None:
        """Settle a message with the next :meth:`write`, if nothing is pending for it any more."""
        if received.pending:
            return
        self.unfinished -= 1
        self._held.held -= received.cost
        self._settled[received.settlement].append(cast(int, received.message.delivery_tag))
        self._statistics.finished += 1

    def write(self) -> None:
        """Write what was settled."""
        number, frames = self.channel.channel_id, b""
        for how, tags in self._settled.items():
            if tags:
                frames += wire.settle_frames(number, how, tags)
                tags.clear()
        if frames:
            self._wire.write(frames, self._module.timeout)

    def _consume(self) -> None:
        self._prefetch = min(self._wanted, self._held.fitting)
        with self._wire.answers_within(self._module.timeout):
            self.channel.basic_qos(0, self._prefetch, False)
            self._consumers += 1
            tag = f"{CONSUMER_TAG}{self._consumers}"
            self._tag = self.channel.basic_consume(
                self._module.queue.name, tag, callback=self._received
            )
        # py-amqp keeps the callback of a consumer that was cancelled without waiting.
        self.channel.callbacks.pop(self._former_tag, None)

    def _cancel(self) -> None:
        if self._tag is None:
            return
        tag, self._tag = self._tag, None
        with self._wire.answers_within(self._module.timeout):
            self.channel.basic_cancel(tag)

    def _received(self, message: amqp.Message) -> None:
        """Check a message that has arrived: it is held, given back, or rejected unread."""
        module = self._module
        seen: wire.Seen = cast(Any, message).rabbitdelay_seen
        cost = len(message.body) + HEADER_EXPANSION * seen.properties_bytes
        self.are_redelivered = self.are_redelivered and message.delivery_info["redelivered"]
        if seen.skipped_bytes is not None:
            self._reject_unread(message, seen.skipped_bytes)
            return
        if not self._held.take(cost):
            self._give_back(message)
            return
        self._statistics.received += 1
        self.unfinished += 1
        if module.admit is not None:
            module.admit(message)
        if seen.marks:
            message.properties["application_headers"].update(seen.marks)
        reason = seen.unreadable
        outgoing = module.receive(message) if reason is None else _unreadable(reason)
        self.waiting.append(Received(message, outgoing, cost))

    def _reject_unread(self, message: amqp.Message, size: int) -> None:
        """Let the broker put a message into ``undeliverable`` whose body was not kept."""
        if self._unread.allows(size):
            logger.warning(
                "%s: a message of %s bytes is undeliverable: rabbitdelay_max_message_bytes is %s",
                self._module.name,
                f"{size:,}",
                f"{self._module.max_bytes:,}",
            )
        self._statistics.received += 1
        self._statistics.undeliverable += 1
        self._statistics.finished += 1
        self._settled[wire.REJECT].append(cast(int, message.delivery_tag))

    def _give_back(self, message: amqp.Message) -> None:
        """Give a message back that the budget does not hold, and take no more until it does."""
        if self._tag is not None:
            logger.info(
                "%s: %s bytes of messages are held; the next ones are taken later.",
                self._module.queue.name,
                self._held.held,
            )
            # Without waiting for the answer, because frames are being read. Before the messages are
            # given back, so that the broker does not deliver them here again.
            self.channel.basic_cancel(self._tag, nowait=True)
            self._former_tag, self._tag = self._tag, None
        self._settled[wire.REQUEUE].append(cast(int, message.delivery_tag))


def _unreadable(reason: str) -> Iterator[Outgoing]:
    """Refuse a message when it is its turn."""
    raise UnprocessableMessage(reason)
    yield
