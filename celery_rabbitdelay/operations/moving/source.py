"""Takes messages from queues, to acknowledge them once they are published elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple, cast

import amqp
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.operations.consumer_connection import BARRIERS, ConsumerConnection
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.wire import ack_frames

#: Seconds without a message until :meth:`Source.take` returns.
SILENCE: Final = 0.2


class SourceLost(OSError):
    """The connection to the source is lost; the broker has requeued all unacknowledged messages."""


class SourceRefused(OSError):
    """The broker does not let a queue be read: no permission, or it has an exclusive consumer."""


class Taken(NamedTuple):
    """A message that was taken from its queue and is not acknowledged.

    Attributes:
        message: The message.
        queue: The name of its queue.
        connection: The number of the connection that it was taken on.
    """

    message: amqp.Message
    queue: str
    connection: int


class Source:
    """Takes messages from queues, on one connection after the other.

    Args:
        like: A connection to the broker; others like it are opened.
        timeout: Seconds that an answer of the broker may take.

    Attributes:
        number: The number of the open connection; a delivery tag belongs to one connection.
        to_acknowledge: The delivery tags of messages that :meth:`acknowledge` acknowledges.
    """

    def __init__(self, like: Connection, timeout: float) -> None:
        self._like = like
        self._timeout = timeout
        self.number = 0
        self.to_acknowledge: list[int] = []
        self._received: deque[Taken] = deque()
        self._last_tag = 0
        self._consumers = 0
        self._consumed: set[str] = set()
        self._consumer_tags: list[str] = []
        self._opened: ConsumerConnection | None = None

    @property
    def _own(self) -> ConsumerConnection:
        assert self._opened is not None, "the source is not open"
        return self._opened

    @property
    def frame_max(self) -> int:
        """The largest frame, in bytes."""
        return self._own.frame_max

    def open(self) -> None:
        """Open a connection; drop the former one.

        Raises:
            OSError: The broker cannot be reached.
            amqp.AMQPError: It refuses the connection.
        """
        self._drop()
        self._opened = ConsumerConnection(self._like, self._timeout)
        self.number += 1
        with self._errors():
            self._own.open_channel()

    def ready(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages are ready in each queue that has some."""
        with self._errors():
            counts = queue_counts(self._own.connection, [Queue(name) for name in queues])
        return {name: found.messages for name, found in counts.items() if found and found.messages}

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
        with self._errors():
            self._own.channel.basic_qos(0, prefetch, False)
            for number, queue in enumerate(queues, 1):
                self._consumers += 1
                tag = f"rabbitdelay-{self._consumers}"
                self._consumer_tags.append(tag)
                self._own.channel.basic_consume(
                    queue,
                    tag,
                    callback=partial(self._on_message, queue),
                    # One answer for all: the broker closes the channel if it refuses one of them.
                    nowait=number < len(queues),
                )

    def _on_message(self, queue: str, message: amqp.Message) -> None:
        self._last_tag = max(self._last_tag, cast(int, message.delivery_tag))
        self._received.append(Taken(message, queue, self.number))

    def take(self) -> Taken | None:
        """Return the next message; None if no message arrives for :data:`SILENCE` seconds."""
        if not self._received:
            with suppress(TimeoutError), self._errors():
                while not self._received:
                    self._own.connection.drain_events(timeout=SILENCE)
        return self._received.popleft() if self._received else None

    def acknowledge(self) -> None:
        """Acknowledge the messages in ``to_acknowledge``."""
        if not self.to_acknowledge:
            return
        with self._errors():
            self._own.write(ack_frames(self._own.channel.channel_id, self.to_acknowledge))
            self.to_acknowledge = []

    def cancel(self) -> None:
        """Cancel the consumers; ``take`` still returns messages that have arrived already."""
        with self._errors():
            while self._consumer_tags:
                self._own.channel.basic_cancel(self._consumer_tags.pop())

    def close(self) -> None:
        """Requeue the messages that are not acknowledged, and close the connection."""
        with suppress(OSError):
            if self._opened is not None:
                self.cancel()
                self.acknowledge()
                for _ in range(BARRIERS):
                    self.ready(sorted(self._consumed))
                with self._errors():
                    self._own.give_back(self._last_tag)
        self._drop()

    def _drop(self) -> None:
        self.to_acknowledge, self._consumer_tags, self._last_tag = [], [], 0
        self._received.clear()
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(*opened.errors):
                opened.connection.release()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Bound each wait for an answer; raise errors but a time-out as one of the two above."""
        own = self._own
        try:
            with own.answers_in_time():
                yield
        except TimeoutError:
            raise
        except own.errors as lost:
            # A queue that does not exist may have been deleted a moment ago.
            is_refused = isinstance(lost, amqp.ChannelError) and not isinstance(lost, NotFound)
            raise (SourceRefused if is_refused else SourceLost)(str(lost)) from lost
