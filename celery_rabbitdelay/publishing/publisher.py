"""Publish one or many messages, and wait until the broker has confirmed them.

The connection is opened when needed, and dropped when its state is in doubt.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, LifoQueue
from typing import Final, NoReturn
from weakref import WeakSet

from amqp import spec
from amqp.exceptions import AccessRefused, ChannelError, NotAllowed, NotFound
from kombu import Connection

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels.shown_url import shown_broker
from celery_rabbitdelay.publishing import kombu_internals, publish_loop
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, OnSettled
from celery_rabbitdelay.publishing.message import Declaration, Publication
from celery_rabbitdelay.publishing.refusals import error_of, reason_of
from celery_rabbitdelay.publishing.wire import Wire

#: The maximum seconds for closing a channel, whose messages are all settled.
CLOSE_TIMEOUT: Final = 2.0

#: The reason for an unsent message if declaring took too long.
NOT_DECLARED: Final = (
    "the broker has not declared the delay levels and the queue in time; declare the levels "
    "beforehand, with: celery rabbitdelay declare"
)

#: The broker's reasons for not finding a queue that exists: the queue's node is down, or the queue
#: is starting or stopping (``priv_absent`` in
#: https://github.com/rabbitmq/rabbitmq-server/blob/v3.10.8/deps/rabbit/src/rabbit_amqqueue.erl).
PASSING_REASONS: Final = re.compile(
    "is down or inaccessible|process is stopped by supervisor|due to timeout|may be stopping"
)


class Publisher:
    """Publishes over one connection, and waits for the confirms; not thread-safe.

    Args:
        connection: A kombu connection to RabbitMQ over py-amqp; opened on first use, and again
            after a loss.
        is_alone: Whether the connection has no other reader, which makes reading faster.
    """

    def __init__(self, connection: Connection, is_alone: bool = False) -> None:
        self.connection = connection
        self._is_alone = is_alone
        self._channel: ConfirmChannel | None = None
        #: The declarations that were made on this connection.
        self.declared: WeakSet[Declaration] = WeakSet()

    def publish(
        self,
        publication: Publication,
        policy: publish_loop.PublishPolicy = publish_loop.DEFAULT_POLICY,
        *,
        declare: Declaration | None = None,
        redeclare: Declaration | None = None,
    ) -> None:
        """Publish a message and return once the broker has confirmed it.

        After a lost connection, the message is sent again on a new connection, and the broker may
        then have it twice. After an error, treat the message as not sent; the error's
        ``may_have_arrived`` is True if the broker may have the message.

        Args:
            publication: The message; sent as mandatory.
            policy: The timeout and the resends.
            declare: Called once per connection, to declare missing exchanges, queues and bindings.
            redeclare: Called once if the message is returned or its exchange does not exist; the
                message is then sent once more.

        Raises:
            MessageNacked: The broker nacked the message and all its resends.
            MessageRefused: The broker closed the channel: the message is too large or invalid, or
                the user lacks write permission.
            MessageReturned: No queue takes the message, or the exchange does not exist.
            DeclarationRefused: The broker refused a declaration, and its retries if the reason is
                temporary.
            ConfirmTimeout: No confirm within the policy's ``timeout``.
            ConnectionBlocked: The broker blocked the connection until the ``timeout``.
            ConnectionLost: The connection could not be opened or broke, and all resends failed too.
        """
        self.publish_all([publication], policy, declare=declare, redeclare=redeclare)
        if publication.error is not None:
            raise publication.error

    def publish_all(
        self,
        publications: Iterable[Publication],
        policy: publish_loop.PublishPolicy = publish_loop.DEFAULT_POLICY,
        *,
        declare: Declaration | None = None,
        redeclare: Declaration | None = None,
        done: Callable[[Publication], None] | None = None,
    ) -> None:
        """Publish messages, many in flight at a time; return once every message has its outcome.

        Errors of ``publications`` or ``done`` are raised unchanged. Messages in flight then have no
        outcome, and the broker may have accepted them. No message's timeout includes the time spent
        in ``publications``.

        Args:
            publications: The messages, taken only while the window has room.
            policy: The timeout and the resends of each message.
            declare: Called once per connection, to declare missing exchanges, queues and bindings.
            redeclare: Called if a message is returned or an exchange does not exist; the message is
                then sent once more.
            done: Called with each message that is confirmed, or has an error.

        Raises:
            RabbitDelayError: Nothing can be published any more, or the topology cannot be declared.
                All messages that were taken and have no outcome get this error; no more messages
                are taken.
        """
        source = partial(next, iter(publications), None)
        Run(self, source, policy, declare=declare, redeclare=redeclare, done=done).go_on()

    def channel(self, deadline: float, on_settled: OnSettled) -> ConfirmChannel:
        """Return an open channel; open the connection if needed.

        Args:
            deadline: When to give up, on the clock of :func:`time.monotonic`. Every wait ends by
                then, but connecting to a host that answers every step late may take longer.
            on_settled: Called with each publication that is settled.
        """
        if self._channel is not None and self._channel.open:
            self._channel.unconfirmed.on_settled = on_settled
            return self._channel
        self.declared.clear()
        kombu_internals.connect(self.connection, deadline)
        with Wire(self.connection).all_answers_by(deadline):
            self._channel = ConfirmChannel(self.connection, on_settled)
        if self._is_alone:
            self._channel.wire.receive_ahead()
        return self._channel

    def discard(self) -> None:
        """Drop the connection without AMQP's handshake; :meth:`channel` opens a new one."""
        self._channel = None
        kombu_internals.drop_connection(self.connection)

    def close_channel(self) -> None:
        """Close the channel; the connection stays open for other users."""
        channel, self._channel = self._channel, None
        if channel is not None:
            # All messages are settled, so a failed close does no harm.
            errors = (*self.connection.connection_errors, *self.connection.channel_errors)
            with kombu_internals.conversation(self.connection), suppress(*errors):
                channel.close(CLOSE_TIMEOUT)

    def close(self) -> None:
        """Close the channel and the connection; the publisher cannot be used again."""
        if self._channel is not None and self._channel.blocked is not None:
            self.discard()  # the broker would not answer
        with kombu_internals.closing(self.connection):
            self.close_channel()

    def give_up(self, error: exceptions.RabbitDelayError) -> None:
        """Give up on the messages in flight, and leave a connection that the next caller can use.

        Late answers must not count for the next caller's messages, so the connection is dropped.
        The publisher's own connection is kept while the broker blocks it: the broker does not
        notice that a blocked connection was closed, so dropped connections would pile up there
        until the alarm is over.
        """
        if self._is_alone and self._channel and isinstance(error, exceptions.ConnectionBlocked):
            self._channel.give_up()
        else:
            self.discard()


