"""Consumes messages from queues, to read them or to move them.

AMQP cannot read a message and leave it in its queue. Therefore a message is consumed, stays
unacknowledged while it is read or published elsewhere, and is then acknowledged or requeued. If the
process dies before that, the broker requeues the message.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final, cast

import amqp
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels.topology import CONSUMER_TAG
from celery_rabbitdelay.operations.quirks import ORDER_OF_REQUEUED, version_of
from celery_rabbitdelay.publishing import declaration, wire
from celery_rabbitdelay.publishing.kombu_internals import connect, conversation, drop_connection

#: Seconds without a message until :meth:`Source.take` returns.
SILENCE: Final = 0.2

#: Round trips to the queues before the channel is closed, so that the queues have received all
#: acknowledgements. A channel passes only 32 acknowledgements at a time to a quorum queue, and
#: drops the others when it is closed (measured on RabbitMQ 3.10.8).
BARRIERS: Final = 3

#: The prefetch of a reader.
AHEAD: Final = 1000

#: The priority of a reader. Other consumers have priority 0, so they receive messages first.
READERS_PRIORITY: Final = -10

#: After this many rounds without a message, another consumer must hold the remaining messages.
MOST_IDLE_ROUNDS: Final = 3

#: Seconds for an answer of the broker.
ANSWER_TIMEOUT: Final = 30.0

#: The maximum seconds for which a reader holds messages: less than the broker's
#: ``consumer_timeout`` of 30 minutes
#: (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout).
MOST_SECONDS: Final = 1500.0

#: Seconds to wait until requeued messages are ready again, and between two checks.
PUT_BACK_TIMEOUT: Final = 5.0
LOOK_EVERY: Final = 0.02


#: Raised if the connection to the queues is lost, or the broker refuses access to the queues. The
#: broker requeues unacknowledged messages, at the latest when the connection is closed.
LOST: Final = (OSError, amqp.AMQPError)


class Source:
    """Consumes messages from queues, on a connection with one channel; raises :data:`LOST`.

    The name of a message's queue is ``message.delivery_info["queue"]``; its body is bytes.

    Args:
        like: A connection to the broker; the source opens a clone of it.
        timeout: Seconds for an answer of the broker.
        priority: The priority of the consumers; other consumers have priority 0.

    Attributes:
        connection: The connection.
        channel: The only channel of the connection.
        frame_max: The largest frame, in bytes.
        received: Messages that have arrived and were not returned by :meth:`take` yet.
        to_acknowledge: The delivery tags for the next :meth:`acknowledge`.
    """

    def __init__(self, like: Connection, timeout: float, priority: int = 0) -> None:
        # Heartbeats are off, because the pauses between two reads may be longer than heartbeats
        # allow.
        self.connection = like.clone(heartbeat=0)
        self._timeout = timeout
        self._arguments = {"x-priority": priority}
        connect(self.connection)  # opening a channel would make kombu retry forever
        wire.read_unreadable_properties(self.connection)
        self._wire = wire.Wire(self.connection)
        self._wire.receive_ahead()
        self.frame_max = self._wire.frame_max
        properties = self.connection.connection.server_properties
        self._version = version_of(str(properties.get("version", "0")))
        self.received: deque[amqp.Message] = deque()
        self.to_acknowledge: list[int] = []
        self._last_tag = 0
        #: How many messages were received and are not acknowledged.
        self._held = 0
        self._prefetch = 0
        self._numbers = count(1)
        self._consumed: set[str] = set()
        self._consumer_tags: list[str] = []
        with self._answers():
            self.channel = cast(Any, self.connection.channel())
        self.channel.auto_decode = False

    def ready(self, queues: Sequence[str]) -> dict[str, int]:
        """Return the number of ready messages for each non-empty queue."""
        with self._answers():
            return waiting(self.connection, queues)

    def consume(self, queues: Sequence[str], prefetch: int) -> None:
        """Start to consume queues.

        Every call uses new consumer tags; see :data:`.SAME_CONSUMER_TAG`.

        Args:
            queues: The names of the queues.
            prefetch: The prefetch per queue, not counting messages of former calls.
        """
        self._consumed.update(queues)
        self._prefetch = prefetch
        with self._answers():
            self.channel.basic_qos(0, prefetch, False)
            for queue in queues:
                tag = f"{CONSUMER_TAG}{next(self._numbers):06}"
                self._consumer_tags.append(tag)
                self.channel.basic_consume(
                    queue,
                    tag,
                    callback=partial(self._receive, queue),
                    arguments=self._arguments,
                    # One answer for all queues: the broker closes the channel if it refuses one.
                    nowait=queue != queues[-1],
                )

    def _receive(self, queue: str, message: Any) -> None:
        message.delivery_info["queue"] = queue
        self._held += 1
        self._last_tag = max(self._last_tag, cast(int, message.delivery_tag))
        self.received.append(message)

    def take(self) -> amqp.Message | None:
        """Return the next message; None if no message arrives for :data:`SILENCE` seconds."""
        if not self.received:
            with self._answers(), suppress(TimeoutError):
                while not self.received:
                    self.connection.drain_events(timeout=SILENCE)
        return self.received.popleft() if self.received else None

    def messages(self, queue: str, limit: int) -> Iterator[amqp.Message]:
        """Yield the messages of a queue until it is empty, and leave the messages there.

        Until this source is closed, no other consumer receives these messages.

        Args:
            queue: The name of the queue.
            limit: The maximum number of messages to read.

        Raises:
            amqp.exceptions.NotFound: The queue does not exist.
            ReadTooLong: Reading took so long that the broker may have requeued messages.
        """
        with self._answers():
            ready_in(self.connection, queue)
        began, taken, idle = time.monotonic(), 0, 0
        # Silence does not mean empty: the broker may be slow, or another consumer may be ahead.
        while taken < limit and idle < MOST_IDLE_ROUNDS and self.ready([queue]):
            before, end = taken, min(taken + AHEAD, limit)
            self.consume([queue], end - taken)
            while taken < end and (message := self.take()) is not None:
                held = time.monotonic() - began
                if held > MOST_SECONDS:
                    raise ReadTooLong(taken, held)
                taken += 1
                yield message
            self.cancel()
            while self.received:
                taken += 1
                yield self.received.popleft()
            idle = 0 if taken > before else idle + 1

    def acknowledge(self) -> None:
        """Acknowledge ``to_acknowledge``, and wait until the broker has the acknowledgements."""
        if not self.to_acknowledge:
            return
        with self._answers():
            frames = wire.settle_frames(self.channel.channel_id, wire.ACK, self.to_acknowledge)
            self._wire.write(frames, self._timeout)
            # The answer follows the acknowledgements; a process killed before may lose them.
            self.channel.basic_qos(0, self._prefetch, False)
            self._held -= len(self.to_acknowledge)
            self.to_acknowledge = []

    def cancel(self) -> None:
        """Cancel the consumers; ``take`` still returns messages that have already arrived."""
        if not self._consumer_tags:
            return
        with self._answers():
            while self._consumer_tags:
                self.channel.basic_cancel(self._consumer_tags.pop(), nowait=True)
            self.channel.basic_qos(0, self._prefetch, False)  # answered after the cancels

    def close(self) -> None:
        """Requeue unacknowledged messages, and close the connection."""
        with suppress(*LOST):
            self.cancel()
            self.acknowledge()
            queues = sorted(self._consumed)
            for _ in range(BARRIERS):
                self.ready(queues)
            with self._answers():
                self._give_back()
            self._wait_until_back(queues)
        self.drop()

    def _give_back(self) -> None:
        # Use basic.nack if it keeps the order: closing a channel may count as a failed delivery.
        if self._held and self._last_tag and not ORDER_OF_REQUEUED.is_in(self._version):
            tags = [self._last_tag]
            frames = wire.settle_frames(self.channel.channel_id, wire.REQUEUE, tags, multiple=True)
            self._wire.write(frames, self._timeout)
        self.channel.close()

    def _wait_until_back(self, queues: Sequence[str]) -> None:
        """Wait until requeued messages are ready, so that the next reader finds them.

        Another consumer may receive the messages, so the wait is short.
        """
        deadline = time.monotonic() + PUT_BACK_TIMEOUT
        while self._held and time.monotonic() < deadline:
            if sum(self.ready(queues).values()) >= self._held:
                return
            time.sleep(LOOK_EVERY)

    def drop(self) -> None:
        """Close the connection; the broker requeues unacknowledged messages."""
        with suppress(*LOST):
            drop_connection(self.connection)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Limit waits for answers; if the block is interrupted, drop the connection."""
        with conversation(self.connection), self._wire.answers_within(self._timeout):
            yield


def ready_in(connection: Connection, queue: str) -> int:
    """Return how many messages are ready in a queue.

    Args:
        connection: A connection to the broker.
        queue: The name of the queue.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
    """
    found = declaration.queue_counts(connection, [Queue(queue)])[queue]
    if found is None:
        raise NotFound(f"the queue {queue} does not exist")
    return found.messages


def waiting(connection: Connection, queues: Sequence[str]) -> dict[str, int]:
    """Return the number of ready messages for each non-empty queue of a list.

    Args:
        connection: A connection to the broker.
        queues: The names of the queues; missing queues are skipped.
    """
    counts = declaration.queue_counts(connection, [Queue(name) for name in queues])
    return {name: found.messages for name, found in counts.items() if found and found.messages}
