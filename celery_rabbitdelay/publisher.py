"""Publishing that returns only once the broker has confirmed.

RabbitMQ takes responsibility for a message with ``basic.ack``
(https://www.rabbitmq.com/docs/confirms); until then it may be lost with the connection, and nobody
else tells. A :class:`Publisher` sends persistent, mandatory messages over one connection and waits
for that word; a :class:`PublisherPool` lends publishers to threads and forgets them in a forked
process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import LifoQueue
from typing import Any, Final, TypeAlias
from weakref import WeakSet

import amqp
from amqp.exceptions import AMQPError, NotFound
from kombu import Connection
from kombu.resource import Resource

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    MessageNacked,
    MessageReturned,
    PublishError,
)

__all__ = ["PERSISTENT", "Publisher", "PublisherPool"]

#: ``delivery_mode`` of a message that RabbitMQ writes to disk.
PERSISTENT: Final = 2

#: How often a message is sent again after the connection was lost, unless the caller says.
RESENDS: Final = 3

#: Seconds that opening a connection may take where the connection sets no bound of its own.
CONNECT_TIMEOUT: Final = 5.0

#: Seconds before the first resend, and how many more before each further one, up to the maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)


#: Returns exchange and routing key; called with whether time was lost since the call.
Address: TypeAlias = Callable[[bool], tuple[str, str]]


class _Unconfirmed:
    """A message that was sent, and what became of it."""

    __slots__ = ("error", "exchange", "routing_key", "settled")

    def __init__(self, exchange: str, routing_key: str) -> None:
        self.exchange = exchange
        self.routing_key = routing_key
        self.settled = False
        self.error: PublishError | None = None


class _ConfirmChannel:
    """A channel in confirm mode that knows which of its messages are not confirmed yet."""

    def __init__(self, connection: Connection) -> None:
        self.transport: amqp.Connection = connection.connection
        channel: Any = connection.channel()
        self.channel = channel
        self.channel.confirm_select()
        self.channel.events["basic_ack"].add(self._on_ack)
        self.channel.events["basic_nack"].add(self._on_nack)
        self.channel.events["basic_return"].add(self._on_return)
        self.transport.on_blocked = self._on_blocked
        self.transport.on_unblocked = self._on_unblocked
        self.blocked: str | None = None
        self._last_tag = 0
        self._unconfirmed: dict[int, _Unconfirmed] = {}

    @property
    def open(self) -> bool:
        return self.channel.connection is not None and bool(self.channel.is_open)

    def send(
        self, message: amqp.Message, exchange: str, routing_key: str, timeout: float
    ) -> _Unconfirmed:
        unconfirmed = _Unconfirmed(exchange, routing_key)
        self._last_tag += 1
        self._unconfirmed[self._last_tag] = unconfirmed
        # The class's own method: where a connection asks for confirm_publish, the instance's
        # would wait for any ack, which may be another message's.
        amqp.Channel.basic_publish(
            self.channel, message, exchange, routing_key, mandatory=True, timeout=timeout
        )
        return unconfirmed

    def drain(self, until: Callable[[], bool], deadline: float) -> bool:
        """Take in what the broker says until ``until()``; return False when time ran out."""
        while not until():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            try:
                self.transport.drain_events(timeout=remaining)
            except TimeoutError:
                return until()
        return True

    @contextmanager
    def answers_within(self, seconds: float) -> Iterator[None]:
        """Bound every wait for an answer on this connection; without it there is none."""
        with self.transport.transport.having_timeout(seconds):
            yield

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for unconfirmed in self._settle(tag, multiple):
            unconfirmed.settled = True

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for unconfirmed in self._settle(tag, multiple):
            unconfirmed.settled = True
            unconfirmed.error = MessageNacked(
                unconfirmed.exchange,
                unconfirmed.routing_key,
                "the broker refused the message: a queue is full, or its leader is away",
            )

    def _settle(self, tag: int, multiple: bool) -> list[_Unconfirmed]:
        if not multiple:
            settled = self._unconfirmed.pop(tag, None)
            return [] if settled is None else [settled]
        tags = [earlier for earlier in self._unconfirmed if earlier <= tag]
        return [self._unconfirmed.pop(earlier) for earlier in tags]

    def _on_return(
        self, reply: AMQPError, exchange: str, routing_key: str, message: amqp.Message
    ) -> None:
        # A return comes before the ack of the same message, in the order of publishing.
        for unconfirmed in self._unconfirmed.values():
            address = (unconfirmed.exchange, unconfirmed.routing_key)
            if address == (exchange, routing_key) and unconfirmed.error is None:
                unconfirmed.error = MessageReturned(exchange, routing_key, str(reply))
                return

    def _on_blocked(self, reason: str) -> None:
        self.blocked = reason

    def _on_unblocked(self) -> None:
        self.blocked = None


class Publisher:
    """Publishes over one connection, and waits for the broker's confirm. For one thread at a time.

    Args:
        connection: A kombu connection to RabbitMQ by py-amqp; opened when it is first needed, and
            again whenever it was lost.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._connect_timeout: float = connection.connect_timeout or CONNECT_TIMEOUT
        self._confirming: _ConfirmChannel | None = None

    def publish(
        self,
        message: amqp.Message,
        address: Address,
        *,
        timeout: float = 30.0,
        resends: int | None = RESENDS,
        backoff: tuple[float, float, float] = BACKOFF,
        prepare: Callable[[Connection], None] | None = None,
    ) -> None:
        """Publish a message and return once the broker has it on disk.

        A lost connection is opened again and the message sent again; the broker may then have it
        twice. After an error, regard it as not sent: after a timeout or a lost connection it may
        have been taken all the same.

        Args:
            message: The message with its properties; sent persistent and mandatory.
            address: Returns the exchange and the routing key; called with whether time was lost
                since the call, by a resend or a blocked connection, for those of a delayed
                message depend on the time that is left.
            timeout: Seconds for everything, from connecting over resends to the confirm.
            resends: How often the message is sent again after the connection was lost; None for
                as often as the time allows.
            backoff: Seconds before the first resend, the step by which they grow, their maximum.
            prepare: Called with the connection before each attempt, to declare what is missing.

        Raises:
            MessageNacked: The broker refused the message.
            MessageReturned: No queue takes it, or the exchange does not exist.
            ConfirmTimeout: No confirm within ``timeout``.
            ConnectionBlocked: The broker blocked the connection for all of that time.
            ConnectionLost: The connection could not be opened or broke, also at each resend.
        """
        message.properties["delivery_mode"] = PERSISTENT
        deadline = time.monotonic() + timeout
        attempts = 0
        pause, step, longest = backoff
        while True:
            attempts += 1
            try:
                return self._attempt(message, address, prepare, deadline, late=attempts > 1)
            except self._connection_errors as lost:
                self.discard()
                self.connection.maybe_switch_next()
                exhausted = resends is not None and attempts > resends
                if exhausted or time.monotonic() + pause >= deadline:
                    reason = f"connection lost, attempt {attempts}: {lost!r}"
                    raise ConnectionLost(*address(True), reason) from lost
            time.sleep(pause)
            pause = min(pause + step, longest)

    @property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        errors: tuple[type[BaseException], ...] = self.connection.connection_errors
        return errors

    def _attempt(
        self,
        message: amqp.Message,
        address: Address,
        prepare: Callable[[Connection], None] | None,
        deadline: float,
        late: bool,
    ) -> None:
        confirming = self._open(deadline)
        if prepare is not None:
            with confirming.answers_within(_remaining(deadline)):
                prepare(self.connection)
        if confirming.blocked is not None:
            late = True
            if not confirming.drain(lambda: confirming.blocked is None, deadline):
                raise self._gave_up(confirming, address(late))
        exchange, routing_key = address(late)
        try:
            unconfirmed = confirming.send(message, exchange, routing_key, _remaining(deadline))
            if not confirming.drain(lambda: unconfirmed.settled, deadline):
                raise self._gave_up(confirming, (exchange, routing_key))
        except self.connection.channel_errors as closed:
            # py-amqp opens a channel that the broker closed again, but not in confirm mode.
            self.close_channel()
            error = MessageReturned if isinstance(closed, NotFound) else MessageNacked
            raise error(exchange, routing_key, str(closed)) from closed
        if unconfirmed.error is not None:
            raise unconfirmed.error

    def _open(self, deadline: float) -> _ConfirmChannel:
        if self._confirming is None or not self._confirming.open:
            if not self.connection.connected:
                # kombu tries twice.
                self.connection.connect_timeout = min(
                    self._connect_timeout, _remaining(deadline) / 2
                )
            self._confirming = _ConfirmChannel(self.connection)
        return self._confirming

    def _gave_up(self, confirming: _ConfirmChannel, address: tuple[str, str]) -> PublishError:
        # What the broker says about this message later must not be taken for the next one's.
        self.discard()
        if confirming.blocked is not None:
            return ConnectionBlocked(*address, confirming.blocked)
        return ConfirmTimeout(*address, "the broker did not confirm in time")

    def discard(self) -> None:
        """Drop the connection without a word to the broker; the next publish opens a new one."""
        self._confirming = None
        self.connection.collect(socket_timeout=0.1)

    def close_channel(self) -> None:
        """Close the publisher's channel; the connection stays open for others."""
        confirming, self._confirming = self._confirming, None
        if confirming is not None and confirming.open:
            confirming.channel.close()

    def close(self) -> None:
        """Close the connection in order."""
        self._confirming = None
        self.connection.release()


