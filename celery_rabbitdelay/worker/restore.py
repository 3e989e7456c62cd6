"""Restore a delayed task that arrives at a worker, as if it had been sent without a delay.

A hostile client may have written the message. So a retry goes to the exchange in the message's
headers only if distribution may publish there. With a signing key, a message with headers for the
registry is refused unless its signature is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, Protocol, TypeAlias

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.destinations import distribution_reach
from celery_rabbitdelay.app.instruments import EARLY, LATENESS, TAKEN_OVER, Instrument
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import DelayHeaders, later_version
from celery_rabbitdelay.publishing.signature import NOT_SIGNED
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.celery_internals import Consumer, Delivery, name_of_queue
from celery_rabbitdelay.worker.early_tasks import EarlyTasks

logger = get_logger(__name__)


def may_run_since(waited: DelayHeaders) -> int | None:
    """Return the time from which lateness counts.

    Lateness counts from the due time, or from a later time until which a worker has put the task
    back.
    """
    return None if waited.due_ms is None else max(waited.due_ms, waited.early.until_ms)


def lateness(due_ms: object) -> float:
    """Return how many seconds late a task is now; 0 if it is not due, or has no valid due time.

    Args:
        due_ms: The value of its header ``rabbitdelay-due``, which may be of any type.
    """
    late_ms = wall_clock.ms() - due_ms if isinstance(due_ms, int) else 0
    return max(late_ms, 0) / 1000


class Origins:
    """Checks the origin in a message's headers: exchange and routing key without the delay.

    Celery publishes a retry of a task to the task's origin, and a client that may publish into the
    levels can forge the headers. So a worker accepts only an origin that distribution may publish
    to, and with a signing key, only a signed origin. Instead of any other origin, the worker uses
    the queue that the message was consumed from.

    Args:
        consumer: The worker's consumer.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._reach = distribution_reach(consumer.app)
        settings = consumer.app.rabbitdelay.settings
        self._signing_keys = settings.signing_keys if settings.signing_required else None

    def checked(
        self, message: Message, headers: DelayHeaders, exchange: str, routing_key: str
    ) -> tuple[str, str]:
        """Return the given exchange and key for retries if allowed, or else the task's queue."""
        queue = name_of_queue(self._consumer, message) or ""
        if (exchange, routing_key) == ("", queue):
            return exchange, routing_key
        if not self._is_signed(message, headers):
            why = "its message is not signed: see rabbitdelay_signing_key"
        elif not self._reaches(exchange, routing_key):
            why = "distribution may not publish there: see rabbitdelay_distribution_allowed"
        else:
            return exchange, routing_key
        logger.warning(
            "Task %s: its headers name the exchange and routing key %r for retries, but retries "
            "go to the queue %r, because %s.",
            celery_internals.shown(message.headers.get("id")),
            (exchange, routing_key),
            queue,
            why,
        )
        return "", queue

    def is_forged(self, message: Message, headers: DelayHeaders) -> bool:
        """Return whether a message has headers for the registry without a valid signature.

        With such a message, a client that may publish into the levels could make the registry
        discard the real message of a task.
        """
        return bool(headers.registry) and not self._is_signed(message, headers)

    def _is_signed(self, message: Message, headers: DelayHeaders) -> bool:
        keys = self._signing_keys
        return keys is None or keys.verifies(b"", message.properties, headers)

    def _reaches(self, exchange: str, routing_key: str) -> bool:
        try:
            return self._reach.names(exchange, routing_key)
        except UnprocessableMessage:
            return False


#: The header of Sentry's Celery integration for the time of publishing: float, seconds since
#: 1970-01-01 UTC. Sentry's ``messaging.message.receive.latency`` begins at this time.
SENTRY_ENQUEUED: Final = "sentry-task-enqueued-time"

#: The function that Celery's consumer calls with every message of one task.
Strategy: TypeAlias = Callable[..., object]


class Decisions(Protocol):
    """Decides about due tasks, in a thread; set by the bootstep of an addition."""

    def ask(self, delivery: Delivery, waited: DelayHeaders) -> None:
        """Run a task, discard it or put it back, now or later, in the event loop.

        Args:
            delivery: The task's message, restored, as Celery has passed it.
            waited: The message's parsed headers.
        """


