"""Tasks go back into the levels: published, many at once, by a thread beside the event loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import kombu
from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.headers import (
    MAX_PRIORITY,
    ONCE,
    REDELIVERED,
    DelayHeaders,
    EarlyHeader,
    parse,
)
from celery_rabbitdelay.modules.forwarding import Outgoing, to_undeliverable, without_headers
from celery_rabbitdelay.modules.redelivery import Redelivery, pause_ms
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import WaitingMessage, kept_properties
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import as_received, lower_prefetch, raise_prefetch

logger = get_logger(__name__)

#: Seconds between two attempts to publish a message after a temporary error.
RETRY_INTERVAL: Final = 1.0


@dataclass(slots=True)
class Early:
    """A message that arrived before it may run.

    Attributes:
        message: The message.
        destination: The queue that it was consumed from, its exchange and its routing key.
        due: Until when it is to wait.
        due_ms: Its due time, from its header, in milliseconds since 1970-01-01 UTC.
        waited: What its headers have said; None if it has an ``eta`` and was never in the levels.
        acknowledge: Acknowledges it.
        hold: Called if the levels do not take it: passes the task to Celery, which holds it.
        forgotten: Why it is for ``undeliverable``; empty if it waits.
        later_version: Why only a later version of this package can read it; empty if this one can.
        again_at: When to try again, on the clock of :func:`time.monotonic`; None before the first
            failure.
        unpublishable: Why a task of a later version can never be put into the levels, so that it is
            for ``undeliverable``; empty if it can.
        has_place: Whether the prefetch count was raised for it, because it stays unacknowledged.
    """

    message: Message
    destination: Destination
    due: Due
    due_ms: int
    waited: DelayHeaders | None
    acknowledge: Action
    hold: Action
    later_version: str = ""
    forgotten: str = ""
    again_at: float | None = None
    unpublishable: str = ""
    has_place: bool = False


class PutBackThread(BatchThread[Early]):
    """Publishes messages into the levels on a connection of its own.

    So neither the worker's tasks nor its heartbeat wait for a confirm. A message is acknowledged
    once the broker has confirmed the message that replaces it. If the worker dies before that, the
    broker delivers the original again.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    name = "rabbitdelay-put-back"

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer)
        self._consumer = consumer
        self._delays = consumer.app.rabbitdelay
        self._failed: deque[Early] = deque()
        settings = self._delays.settings
        self._redelivery = Redelivery(settings.topology, settings.retry_for)
        self._undeliverable = settings.topology.module_queues.undeliverable.exchange.name
        self._has_warned_of_later_version = False

    def own_work_in(self) -> float | None:
        """Return the seconds until a failed message is tried again; None if none has failed."""
        if not self._failed:
            return None
        return (self._failed[0].again_at or 0.0) - time.monotonic()

    def work(self, batch: list[Early]) -> None:
        """Publish messages, and those that are to be tried again by now."""
        now = time.monotonic()
        while self._failed and (self._failed[0].again_at or 0.0) <= now:
            batch.append(self._failed.popleft())
        try:
            with self._delays.publisher() as publisher:
                producer = DelayedProducer(publisher, **self._delays.settings.for_producer)
                for queue, publications in self._by_queue(producer, batch):
                    self._publish(producer, queue, publications)
        except exceptions.NoPublisherFree as error:
            for early in batch:
                self._settled(early, error)

    def _by_queue(
        self, producer: DelayedProducer, batch: list[Early]
    ) -> Iterable[tuple[kombu.Queue | None, list[Publication]]]:
        """Return what replaces the messages, grouped by the queue that has to exist."""
        groups: dict[str | None, tuple[kombu.Queue | None, list[Publication]]] = {}
        for early in batch:
            try:
                queue, publication = self._publication(producer, early)
            except Exception as error:  # noqa: BLE001 - the others are published
                self._settled(early, error)
                continue
            group = groups.setdefault(None if queue is None else queue.name, (queue, []))
            group[1].append(publication)
        return groups.values()

    def _publication(
        self, producer: DelayedProducer, early: Early
    ) -> tuple[kombu.Queue | None, Publication]:
        """Return what replaces a message, and the queue that has to exist."""
        if early.unpublishable or early.forgotten:
            origin, received = early.destination, as_received(early.message)
            outgoing = Outgoing(
                origin.exchange, origin.routing_key, WaitingMessage.unopened(received)
            )
            reason = early.forgotten or f"{early.later_version}; {early.unpublishable}"
            left = to_undeliverable(self._undeliverable, outgoing, reason)
            if early.unpublishable:
                left = without_headers(self._undeliverable, left)
            return None, Publication.of(left.message.amqp(), lambda: left.address, early)
        if early.later_version:
            queue = early.destination.queue
            assert queue is not None
            later = self._redelivery.until_upgraded(
                as_received(early.message), early.later_version, queue.name
            )
            if later.reroute is None:
                logger.warning("A task is undeliverable: %s", early.later_version)
            address = later.reroute or (lambda: (later.exchange, later.routing_key))
            return queue, Publication.of(later.message.amqp(), address, early)
        due = early.due if early.waited is None else self._pause(early.due)
        delayed = self._delayed(producer, early, due)
        address = partial(producer.address, delayed, due)
        return delayed.queue, Publication.of(delayed.message.amqp(), address, early)

    def _publish(
        self, producer: DelayedProducer, queue: kombu.Queue | None, publications: list[Publication]
    ) -> None:
        unsettled = set(publications)

        def done(publication: Publication) -> None:
            unsettled.discard(publication)
            self._settled(publication.subject, publication.error)

        # Without resends, so as not to block the others: a message that is tried again gets a new
        # route.
        policy = PublishPolicy(producer.timeout, resends=0)
        declarations = producer.declarations(queue, ())
        try:
            producer.publisher.publish_all(publications, policy, done=done, **declarations)
        except Exception as error:  # noqa: BLE001 - the thread has to live on
            for publication in unsettled:
                self._settled(publication.subject, error)

    def _settled(self, early: Early, error: Exception | None) -> None:
        """Acknowledge a message, or try it again; if that is no use, the worker holds it."""
        if error is None:
            self.actions.add(
                partial(self._finish, early, early.acknowledge), is_acknowledgement=True
            )
            return
        if early.later_version:
            self._try_later_version_again(early, error)
            return
        is_over = early.due.remaining_ms() <= 0 and not early.forgotten
        if not isinstance(error, TEMPORARY_ERRORS) or is_over:
            self._give_up(early, error)
            return
        if early.again_at is None:
            logger.warning("A task that is not due could not be put into the levels: %s", error)
        self._give_it_a_place(early)
        early.again_at = time.monotonic() + RETRY_INTERVAL
        self._failed.append(early)

    def _try_later_version_again(self, early: Early, error: Exception) -> None:
        """Put a task that only a later version can read into ``undeliverable``, or try it again.

        Its headers may leave no room in a frame for those that count the attempts, and the broker
        may refuse it: then it will never wait in the levels.
        """
        if _is_permanent(error) and not early.unpublishable:
            logger.warning("A task of a later version is undeliverable: %s", error)
            early.unpublishable = getattr(error, "reason", str(error))
            early.again_at = time.monotonic()
            self._failed.appendleft(early)
            return
        log = logger.debug if self._has_warned_of_later_version else logger.warning
        self._has_warned_of_later_version = True
        log(
            "A task of a later version could not be put into the levels; the worker holds it and "
            "tries again, without a further warning on this connection: %s",
            error,
        )
        self._give_it_a_place(early)
        self.actions.add(early.hold)

    def _give_up(self, early: Early, error: Exception) -> None:
        logger.warning(
            "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds it: %s",
            early.message.headers.get("id"),
            early.due.remaining_ms() / 1000,
            error,
        )
        self.actions.add(partial(self._finish, early, early.hold))

    def _give_it_a_place(self, early: Early) -> None:
        """Raise the prefetch count, as Celery does for a task that it holds.

        The message stays unacknowledged, and others would wait for it.
        """
        if not early.has_place:
            early.has_place = True
            self.actions.add(partial(raise_prefetch, self._consumer))

    def _finish(self, early: Early, action: Action) -> None:
        """Lower the prefetch count if it was raised for a message, and acknowledge or hold it."""
        if early.has_place:
            early.has_place = False
            lower_prefetch(self._consumer)
        action()

    def _delayed(self, producer: DelayedProducer, early: Early, due: Due) -> Delayed:
        """Return what replaces a message, and waits until ``due``."""
        message = early.message
        users: dict[str, Any] = dict(message.headers)
        if "eta" in users:
            users["eta"] = None
        properties = kept_properties(message.properties)
        destination = early.destination
        headers, _ = parse(message.headers)
        again = EarlyHeader() if early.waited is None else EarlyHeader(early.waited.early.times)
        if due.at_ms != early.due_ms:
            again = again._replace(until_ms=due.at_ms)
        if self._needs_distribution(early, properties["priority"] or 0):
            # Distribution publishes by exchange and key: to this queue, and to no other.
            assert destination.queue is not None
            again = again._replace(
                exchange=destination.exchange, routing_key=destination.routing_key
            )
            destination = Destination(None, "", destination.queue.name)
        registry = dict(headers.registry)
        if ONCE in registry and message.delivery_info.get("redelivered"):
            registry[REDELIVERED] = True
        producer.says = {"due_ms": early.due_ms, "early": again, "registry": registry}
        return producer.delayed_message(
            message.body,
            destination,
            due,
            headers=users,
            # kombu has decompressed the body.
            compression=users.pop("compression", None),
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            **properties,
        )

    def _pause(self, due: Due) -> Due:
        """Return until when to put a task back: until it is due, or less; see :func:`pause_ms`."""
        rest_ms = due.remaining_ms()
        pause = pause_ms(rest_ms, self._delays.topology)
        return due._replace(at_ns=due.at_ns - (rest_ms - pause) * NS_PER_MS, delay_ms=pause)

    def _needs_distribution(self, early: Early, priority: int) -> bool:
        """Return whether a task has to pass through distribution, which no other queue notices.

        A task that has done so already does it again: nobody may have bound its queue to the
        levels.
        """
        is_too_high = self._delays.topology.queue_type == "quorum" and priority > MAX_PRIORITY
        return is_too_high or (early.waited is not None and early.waited.queue is None)


def _is_permanent(error: Exception) -> bool:
    """Return whether a message can never be published: AMQP or RabbitMQ does not take it.

    Not if the user lacks a permission, which an operator can give.
    """
    if isinstance(error, exceptions.PermissionMissing):
        return False
    # Of the class itself are those that AMQP cannot write.
    return isinstance(error, exceptions.MessageRefused) or type(error) is exceptions.PublishError
