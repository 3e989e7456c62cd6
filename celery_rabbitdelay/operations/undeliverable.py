"""The messages in ``undeliverable``, read without taking them away, or taking only some away.

AMQP has no way to look at a message that stays in its queue. So the messages are delivered and not
acknowledged, on a connection of their own, and given back to their queue in the end. Until then no
other consumer gets them; if the reader dies, the broker gives them back. Those that are to leave
the queue are acknowledged on the way.

A quorum queue keeps the order of what one consumer gives back, but not of what ``basic.get`` has
taken (measured on RabbitMQ 3.10.8, 4.0.5 and 4.3.6). So a read uses one consumer, which is
cancelled and starts again under its tag with a larger prefetch count: the broker never sends more
than :data:`AHEAD` messages ahead of the reader. After a read of only some messages, these stand
behind others that were read before.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import amqp
from amqp.exceptions import AccessRefused
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.undeliverable import Undeliverable, examine
from celery_rabbitdelay.publishing.message import body_of, headers_of, shortened
from celery_rabbitdelay.publishing.wire import (
    Wire,
    ack_frames,
    reading_unreadable_properties,
    requeue_all_frame,
)

__all__ = [
    "LIMIT",
    "Reader",
    "UndeliverableMessage",
    "as_json",
    "copy_of",
    "headers_as_json",
    "reading",
    "ready_messages",
    "undeliverable_messages",
]

#: How many messages are read at most, unless the caller says otherwise. The broker needs some 200
#: bytes for each until it gets it back (measured on 3.10.8, 4.0.5 and 4.3.6).
LIMIT: Final = 1_000_000

#: Messages that the broker sends before the reader asks for more.
AHEAD: Final = 1000

#: Messages that are taken under one consumer tag; AMQP's prefetch count has 16 bits.
MOST_OF_A_TAG: Final = 65 * AHEAD

#: The reader's priority; that of other consumers is 0, so a message goes to them if they take it.
PRIORITY: Final = -10

#: Seconds without a message until the queue is asked whether it is empty.
SILENCE: Final = 0.5

#: Seconds that an answer of the broker may take.
ANSWER_TIMEOUT: Final = 30.0

#: Seconds after which the broker may take the messages back: less than its ``consumer_timeout`` of
#: 30 minutes (https://www.rabbitmq.com/docs/consumers#acknowledgement-timeout).
MOST_SECONDS: Final = 1500.0


class UndeliverableMessage(NamedTuple):
    """A copy of a message that could not be delivered.

    Attributes:
        found: Its task, its queue and due time, and why it could not be delivered.
        headers: Its headers.
        body: Its body.
        exchange: The exchange that it was published to, the last time.
        routing_key: The routing key that it was published with, the last time.
        properties: Its other properties.
    """

    found: Undeliverable
    headers: Mapping[str, Any]
    body: bytes
    exchange: str
    routing_key: str
    properties: Mapping[str, Any] = MappingProxyType({})


def undeliverable_messages(
    connection: Connection, topology: Topology, limit: int = LIMIT
) -> Generator[UndeliverableMessage, None, None]:
    """Yield a copy of each message in ``undeliverable``, oldest first; all of them stay there.

    Messages that another consumer has at this moment are left out.

    Args:
        connection: Where; the messages are read on another connection like it.
        topology: The topology whose messages are read.
        limit: How many messages are read at most.

    Raises:
        ReadTooLong: Reading took so long that the broker may have taken messages back.
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached, or the connection was lost.
    """
    with reading(connection, topology) as reader:
        for message in reader.messages(limit):
            yield copy_of(message, topology)


def ready_messages(connection: Connection, topology: Topology) -> int | None:
    """Return how many messages are in ``undeliverable``; None if the user may not ask.

    From RabbitMQ 4.3 on, it takes the permission to configure the queue.

    Raises:
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached.
    """
    with reading(connection, topology) as reader:
        return reader.ready()


@contextmanager
def reading(connection: Connection, topology: Topology) -> Iterator[Reader]:
    """Open a connection, and take messages from ``undeliverable`` on it.

    At the end, all messages go back that were not acknowledged.

    Args:
        connection: Where; the messages are read on another connection like it.
        topology: The topology whose messages are read.

    Raises:
        OSError: The broker cannot be reached.
    """
    # Without heartbeats: the caller may pause between two messages for longer than they allow.
    own = connection.clone(heartbeat=0)
    reading_unreadable_properties(own)
    try:
        own.connect()  # tries once, where a channel of kombu's would try for ever
        reader = Reader(own, topology)
        try:
            yield reader
        finally:
            reader.give_back()
    finally:
        own.release()


class Reader:
    """Takes messages, acknowledges some of them, and gives the others back.

    Args:
        connection: An open connection of its own.
        topology: The topology.

    Attributes:
        errors: The errors that mean that the connection, or its channel, is lost.
    """

    def __init__(self, connection: Connection, topology: Topology) -> None:
        self._connection = connection
        self.errors: tuple[type[BaseException], ...] = (
            *connection.connection_errors,
            *connection.channel_errors,
        )
        self._queue: Queue = topology.module_queues.undeliverable
        self._wire = Wire(connection)
        with self._answers():
            self._channel = cast(Any, connection.channel())
        # Bodies stay bytes.
        self._channel.auto_decode = False
        version = str(connection.connection.server_properties.get("version", "0"))
        self._is_4 = int(version.partition(".")[0]) >= 4
        # RabbitMQ 3.10.8 fails if a consumer of a quorum queue starts again under its tag while it
        # has messages (measured).
        self._restarts = self._is_4 and topology.queue_type == "quorum"
        self._received: deque[amqp.Message] = deque()
        self._taken = self._acknowledged = 0
        self._last_tag = 0
        self._began = time.monotonic()
        #: The consumer's number, and how many messages it has taken that are not acknowledged.
        self._number = self._of_consumer = 0
        self._is_consuming = False

    @property
    def frame_max(self) -> int:
        """The largest frame of the connection, in bytes."""
        return self._wire.frame_max

    def ready(self) -> int | None:
        """Return how many messages are in the queue; None if the user may not ask.

        From RabbitMQ 4.3 on, it takes the permission to configure the queue.

        Raises:
            amqp.exceptions.NotFound: The queue does not exist.
        """
        channel: Any
        with self._answers(), suppress(AccessRefused), self._connection.channel() as channel:
            count: int = channel.queue_declare(self._queue.name, passive=True).message_count
            return count
        return None

    def messages(self, limit: int) -> Iterator[amqp.Message]:
        """Yield messages until the queue is empty.

        Args:
            limit: How many to read. If messages are acknowledged meanwhile, some more may come.

        Raises:
            ReadTooLong: Reading took so long that the broker may have taken messages back.
        """
        while self._taken < limit:
            wanted = min(AHEAD, limit - self._taken)
            end = self._taken + wanted
            self._consume(wanted)
            while self._taken < end and self._arrived():
                yield self._next()
            self._cancel()
            while self._received:
                yield self._next()
            if self._taken < end:
                # Silence proves nothing: the broker may be slow.
                with self._answers():
                    message = self._channel.basic_get(self._queue.name)
                if message is None:
                    return
                self._of_consumer -= 1
                self._received.append(message)
                yield self._next()

    def acknowledge(self, messages: Iterable[amqp.Message]) -> None:
        """Take messages out of the queue for good.

        Args:
            messages: Some of those that were yielded, each of them once.
        """
        messages = list(messages)
        tags = [cast(int, each.delivery_tag) for each in messages]
        tag = self._tag
        # The others of its messages fill up the prefetch count of a consumer.
        self._of_consumer -= sum(each.delivery_info.get("consumer_tag") == tag for each in messages)
        self._acknowledged += len(messages)
        frames = ack_frames(self._channel.channel_id, tags)
        self._wire.write(frames, ANSWER_TIMEOUT)

    def _consume(self, wanted: int) -> None:
        if not self._restarts or self._of_consumer + wanted > MOST_OF_A_TAG:
            self._number, self._of_consumer = self._number + 1, 0
        with self._answers():
            self._channel.basic_qos(0, self._of_consumer + wanted, False)
            self._channel.basic_consume(
                self._queue.name,
                self._tag,
                callback=self._received.append,
                arguments={"x-priority": PRIORITY},
            )
        self._is_consuming = True

    def _arrived(self) -> bool:
        """Return whether there is another message; wait for it for a while."""
        with suppress(TimeoutError):
            while not self._received:
                self._connection.drain_events(timeout=SILENCE)
        return bool(self._received)

    def _next(self) -> amqp.Message:
        held = time.monotonic() - self._began
        if held > MOST_SECONDS:
            raise ReadTooLong(self._taken, held)
        message = self._received.popleft()
        self._taken += 1
        self._of_consumer += 1
        self._last_tag = message.delivery_info["delivery_tag"]
        return message

    def _cancel(self) -> None:
        with self._answers():
            self._channel.basic_cancel(self._tag)
        self._is_consuming = False

    def give_back(self) -> None:
        """Give all others back; if the connection is lost, the broker has done so already."""
        with suppress(*self.errors):
            if self._is_consuming:
                self._cancel()
            if self._received:
                self._last_tag = self._received[-1].delivery_info["delivery_tag"]
            held = self._taken + len(self._received) - self._acknowledged
            if held and self._is_4:
                # On RabbitMQ 4.3, a closed channel counts as a failed delivery, and this does not.
                # On 3.10.8, this would change the order (measured).
                frame = requeue_all_frame(self._channel.channel_id, self._last_tag)
                self._wire.write(frame, ANSWER_TIMEOUT)
            with self._answers():
                self._channel.close()

    @property
    def _tag(self) -> str:
        # RabbitMQ 3.10.8 gives the messages of a closed channel back by the names of consumers, in
        # their order up to 32 of them (measured).
        return f"undeliverable-{self._number:06}"

    def _answers(self) -> AbstractContextManager[None]:
        return self._wire.answers_within(ANSWER_TIMEOUT)


def copy_of(message: amqp.Message, topology: Topology) -> UndeliverableMessage:
    """Return a copy of a message that was read."""
    headers, information = headers_of(message), message.delivery_info
    exchange, key = information["exchange"], information["routing_key"]
    found = examine(headers, topology, key)
    others = {k: value for k, value in message.properties.items() if k != "application_headers"}
    return UndeliverableMessage(found, headers, body_of(message), exchange, key, others)


def headers_as_json(headers: Mapping[str, Any]) -> str:
    """Return headers as the text of a JSON object, whatever they hold.

    Instants are written as in ISO 8601, bytes as text with escapes, and what JSON cannot express
    as Python shows it.
    """
    try:
        return json.dumps(as_json(headers))
    except RecursionError:
        return json.dumps(_types(headers))


def as_json(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers, or properties, as :func:`headers_as_json` writes them."""
    try:
        plain: dict[str, Any] = _plain(headers)
    except RecursionError:
        return _types(headers)
    return plain


def _types(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): shortened(type(value)) for name, value in headers.items()}


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case datetime():
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    return str(value)
