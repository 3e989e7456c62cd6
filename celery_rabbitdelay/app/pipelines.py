"""Publish a task's message at once, or in a block with many messages in flight.

``app.rabbitdelay.pipeline()`` opens such a block.

A block belongs to the thread and the coroutine that opened it: a context variable holds the open
blocks, and each block knows its owner. Celery sends the members of a group through a separate
block, or through the caller's open block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final, NamedTuple, TypeVar

from celery.exceptions import Ignore, Reject
from kombu import Connection, Producer

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.exceptions import NoPublisherFree, RabbitDelayError, TasksNotConfirmed
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.message import Declaration, Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Pipeline, Publisher

logger = logging.getLogger(__name__)

ErrorT = TypeVar("ErrorT", bound=BaseException)

#: The minimum seconds for publishing, however long the wait for a publisher was.
MIN_TIMEOUT: Final = 0.1


class PublishedTask(NamedTuple):
    """A task whose message is published: the context of its :class:`.Publication`.

    Attributes:
        task: The task's name.
        task_id: The task's id.
        due_ms: When the task is due, in milliseconds since 1970-01-01 UTC.
        queue: The label of its queue.
    """

    task: str
    task_id: str
    due_ms: int
    queue: str


class TaskPipeline:
    """The delayed sends of one ``pipeline()`` block.

    Args:
        delays: The application's ``app.rabbitdelay``.
        producer: The producer of a group, whose connection is used; None to use a publisher of the
            pool, from the first send to the end of the block.
        outer: The block around this one.
    """

    def __init__(
        self, delays: Delays, producer: Producer | None, outer: TaskPipeline | None = None
    ) -> None:
        self.delays = delays
        self.outer = outer
        self._producer = producer
        self._owner = _owner()
        #: The producers of Celery's pool that send groups within the block.
        self._joined: list[Producer] = []
        self._borrowed = ExitStack()
        self._publisher: Publisher | None = None
        self._pipeline: Pipeline | None = None
        self._is_usable = True
        self._settled: deque[Publication] = deque()
        self._is_noting = False
        self._errors: dict[str, Exception] = {}
        #: The failed sends whose error was raised by the send itself.
        self._raised: set[Publication] = set()

    def takes(self, delays: Delays, connection: Connection | None) -> bool:
        """Return whether a send over a connection goes through this block.

        Args:
            delays: The ``app.rabbitdelay`` of the sending application.
            connection: The caller's own connection; None for the application's.
        """
        if delays is not self.delays or not self._is_usable or _owner() != self._owner:
            return False
        if delays.fake_broker is not None:
            return False  # a fake broker confirms at once
        if connection is None or self._producer is not None:
            return connection is (self._producer and self._producer.connection)
        return any(connection is each.connection for each in self._joined) and self._is_ready()

    def _is_ready(self) -> bool:
        """Return whether a publisher is available without waiting.

        Waiting could deadlock: the group holds a producer of Celery's pool, and a thread that holds
        a publisher may wait for that producer.
        """
        try:
            self.borrow(timeout=0)
        except NoPublisherFree:
            return False
        return True

    def borrow(self, timeout: float) -> Publisher:
        """Return the block's publisher.

        Raises:
            NoPublisherFree: All publishers of the pool were in use for ``timeout`` seconds.
        """
        if self._publisher is None:
            connection = None if self._producer is None else self._producer.connection
            # This block has no publisher yet: borrow one for the connection, or from the pool.
            borrowing = borrowed_publisher(self.delays, connection, timeout)
            self._publisher = self._borrowed.enter_context(borrowing)
            settings, topology = self.delays.settings, self.delays.topology
            redeclare = partial(declare, topology=topology)
            self._pipeline = Pipeline(
                self._publisher,
                redeclare if settings.declare == "auto" else None,
                self._settled.append,
            )
        return self._publisher

    def publish(self, publication: Publication, policy: PublishPolicy) -> None:
        """Write a task's message.

        Args:
            publication: The message, with its ``declare``.
            policy: How long, and how often, to try to publish the message.

        Raises:
            RabbitDelayError: The task was not sent; the end of the block does not repeat the error.
        """
        self.borrow(policy.timeout)
        assert self._pipeline is not None
        try:
            self._pipeline.publish(publication, policy)
        finally:
            if publication.error is not None:
                self._raised.add(publication)
            self._note_settled()

    @contextmanager
    def lent(self) -> Iterator[Publisher]:
        """Confirm all messages and lend the publisher; meanwhile, no send uses the block."""
        self._confirm()
        assert self._publisher is not None
        self._is_usable = False
        try:
            yield self._publisher
        finally:
            self._is_usable = True

    @property
    def has_publisher(self) -> bool:
        """Whether the block has a publisher yet."""
        return self._publisher is not None

    @contextmanager
    def joined(self, producer: Producer) -> Iterator[None]:
        """Redirect sends that use ``producer`` to this block."""
        self._joined.append(producer)
        try:
            yield
        finally:
            self._joined.remove(producer)

    def end(self) -> None:
        """Wait for all confirms, and return the publisher to its pool.

        Raises:
            TasksNotConfirmed: Some tasks are not confirmed. For a group, the first of their errors
                is raised, and its chain of causes ends with a ``TasksNotConfirmed``.
        """
        if _owner()[0] != self._owner[0]:
            return  # a fork: the connection is the parent's
        try:
            self._confirm()
        except BaseException as error:
            self._note_settled()
            if self._errors:
                _with_last_cause(error, TasksNotConfirmed(self._errors))
            raise
        finally:
            self._is_usable = False
            self._borrowed.close()
        if self._errors:
            not_confirmed = TasksNotConfirmed(self._errors)
            if self._producer is None:
                raise not_confirmed
            raise _with_last_cause(next(iter(self._errors.values())), not_confirmed)

    def _confirm(self) -> None:
        # A receiver of the signal ``delayed`` may send more.
        if self._pipeline is not None:
            while self._pipeline.is_running or self._settled:
                self._pipeline.confirm()
                self._note_settled()

    def _note_settled(self) -> None:
        """Count the tasks that have an outcome; send the signal ``delayed`` for confirmed ones.

        Not called while the broker's answers are read, because a receiver of the signal may send.
        The outermost call handles tasks that get their outcome during such a send.
        """
        if self._is_noting:
            return
        self._is_noting = True
        try:
            while self._settled:
                self._note(self._settled.popleft())
        finally:
            self._is_noting = False

    def _note(self, publication: Publication) -> None:
        sent: PublishedTask = publication.context
        error = publication.error
        recorder = self.delays.recorder
        recorder.record_send(sent.task, sent.queue, error is None, publication.resent)
        if error is None:
            signals.send(signals.delayed, self.delays.app, sent.task_id, sent.due_ms)
        elif publication in self._raised:
            self._raised.discard(publication)
        else:
            self._errors[sent.task_id] = error


def publish_task(
    delays: Delays,
    publication: Publication,
    policy: PublishPolicy,
    declares: Mapping[str, Declaration | None],
    pipeline: TaskPipeline | None,
    connection: Connection | None = None,
) -> None:
    """Publish the message of a task.

    Args:
        delays: The application's ``app.rabbitdelay``.
        publication: The message, with a :class:`PublishedTask` as its context.
        policy: How long, and how often, to try to publish the message.
        declares: The arguments ``declare`` and ``redeclare`` of :meth:`.Publisher.publish`.
        pipeline: The block that confirms the message; None if this function confirms it.
        connection: The caller's own connection, to be used instead of the pool's.
    """
    if pipeline is not None:
        publication.declare = declares["declare"]
        pipeline.publish(publication, policy)
        return
    began, is_confirmed = time.monotonic(), False
    with borrowed_publisher(delays, connection, policy.timeout) as publisher:
        left = max(policy.timeout - (time.monotonic() - began), MIN_TIMEOUT)
        try:
            publisher.publish(publication, policy._replace(timeout=left), **declares)
            is_confirmed = True
        finally:
            sent: PublishedTask = publication.context
            delays.recorder.record_send(sent.task, sent.queue, is_confirmed, publication.resent)


@contextmanager
def borrowed_publisher(
    delays: Delays, connection: Connection | None = None, timeout: float | None = None
) -> Iterator[Publisher]:
    """Borrow a publisher: the open block's, one on the caller's connection, or one of the pool.

    Args:
        delays: The application's ``app.rabbitdelay``.
        connection: The caller's own connection; None for the application's.
        timeout: Seconds to wait for a publisher of the pool; None for
            ``rabbitdelay_confirm_timeout``.

    Raises:
        NoPublisherFree: All publishers of the pool were in use until the timeout.
    """
    pipeline = current_pipeline(delays, connection)
    if delays.fake_broker is not None:
        yield delays.fake_broker.publisher
    elif pipeline is not None and pipeline.has_publisher:
        with pipeline.lent() as publisher:
            yield publisher
    elif connection is None:
        limit = delays.settings.confirm_timeout if timeout is None else timeout
        with delays.pool.acquire(limit) as publisher:
            yield publisher
    else:
        publisher = Publisher(connection)
        try:
            yield publisher
        finally:
            publisher.close_channel()


#: The innermost block that is open in this context; another thread may have opened it.
_innermost: Final[ContextVar[TaskPipeline | None]] = ContextVar("pipeline", default=None)


def current_pipeline(delays: Delays, connection: Connection | None = None) -> TaskPipeline | None:
    """Return the block that a send goes through; None if the send waits for its own confirm.

    Args:
        delays: The application's ``app.rabbitdelay``.
        connection: The caller's own connection; None for the application's.
    """
    pipeline = _innermost.get()
    while pipeline is not None and not pipeline.takes(delays, connection):
        pipeline = pipeline.outer
    return pipeline


@contextmanager
def open_pipeline(delays: Delays) -> Iterator[None]:
    """Open a block, or join the block that is already open.

    Args:
        delays: The application's ``app.rabbitdelay``.

    Raises:
        TasksNotConfirmed: Some tasks are not confirmed.
    """
    if current_pipeline(delays) is not None:
        yield
        return
    with _opened(TaskPipeline(delays, None, _innermost.get())):
        yield


@contextmanager
def group_pipeline(
    delays: Delays, acquiring: AbstractContextManager[Producer], is_given: bool
) -> Iterator[Producer]:
    """Acquire the producer of a group, and send the group's delayed members through a pipeline.

    Args:
        delays: The application's ``app.rabbitdelay``.
        acquiring: Celery's context, which returns the producer.
        is_given: Whether the caller has passed the producer.

    Raises:
        RabbitDelayError: A member is not confirmed. The member's own error is raised; its chain of
            causes ends with a :class:`.TasksNotConfirmed`, which names all unconfirmed members.
    """
    outer = None if is_given else current_pipeline(delays)
    with acquiring as producer:
        if outer is not None:
            with outer.joined(producer):
                yield producer
            return
        if _innermost.get() and current_pipeline(delays, producer.connection):
            yield producer  # a group within a group
            return
        with _opened(TaskPipeline(delays, producer, _innermost.get())):
            yield producer


@contextmanager
def _opened(pipeline: TaskPipeline) -> Iterator[None]:
    token = _innermost.set(pipeline)
    try:
        yield
    except BaseException as error:
        try:
            pipeline.end()
        except RabbitDelayError as not_confirmed:
            is_rejected = isinstance(error, Reject) and not error.requeue  # type: ignore[attr-defined]
            if is_rejected or isinstance(error, Ignore):
                # A worker drops the task, but tasks sent in its place are not confirmed.
                raise not_confirmed from error
            logger.error("%s", not_confirmed)
            _with_last_cause(error, not_confirmed)
        raise
    else:
        pipeline.end()
    finally:
        with suppress(ValueError):  # a generator that is closed in another context
            _innermost.reset(token)


def _with_last_cause(error: ErrorT, cause: BaseException) -> ErrorT:
    """Append a cause to an error's chain of causes, unless both share one; return the error."""
    own, others = _chain(error), {id(each) for each in _chain(cause)}
    if not any(id(each) in others for each in own):
        own[-1].__cause__ = cause
    return error


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, without repetitions."""
    chain, seen = [error], {id(error)}
    while (cause := chain[-1].__cause__) is not None and id(cause) not in seen:
        chain.append(cause)
        seen.add(id(cause))
    return chain


def _owner() -> tuple[int, int, object]:
    """Return the current process, thread and coroutine."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    # gevent replaces ``get_ident``, so that every greenlet has its own identity.
    return os.getpid(), threading.get_ident(), task
