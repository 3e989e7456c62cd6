"""The consumer of a module's queue: checks, counts and settles every message."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
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

#: The maximum bytes of received messages that a module holds, and the maximum bytes of messages
#: that it has in flight. A single message may exceed the maximum.
MAX_HELD_BYTES: Final = 64 * 2**20

#: The memory of a message's headers in Python, as a multiple of their encoded bytes, at most
#: (measured with tracemalloc: 22 for a table of two-character names without values).
HEADER_EXPANSION: Final = 25

#: The largest of this many latest messages determines the prefetch count.
LATEST: Final = 200


@dataclass(eq=False)
class ModuleStatistics:
    """The counts of a module.

    Attributes:
        received: Received messages.
        finished: Acknowledged or rejected messages.
        published: Published and confirmed messages.
        redelivered: Messages put back into the levels because their destination did not accept
            them.
        undeliverable: Messages put into ``undeliverable``.
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
    """A module that a worker serves.

    Attributes:
        name: The module's name.
        topology: The topology that its queue belongs to.
        queue: The queue.
        receive: Takes a message; returns the messages to publish for it.
        prefetch: The prefetch count of its consumer.
        max_unconfirmed: The maximum number of messages in flight.
        timeout: The timeout of confirms, in seconds. After that time without any confirm, the
            connection is closed; after that time without the confirm of one message, that message
            goes into the levels, for a retry.
        retry_for: Seconds of retries for a message that its destination does not accept; then the
            message is undeliverable.
        signing_keys: Signs the messages that wait for a retry; None: they stay unsigned.
        max_bytes: The largest message that is read. The broker dead-letters a larger message to
            ``undeliverable``; its body never takes memory here.
        admit: Removes the headers that a sender may not set; None if a sender may set all headers.
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
    """A received message and its state.

    Attributes:
        message: The message.
        outgoing: The messages to publish for it.
        cost: The maximum bytes of memory that the message takes.
        held: The next message to publish, while it waits for its destination.
        waits_for: The destination of ``held``.
        pending: The number of messages in flight for it, plus one until ``outgoing`` is exhausted.
            At 0, the received message is settled.
        settlement: How the received message is settled.
    """

    message: amqp.Message
    outgoing: Iterator[Outgoing]
    cost: int = 0
    held: Outgoing | None = None
    waits_for: str | None = None
    pending: int = 1
    settlement: wire.Settlement = wire.ACK


class HeldBytes:
    """Counts the bytes of a consumer's unacknowledged messages.

    RabbitMQ has no prefetch in bytes (https://www.rabbitmq.com/docs/specification). So the prefetch
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
        """Return whether an arriving message fits into the budget; a single message always does."""
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
        """How many messages as large as the largest recent one fit into half of the budget."""
        return max(self._budget // 2 // max(*self._latest, 1), 1)


class Deliveries:
    """Consumes a module's queue on a separate channel, and settles its messages.

    If the held messages exceed the budget of bytes, more messages are requeued at once, and the
    consumer is cancelled until half of the budget is free. Then it consumes with a prefetch count
    that fits the largest of the latest messages, and raises the count once messages are smaller. To
    raise the count, the consumer is cancelled and created again: AMQP cannot change the prefetch
    count of a consumer.

    Args:
        connection: An open connection.
        module: The module.

    Attributes:
        waiting: The received messages that have no published message yet.
        unfinished: The number of unacknowledged messages.
        are_redelivered: Whether all messages so far were redelivered.
        consuming: Whether to consume.
        channel: The channel.
    """

    def __init__(self, connection: Connection, module: Module) -> None:
        self.waiting: deque[Received] = deque()
        self.unfinished = 0
        self.are_redelivered = True
        self.consuming = False
        self.channel = cast(Any, connection.channel())
        # py-amqp must not decode bodies.
        self.channel.auto_decode = False
        self._unread = WarningLimit(
            logger, f"rabbitdelay {module.name}: messages above rabbitdelay_max_message_bytes"
        )
        self._wire = wire.Wire(connection)
        self._module = module
        self._statistics = module.statistics
        self._held = HeldBytes()
        #: The prefetch count that the module wants, and the prefetch count in use, which fits the
        #: budget.
        self._wanted = self._prefetch = 1
        self._consumers = 0
        self._tag: str | None = None
        self._former_tag: str | None = None
        #: The delivery tags that the next :meth:`write` settles.
        self._settled: defaultdict[wire.Settlement, list[int]] = defaultdict(list)

    def take(self, prefetch: int) -> None:
        """Consume with this prefetch count from now on."""
        self._wanted, self.consuming = min(prefetch, MAX_PREFETCH), True
        self._cancel()
        self._consume()

    def stop(self) -> None:
        """Stop consuming, and requeue messages without a published message."""
        self.consuming = False
        self._cancel()
        self.unfinished -= len(self.waiting)
        while self.waiting:
            self._settled[wire.REQUEUE].append(
                cast(int, self.waiting.popleft().message.delivery_tag)
            )

    def adapt(self) -> None:
        """Consume again once there is room; raise the prefetch count if messages are smaller."""
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
        """Settle a message with the next :meth:`write`, unless something is pending for it."""
        if received.pending:
            return
        self.unfinished -= 1
        self._held.held -= received.cost
        self._settled[received.settlement].append(cast(int, received.message.delivery_tag))
        self._statistics.finished += 1

    def write(self) -> None:
        """Write the frames that settle messages."""
        number, settled = self.channel.channel_id, self._settled.items()
        if settled:
            frames = [wire.settle_frames(number, how, tags) for how, tags in settled]
            self._settled.clear()
            self._wire.write(b"".join(frames), self._module.timeout)

    def _consume(self) -> None:
        self._prefetch = min(self._wanted, self._held.fitting)
        with self._wire.answers_within(self._module.timeout):
            self.channel.basic_qos(0, self._prefetch, False)
            self._consumers += 1
            tag = f"{CONSUMER_TAG}{self._consumers}"
            self._tag = self.channel.basic_consume(
                self._module.queue.name, tag, callback=self._received
            )
        # py-amqp keeps the callback of a consumer that was cancelled with ``nowait``.
        self.channel.callbacks.pop(self._former_tag, None)

    def _cancel(self) -> None:
        if self._tag is None:
            return
        tag, self._tag = self._tag, None
        with self._wire.answers_within(self._module.timeout):
            self.channel.basic_cancel(tag)

    def _received(self, message: amqp.Message) -> None:
        """Hold, requeue or reject a message that has arrived."""
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
        """Reject a message whose body was skipped; it is dead-lettered to ``undeliverable``."""
        if self._unread.allows(size):
            logger.warning(
                "rabbitdelay %s: a message of %s bytes is undeliverable: "
                "rabbitdelay_max_message_bytes is %s",
                self._module.name,
                f"{size:,}",
                f"{self._module.max_bytes:,}",
            )
        self._statistics.received += 1
        self._statistics.undeliverable += 1
        self._statistics.finished += 1
        self._settled[wire.REJECT].append(cast(int, message.delivery_tag))

    def _give_back(self, message: amqp.Message) -> None:
        """Requeue a message that exceeds the budget; stop consuming until there is room."""
        if self._tag is not None:
            logger.info(
                "rabbitdelay %s: consuming is paused: unacknowledged messages take %s bytes.",
                self._module.name,
                f"{self._held.held:,}",
            )
            # Cancel with ``nowait``, because frames are being read; and before the message is
            # requeued, so that the broker does not deliver it here again.
            self.channel.basic_cancel(self._tag, nowait=True)
            self._former_tag, self._tag = self._tag, None
        self._settled[wire.REQUEUE].append(cast(int, message.delivery_tag))


def _unreadable(reason: str) -> Iterator[Outgoing]:
    """Return an iterator that refuses an unreadable message when its turn comes."""
    raise UnprocessableMessage(reason)
    yield
