"""Restore a delayed task when it arrives at a worker, as if it had been sent without a delay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final, TypeAlias

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.instruments import EARLY, TAKEN_OVER
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import DelayHeaders, later_version
from celery_rabbitdelay.worker.arrivals import Arrivals, record_lateness
from celery_rabbitdelay.worker.celery_internals import id_of, name_of_queue
from celery_rabbitdelay.worker.decisions import Decisions
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.origin import Origin, as_it_says

logger = get_logger(__name__)

#: When the task was published, as Sentry's Celery integration notes it: float, seconds since
#: 1970-01-01 UTC. The time from then to the start is its ``messaging.message.receive.latency``.
SENTRY_ENQUEUED: Final = "sentry-task-enqueued-time"

#: What Celery's consumer calls with each message of one task.
Strategy: TypeAlias = Callable[..., Any]


class RestoringStrategies(dict[str, Strategy]):
    """The execution strategies of a worker's consumer; each receives restored messages.

    Celery sets them again on every connection and when the pool is restarted.

    Args:
        consumer: The consumer, whose present strategies are wrapped.
        takeover: Whether an ``eta`` waits in the levels; see ``rabbitdelay_takeover``.
        origin: Returns where a retry of a task goes; see :class:`.Origins`.

    Attributes:
        early_tasks: Takes the tasks that are not due yet; None between two connections.
        decisions: Asks the registry about the tasks that are due; None without a registry, and
            between two connections.
        arrivals: How late the delayed tasks arrive.
    """

    def __init__(self, consumer: Any, takeover: bool = True, origin: Origin = as_it_says) -> None:
        super().__init__()
        self.early_tasks: EarlyTasks | None = None
        self.decisions: Decisions | None = None
        self.arrivals = Arrivals()
        self._app = consumer.app
        self._consumer = consumer
        self._tasks = consumer.app.tasks
        self._takeover = takeover
        self._origin = origin
        self._delivery = consumer.app.rabbitdelay.topology.delivery.name
        for task_name, strategy in consumer.strategies.items():
            self[task_name] = strategy

    def __setitem__(self, task_name: str, strategy: Strategy) -> None:
        takes_eta = self._takeover and getattr(self._tasks[task_name], "rabbitdelay", True)

        @wraps(strategy)
        def restoring(message: Message, body: Any, ack: Any, *args: Any, **kwargs: Any) -> Any:
            go_on = partial(strategy, message, body, ack, *args, **kwargs)
            try:
                is_taken = self._take(message, body, ack, go_on, task_name, takes_eta)
            except Exception:  # anybody may have written the message
                logger.exception("A message for the task %s is left to Celery.", task_name)
                is_taken = False
            return None if is_taken else go_on()

        super().__setitem__(task_name, restoring)

    def _take(
        self,
        message: Message,
        body: Any,
        ack: Any,
        go_on: Callable[[], Any],
        task_name: str,
        takes_eta: bool,
    ) -> bool:
        """Restore a message; return whether it is not passed to Celery, or not now."""
        later = later_version(message.headers or {}, message.content_type)
        if later is not None:
            # Between two connections there is nothing to acknowledge: RabbitMQ redelivers it.
            if self.early_tasks is not None:
                self.early_tasks.leave_to_later_version(message, ack, later)
            return True
        waited = restore(message, self._origin)
        self._hide_delivery(message)
        metrics = self._app.rabbitdelay.active_metrics
        if waited is not None:
            self.arrivals.note(waited.due_ms)
        if self.early_tasks is None or (waited is None and not takes_eta):
            return False
        ask = None
        if self.decisions is not None and waited is not None and id_of(message):
            ask = partial(self.decisions.ask, message, body, ack, go_on, waited, task_name)
        if self.early_tasks.try_enqueue(message, body, ack, go_on, waited, takes_eta, ask):
            if metrics is not None:
                what = TAKEN_OVER if waited is None else EARLY
                metrics.record(what, 1, task_name, self._queue_of(message))
            return True
        if ask is not None:
            ask()
            return True
        if waited is not None:
            if metrics is not None:
                record_lateness(metrics, waited.due_ms, task_name, self._queue_of(message))
            signals.send(signals.released, self._app, id_of(message), waited.due_ms)
        return False

    def _hide_delivery(self, message: Message) -> None:
        """Replace a delivery exchange as the origin of a message by the queue that it came to.

        Distribution publishes by that exchange what is for a queue that only a binding reaches, and
        nothing is ever published there by name: a retry of the task would be undeliverable.
        """
        if message.delivery_info.get("exchange") == self._delivery:
            queue = name_of_queue(self._consumer, message)
            if queue is not None:
                message.delivery_info.update(exchange="", routing_key=queue)

    def _queue_of(self, message: Message) -> str:
        return name_of_queue(self._consumer, message) or ""


def restore(message: Message, origin: Origin = as_it_says) -> DelayHeaders | None:
    """Undo what the levels did to a message. Any other message stays as it is.

    The exchange and the routing key become those that the message would have had without a delay:
    Celery sends a retry to them. The broker's dead-letter headers are removed. The due time and the
    queue stay readable in ``task.request.headers``. Sentry's time in the queue begins when the task
    is due. A message that comes from distribution needs nothing more, unless a worker has put it
    back into the levels: then it is given back to one queue, by the default exchange.

    Args:
        message: The message.
        origin: Returns the exchange and the routing key, for those that the headers name.

    Returns:
        What its headers have said; None if it was not delayed.
    """
    given: dict[str, Any] = message.headers
    if not given or header_names.DUE not in given:
        return None
    headers, _ = header_names.parse(given)
    claimed = headers.early.exchange, headers.early.routing_key
    if header_names.QUEUE in given:
        claimed = headers.exchange, headers.routing_key
        if None in (headers.queue, *claimed):
            return None
    if claimed[0] is not None:
        exchange, routing_key = origin(message, headers, *claimed)
        message.delivery_info.update(exchange=exchange, routing_key=routing_key)
    said = DelayHeaders(headers.due_ms, queue=headers.queue, registry=headers.registry)
    kept, restored = said.to_headers(), dict(headers.others)
    nested = restored.get(header_names.NESTED_HEADERS)
    for shown in (restored, nested) if isinstance(nested, dict) else (restored,):
        shown.update(kept)
        if SENTRY_ENQUEUED in shown and headers.due_ms is not None:
            shown[SENTRY_ENQUEUED] = headers.due_ms / 1000
    given.clear()
    given.update(restored)
    if header_names.REDELIVERED in headers.registry:
        message.delivery_info["redelivered"] = True
    return headers