class Run(publish_loop.PublishLoop):
    """Runs the publish loop on one connection after another.

    Args:
        publisher: The publisher whose connection is used.
        source: Returns the next message, or None if there is no message at present.
        policy: As for :meth:`Publisher.publish_all`, like ``declare``, ``redeclare`` and ``done``.
    """

    def __init__(
        self,
        publisher: Publisher,
        source: publish_loop.NextPublication,
        policy: publish_loop.PublishPolicy,
        *,
        declare: Declaration | None = None,
        redeclare: Declaration | None = None,
        done: Callable[[Publication], None] | None = None,
    ) -> None:
        super().__init__(source, policy, done or (lambda _: None), redeclare)
        self._publisher = publisher
        self._connection = publisher.connection
        self._errors = (*self._connection.connection_errors, *self._connection.channel_errors)
        self._declare = declare
        self._losses = 0
        self._lost_at = 0.0
        #: The number of consecutive failed attempts to connect, and when to give up.
        self._unreached = 0
        self._reach_by = math.inf

    def go_on(self, until_written: bool = False) -> None:
        """Publish until all messages have their outcome, or only until all are written.

        Raises:
            RabbitDelayError: Nothing can be published any more, or the topology cannot be declared;
                all messages have this error. After any other exception, the messages have no
                outcome.
        """
        # Drop the connection if interrupted: late confirms must not count for the next caller.
        with publish_loop.unwrap_callers_errors(), kombu_internals.conversation(self._connection):
            while self.has_more() and (not until_written or self.has_unwritten):
                try:
                    if self._channel is None or not self._channel.open:
                        # kombu may have reconnected in the meantime.
                        self.take_back()
                        self._open()
                    self._publish(until_written)
                except publish_loop.MayPass as refused:
                    self._try_again(*refused.args)
                except exceptions.RabbitDelayError as error:
                    self._fail_all_and_raise(error)
                except NotAllowed as refused:
                    # Do not retry: the virtual host is missing or not accessible.
                    self.take_back()
                    self._publisher.discard()
                    if self.has_more():
                        self._fail_all_and_raise(self._lost(refused))
                except self._errors as lost:
                    self._try_again(lost)

    def _open(self) -> None:
        """Open a channel, use it, and declare missing exchanges, queues and bindings."""
        if self.policy.reconnects is not None and not self._unreached:
            limit = self._connection.connect_timeout or kombu_internals.CONNECT_TIMEOUT
            self._reach_by = time.monotonic() + limit
        deadline = min(self.next_waiting.deadline, self._reach_by)
        try:
            channel = self._publisher.channel(deadline, self.settled)
        except AccessRefused as refused:
            raise self._lost(refused) from refused
        except self._connection.connection_errors:
            self._unreached += 1
            raise
        self._unreached, self._reach_by = 0, math.inf
        self.use(channel)
        self._ensure_declared(self._declare, self.next_waiting)

    def _ensure_declared(
        self, declare: Declaration | None, publication: Publication, again: bool = False
    ) -> None:
        declared = self._publisher.declared
        if declare is None or (declare in declared and not again):
            return
        channel = self.channel
        if channel.blocked is not None and not channel.drain(
            lambda: channel.blocked is None, publication.deadline
        ):
            raise exceptions.ConnectionBlocked(*publication.address(), publish_loop.BLOCKED)
        try:
            with channel.wire.all_answers_by(publication.deadline):
                declare(self._connection)
            declared.add(declare)
        except TimeoutError as slow:
            raise TimeoutError(NOT_DECLARED) from slow
        except self._connection.channel_errors as refused:
            if isinstance(refused, ChannelError) and refused.method_sig == spec.Basic.Publish:
                raise  # a message in flight made the broker close the channel
            kinds = exceptions.DeclarationRefused, exceptions.DeclarationNotPermitted
            error = error_of(refused, publication.address(), *kinds)
            if isinstance(refused, NotFound) and PASSING_REASONS.search(str(refused)):
                error.__cause__ = refused
                raise publish_loop.MayPass(error) from refused
            raise error from refused

    def _publish(self, until_written: bool) -> None:
        """Publish on one channel until no message is left, or all are written."""
        try:
            while self.has_more():
                self.send()
                if until_written and not self.has_unwritten:
                    self.flush()
                    return
                self.wait()
        except ChannelError as closed:
            # py-amqp reopens a channel that the broker closed, but not in confirm mode.
            self._publisher.close_channel()
            culprit = self.channel_closed(closed)
            if culprit is None or culprit.declare is not None:
                return  # the other messages have other destinations
            if isinstance(closed, AccessRefused | NotFound):
                assert culprit.error is not None
                # Further messages would fail too.
                raise culprit.error.copy(culprit.may_have_arrived) from closed

    def _try_again(self, error: BaseException) -> None:
        """Drop the connection, pause, and continue, perhaps with another node.

        Args:
            error: The error of this attempt.
        """
        self.take_back()
        self._publisher.discard()
        self._connection.maybe_switch_next()
        if not self.has_more():
            return
        if self.last_settled > self._lost_at:
            self._losses = 0
        self._losses += 1
        pause = self.policy.pause(self._unreached or self._losses)
        late = time.monotonic() + pause >= min(self.next_waiting.deadline, self._reach_by)
        reconnects = self.policy.reconnects
        is_unreachable = reconnects is not None and self._unreached > reconnects
        if self.policy.is_over(self._losses) or is_unreachable or late:
            if not isinstance(error, exceptions.RabbitDelayError):
                error = self._lost(error)
            self._fail_all_and_raise(error)
        self._lost_at = time.monotonic()
        time.sleep(pause)

    def _lost(self, cause: BaseException) -> exceptions.ConnectionLost:
        broker, attempt = shown_broker(self._connection), max(self._losses, 1)
        reason = f"no connection to {broker}, attempt {attempt}: {reason_of(cause)}"
        error = exceptions.ConnectionLost(*self.next_waiting.address(), reason)
        error.__cause__ = cause
        return error

    def _fail_all_and_raise(self, error: exceptions.RabbitDelayError) -> NoReturn:
        """Finish all messages with this error, and raise it."""
        if self.take_back():
            self._publisher.give_up(error)
        self.fail_all(error)
        raise error from error.__cause__


