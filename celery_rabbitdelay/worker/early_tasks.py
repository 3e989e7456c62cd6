"""Early tasks: a task that arrives at a worker before it is due goes into the levels.

There are two kinds. A producer that does not know the levels (plain Celery, another language, an
older version) sends a task at once, with an ``eta`` in the future; Celery would hold it in the
worker until then. And a task may leave the levels before it is due; see ``modules/early.py``.
Celery would start it at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any, Final, NamedTuple

import kombu
from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due, milliseconds
from celery_rabbitdelay.modules.early import EarlyWarning, PutBack, early_ms, pause_ms
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import MAX_PRIORITY
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.registry.decision import registry_headers
from celery_rabbitdelay.worker.celery_internals import (
    eta_of,
    give_eta,
    is_revoked,
    lower_prefetch,
    name_of_queue,
    raise_prefetch,
    run_strategy,
    write_pending_acknowledgements,
)
from celery_rabbitdelay.worker.loop_actions import Action, LoopActions

__all__ = ["EarlyTasks", "Waited", "acknowledge_message"]

logger = get_logger(__name__)

#: The properties of a message that are published again. Not ``user_id``, which must be the user of
#: the connection (https://www.rabbitmq.com/docs/validated-user-id).
KEPT_PROPERTIES: Final = (
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)

#: Seconds between two attempts to publish a message after a temporary error.
RETRY_INTERVAL: Final = 1.0

#: Seconds that a stopping worker waits for the confirm of the message that is being published.
STOP_TIMEOUT: Final = 2.0


class Waited(NamedTuple):
    """The delay of a message that has left the levels, as its headers tell it.

    Attributes:
        due_ms: Its header ``rabbitdelay-due``.
        times: How often it was put back into the levels already.
        straight: Whether it came straight from the levels, and not through distribution.
    """

    due_ms: object
    times: int
    straight: bool


@dataclass(slots=True)
class _Early:
    """A message that arrived before it is due.

    Attributes:
        message: The message.
        destination: The queue that it was consumed from, its exchange and its routing key.
        due: Until when it is to wait.
        due_ms: Its due time, which its header tells; in milliseconds since 1970-01-01 UTC.
        waited: Its delay in the levels; None if it has an ``eta`` and was never in the levels.
        acknowledge: Acknowledges it.
        hold: What to do if the levels do not take it: passes the task to Celery, which holds it.
        again_at: When to try again, on the clock of :func:`time.monotonic`; None before the first
            failure.
    """

    message: Message
    destination: Destination
    due: Due
    due_ms: int
    waited: Waited | None
    acknowledge: Action
    hold: Action
    again_at: float | None = None


class EarlyTasks:
    """Publishes early tasks into the levels in a thread and on a connection of its own.

    So neither the worker's tasks nor its heartbeat wait for a confirm. A message is acknowledged
    once the broker has confirmed the message that replaces it. If the worker dies before that, the
    broker delivers the original again.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._delays = consumer.app.rabbitdelay
        self._tick_ms: int = self._delays.topology.layout.tick_ms
        self._tolerated_ms = milliseconds(self._delays.settings.early)
        self._warning = EarlyWarning(logger)
        self._arrived: Queue[_Early | None] = Queue()
        self._failed: deque[_Early] = deque()
        self._actions = LoopActions(consumer)
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="rabbitdelay-early-tasks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def register(self, hub: Any) -> None:
        """Let the worker's event loop run the acknowledgements, which must run in it."""
        self._actions.register(hub)

    def stop(self) -> None:
        """End the thread; the broker delivers unpublished messages again."""
        self._stopping.set()
        self._arrived.put(None)
        self._thread.join(STOP_TIMEOUT)
        self._actions.stop()

    def try_enqueue(
        self,
        message: Message,
        body: Any,
        ack: Callable[..., Any],
        go_on: Callable[[], Any],
        waited: Waited | None = None,
        takes_eta: bool = True,
    ) -> bool:
        """Take a task that is not due yet; return whether it was taken.

        A task with an ``eta`` is early by a tick, one that has left the levels by the setting
        ``rabbitdelay_early``. If the latter cannot be taken, it gets an ``eta``, so that Celery
        holds it and does not start it.

        Args:
            message: The task's message.
            body: The body that Celery passes to a strategy.
            ack: Acknowledges the message; the function that Celery passes to a strategy.
            go_on: Passes the task to Celery, which holds it until its ``eta``.
            waited: Its delay in the levels; None if it was not in the levels.
            takes_eta: Whether to take a task for its ``eta``.
        """
        due = self._due_after_levels(waited)
        if due is None:
            # It was released in time, or never waited.
            waited = None
            due = self._due_by_eta(message, body) if takes_eta else None
        if due is None or is_revoked(self._consumer, message.headers.get("id")):
            return False
        destination = self._destination(message, waited)
        if destination is None:
            if waited is not None:
                give_eta(message, body, due.at_ms)
            return False

        def hold() -> None:
            if waited is not None:
                give_eta(message, body, due.at_ms)
            run_strategy(self._consumer, message, body, go_on)

        if waited is not None:
            self._warning.warn(f"Task {message.headers.get('id')}", due.delay_ms)
            waited = waited._replace(times=waited.times + 1)
        acknowledge = partial(acknowledge_message, self._consumer, ack)
        self._arrived.put(_Early(message, destination, due, due.at_ms, waited, acknowledge, hold))
        return True

    def put_back(
        self,
        message: Message,
        ack: Callable[..., Any],
        waited: Waited,
        until_ms: int,
        due_ms: int,
        otherwise: Action,
    ) -> bool:
        """Put a task back into the levels that has left them; return whether it was taken.

        Args:
            message: The task's message.
            ack: As for :meth:`try_enqueue`.
            waited: Its delay in the levels.
            until_ms: Until when it is to wait, in milliseconds since 1970-01-01 UTC.
            due_ms: Its due time, likewise, which its header tells from then on.
            otherwise: What the event loop runs if the levels do not take it.
        """
        destination = self._destination(message, waited)
        if destination is None:
            return False
        rest_ms = max(until_ms - time.time_ns() // NS_PER_MS, 0)
        due = Due(until_ms * NS_PER_MS, rest_ms, is_instant=True)
        acknowledge = partial(acknowledge_message, self._consumer, ack)
        self._arrived.put(_Early(message, destination, due, due_ms, waited, acknowledge, otherwise))
        return True

    def _due_after_levels(self, waited: Waited | None) -> Due | None:
        """Return when a task is due that has left the levels too early; None if it has not."""
        if waited is None:
            return None
        now_ms = time.time_ns() // NS_PER_MS
        by_ms = early_ms(waited.due_ms, now_ms, self._tolerated_ms)
        if by_ms is None:
            return None
        return Due((now_ms + by_ms) * NS_PER_MS, by_ms, is_instant=True)

    def _due_by_eta(self, message: Message, body: Any) -> Due | None:
        """Return when a task is due that has an ``eta`` in more than a tick; None otherwise."""
        eta = message.headers.get("eta")
        if eta is None:
            # Protocol 1, and a mixture of both: Celery's strategies look into the body as well.
            with suppress(Exception):  # a strategy reports an invalid body
                fields = message.payload if body is None else body
                eta = fields.get("eta") if isinstance(fields, Mapping) else None
        instant = eta_of(eta, self._consumer.app.timezone)
        if instant is None:
            return None
        due = Due.at(instant)
        return due if due.delay_ms > self._tick_ms else None

    def _destination(self, message: Message, waited: Waited | None) -> Destination | None:
        """Return where the message came from; None if it cannot return there from the levels."""
        info, name = message.delivery_info, name_of_queue(self._consumer, message)
        queue: kombu.Queue | None = self._consumer.app.amqp.queues.get(name)
        if waited is not None:
            # The levels, or distribution, have reached its queue already.
            if queue is None and name is not None:
                queue = kombu.Queue(name, no_declare=True)
        elif queue is not None and (queue.auto_delete or queue.exclusive):
            queue = None  # it ends with this worker
        if queue is None:
            return None
        return Destination(queue, info["exchange"], info["routing_key"])

    def _run(self) -> None:
        while (early := self._next()) is not None and not self._stopping.is_set():
            try:
                self._publish(early)
            except TEMPORARY_ERRORS as failure:
                self._try_again(early, failure)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._give_up(early, error)
            else:
                self._actions.add(partial(self._done, early), is_acknowledgement=True)
        self._actions.end()

    def _next(self) -> _Early | None:
        """Return the next message, new or to be tried again; None to end."""
        if not self._failed:
            return self._arrived.get()
        wait = (self._failed[0].again_at or 0.0) - time.monotonic()
        try:
            return self._arrived.get(timeout=wait) if wait > 0 else self._failed.popleft()
        except Empty:
            return self._failed.popleft()

    def _try_again(self, early: _Early, failure: Exception) -> None:
        """Queue a message behind the others; if it is due by now, the worker runs it."""
        if early.due.remaining_ms() <= 0:
            self._give_up(early, failure)
            return
        if early.again_at is None:
            logger.warning("A task that is not due could not be put into the levels: %s", failure)
            # The message stays unacknowledged, so raise the prefetch count, as Celery does for a
            # task that it holds.
            self._actions.add(partial(raise_prefetch, self._consumer))
        early.again_at = time.monotonic() + RETRY_INTERVAL
        self._failed.append(early)

    def _give_up(self, early: _Early, error: Exception) -> None:
        logger.warning(
            "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds it: %s",
            early.message.headers.get("id"),
            early.due.remaining_ms() / 1000,
            error,
        )
        self._actions.add(partial(self._hold, early))

    def _done(self, early: _Early) -> None:
        self._give_back_its_place(early)
        early.acknowledge()

    def _hold(self, early: _Early) -> None:
        self._give_back_its_place(early)
        early.hold()

    def _give_back_its_place(self, early: _Early) -> None:
        if early.again_at is not None:
            lower_prefetch(self._consumer)

    def _publish(self, early: _Early) -> None:
        message = early.message
        headers: dict[str, Any] = dict(message.headers)
        if "eta" in headers:
            headers["eta"] = None
        properties: dict[str, Any] = {
            name: message.properties[name]
            for name in KEPT_PROPERTIES
            if message.properties.get(name) is not None
        }
        # Otherwise a task without a priority would get 0.
        properties.setdefault("priority", None)
        destination, due, own = early.destination, early.due, PutBack()
        if early.waited is not None:
            own = PutBack(early.waited.times)
            due = self._pause(due)
        if self._needs_distribution(early, properties["priority"] or 0):
            # Distribution publishes by exchange and key: to this queue, and to no other.
            assert destination.queue is not None
            own = own._replace(exchange=destination.exchange, routing_key=destination.routing_key)
            destination = Destination(None, "", destination.queue.name)
        with self._delays.publisher() as publisher:
            producer = DelayedProducer(publisher, **self._delays.settings.for_producer)
            producer.further_headers = registry_headers(message.headers)
            delayed = producer.delayed_message(
                message.body,
                destination,
                due,
                headers=headers,
                # kombu has decompressed the body.
                compression=headers.pop("compression", None),
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                **properties,
            )
            own_headers = delayed.message.properties["application_headers"]
            own_headers[header_names.DUE] = early.due_ms
            if own != PutBack():
                own_headers.update(own.header())
            # Without resends, so as not to block the others: _try_again retries with a new route.
            producer.publish_message(delayed, due, resends=0)

    def _pause(self, due: Due) -> Due:
        """Return until when to put a task back: until it is due, or less; see :func:`pause_ms`."""
        rest_ms = due.remaining_ms()
        pause = pause_ms(rest_ms, self._delays.topology)
        return due._replace(at_ns=due.at_ns - (rest_ms - pause) * NS_PER_MS, delay_ms=pause)

    def _needs_distribution(self, early: _Early, priority: int) -> bool:
        """Return whether a task has to pass through distribution, which no other queue notices.

        A task that has done so already does it again: nobody may have bound its queue to the
        levels.
        """
        is_too_high = self._delays.topology.queue_type == "quorum" and priority > MAX_PRIORITY
        return is_too_high or (early.waited is not None and not early.waited.straight)


def acknowledge_message(consumer: Any, ack: Callable[..., Any]) -> None:
    """Acknowledge a message with the function that Celery passes to a strategy."""
    ack(logger, consumer.connection_errors)
    write_pending_acknowledgements(consumer)
