"""``app.rabbitdelay``: the delay levels of one Celery application."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import amqp
import celery
from celery.result import AsyncResult
from celery.signals import beat_init
from kombu import Connection
from kombu.transport import pyamqp

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import beat
from celery_rabbitdelay.app.celery_internals import eta_of, forget_connections, own_changes
from celery_rabbitdelay.app.instruments import JOBS_EXPIRED, REGISTRY, REGISTRY_FAILURES
from celery_rabbitdelay.app.metrics import Metrics
from celery_rabbitdelay.app.options import refuse_without_registry
from celery_rabbitdelay.app.pausing import Pausing
from celery_rabbitdelay.app.schedules import Schedules
from celery_rabbitdelay.app.sending.pipelines import current_pipeline, open_pipeline
from celery_rabbitdelay.app.sending.rows import Given, Report, send_one_by_one
from celery_rabbitdelay.app.sending.send_many import RowSender
from celery_rabbitdelay.app.sending.task_messages import function_to_send
from celery_rabbitdelay.app.sending.task_producer import MIN_TIMEOUT, StandIn
from celery_rabbitdelay.app.sending.templates import Templates
from celery_rabbitdelay.app.settings import PREFIX, Settings, checked
from celery_rabbitdelay.app.waiting_tasks import WaitingTasks
from celery_rabbitdelay.levels.delay import (
    TAKES_INSTANT,
    Delay,
    Due,
    milliseconds,
    tolerance_milliseconds,
)
from celery_rabbitdelay.levels.entities import DISTRIBUTE
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import check_complete, declare, on_declared
from celery_rabbitdelay.publishing.kombu_internals import cached_property
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.publisher_pool import PublisherPool
from celery_rabbitdelay.registry.connection import connect as connect_to_redis
from celery_rabbitdelay.registry.registry import Registry

logger = logging.getLogger(__name__)

beat_init.connect(beat.idle_beat, weak=False)

#: For how many seconds a task may be late, and is listed, in addition to ``rabbitdelay_retry_for``,
#: for which it is tried again if its queue does not take it.
REGISTRY_MARGIN: Final = 3600.0

#: How many coroutines send at the same time, each in a thread, if ``broker_pool_limit`` says none.
MAX_THREADS: Final = 10


class RabbitDelay(WaitingTasks, Pausing):
    """``app.rabbitdelay``: the delay levels of one application.

    Args:
        app: The application; its configuration is read when it is first needed.

    Attributes:
        recorder: The same as ``metrics``, which does not begin to count when it is read.
        stand_in: What takes the messages instead of the broker, in tests; None outside of them.
    """

    def __init__(self, app: celery.Celery) -> None:
        self.app = app
        self.recorder = Metrics()
        self.stand_in: StandIn | None = None
        self._has_warned = self._has_warned_of_loop = False
        #: By process: threads do not survive a fork.
        self._threads: dict[int, ThreadPoolExecutor] = {}

    @cached_property
    def settings(self) -> Settings:
        """The application's ``rabbitdelay_*`` settings, as they are when they are first used.

        Raises:
            InvalidSetting: One of them is wrong.
        """
        settings = Settings.of(self.app.conf, self._namespace)
        # Of a bound method, nothing shows a password.
        self._is_unchanged = own_changes(self.app, PREFIX).__eq__
        return settings

    def check_settings(self) -> None:
        """Refuse settings that were changed since they were first used; every send does so.

        Raises:
            InvalidSetting: One of them is wrong, or was changed.
        """
        settings = self.settings
        changes = own_changes(self.app, PREFIX)
        if not self._is_unchanged(changes):
            settings.check_unchanged(Settings.of(self.app.conf, self._namespace), self._namespace)
            self._is_unchanged = changes.__eq__

    @property
    def _namespace(self) -> str | None:
        namespace: str | None = getattr(self.app, "namespace", None)
        return namespace

    @property
    def topology(self) -> Topology:
        """The levels as exchanges, queues and bindings; ``topology.route(delay, queue_name)``."""
        return self.settings.topology

    @cached_property
    def pool(self) -> PublisherPool:
        """The pool of this process's publishers; its limit is ``broker_pool_limit``."""
        return PublisherPool(self.app.connection_for_write(), self.app.conf.broker_pool_limit)

    @property
    def schedules(self) -> Schedules:
        """Tasks that run again and again: ``put``, ``get``, ``all``, ``delete`` and more."""
        return Schedules(self.app)

    @cached_property
    def templates(self) -> Templates:
        """The messages that plain sends are written from."""
        return Templates(self)

    @cached_property
    def registry(self) -> Registry:
        """The registry of this process, which connects when it is first used.

        Raises:
            RegistryRequired: ``rabbitdelay_registry_url`` is not set.
            InvalidSetting: There is no such URL, or the package ``redis`` is missing.
        """
        settings = self.settings
        if settings.registry_url is None:
            raise exceptions.RegistryRequired("app.rabbitdelay.registry")
        if self.stand_in is not None:
            return self.stand_in.registry  # type: ignore[no-any-return]
        store = connect_to_redis(
            settings.registry_url, settings.registry_options, settings.registry_durability or 0
        )
        store.on_call = self._note_call
        margin = settings.retry_for + REGISTRY_MARGIN
        keep_ms = milliseconds(max(settings.registry_keep, margin))
        prefix = settings.registry_prefix or settings.prefix
        registry = Registry(store, prefix, keep_ms, milliseconds(margin))
        registry.jobs.on_expired = partial(self.recorder.record, {JOBS_EXPIRED: 1})
        return registry

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process, counted from now on: a ``prometheus_client`` collector.

        Raises:
            ImportError: The package ``prometheus-client`` is missing.
        """
        self.recorder.begin()
        return self.recorder

    @cached_property
    def available(self) -> bool:
        """Whether the application's broker is RabbitMQ, over py-amqp: the levels need both."""
        return _is_rabbitmq(self.app.connection_for_write())

    @property
    def has_registry(self) -> bool:
        """Whether there is a registry, and the broker has levels."""
        return self.available and self.settings.registry_url is not None

    def is_available(self, connection: Connection | None) -> bool:
        """Return whether a broker is RabbitMQ, over py-amqp: delays can wait in its levels.

        Args:
            connection: The caller's own connection; None for the application's.
        """
        return self.available if connection is None else _is_rabbitmq(connection)

    def _note_call(self, seconds: float, has_succeeded: bool) -> None:
        self.recorder.record({REGISTRY: seconds, REGISTRY_FAILURES: int(not has_succeeded)})

    def warn_treated_as_countdown(self, why: str) -> None:
        """Log once that a delay does not wait in the levels, but is treated as a countdown.

        Args:
            why: The reason, and what happens to the task.
        """
        if not self._has_warned:
            self._has_warned = True
            logger.warning("A delay is treated as Celery's own countdown: %s.", why)

    def warn_blocked_loop(self, seconds: float) -> None:
        """Log once that a send has blocked this thread's event loop, if there is one, for long.

        Args:
            seconds: How long it took. From asyncio's own ``slow_callback_duration`` on, it is long.
        """
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            if not self._has_warned_of_loop and seconds >= loop.slow_callback_duration:
                self._has_warned_of_loop = True
                logger.warning(
                    "apply_async has blocked the event loop for %.3f s. In a coroutine, write "
                    "'await app.rabbitdelay.send(task, args, delay=...)' instead.",
                    seconds,
                )

    def close(self) -> None:
        """Close the connections of the pool."""
        if threads := self._threads.pop(os.getpid(), None):
            threads.shutdown(wait=False)
        if "pool" in self.__dict__:
            self.pool.close()
        if "registry" in self.__dict__:
            self.registry.store.close()

    def reset(self) -> None:
        """Forget settings and connections, also Celery's: the next use reads and connects anew."""
        self.close()
        for name in ("settings", "pool", "templates", "registry", "available"):
            self.__dict__.pop(name, None)
        forget_connections(self.app)

    @contextmanager
    def replaced_by(self, stand_in: StandIn) -> Iterator[None]:
        """Let something else take all messages, and answer instead of Redis, during a block."""
        former = self.stand_in, self.__dict__.pop("registry", None)
        self.stand_in = stand_in
        try:
            yield
        finally:
            self.stand_in, registry = former
            self.__dict__.pop("registry", None)
            if registry is not None:
                self.__dict__["registry"] = registry

    @contextmanager
    def publisher(
        self, connection: Connection | None = None, timeout: float | None = None
    ) -> Iterator[Publisher]:
        """Borrow a confirmed publisher.

        Args:
            connection: The caller's own connection, to be used instead of the pool's.
            timeout: Seconds to wait for a publisher of the pool; None for
                ``rabbitdelay_confirm_timeout``.

        Raises:
            NoPublisherFree: All publishers of the pool were in use for that long.
        """
        pipeline = current_pipeline(self, connection)
        if self.stand_in is not None:
            yield self.stand_in.publisher
        elif pipeline is not None and pipeline.has_publisher:
            with pipeline.lent() as publisher:
                yield publisher
        elif connection is None:
            with self.pool.acquire(timeout or self.settings.confirm_timeout) as publisher:
                yield publisher
        else:
            publisher = Publisher(connection)
            try:
                yield publisher
            finally:
                publisher.close_channel()

    def declare(self, connection: Connection) -> None:
        """Declare the levels on a broker, as a worker does at its start.

        Declares all of them again (about 50 ms), which restores those that somebody deleted by
        hand. With ``rabbitdelay_declare = "never"`` they are only checked.

        Raises:
            LayoutConflict: Another layout is declared under the prefix.
            TopologyIncomplete: Something is missing, and the settings forbid to declare it.
        """
        if self.settings.declare == "auto":
            declare(connection, self.topology)
        else:
            check_complete(connection, self.topology)

    def check(self, timeout: float = 1.0) -> None:
        """Raise if a delayed task could not be sent now, for the readiness of a web server.

        Connects like a send and publishes a message that reaches no queue: RabbitMQ has to answer
        in time, and must not block publishers. It does not look into the levels' queues. With
        ``rabbitdelay_declare = "never"``, the levels have to exist; otherwise, the first send
        declares them. A broker that is not RabbitMQ is only connected to.

        Args:
            timeout: Seconds that it may take.

        Raises:
            PublishError: A send would raise the same.
            NoPublisherFree: All connections of the pool were in use for all of that time.
            TopologyIncomplete: The levels do not exist, and must not be declared.
        """
        if not self.available:
            with self.app.connection_for_write(connect_timeout=timeout) as connection:
                connection.ensure_connection(max_retries=1)
            return
        began, marker = time.monotonic(), self.topology.identity.marker.name
        complete = partial(check_complete, topology=self.topology, by_marker=True)
        with (
            self.publisher(timeout=timeout) as publisher,
            # No queue is bound to this exchange. It may be missing, and a producer needs no
            # permission for it.
            suppress(exceptions.MessageReturned, exceptions.MessageNotPermitted),
        ):
            publisher.publish(
                # RabbitMQ holds a message back, if it blocks publishers, only for its body.
                amqp.Message(b"check"),
                lambda: (marker, ""),
                timeout=max(timeout - (time.monotonic() - began), MIN_TIMEOUT),
                resends=1,  # an idle connection may be lost
                declare=complete if self.settings.declare == "never" else None,
            )

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Let the delayed sends of a block not wait for their confirms; its end does.

        In the block, a delayed send by any of Celery's ways writes its message and returns. At most
        ``rabbitdelay_max_unconfirmed`` are unconfirmed. A send with ``key``, ``job`` or ``track``,
        a ``retry``, and a send over the caller's own connection are confirmed before they return.
        Sends of other threads and coroutines do not belong to it; a block within a block is part of
        that one. If the block raises, what was sent is confirmed as well, and what is not is told
        by a :class:`.TasksNotConfirmed` at the end of the error's chain of causes.

        Raises:
            TasksNotConfirmed: Some tasks are not confirmed; the error names them. Those whose send
                has raised are not among them.
        """
        with open_pipeline(self):
            yield

    async def send(
        self,
        task: celery.Task[Any, Any] | str,
        args: Any = None,
        kwargs: Any = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Send a task from a coroutine: ``apply_async`` in a thread; the event loop goes on.

        As many run at the same time as ``broker_pool_limit`` says; further ones wait for a thread,
        and the wait counts towards the timeout. If this is cancelled before a thread has begun,
        nothing is sent. After that, the thread goes on, and the task may arrive.

        Args:
            task: The task, or its name.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            **options: Further options of ``apply_async``: ``delay``, ``task_id``, ``queue``, ...

        Raises:
            NoPublisherFree: No thread was free within the timeout. Nothing was sent.
            Exception: What ``apply_async`` raises.
        """
        timeout = options.get("confirm_timeout")
        timeout = self.settings.confirm_timeout if timeout is None else timeout
        deadline = time.monotonic() + checked("confirm_timeout", timeout)

        def send() -> AsyncResult[Any]:
            left = max(deadline - time.monotonic(), MIN_TIMEOUT)
            given = {**options, "confirm_timeout": left}
            result: AsyncResult[Any] = function_to_send(self.app, task)(args, kwargs, **given)
            return result

        limit, process = self.app.conf.broker_pool_limit or MAX_THREADS, os.getpid()
        if process not in self._threads:
            threads = ThreadPoolExecutor(limit, "rabbitdelay-send")
            self._threads.setdefault(process, threads)
        work = self._threads[process].submit(copy_context().run, send)
        sending = asyncio.wrap_future(work)
        try:
            await asyncio.wait([sending], timeout=timeout)
            if not sending.done() and work.cancel():
                raise exceptions.NoPublisherFree(limit, timeout)
            return await sending
        finally:
            sending.cancel()

    def send_many(
        self,
        task: celery.Task[Any, Any] | str,
        rows: Iterable[Given],
        *,
        tolerance: Delay = 0,
        envelopes: bool | None = None,
        progress: Callable[[Report], None] | None = None,
        connection: Connection | None = None,
        **options: Any,
    ) -> Report:
        """Send a task many times, with ``rabbitdelay_max_unconfirmed`` messages in flight.

        Every row is confirmed when this returns. Rows that are due in the same tick travel in one
        message, an envelope, which distribution unpacks. Tasks that do not wait in the levels
        (``rabbitdelay=False``, another broker, ``task_always_eager``), and those of Celery's
        message protocol 1, are sent one by one with ``apply_async``.

        Args:
            task: The task, or its name.
            rows: A :class:`~celery_rabbitdelay.Row`, or a mapping of its fields, for each call.
                A generator is read as rows are sent, never as a whole. A delay counts from the
                moment when its row is taken.
            tolerance: Seconds, or a timedelta, that each may start later if that saves stops or
                fills envelopes.
            envelopes: Whether rows share messages. None: if ``rabbitdelay_modules`` has
                distribution.
            progress: Called with the report every half second, and at the end.
            connection: The caller's own connection, to be used instead of the pool's.
            **options: Further options of ``apply_async``, for all rows: ``queue``, ``priority``,
                ``headers``, ``expires``, ...

        Returns:
            The report on what was sent.

        Raises:
            UnknownOption: An option belongs to each row, such as ``delay``; or it is a producer.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
            RowsNotConfirmed: Some rows are not confirmed; the error names them. After 1,000 of
                them, or if the broker cannot be reached, no further rows are taken.
            NeedsDistribution: Envelopes, or the options, need distribution, which no worker serves.
        """
        for name, reason in _REFUSED.items():
            if options.get(name) is not None:
                raise exceptions.UnknownOption(name, options[name], reason)
        self.check_settings()
        refuse_without_registry(options, self.app)
        if envelopes is None:
            envelopes = DISTRIBUTE in self.settings.modules
        tolerance_ms = tolerance_milliseconds(tolerance)
        registered: Any = self.app.tasks.get(task) if isinstance(task, str) else task
        if (
            not self.is_available(connection)
            or self.app.conf.task_always_eager
            or self.app.conf.task_protocol == 1
            or not getattr(registered, "rabbitdelay", True)
        ):
            if connection is not None:
                options["connection"] = connection
            return send_one_by_one(
                self.app, task, rows, progress, {**options, "tolerance": tolerance}
            )

        sender = RowSender(self, connection, task, tolerance_ms, envelopes, progress, options)
        return sender.send(rows)

    def due(
        self,
        delay: Delay | None,
        countdown: float | None,
        eta: datetime | str | None,
        tolerance_ms: int = 0,
    ) -> Due:
        """Return when a task is due: ``delay`` counts first, then ``countdown``, then ``eta``.

        Raises:
            InvalidDelay: A time that is not finite, or an ``eta`` that is not ISO 8601.
            InvalidDelayType: A value that is neither a length of time nor an instant.
        """
        if delay is not None:
            return Due.after(delay, tolerance_ms)
        if countdown or eta is None:
            return Due.after(countdown or 0, tolerance_ms)
        instant = eta_of(eta, UTC)
        if instant is None:
            error = exceptions.InvalidDelay if isinstance(eta, str) else exceptions.InvalidDelayType
            raise error(eta, TAKES_INSTANT, "eta")
        return Due.at(instant, tolerance_ms)

    def bind_declared_queue(self, queue_name: str, message_count: int, consumer_count: int) -> None:
        """Bind a queue that was just declared to the levels: kombu's ``on_declared``.

        An exclusive queue is left alone: only the connection that declared it can bind it.
        """
        queue = self.app.amqp.queues.get(queue_name)
        if queue is not None and queue.exclusive:
            return
        if self.available and self.settings.declare == "auto":
            with self.app.connection_for_write() as connection:
                if queue is not None:
                    # Tasks may be sent to another broker than the one that it was declared on.
                    queue = queue(connection)
                    queue.on_declared = None
                    queue.declare()
                hook = on_declared(connection, self.topology)
                hook(queue_name, message_count, consumer_count)


#: The options of ``apply_async`` that ``send_many`` refuses, with what to do instead.
_REFUSED: Final = {
    **dict.fromkeys(
        ("delay", "countdown", "eta", "task_id", "key"),
        "give it to each row, as its delay, eta, task_id or key",
    ),
    **dict.fromkeys(("producer", "publisher"), "give the connection to use as connection"),
}


def _is_rabbitmq(connection: Connection) -> bool:
    return isinstance(connection.transport, pyamqp.Transport)