@dataclass(eq=False, repr=False)
class Pipeline:
    """Writes every message at once, and reads its confirm later; not thread-safe.

    Attributes:
        publisher: The publisher; nothing else may use it while messages are in flight.
        redeclare: As for :meth:`.Publisher.publish_all`; does not declare the messages'
            destinations.
        done: Called with each message that is confirmed or has an error. The function must not
            raise errors or publish.
    """

    publisher: Publisher
    redeclare: Declaration | None
    done: Callable[[Publication], None]
    #: The messages without an outcome, in their order.
    _open: dict[Publication, None] = field(default_factory=dict)
    _run: Run | None = None
    _left_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether a message was published since the last :meth:`confirm`."""
        return self._run is not None

    def publish(self, publication: Publication, policy: publish_loop.PublishPolicy) -> None:
        """Write a message, and return; wait only while the window is full.

        Args:
            publication: The message, with its ``declare``.
            policy: The timeout and the resends. If the policy changes, the earlier messages are
                confirmed first.

        Raises:
            RabbitDelayError: The message could not be published.
        """
        if self._run is not None and self._run.policy != policy:
            self.confirm()
        if self._run is None:
            self._run = Run(
                *(self.publisher, lambda: None, policy),
                redeclare=self.redeclare,
                done=self._finish,
            )
        else:
            self._excuse(self._run)
        self._open[publication] = None
        self._run.add(publication)
        self._go_on(self._run, until_written=True)
        if publication.error is not None and publication not in self._open:
            raise publication.error

    def confirm(self) -> None:
        """Wait until all messages are confirmed or failed; the publisher is then free."""
        if self._run is not None:
            self._excuse(self._run)
            self._go_on(self._run)
            self._run = None

    def _excuse(self, run: Run) -> None:
        """Extend all deadlines by the time of the caller's own work: no answers were read then."""
        away = time.monotonic() - self._left_at
        if away >= publish_loop.READ_EVERY:
            run.excuse(away)

    def _go_on(self, run: Run, until_written: bool = False) -> None:
        try:
            run.go_on(until_written)
        except exceptions.RabbitDelayError:
            self._run = None  # all messages have this error
        except BaseException as interrupt:
            self._run = None
            for publication in list(self._open):
                reason = f"interrupted before the broker confirmed the message: {interrupt!r}"
                publication.error = exceptions.PublishError(*publication.address(), reason)
                # The value is True even if no byte of the message was written.
                publication.error.may_have_arrived = bool(publication.routing_key)
                self._finish(publication)
            raise
        finally:
            self._left_at = time.monotonic()

    def _finish(self, publication: Publication) -> None:
        self._open.pop(publication, None)
        self.done(publication)


