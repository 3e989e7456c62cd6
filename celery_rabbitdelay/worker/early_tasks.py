"""Early tasks: a task that arrives at a worker before it may run goes into the levels.

There are three kinds. A producer that does not know the levels (plain Celery, another language, an
older version) sends a task at once, with an ``eta`` in the future; Celery would hold it in the
worker until then. A task may leave the levels before it is due; see ``modules/forwarding.py``.
Celery would start it at once. And the registry may say that a task waits on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import kombu
from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due, milliseconds
from celery_rabbitdelay.levels.headers import DelayHeaders, EarlyHeader, shortened
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.bounds import EarlyWarning, LaterVersionWarning
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import WaitingMessage, kept_properties
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.worker import celery_internals, republishing
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Delivery
from celery_rabbitdelay.worker.celery_requests import is_ours, run_strategy

logger = get_logger(__name__)

#: Seconds between two attempts to publish a message after a temporary error.
RETRY_INTERVAL: Final = 1.0

#: Seconds until a task that does not run here is published again, if that has failed.
TRY_AGAIN: Final = 5.0


@dataclass(slots=True)
class Early:
    """A message that arrived before it may run.

    Attributes:
        message: The message.
        destination: The queue that it was consumed from, its exchange and its routing key.
        due: Until when it is to wait.
        due_ms: Its due time, from its header, in milliseconds since 1970-01-01 UTC.
        waited: Its parsed headers; None if it has an ``eta`` and was never in the levels.
        ack: Acknowledges it: the function that Celery passes to a strategy.
        hold: Called if the levels do not take it: passes the task to Celery, which holds it. None
            if the task does not run here, for one of the next two reasons.
        later_version: Why only a later version of this package can read it; empty if this one can.
        refused: Why it is for ``undeliverable``; empty if it waits.
        unpublishable: Why a task that does not run here can never be published with its headers, so
            that it is for ``undeliverable`` without them; empty if it can.
        has_place: Whether the prefetch count was raised for it, because it stays unacknowledged.
        is_paused: Whether it goes to the queue of paused tasks.
    """

    message: Message
    destination: Destination
    due: Due
    due_ms: int
    waited: DelayHeaders | None
    ack: Callable[..., Any]
    hold: Action | None = None
    later_version: str = ""
    refused: str = ""
    unpublishable: str = ""
    has_place: bool = False
    is_paused: bool = False


def warn_undeliverable(message: Message, why: str) -> None:
    """Log that a task goes to ``undeliverable``."""
    name = celery_internals.shown(celery_internals.id_of(message))
    logger.warning("Task %s is undeliverable: %s", name, why)


class EarlyTasks(BatchThread[Early]):
    """Tells which tasks are early, and puts them back into the levels, in a thread.

    The thread publishes on a connection of its own, so neither the worker's tasks nor its heartbeat
    wait for a confirm. A message is acknowledged once the broker has confirmed the message that
    replaces it. If the worker dies before that, the broker delivers the original again.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    name = "rabbitdelay-put-back"

    def __init__(self, consumer: Any) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        settings = self._delays.settings
        self._topology = settings.topology
        self._tolerated_ms = milliseconds(settings.early_tolerance)
        self._redelivery = forwarding.Redelivery(self._topology, settings.retry_for)
        self._warning = EarlyWarning(logger)
        self._later_version = LaterVersionWarning(logger)
        self._has_warned_of_later_version = False

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
            run_strategy(self._consumer, delivery, self.refuse_unrunnable)

        destination = self.destination(message, waited)
        if destination is None:
            if waited is None:
                return False
            hold()
            return True
        if waited is not None:
            earlier = waited.early
            if not earlier.expects(due.at_ms - due.delay_ms, self._tolerated_ms):
                name = celery_internals.shown(message.headers.get("id"))
                self._warning.warn(f"Task {name}", due.delay_ms / 1000)
            waited = waited._replace(early=earlier._replace(times=earlier.times + 1))
        self.give(Early(message, destination, due, due.at_ms, waited, delivery.ack, hold))
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
        is_paused: bool = False,
    ) -> None:
        """Put a task back into the levels that has left them.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: What its headers have said.
            until_ms: Until when it is to wait, in milliseconds since 1970-01-01 UTC.
            due_ms: Its due time, likewise, which its header has from then on.
            otherwise: What the event loop runs if the levels do not take it.
            is_paused: Whether it goes to the queue of paused tasks; into the levels only if that
                does not take it.
        """
        destination = self.destination(delivery.message, waited)
        if destination is None:
            otherwise()
            return
        rest_ms = max(until_ms - wall_clock.ms(), 0)
        due = Due(until_ms * NS_PER_MS, rest_ms, is_instant=True)
        given = delivery.message, destination, due, due_ms, waited, delivery.ack, otherwise
        self.give(Early(*given, is_paused=is_paused))

    def refuse(self, message: Message, ack: Callable[..., Any], why: str) -> None:
        """Put a task into ``undeliverable``; while that does not take it, try again.

        Args:
            message: The task's message.
            ack: Acknowledges the message; the function that Celery passes to a strategy.
            why: The reason.
        """
        info, now = message.delivery_info, Due.after(0)
        destination = Destination(None, info["exchange"], info["routing_key"])
        self.give(Early(message, destination, now, now.at_ms, None, ack, refused=why))

    def refuse_unrunnable(self, message: Message, error: Exception) -> None:
        """Refuse a task about which Celery has raised an error.

        Args:
            message: The task's message.
            error: The error.
        """
        why = f"Celery cannot run it: {shortened(error)}"
        warn_undeliverable(message, why)
        logger.debug(why, exc_info=error)

        def settle(*args: Any) -> None:
            if not message.acknowledged:  # Celery may do it soon, in the event loop
                message.ack_log_error(*args)

        self.refuse(message, settle, why)

    def refuse_unopened(self, message: Message, why: str) -> None:
        """Refuse a task whose body kombu does not decompress, unless a later version may read it.

        Args:
            message: The task's message, as it was received.
            why: The reason.
        """
        later = header_names.later_version(message.headers, message.content_type)
        if later is not None:
            self.leave_to_later_version(message, message.ack_log_error, later)
            return
        warn_undeliverable(message, why)
        self.refuse(message, message.ack_log_error, why)

    def leave_to_later_version(self, message: Message, ack: Callable[..., Any], why: str) -> None:
        """Put a task back into the levels that only a worker of a later version can read.

        It stays as it is. If the levels do not take it, they are tried again after some seconds.

        Args:
            message: The task's message, as it was received.
            ack: As for :meth:`refuse`.
            why: Why this version cannot read it.
        """
        name = celery_internals.name_of_queue(self._consumer, message)
        if name is None:
            logger.warning("A task stays unacknowledged: its queue is unknown, and %s", why)
            return
        queue = self._consumer.app.amqp.queues.get(name) or kombu.Queue(name, no_declare=True)
        self._later_version.warn(f"Task {celery_internals.shown(message.headers.get('id'))}", why)
        destination, now = Destination(queue, "", queue.name), Due.after(0)
        self.give(Early(message, destination, now, now.at_ms, None, ack, later_version=why))

    def _due_after_levels(self, waited: DelayHeaders | None) -> Due | None:
        """Return when a task is due that has left the levels too early; None if it has not."""
        if waited is None:
            return None
        now_ms = wall_clock.ms()
        by_ms = forwarding.early_ms(waited, now_ms, self._tolerated_ms)
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
        return due if due.delay_ms > self._topology.layout.tick_ms else None

    def destination(self, message: Message, waited: DelayHeaders | None) -> Destination | None:
        """Return where the message came from; None if it cannot return there from the levels."""
        info, name = message.delivery_info, celery_internals.name_of_queue(self._consumer, message)
        queue: kombu.Queue | None = self._consumer.app.amqp.queues.get(name)
        if waited is not None:
            # The levels, or distribution, have reached its queue, which may be consumed no more.
            name = name or waited.queue
            if queue is None and name is not None:
                queue = kombu.Queue(name, no_declare=True)
        elif queue is not None and (queue.auto_delete or queue.exclusive):
            queue = None  # it ends with this worker
        if queue is None:
            return None
        return Destination(queue, info["exchange"], info["routing_key"])

    def work(self, batch: list[Early]) -> None:
        """Publish what replaces messages."""
        # Without resends, so as not to block the others: a message that is tried again gets a new
        # route.
        republishing.publish_each(self._delays, batch, self._replacement, self._settled, resends=0)

    def _replacement(self, producer: DelayedProducer, early: Early) -> republishing.ToPublish:
        """Return what replaces a message."""
        if early.unpublishable or early.refused:
            origin, received = early.destination, celery_internals.as_received(early.message)
            unopened = WaitingMessage.unopened(received)
            outgoing = forwarding.Outgoing(origin.exchange, origin.routing_key, unopened)
            reason = early.refused or f"{early.later_version}; {early.unpublishable}"
            undeliverable = self._topology.module_queues.undeliverable.exchange.name
            left = forwarding.to_undeliverable(undeliverable, outgoing, reason)
            if early.unpublishable:
                left = forwarding.without_headers(undeliverable, left)
            return None, left.message.amqp(), lambda: left.address
        if early.later_version:
            queue = early.destination.queue
            assert queue is not None
            later = self._redelivery.until_upgraded(
                celery_internals.as_received(early.message), early.later_version, queue.name
            )
            if later.reroute is None:
                logger.warning("A task is undeliverable: %s", early.later_version)
            address = later.reroute or (lambda: (later.exchange, later.routing_key))
            return queue, later.message.amqp(), address
        due = early.due if early.waited is None else self._pause(early.due)
        delayed = self._delayed(producer, early, due)
        if early.is_paused:
            _, key = producer.address(delayed, Due.after(0))
            paused = self._topology.module_queues.paused.exchange.name
            return delayed.queue, delayed.message.amqp(), lambda: (paused, key)
        return delayed.queue, delayed.message.amqp(), partial(producer.address, delayed, due)

    def _settled(self, early: Early, error: Exception | None) -> None:
        """Acknowledge a message, or try it again; if that is no use, the worker holds it."""
        if error is None:
            acknowledge = partial(self.acknowledge, early.ack)
            self.act(partial(self._finish, early, acknowledge), is_acknowledgement=True)
        elif early.hold is None:
            self._try_unread_again(early, error)
        elif isinstance(error, exceptions.InvalidDelay) and is_ours(early.message):
            # A client's eta, after the latest due time: held, it would keep others from the worker.
            why = f"it cannot wait until its eta: {error}"
            warn_undeliverable(early.message, why)
            self.act(
                partial(self._finish, early, partial(self.refuse, early.message, early.ack, why))
            )
        elif early.is_paused and (
            isinstance(error, exceptions.MessageNacked) or not isinstance(error, TEMPORARY_ERRORS)
        ):
            logger.warning("A paused task goes back into the levels: %s", error)
            early.is_paused = False
            self.give(early)
        elif not isinstance(error, TEMPORARY_ERRORS) or early.due.remaining_ms() <= 0:
            logger.warning(
                "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds it: "
                "%s",
                celery_internals.shown(early.message.headers.get("id")),
                early.due.remaining_ms() / 1000,
                error,
            )
            self.act(partial(self._finish, early, early.hold))
        else:
            if not early.has_place:
                logger.warning("A task that is not due could not be put into the levels: %s", error)
            self._again(early, RETRY_INTERVAL)

    def _try_unread_again(self, early: Early, error: Exception) -> None:
        """Put a task that does not run here into ``undeliverable``, or try it again.

        Its headers may leave no room in a frame for those that are added, and the broker may refuse
        it: then it goes there without its headers.
        """
        if _is_permanent(error) and not early.unpublishable:
            logger.warning("A task is undeliverable, without its headers: %s", error)
            early.unpublishable = getattr(error, "reason", str(error))
            self.give(early)
            return
        log = logger.debug if self._has_warned_of_later_version else logger.warning
        self._has_warned_of_later_version = True
        log(
            "A task that does not run here could not be published; the worker holds it and tries "
            "again, without a further warning on this connection: %s",
            error,
        )
        self._again(early, TRY_AGAIN)

    def _again(self, early: Early, seconds: float) -> None:
        """Try a message again; raise the prefetch count, as Celery does for a task that it holds.

        The message stays unacknowledged, and others would wait for it.
        """
        if not early.has_place:
            early.has_place = True
            self.act(partial(celery_internals.raise_prefetch, self._consumer))
        self.give(early, seconds)

    def _finish(self, early: Early, action: Action) -> None:
        """Lower the prefetch count if it was raised for a message, and acknowledge or hold it."""
        if early.has_place:
            early.has_place = False
            celery_internals.lower_prefetch(self._consumer)
        action()

    def _delayed(self, producer: DelayedProducer, early: Early, due: Due) -> Delayed:
        """Return what replaces a message, and waits until ``due``."""
        message = early.message
        users: dict[str, Any] = dict(message.headers)
        if "eta" in users:
            users["eta"] = None
        properties = kept_properties(message.properties)
        destination = early.destination
        headers, _ = header_names.parse(message.headers)
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
        if header_names.ONCE in registry:
            mark = header_names.Mark.of(registry[header_names.ONCE])
            again_mark = mark._replace(generation=mark.generation + 1)
            registry[header_names.ONCE] = again_mark.text
            if message.delivery_info.get("redelivered"):
                registry[header_names.REDELIVERED] = True
        producer.says = {"due_ms": early.due_ms, "early": again, "registry": registry}
        return republishing.message_again(producer, message, destination, due, users, properties)

    def _pause(self, due: Due) -> Due:
        """Return until when to put a task back: until it is due, or less; see :func:`.pause_ms`."""
        rest_ms = due.remaining_ms()
        pause = forwarding.pause_ms(rest_ms, self._topology)
        return due._replace(at_ns=due.at_ns - (rest_ms - pause) * NS_PER_MS, delay_ms=pause)

    def _needs_distribution(self, early: Early, priority: int) -> bool:
        """Return whether a task has to pass through distribution, which no other queue notices.

        A task that has done so already does it again: nobody may have bound its queue to the
        levels.
        """
        is_too_high = self._topology.queue_type == "quorum" and priority > header_names.MAX_PRIORITY
        return is_too_high or (early.waited is not None and early.waited.queue is None)


def _is_permanent(error: Exception) -> bool:
    """Return whether a message can never be published: AMQP or RabbitMQ does not take it.

    Not if the user lacks a permission, which an operator can give.
    """
    if isinstance(error, exceptions.PermissionMissing):
        return False
    # Of the class itself are those that AMQP cannot write.
    return isinstance(error, exceptions.MessageRefused) or type(error) is exceptions.PublishError