class RestoringStrategies(dict[str, Strategy]):
    """Passes restored messages to the execution strategies of a worker's consumer.

    Celery sets the strategies again on every connection, and when the pool is restarted.

    Args:
        consumer: The consumer; its present strategies are wrapped.
        takeover: Whether tasks with an ``eta`` go into the levels; see ``rabbitdelay_takeover``.
        origins: Checks the origin of a message; None to accept every origin.

    Attributes:
        early_tasks: Handles the tasks that are not due yet; None between two connections.
        decisions: Decides about due tasks; None to run all due tasks.
    """

    def __init__(
        self, consumer: Consumer, takeover: bool = True, origins: Origins | None = None
    ) -> None:
        super().__init__()
        self.early_tasks: EarlyTasks | None = None
        self.decisions: Decisions | None = None
        self._app = consumer.app
        self._consumer = consumer
        self._tasks = consumer.app.tasks
        self._takeover = takeover
        self._origins = origins
        self._delivery = consumer.app.rabbitdelay.topology.delivery.name
        self._has_static_prefetch = celery_internals.has_static_prefetch(consumer)
        for task_name, strategy in consumer.strategies.items():
            self[task_name] = strategy

    def __setitem__(self, task_name: str, strategy: Strategy) -> None:
        is_ours_to_hold = self._takeover and getattr(self._tasks[task_name], "rabbitdelay", True)
        takes_eta = is_ours_to_hold or self._has_static_prefetch

        @wraps(strategy)
        def restoring(message: Message, body: Any, ack: Any, *args: Any, **kwargs: Any) -> Any:
            go_on = partial(strategy, message, body, ack, *args, **kwargs)
            redelivered = bool((message.delivery_info or {}).get("redelivered"))
            try:
                delivery = Delivery(message, body, ack, go_on, task_name, redelivered)
                is_taken = self._take(delivery, takes_eta)
            except Exception:  # the message may be invalid in any way
                logger.exception(
                    "Task %s[%s]: the exchange, routing key and headers of its message cannot be "
                    "restored; Celery gets it unchanged.",
                    task_name,
                    celery_internals.shown(celery_internals.id_of(message)),
                )
                is_taken = False
            return None if is_taken else go_on()

        super().__setitem__(task_name, restoring)

    def _take(self, delivery: Delivery, takes_eta: bool) -> bool:
        """Restore a message; return False if the caller has to pass it to Celery now."""
        message = delivery.message
        later = later_version(message.headers or {}, message.content_type)
        if later is not None:
            # Between two connections, RabbitMQ redelivers the unacknowledged message.
            if self.early_tasks is not None:
                self.early_tasks.leave_to_later_version(message, delivery.ack, later)
            return True
        origins = self._origins
        waited = restore(message, origins)
        if waited is None:
            # Drop this package's headers: a retry, or a message that is put back, would otherwise
            # pass them on with a signature.
            header_names.drop_own(message.headers)
        elif origins is not None and origins.is_forged(message, waited):
            if self.early_tasks is not None:
                self.early_tasks.refuse(message, delivery.ack, NOT_SIGNED)
            return True
        self._hide_delivery(message)
        if self.early_tasks is None or (waited is None and not takes_eta):
            return False
        ask = None
        if self.decisions is not None and waited is not None and celery_internals.id_of(message):
            ask = partial(self.decisions.ask, delivery, waited)
        if self.early_tasks.try_enqueue(delivery, waited, takes_eta, ask):
            self._record(TAKEN_OVER if waited is None else EARLY, 1, delivery)
            return True
        if ask is not None:
            ask()
            return True
        if waited is not None:
            self._record(LATENESS, lateness(may_run_since(waited)), delivery)
            signals.send(
                signals.released, self._app, celery_internals.id_of(message), waited.due_ms
            )
        return False

    def _hide_delivery(self, message: Message) -> None:
        """Replace the delivery exchange as the origin of a message by the message's queue.

        Distribution publishes to that exchange if only a binding leads to the queue. A retry that
        is published to the delivery exchange is undeliverable.
        """
        if message.delivery_info.get("exchange") == self._delivery:
            queue = name_of_queue(self._consumer, message)
            if queue is not None:
                message.delivery_info.update(exchange="", routing_key=queue)

    def _record(self, instrument: Instrument, value: float, delivery: Delivery) -> None:
        queue = name_of_queue(self._consumer, delivery.message) or ""
        self._app.rabbitdelay.recorder.record({instrument: value}, delivery.task, queue)


def restore(message: Message, origins: Origins | None = None) -> DelayHeaders | None:
    """Undo the changes that the levels made to a message. Any other message stays as it is.

    The message gets the exchange and the routing key that it would have had without a delay: Celery
    publishes a retry to them. The broker's dead-letter headers are removed. The due time and the
    queue stay readable in ``task.request.headers``. Sentry counts the time in the queue from the
    due time. A message from distribution already has the right exchange and routing key, unless a
    worker has put the message back into the levels: then distribution has published it to one queue
    through the default exchange.

    Args:
        message: The message.
        origins: Checks the exchange and the routing key in the headers; None to accept all.

    Returns:
        The message's parsed headers; None if the message was not delayed.
    """
    given: dict[str, Any] = message.headers
    if not given or header_names.DUE not in given:
        return None
    headers, _ = header_names.parse(given)
    exchange, routing_key = headers.early.exchange, headers.early.routing_key
    if header_names.QUEUE in given:
        exchange, routing_key = headers.exchange, headers.routing_key
        if None in (headers.queue, exchange, routing_key):
            return None
    if exchange is not None and routing_key is not None:
        if origins is not None:
            exchange, routing_key = origins.checked(message, headers, exchange, routing_key)
        message.delivery_info.update(exchange=exchange, routing_key=routing_key)
    visible = DelayHeaders(headers.due_ms, queue=headers.queue, registry=headers.registry)
    kept, restored = visible.to_headers(), dict(headers.others)
    nested = restored.get(header_names.NESTED_HEADERS)
    for table in (restored, nested) if isinstance(nested, dict) else (restored,):
        table.update(kept)
        if SENTRY_ENQUEUED in table and headers.due_ms is not None:
            table[SENTRY_ENQUEUED] = headers.due_ms / 1000
    given.clear()
    given.update(restored)
    if header_names.REDELIVERED in headers.registry:
        message.delivery_info["redelivered"] = True
    return headers
