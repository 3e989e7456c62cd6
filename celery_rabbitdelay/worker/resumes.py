"""What was paused and is resumed returns to its queue at once, from the queue where it waits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import repeat
from threading import Event, Thread
from typing import Any, Final

import amqp
from celery.utils.log import get_logger

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import QUEUE, ROUTING_KEY
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded
from celery_rabbitdelay.publishing.declaration import connect, opened_channel
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.kombu_internals import find_queues
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.registry.pauses import paused_since

logger = get_logger(__name__)

#: Seconds between two looks at what is paused.
EVERY: Final = 1.0

#: Seconds for which a worker goes on after a resume, or after it last found a task to return:
#: another worker may not know of the resume yet.
AFTERWARDS: Final = 10.0

#: Seconds that a stopping worker waits for the thread.
STOP_TIMEOUT: Final = 10.0


class Resumes:
    """Returns tasks to their queues that were paused and are not any more, in a thread.

    When something is resumed, it takes each message that is in the queue of paused tasks. Those
    that are still paused go to the end of it. If the worker dies meanwhile, what it has not
    returned waits until its time in the queue is over, or for another worker.

    Args:
        delays: The ``app.rabbitdelay``.

    Attributes:
        name: The name of its part of the worker's status.
        stopping: Set once nothing more is to be returned.
    """

    name = "resumes"

    def __init__(self, delays: Any) -> None:
        self.stopping = Event()
        self._delays = delays
        self._queue = delays.topology.module_queues.paused
        self._delivery = delays.topology.delivery
        self._returned = 0
        self._failures = WarningLimit(logger, "Attempts to return what was paused")
        self._thread = Thread(target=self._run, name="rabbitdelay-resumes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Return nothing more, and end the thread."""
        self.stopping.set()
        self._thread.join(STOP_TIMEOUT)

    def status(self) -> dict[str, Any]:
        """Return how many tasks it has returned."""
        return {"returned": self._returned}

    def _run(self) -> None:
        # Something may have been resumed while no worker was there.
        before, until = self._paused(), time.monotonic() + 2 * EVERY
        while not self.stopping.wait(EVERY):
            paused = self._paused()
            if before.keys() - paused.keys():
                until = time.monotonic() + AFTERWARDS
            before = paused
            if time.monotonic() >= until:
                continue
            try:
                if self._return_all():
                    until = time.monotonic() + AFTERWARDS
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                until = time.monotonic() + AFTERWARDS
                if self._failures.allows(repr(error)):
                    logger.warning("What was paused returns later: %r", error)

    def _paused(self) -> Mapping[str, int]:
        try:
            known: Mapping[str, int] = self._delays.registry.pauses.known()
        except RegistryUnavailable:
            return {}
        return known

    def _return_all(self) -> bool:
        """Look at each message that is in the queue; return whether any was returned."""
        returned, settings = self._returned, self._delays.settings
        with self._delays.app.connection_for_write() as connection:
            reading_unreadable_properties(connection, settings.max_message_bytes)
            connect(connection)
            with opened_channel(connection) as channel:
                (found,) = find_queues(channel, [self._queue.name])
                if found is not None and found[0]:
                    with self._delays.publisher() as publisher:
                        publisher.publish_all(
                            self._publications(channel, found[0]),
                            PublishPolicy(settings.confirm_timeout),
                            done=partial(self._done, channel),
                        )
        if self._returned > returned:
            logger.info("Tasks that were paused return: %d", self._returned - returned)
        return self._returned > returned

    def _publications(self, channel: Any, most: int) -> Iterator[Publication]:
        for _ in range(most):
            message = None if self.stopping.is_set() else channel.basic_get(self._queue.name)
            if message is None:
                return
            key = message.delivery_info["routing_key"]
            exchange = self._queue.exchange if self._is_paused(message, key) else self._delivery
            outgoing = Outgoing(exchange.name, key, WaitingMessage.unopened(message))
            content = encoded(outgoing, channel.connection.frame_max)
            yield Publication(content, repeat(outgoing.address).__next__, message)

    def _is_paused(self, message: amqp.Message, key: str) -> bool:
        """Return whether a message is of a task that is known to be paused."""
        headers, word = headers_of(message), key.split(".")[-1]
        if word == encode_destination(DISTRIBUTION):
            queue = headers.get(ROUTING_KEY)  # of the default exchange
        else:
            queue = decode_destination(word) or headers.get(QUEUE)
        return bool(paused_since(self._paused(), str(headers.get("task")), str(queue)))

    def _done(self, channel: Any, publication: Publication) -> None:
        if publication.error is not None:
            raise publication.error
        self._returned += publication.exchange == self._delivery.name
        channel.basic_ack(publication.context.delivery_tag)
