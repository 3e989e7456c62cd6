"""The registry's bootsteps: decide about tasks on arrival, and return resumed tasks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Event, Thread
from typing import Final, Protocol

import amqp
from celery.utils.log import get_logger
from celery.worker.worker import WorkController
from kombu.asynchronous.hub import Hub

from celery_rabbitdelay.app.delays import DelayingCelery, Delays
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import QUEUE, ROUTING_KEY
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import connect, find_queues
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.wire import Wire, read_unreadable_properties
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.decisions import Decisions
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.worker.bootsteps import Modules, RestoreTasks
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep
from celery_rabbitdelay.worker.restore import RestoringStrategies

logger = get_logger(__name__)

#: Seconds between two checks of the pauses.
EVERY: Final = 1.0

#: Seconds for which a worker returns tasks after a resume. During this time, a worker that has
#: cached the pause may still move tasks to the queue of paused tasks.
AFTERWARDS: Final = 10.0

#: Seconds that a stopping worker waits for the thread of :class:`ReturnPaused`.
STOP_TIMEOUT: Final = 10.0


class _Consumer(Protocol):
    """A worker's consumer, with the attribute ``strategies`` that the kernel's bootstep has set."""

    app: DelayingCelery
    strategies: RestoringStrategies


class DecideOnArrival(RabbitMQStep):
    """Asks the registry about every due delayed task; see :class:`.Decisions`."""

    requires = (RestoreTasks,)

    _decisions: Decisions | None = None

    def start(self, consumer: _Consumer) -> None:
        """Start asking the registry about the tasks that a new connection receives."""
        strategies = consumer.strategies
        if consumer.app.rabbitdelay.setting("registry_url") and strategies.early_tasks is not None:
            self._decisions = strategies.decisions = Decisions(consumer, strategies.early_tasks)
            self._decisions.start()

    def register_with_event_loop(self, consumer: _Consumer, hub: Hub) -> None:
        """Let the event loop run the thread's callbacks in the worker's main thread."""
        if self._decisions is not None:
            self._decisions.register(hub)

    def stop(self, consumer: _Consumer) -> None:
        """Stop asking the registry about the tasks of a lost or closed connection."""
        decisions, self._decisions = self._decisions, None
        if decisions is not None:
            consumer.strategies.decisions = None
            decisions.stop()


class ReturnPaused(RabbitMQStep):
    """Returns resumed tasks to their queues, in a thread.

    After a resume, the thread gets all messages from the queue of paused tasks. The thread rejects
    the messages of resumed tasks, so that RabbitMQ dead-letters these messages as if their TTL had
    expired. All other messages are requeued when the channel is closed or the worker dies.
    """

    requires = (Modules,)

    _thread: Thread | None = None

    def start(self, worker: WorkController) -> None:
        """Start the thread that returns resumed tasks."""
        self._delays: Delays = worker.app.rabbitdelay
        if self._delays.setting("registry_url"):
            self._stopping = Event()
            self._failures = WarningLimit(logger, "Attempts to return resumed tasks")
            self._thread = Thread(target=self._run, name="rabbitdelay-resumes", daemon=True)
            self._thread.start()

    def stop(self, worker: WorkController) -> None:
        """Stop the thread that returns resumed tasks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        before: Mapping[str, int] | None = None
        until = 0.0
        while not self._stopping.wait(EVERY):
            try:
                paused: Mapping[str, int] = registry_of(self._delays).pauses.known()
                # Also return tasks at the start, because the last pause may have ended while no
                # worker ran.
                if not paused if before is None else before.keys() - paused.keys():
                    until = time.monotonic() + AFTERWARDS
                before = paused
                if time.monotonic() < until:
                    self._return_all()
            except RegistryUnavailable:
                continue  # paused tasks stay in their queue
            except Exception as error:  # noqa: BLE001 - the thread must survive
                if self._failures.allows(repr(error)):
                    logger.warning("Cannot return resumed tasks to their queues yet: %r", error)

    def _return_all(self) -> None:
        """Return the resumed tasks from the queue of paused tasks to their own queues."""
        settings, returned = self._delays.settings, 0
        queue = self._delays.topology.module_queues.paused.name
        with self._delays.app.connection_for_write(heartbeat=0) as connection:
            connect(connection)
            # Bodies do not matter: no message is published again.
            read_unreadable_properties(connection, settings.max_message_bytes)
            in_time = Wire(connection).answers_within(settings.confirm_timeout)
            with in_time, opened_channel(connection) as channel:
                (found,) = find_queues(channel, [queue])
                for _ in range(found[0] if found else 0):
                    message = None if self._stopping.is_set() else channel.basic_get(queue)
                    if message is None:
                        break
                    if not self._is_paused(message):
                        tag = message.delivery_info["delivery_tag"]
                        channel.basic_reject(tag, requeue=False)
                        returned += 1
        if returned:
            logger.info("%d resumed tasks return to their queues", returned)

    def _is_paused(self, message: amqp.Message) -> bool:
        """Return whether a message's task is, or may be, paused."""
        paused, headers = registry_of(self._delays).pauses.known(), headers_of(message)
        task, word = headers.get("task"), message.delivery_info["routing_key"].split(".")[-1]
        if not isinstance(task, str):  # Celery's message protocol 1
            return bool(paused)
        queue = headers.get(QUEUE)
        if word == encode_destination(DISTRIBUTION):
            queue = queue or headers.get(ROUTING_KEY)  # its name in the default exchange
        else:
            queue = decode_destination(word) or queue
        return bool(paused_since(paused, task, str(queue)))
