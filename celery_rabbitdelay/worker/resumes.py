"""What was paused and is resumed returns to its queue at once, from the queue where it waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from threading import Event
from typing import Any, Final

import amqp
from kombu import Connection

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.headers import QUEUE, ROUTING_KEY
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.modules.forwarding import Outgoing, encoded
from celery_rabbitdelay.modules.service import Service
from celery_rabbitdelay.publishing.declaration import opened_channel
from celery_rabbitdelay.publishing.kombu_internals import find_queues
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.registry.pauses import paused_since

logger = logging.getLogger(__name__)

#: Seconds between two looks at what is paused.
EVERY: Final = 1.0

#: Seconds for which a worker goes on after a resume, or after it last found something to return:
#: another one may not know of the resume yet.
AFTERWARDS: Final = 10.0


@dataclass(eq=False, repr=False)
class Resumes(Service):
    """Returns tasks to their queues that were paused and are not any more.

    When something is resumed, it takes each message that is in the queue of paused tasks. Those
    that are still paused go to the end of it. If the worker dies meanwhile, what it has not
    returned waits until its time in the queue is over, or for another worker.

    Attributes:
        delays: The ``app.rabbitdelay``.
        connection: Template; each attempt to connect clones it.
        returned: How many tasks it has returned.
    """

    delays: Any
    connection: Connection
    declare: Callable[[Connection], None]
    on_lost: Callable[[], None]
    stopping: Event = field(default_factory=Event)
    returned: int = 0

    def __post_init__(self) -> None:
        settings = self.delays.settings
        self.name, self.timeout = "resumes", settings.confirm_timeout
        self.max_bytes = settings.max_message_bytes
        self._queue = settings.topology.module_queues.paused
        self._delivery = settings.topology.delivery

    def status(self) -> dict[str, Any]:
        """Return how many tasks it has returned."""
        return {"returned": self.returned}

    @property
    def _progress(self) -> int:
        return self.returned

    def _serve_on(self, connection: Connection) -> bool:
        before = self._paused()
        until = time.monotonic()
        if not before:
            until += AFTERWARDS  # it may have been resumed while no worker was there
        while not self.stopping.wait(EVERY):
            connection.heartbeat_check()
            paused = self._paused()
            if before.keys() - paused.keys():
                until = time.monotonic() + AFTERWARDS
            before = paused
            if time.monotonic() < until and self._return_all(connection):
                until = time.monotonic() + AFTERWARDS
        return True

    def _paused(self) -> dict[str, int]:
        try:
            return dict(self.delays.registry.pauses.known())
        except RegistryUnavailable:
            return {}

    def _return_all(self, connection: Connection) -> bool:
        """Look at each message that is in the queue; return whether any was returned."""
        returned, policy = self.returned, PublishPolicy(self.timeout)
        with opened_channel(connection) as channel:
            (found,) = find_queues(channel, [self._queue.name])
            if found is not None and found[0]:
                with self.delays.publisher() as publisher:
                    publications = self._publications(channel, found[0])
                    publisher.publish_all(publications, policy, done=partial(self._done, channel))
        if self.returned > returned:
            logger.info("Tasks that were paused return: %d", self.returned - returned)
        return self.returned > returned

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
        headers = headers_of(message)
        word = key.split(".")[-1]
        if word == encode_destination(DISTRIBUTION):
            queue = headers.get(ROUTING_KEY)  # of the default exchange
        else:
            queue = decode_destination(word) or headers.get(QUEUE)
        return bool(paused_since(self._paused(), str(headers.get("task")), str(queue)))

    def _done(self, channel: Any, publication: Publication) -> None:
        if publication.error is not None:
            raise publication.error
        self.returned += publication.exchange == self._delivery.name
        channel.basic_ack(publication.context.delivery_tag)