class PublisherPool:
    """Lends publishers to threads, one each, and keeps them for the next.

    Args:
        connection: Where to; every publisher works on a connection like it, opened when needed.
        limit: How many publishers at most; a thread that comes later waits. None for a new
            connection with every use.
    """

    def __init__(self, connection: Connection, limit: int | None = 10) -> None:
        self._connection = connection
        self._limit = limit
        self._publishers = _Publishers(connection, limit)
        _pools.add(self)

    @contextmanager
    def acquire(self, timeout: float | None = None) -> Iterator[Publisher]:
        """Borrow a publisher for the length of a ``with`` block.

        Args:
            timeout: Seconds to wait for one to be free; None for as long as it takes.
        """
        publisher = self._publishers.acquire(block=True, timeout=timeout)
        try:
            yield publisher
        finally:
            self._publishers.release(publisher)

    def close(self) -> None:
        """Close every connection of the pool."""
        self._publishers.force_close_all(close_pool=False)
        self._publishers = _Publishers(self._connection, self._limit)

    def _forget(self) -> None:
        # In a forked process the sockets are the parent's: closing them in order would end the
        # parent's connections, so they are only let go.
        self._publishers = _Publishers(self._connection, self._limit)


def _remaining(deadline: float) -> float:
    """Seconds until the deadline, but enough for one look at the socket."""
    return max(deadline - time.monotonic(), 0.001)


class _Publishers(Resource):
    """kombu's pool, of publishers."""

    _resource: LifoQueue[Publisher]

    def __init__(self, connection: Connection, limit: int | None) -> None:
        self._connection = connection
        super().__init__(limit=limit)

    def new(self) -> Publisher:
        return Publisher(self._connection.clone())

    def setup(self) -> None:
        """Fill the pool; nothing is connected before a publisher publishes."""
        for _ in range(self.limit or 0):
            self._resource.put_nowait(self.new())

    def close_resource(self, resource: Publisher) -> None:
        resource.close()

    def collect_resource(self, resource: Publisher) -> None:
        resource.close()


_pools: WeakSet[PublisherPool] = WeakSet()


def _forget_parents_connections() -> None:
    for pool in _pools:
        pool._forget()


os.register_at_fork(after_in_child=_forget_parents_connections)