class PublisherPool:
    """Lends publishers to threads, and keeps their connections open.

    Args:
        connection: The template: every publisher opens a clone of it on first use.
        limit: The maximum number of publishers; a thread waits until a publisher is free. None:
            every use opens a new connection.

    Attributes:
        connection: The template.
    """

    def __init__(self, connection: Connection, limit: int | None = 10) -> None:
        self.connection = connection
        self._limit = limit
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """Fill the pool with publishers that are not connected.

        In a forked process, the parent's publishers are dropped without closing them, because
        closing would end the parent's connections.
        """
        clones = [self.connection.clone() for _ in range(self._limit or 0)]
        self._publishers = [Publisher(each, is_alone=True) for each in clones]
        self._free: LifoQueue[Publisher] = LifoQueue()
        for each in self._publishers:
            self._free.put(each)

    @contextmanager
    def acquire(self, timeout: float | None = None) -> Iterator[Publisher]:
        """Borrow a publisher for the length of a ``with`` block.

        Args:
            timeout: Seconds to wait for a free publisher; None for no limit.

        Raises:
            NoPublisherFree: All publishers were in use for ``timeout`` seconds.
        """
        if not self._limit:
            with closing(Publisher(self.connection.clone(), is_alone=True)) as publisher:
                yield publisher
            return
        free = self._free
        try:
            publisher = free.get(timeout=timeout)
        except Empty as none_free:
            raise exceptions.NoPublisherFree(self._limit, timeout) from none_free
        try:
            yield publisher
        finally:
            # Return the publisher to its own queue: a fork or close() may have made a new queue.
            free.put(publisher)

    def close(self) -> None:
        """Close the connections of the pool; the pool can be used again."""
        publishers = self._publishers
        self._begin()
        for publisher in publishers:
            publisher.close()


_pools: WeakSet[PublisherPool] = WeakSet()


def _forget_parents_connections() -> None:
    for pool in _pools:
        pool._begin()


os.register_at_fork(after_in_child=_forget_parents_connections)
