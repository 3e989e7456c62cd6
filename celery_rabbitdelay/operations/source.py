"""Takes messages from queues, to acknowledge them once they are somewhere else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, cast

import amqp
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.wire import Wire, ack_frames, requeue_all_frame

__all__ = ["Source", "SourceLost", "SourceRefused", "Taken"]

#: How often the queues are asked something before the channel is closed, so that they have all
#: acknowledgements by then: a channel passes only some at a time to a quorum queue, and forgets the
#: others when it is closed (measured on 3.10.8).
BARRIERS: Final = 3

#: Seconds without a message until :meth:`Source.take` returns.
SILENCE: Final = 0.2


class SourceLost(OSError):
    """The connection to the source is lost: the broker has given back all that was taken."""


class SourceRefused(OSError):
    """The broker does not let a queue be read: no permission, or an exclusive consumer has it."""


class Taken(NamedTuple):
    """A message that was taken.

    Attributes:
        message: The message.
        queue: The name of its queue.
        connection: The number of the connection that it was taken on.
    """

    message: amqp.Message
    queue: str
    connection: int


class Source:
    """A connection on which messages are taken from queues.

    Args:
        like: A connection to the broker; others like it are opened.
        timeout: Seconds that an answer of the broker may take.

    Attributes:
        number: The number of the open connection; delivery tags belong to one of them.
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
        self._connection: Connection | None = None

    @property
    def frame_max(self) -> int:
        """The largest frame, in bytes."""
        return self._wire.frame_max

    def open(self) -> None:
        """Open a connection; drop the former one.

        Raises:
            OSError: The broker cannot be reached.
            amqp.AMQPError: It refuses the connection.
        """
        self._drop()
        # Without heartbeats: nothing is read from it while the messages are published.
        own = self._like.clone(heartbeat=0)
        reading_unreadable_properties(own)
        own.connect()  # tries once, where a channel of kombu's would try for ever
        self._connection, self._wire = own, Wire(own)
        self.number += 1
        with self._errors():
            self._channel = cast(Any, own.channel())
        # Bodies stay bytes.
        self._channel.auto_decode = False
        version = str(own.connection.server_properties.get("version", "0"))
        self._is_4 = int(version.partition(".")[0]) >= 4

    def ready(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages wait in each queue that has some."""
        assert self._connection is not None, "the source is not open"
        with self._errors():
            counts = queue_counts(self._connection, [Queue(name) for name in queues])
        return {name: found.messages for name, found in counts.items() if found and found.messages}

    def consume(self, queues: Sequence[str], prefetch: int) -> None:
        """Begin to take messages from queues.

        Each call uses consumer tags of its own. RabbitMQ 3.10.8 fails if a consumer of a quorum
        queue starts again under its tag while it has messages (measured).

        Args:
            queues: Their names.
            prefetch: How many messages are taken from each before one is acknowledged; what former
                calls have taken does not count.

        Raises:
            SourceRefused: The broker refuses one of them.
        """
        self._consumed.update(queues)
        with self._errors():
            self._channel.basic_qos(0, prefetch, False)
            for number, queue in enumerate(queues, 1):
                self._consumers += 1
                tag = f"rabbitdelay-{self._consumers}"
                self._consumer_tags.append(tag)
                self._channel.basic_consume(
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
        """Return the next message; None if none has come for :data:`SILENCE` seconds."""
        if not self._received:
            assert self._connection is not None, "the source is not open"
            with suppress(TimeoutError), self._errors():
                while not self._received:
                    self._connection.drain_events(timeout=SILENCE)
        return self._received.popleft() if self._received else None

    def acknowledge(self) -> None:
        """Acknowledge the messages in ``to_acknowledge``."""
        if not self.to_acknowledge:
            return
        with self._errors():
            frames = ack_frames(self._channel.channel_id, self.to_acknowledge)
            self._wire.write(frames, self._timeout)
            self.to_acknowledge = []

    def cancel(self) -> None:
        """Cancel the consumers; messages that have come already are still returned by ``take``."""
        with self._errors():
            while self._consumer_tags:
                self._channel.basic_cancel(self._consumer_tags.pop())

    def close(self) -> None:
        """Give back what was not acknowledged, and close the connection."""
        with suppress(OSError):
            if self._connection is not None:
                self.cancel()
                self.acknowledge()
                for _ in range(BARRIERS):
                    self.ready(sorted(self._consumed))
                self._give_back()
        self._drop()

    def _give_back(self) -> None:
        with self._errors():
            if self._last_tag and self._is_4:
                # On RabbitMQ 4.3, a closed channel counts as a failed delivery, and this does not.
                frame = requeue_all_frame(self._channel.channel_id, self._last_tag)
                self._wire.write(frame, self._timeout)
            self._channel.close()

    def _drop(self) -> None:
        self.to_acknowledge, self._consumer_tags, self._last_tag = [], [], 0
        self._received.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*connection.connection_errors, *connection.channel_errors):
                connection.release()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Bound each wait for an answer; raise errors but a time-out as one of the two above."""
        assert self._connection is not None, "the source is not open"
        errors = (*self._connection.connection_errors, *self._connection.channel_errors)
        try:
            with self._wire.answers_within(self._timeout):
                yield
        except TimeoutError:
            raise
        except errors as lost:
            # A queue that does not exist may have been deleted a moment ago.
            is_refused = isinstance(lost, amqp.ChannelError) and not isinstance(lost, NotFound)
            raise (SourceRefused if is_refused else SourceLost)(str(lost)) from lost
