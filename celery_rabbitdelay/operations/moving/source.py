"""Takes messages from queues, to acknowledge them once they are published elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, Final

import amqp
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.levels.entities import CONSUMER_TAG
from celery_rabbitdelay.operations.consumer_connection import BARRIERS, ConsumerConnection
from celery_rabbitdelay.publishing import declaration
from celery_rabbitdelay.publishing.wire import ACK, settle_frames

#: Seconds without a message until :meth:`Source.take` returns.
SILENCE: Final = 0.2


class SourceLost(OSError):
    """The connection to the source is lost, or does not answer in time.

    The broker has requeued all unacknowledged messages, or does so when the connection is closed.
    """


class SourceRefused(OSError):
    """The broker does not let a queue be read: no permission, or it has an exclusive consumer."""


class Source(ConsumerConnection):
    """Takes messages from queues, on one connection.

    The name of a message's queue is ``message.delivery_info["queue"]``.

    Attributes:
        to_acknowledge: The delivery tags of messages that :meth:`acknowledge` acknowledges.
    """

    def __init__(self, like: Connection, timeout: float) -> None:
        super().__init__(like, timeout)
        self.to_acknowledge: list[int] = []
        #: How many messages were taken and are not acknowledged.
        self._held = 0
        self._prefetch = 0
        self._numbers = count(1)
        self._consumed: set[str] = set()
        self._consumer_tags: list[str] = []

    def ready(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages are ready in each queue that has some."""
        with self._errors():
            return waiting(self.connection, queues)

    def consume(self, queues: Sequence[str], prefetch: int) -> None:
        """Begin to take messages from queues.

        Each call uses consumer tags of its own; see :data:`.SAME_CONSUMER_TAG`.

        Args:
            queues: Their names.
            prefetch: How many messages are taken from each before one is acknowledged, not counting
                those of former calls.

        Raises:
            SourceRefused: The broker refuses one of them.
        """
        self._consumed.update(queues)
        self._prefetch = prefetch
        with self._errors():
            self.channel.basic_qos(0, prefetch, False)
            for queue in queues:
                tag = f"{CONSUMER_TAG}{next(self._numbers)}"
                self._consumer_tags.append(tag)
                callback = partial(self._receive_from, queue)
                # One answer for all: the broker closes the channel if it refuses one of them.
                nowait = queue != queues[-1]
                self.channel.basic_consume(queue, tag, callback=callback, nowait=nowait)

    def _receive_from(self, queue: str, message: Any) -> None:
        message.delivery_info["queue"] = queue
        self._held += 1
        self.receive(message)

    def take(self) -> amqp.Message | None:
        """Return the next message; None if no message arrives for :data:`SILENCE` seconds."""
        if not self.received:
            with self._errors():
                self.has_received(SILENCE)
        return self.received.popleft() if self.received else None

    def acknowledge(self) -> None:
        """Acknowledge the messages in ``to_acknowledge``; the broker has received that then."""
        if not self.to_acknowledge:
            return
        with self._errors():
            self.write(settle_frames(self.channel.channel_id, ACK, self.to_acknowledge))
            # Answered behind them. What is on its way when a process is killed may be lost.
            self.channel.basic_qos(0, self._prefetch, False)
            self._held -= len(self.to_acknowledge)
            self.to_acknowledge = []

    def cancel(self) -> None:
        """Cancel the consumers; ``take`` still returns messages that have arrived already."""
        if not self._consumer_tags:
            return
        with self._errors():
            while self._consumer_tags:
                self.channel.basic_cancel(self._consumer_tags.pop(), nowait=True)
            self.channel.basic_qos(0, self._prefetch, False)  # answered behind them

    def close(self) -> None:
        """Requeue the messages that are not acknowledged, and close the connection."""
        with suppress(OSError):
            self.cancel()
            self.acknowledge()
            for _ in range(BARRIERS):
                self.ready(sorted(self._consumed))
            with self._errors():
                self.give_back(self._held > 0)
        self.drop()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Bound each wait for an answer; raise errors as one of the two above."""
        try:
            with self.answers_in_time():
                yield
        except self.errors as lost:
            # A queue that does not exist may have been deleted a moment ago.
            is_refused = isinstance(lost, amqp.ChannelError) and not isinstance(lost, NotFound)
            raise (SourceRefused if is_refused else SourceLost)(str(lost)) from lost


def waiting(connection: Connection, queues: Sequence[str]) -> dict[str, int]:
    """Return how many messages are ready in each of several queues that has some.

    Args:
        connection: A connection to the broker.
        queues: Their names; missing ones are skipped.
    """
    counts = declaration.queue_counts(connection, [Queue(name) for name in queues])
    return {name: found.messages for name, found in counts.items() if found and found.messages}
