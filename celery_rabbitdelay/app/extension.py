"""``app.rabbitdelay``: the delay levels of one Celery application."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import amqp
from celery.signals import beat_init
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.app.copies import function_to_send
from celery_rabbitdelay.app.delays import DelayingCelery, Delays
from celery_rabbitdelay.app.options import (
    BESIDE_STAMPS,
    Args,
    Kwargs,
    Result,
    TaskOrName,
    without_stamps,
)
from celery_rabbitdelay.app.pipelines import MIN_TIMEOUT, borrowed_publisher, open_pipeline
from celery_rabbitdelay.app.rows import Given, Report
from celery_rabbitdelay.app.seams import additions_of, checked_added_options
from celery_rabbitdelay.app.send_many import RowSender, send_one_by_one
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.delay import Delay, tolerance_milliseconds
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.declaration import check_complete, on_declared
from celery_rabbitdelay.publishing.kombu_internals import closing
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy

if TYPE_CHECKING:
    from celery.beat import Service

    from celery_rabbitdelay.metrics.collector import HasMetrics
    from celery_rabbitdelay.registry.waiting import Waiting
    from celery_rabbitdelay.schedules.addition import HasSchedules

    class Added(
        Waiting,
        HasSchedules,
        HasMetrics,
    ):
        """The methods of all additions, for type checkers: a line for each class."""

else:

    class Added:
        """The methods of additions, which are looked up when they are used."""

        def __getattr__(self, name: str) -> Any:
            """Return the method, or attribute, that an addition adds.

            Raises:
                AdditionMissing: The addition's folder was deleted.
            """
            if name not in additions.methods:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.part(additions.load(additions.methods[name])), name)


logger = logging.getLogger(__name__)


def _beat_starts(sender: Service, **_: object) -> None:
    delays = getattr(sender.app, "rabbitdelay", None)
    if isinstance(delays, Delays):
        for each in delays.part(additions_of):
            each.beat_starts(sender)


beat_init.connect(_beat_starts, weak=False)

#: The number of threads that send for coroutines, if ``broker_pool_limit`` is not set.
MAX_THREADS: Final = 10


class RabbitDelay(Added, Delays):
    """``app.rabbitdelay``: the delay levels of one application.

    Args:
        app: The application; its configuration is read when it is first needed.
    """

    if TYPE_CHECKING:

        def __init__(self, app: DelayingCelery) -> None: ...

    def check(self, timeout: float = 1.0) -> None:
        """Raise an error unless delayed tasks can be sent: a readiness check for web servers.

        The check connects like a send, and publishes a message that reaches no queue: RabbitMQ has
        to answer in time, and must not block publishers. The levels' queues are not checked. With
        ``rabbitdelay_declare = "never"``, the levels have to exist; otherwise, the first send
        declares them. With a broker other than RabbitMQ, the check only connects.

        Args:
            timeout: Seconds that the check may take.

        Raises:
            PublishError: A send would raise the same error.
            NoPublisherFree: All connections of the pool were in use for ``timeout`` seconds.
            TopologyIncomplete: The levels do not exist, and must not be declared.
        """
        if not self.available:
            with closing(self.app.connection_for_write(connect_timeout=timeout)) as connection:
                connection.ensure_connection(max_retries=1)
            return
        began, marker = time.monotonic(), self.topology.identity.marker.name
        complete = partial(check_complete, topology=self.topology, by_marker=True)
        with (
            borrowed_publisher(self, timeout=timeout) as publisher,
            # No queue is bound to this exchange. The exchange may be missing, and a producer needs
            # no permission on it.
            suppress(exceptions.MessageReturned, exceptions.MessageNotPermitted),
        ):
            left = max(timeout - (time.monotonic() - began), MIN_TIMEOUT)
            publisher.publish(
                # When RabbitMQ blocks publishers, it stops reading at the body of a message.
                Publication.of(amqp.Message(b"check"), lambda: (marker, "")),
                PublishPolicy(left, resends=1),  # an idle connection may be lost
                declare=complete if self.settings.declare == "never" else None,
            )

    def is_blocked(self, timeout: float = 1.0) -> bool:
        """Return whether the broker blocks publishers (memory or disk alarm): nothing can be sent.

        Args:
            timeout: Seconds that the broker may take to answer; it reports a block at once.
        """
        try:
            self.check(timeout)
        except exceptions.ConnectionBlocked:
            return True
        except (exceptions.RabbitDelayError, OperationalError):
            pass  # the caller reports an unreachable broker
        return False

    def pipeline(self) -> AbstractContextManager[None]:
        """Send tasks within a block without waiting for confirms; the end of the block waits.

        In the block, a delayed send of any kind writes its message and returns. At most
        ``rabbitdelay_max_unconfirmed`` messages are unconfirmed. A send with ``key``, ``job`` or
        ``track``, a ``retry``, and a send over the caller's own connection are confirmed before
        they return.
        Sends of other threads and coroutines do not belong to the block. A nested block is part of
        the outer block. If the block raises an error, the end of the block also waits for the
        confirms. If some tasks are not confirmed, the error's chain of causes ends with a
        :class:`.TasksNotConfirmed`, which names them.

        Raises:
            TasksNotConfirmed: Some tasks are not confirmed; the error names them, except tasks
                whose send raised an error at once.
        """
        return open_pipeline(self)

    async def send(
        self,
        task: TaskOrName,
        args: Args = None,
        kwargs: Kwargs = None,
        **options: object,
    ) -> Result:
        """Send a task from a coroutine, by ``apply_async`` in a thread.

        At most ``broker_pool_limit`` sends run at the same time; further sends wait for a thread,
        and the wait counts towards the timeout. If the coroutine is cancelled before its thread has
        begun, nothing is sent. A thread that has begun continues, and the task may arrive.

        Args:
            task: The task, or its name.
            args: The task's positional arguments.
            kwargs: The task's keyword arguments.
            **options: Further options of ``apply_async``: ``delay``, ``task_id``, ``queue``, ...

        Raises:
            NoPublisherFree: No thread was free within the timeout. Nothing was sent.
            Exception: Any error of ``apply_async``.
        """
        own, _ = without_stamps(options)
        timeout = own.get("confirm_timeout")
        timeout = self.settings.confirm_timeout if timeout is None else timeout
        deadline = time.monotonic() + Settings.checked("confirm_timeout", timeout)

        def send() -> Result:
            left = max(deadline - time.monotonic(), MIN_TIMEOUT)
            given = {**options, BESIDE_STAMPS: {"confirm_timeout": left}}
            result: Result = function_to_send(self.app, task)(args, kwargs, **given)
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
        task: TaskOrName,
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
        (``rabbitdelay=False``, another broker, ``task_always_eager``) are sent one by one with
        ``apply_async``.

        Args:
            task: The task, or its name.
            rows: A :class:`~celery_rabbitdelay.Row`, or a mapping of its fields, for each call.
                A generator is read as rows are sent, never as a whole. A delay counts from the
                moment when its row is read.
            tolerance: Seconds, or a timedelta, by which a task may start late if that saves stops
                or fills envelopes.
            envelopes: Whether rows share messages. None: they do if ``rabbitdelay_modules`` has
                distribution.
            progress: Called with the report every half second, and at the end.
            connection: The caller's own connection, to be used instead of the pool's.
            **options: Further options of ``apply_async``, for all rows: ``queue``, ``priority``,
                ``headers``, ``expires``, ...

        Returns:
            The report.

        Raises:
            UnknownOption: The option belongs in a row, such as ``delay``, or is ``producer``.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track`` is given without a registry.
            RowsNotConfirmed: Some rows are not confirmed; the error names them. After 1,000
                unconfirmed rows, or if the broker cannot be reached, no more rows are read.
            NeedsDistribution: Envelopes, or an option, need distribution, which no worker serves.
        """
        given, _ = without_stamps(options)
        for name, reason in _REFUSED.items():
            if given.get(name) is not None:
                raise exceptions.UnknownOption(name, given[name], reason)
        checked_added_options(given, self)
        if envelopes is None:
            envelopes = DISTRIBUTE in self.settings.modules
        tolerance_ms = tolerance_milliseconds(tolerance)
        registered: object = self.app.tasks.get(task) if isinstance(task, str) else task
        if (
            not self.is_available(connection)
            or self.app.conf.task_always_eager
            or not getattr(registered, "rabbitdelay", True)
        ):
            if connection is not None:
                options["connection"] = connection
            return send_one_by_one(self.app, task, rows, progress, tolerance, options)
        wanted = connection, task, tolerance_ms, envelopes, progress, options
        return RowSender(self, *wanted).send(rows)

    def bind_declared_queue(self, queue_name: str, message_count: int, consumer_count: int) -> None:
        """Bind a queue to the levels right after its declaration: kombu's ``on_declared``.

        An exclusive queue is skipped: only the connection that declared it can bind it.
        """
        queue = self.app.amqp.queues.get(queue_name)
        if queue is not None and queue.exclusive:
            return
        if self.available and self.settings.declare == "auto":
            with closing(self.app.connection_for_write()) as connection:
                if queue is not None:
                    # Tasks may go to a broker other than the one where the queue was declared.
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
    **dict.fromkeys(("producer", "publisher"), "use the option connection instead"),
}
