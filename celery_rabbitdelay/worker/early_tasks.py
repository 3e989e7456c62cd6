"""Early tasks: a task that arrives at a worker before it is due goes into the levels.

There are two kinds. A producer that does not know the levels (plain Celery, another language, an
older version) sends a task at once, with an ``eta`` in the future; Celery would hold it in the
worker until then. And a task may leave the levels before it is due; see ``modules/redelivery.py``.
Celery would start it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import kombu
from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due, milliseconds
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.modules.bounds import LaterVersionWarning
from celery_rabbitdelay.modules.redelivery import EarlyWarning, early_ms
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import Action
from celery_rabbitdelay.worker.celery_internals import Delivery
from celery_rabbitdelay.worker.put_back import Early, PutBackThread

logger = get_logger(__name__)

#: Seconds until the levels are tried again that have not taken a task of a later version.
TRY_AGAIN: Final = 5.0


class EarlyTasks:
    """Tells which tasks are early, and has them put back into the levels.

    Args:
        consumer: The worker's consumer, on one connection.

    Attributes:
        thread: Puts them back.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        self._delays = consumer.app.rabbitdelay
        self._tick_ms: int = self._delays.topology.layout.tick_ms
        self._tolerated_ms = milliseconds(self._delays.settings.early_tolerance)
        self._warning = EarlyWarning(logger)
        self._later_version = LaterVersionWarning(logger)
        self.thread = PutBackThread(consumer)

    def try_enqueue(
        self, delivery: Delivery, waited: DelayHeaders | None, takes_eta: bool, ask: Action | None
    ) -> bool:
        """Take a task that is not due yet; return whether it was taken.

        A task with an ``eta`` is early by a tick, one that has left the levels by the setting
        ``rabbitdelay_early_tolerance``. If the levels do not take the latter, the worker holds it
        until it is due, and then asks the registry; without a registry it gets an ``eta``, so that
        Celery holds it and does not start it.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: What its headers have said; None if it was not in the levels.
            takes_eta: Whether to take a task for its ``eta``.
            ask: Asks the registry about a task that has left the levels; None without one.
        """
        message, body = delivery.message, delivery.body
        due = self._due_after_levels(waited)
        if due is None:
            # It was released in time, or never waited.
            waited = None
            due = self._due_by_eta(message, body) if takes_eta else None
        if due is None or celery_internals.is_revoked(self._consumer, message.headers.get("id")):
            return False

        def hold() -> None:
            if waited is not None and ask is not None:
                self._ask_at(due, ask)
                return
            if waited is not None:
                celery_internals.give_eta(message, body, due.at_ms)
            celery_internals.run_strategy(self._consumer, delivery)

        destination = self._destination(message, waited)
        if destination is None:
            if waited is None:
                return False
            hold()
            return True
        if waited is not None:
            earlier = waited.early
            if not earlier.expects(due.at_ms - due.delay_ms, self._tolerated_ms):
                self._warning.warn(f"Task {message.headers.get('id')}", due.delay_ms)
            waited = waited._replace(early=earlier._replace(times=earlier.times + 1))
        acknowledge = partial(acknowledge_message, self._consumer, delivery.ack)
        self.thread.give(Early(message, destination, due, due.at_ms, waited, acknowledge, hold))
        return True

    def _ask_at(self, due: Due, ask: Action) -> None:
        """Hold a task until it is due, beside those that the prefetch count allows."""

        def ask_now() -> None:
            celery_internals.lower_prefetch(self._consumer)
            ask()

        celery_internals.raise_prefetch(self._consumer)
        celery_internals.call_after(self._consumer, due.remaining_ms() / 1000, ask_now)

    def put_back(
        self,
        delivery: Delivery,
        waited: DelayHeaders,
        until_ms: int,
        due_ms: int,
        otherwise: Action,
        forgotten: str = "",
    ) -> bool:
        """Put a task back into the levels that has left them; return whether it was taken.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: What its headers have said.
            until_ms: Until when it is to wait, in milliseconds since 1970-01-01 UTC.
            due_ms: Its due time, likewise, which its header has from then on.
            otherwise: What the event loop runs if the levels do not take it.
            forgotten: Why it goes to ``undeliverable`` instead; empty if it does not.
        """
        destination = self._destination(delivery.message, waited)
        if destination is None:
            return False
        rest_ms = max(until_ms - time.time_ns() // NS_PER_MS, 0)
        due = Due(until_ms * NS_PER_MS, rest_ms, is_instant=True)
        acknowledge = partial(acknowledge_message, self._consumer, delivery.ack)
        early = Early(delivery.message, destination, due, due_ms, waited, acknowledge, otherwise)
        early.forgotten = forgotten
        self.thread.give(early)
        return True

    def leave_to_later_version(self, message: Message, ack: Callable[..., Any], why: str) -> None:
        """Put a task back into the levels that only a worker of a later version can read.

        It stays as it is. If the levels do not take it, they are tried again after some seconds.

        Args:
            message: The task's message, as it was received.
            ack: Acknowledges the message; the function that Celery passes to a strategy.
            why: Why this version cannot read it.
        """
        name = celery_internals.name_of_queue(self._consumer, message)
        if name is None:
            logger.warning("A task stays unacknowledged: its queue is unknown, and %s", why)
            return
        queue = self._consumer.app.amqp.queues.get(name) or kombu.Queue(name, no_declare=True)
        self._later_version.warn(f"Task {message.headers.get('id')}", why)
        acknowledge = partial(acknowledge_message, self._consumer, ack)

        def again() -> None:
            celery_internals.call_after(self._consumer, TRY_AGAIN, partial(self.thread.give, early))

        destination, now = Destination(queue, "", queue.name), Due.after(0)
        early = Early(message, destination, now, now.at_ms, None, acknowledge, again, why)
        self.thread.give(early)

    def _due_after_levels(self, waited: DelayHeaders | None) -> Due | None:
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

    def _destination(self, message: Message, waited: DelayHeaders | None) -> Destination | None:
        """Return where the message came from; None if it cannot return there from the levels."""
        info, name = message.delivery_info, celery_internals.name_of_queue(self._consumer, message)
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


def acknowledge_message(consumer: Any, ack: Callable[..., Any]) -> None:
    """Acknowledge a message with the function that Celery passes to a strategy."""
    ack(logger, consumer.connection_errors)
    celery_internals.write_pending_acknowledgements(consumer)
