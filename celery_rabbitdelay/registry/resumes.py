"""After a resume, workers return the tasks to their queues at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Event, Thread
from typing import Final

import amqp
from celery.utils.log import get_logger

from celery_rabbitdelay.app.delays import Delays
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
from celery_rabbitdelay.publishing.wire import Wire, reading_unreadable_properties
from celery_rabbitdelay.registry.application import registry_of
from celery_rabbitdelay.registry.pauses import paused_since

logger = get_logger(__name__)

#: Seconds between two looks at what is paused.
EVERY: Final = 1.0

#: Seconds for which a worker goes on after a resume: another one may not know of it yet.
AFTERWARDS: Final = 10.0

#: Seconds that a stopping worker waits for the thread.
STOP_TIMEOUT: Final = 10.0


class Resumes:
    """Returns tasks to their queues that were paused and are not any more, in a thread.

    After a resume it takes all messages out of the queue of paused tasks, and rejects those that
    are not paused any more: so RabbitMQ passes them on, as if their time in the queue was over. The
    others are requeued at the end, when the channel is closed; or when the worker dies.

    Args:
        delays: The ``app.rabbitdelay``.
    """

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._queue = delays.topology.module_queues.paused.name
        self._stopping = Event()
        self._failures = WarningLimit(logger, "Attempts to return what was paused")
        self._thread = Thread(target=self._run, name="rabbitdelay-resumes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Return nothing more, and end the thread."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        before: Mapping[str, int] | None = None
        until = 0.0
        while not self._stopping.wait(EVERY):
            try:
                paused: Mapping[str, int] = registry_of(self._delays).pauses.known()
                # At first: the last pause may have ended while no worker was there.
                if not paused if before is None else before.keys() - paused.keys():
                    until = time.monotonic() + AFTERWARDS
                before = paused
                if time.monotonic() < until:
                    self._return_all()
            except RegistryUnavailable:
                continue  # what was paused stays paused
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                if self._failures.allows(repr(error)):
                    logger.warning("What was paused returns later: %r", error)

    def _return_all(self) -> None:
        """Look at each message that is in the queue, and return what is not paused any more."""
        settings, returned = self._delays.settings, 0
        with self._delays.app.connection_for_write(heartbeat=0) as connection:
            # Bodies do not matter: no message is published anew.
            reading_unreadable_properties(connection, settings.max_message_bytes)
            connect(connection)
            in_time = Wire(connection).answers_within(settings.confirm_timeout)
            with in_time, opened_channel(connection) as channel:
                (found,) = find_queues(channel, [self._queue])
                for _ in range(found[0] if found else 0):
                    message = None if self._stopping.is_set() else channel.basic_get(self._queue)
                    if message is None:
                        break
                    if not self._is_paused(message):
                        tag = message.delivery_info["delivery_tag"]
                        channel.basic_reject(tag, requeue=False)
                        returned += 1
        if returned:
            logger.info("Tasks that were paused return to their queues: %d", returned)

    def _is_paused(self, message: amqp.Message) -> bool:
        """Return whether a message is, or may be, of a task that is paused."""
        paused, headers = registry_of(self._delays).pauses.known(), headers_of(message)
        task, word = headers.get("task"), message.delivery_info["routing_key"].split(".")[-1]
        if not isinstance(task, str):  # Celery's message protocol 1
            return bool(paused)
        queue = headers.get(QUEUE)
        if word == encode_destination(DISTRIBUTION):
            queue = queue or headers.get(ROUTING_KEY)  # of the default exchange
        else:
            queue = decode_destination(word) or queue
        return bool(paused_since(paused, task, str(queue)))
