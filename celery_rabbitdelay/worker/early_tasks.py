"""Early tasks: if a task reaches a worker before it may run, the worker puts it into the levels.

Early tasks are of three kinds. A producer that does not know the levels (plain Celery, another
language, an older version) sends a task at once, with an ``eta`` in the future: Celery would hold
the task in the worker. A task may leave the levels before it is due (see
``modules/forwarding.py``): Celery would start it at once. And the registry may make a due task
wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

import amqp
import kombu
from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.pipelines import borrowed_publisher
from celery_rabbitdelay.exceptions import TEMPORARY_ERRORS
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Due, milliseconds
from celery_rabbitdelay.levels.headers import DelayHeaders, EarlyHeader, shortened
from celery_rabbitdelay.levels.warning_limit import HOUR, WarningLimit
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import Address, Publication, WaitingMessage
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import Ack, Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Consumer, Delivery
from celery_rabbitdelay.worker.celery_requests import is_ours, run_strategy

logger = get_logger(__name__)

#: Seconds between two attempts to publish a message after a temporary error.
RETRY_INTERVAL: Final = 1.0

#: Seconds between two attempts to publish a task that this worker cannot run.
TRY_AGAIN: Final = 5.0

#: Where a message goes: into the levels, to the queue of paused tasks, or to ``undeliverable``;
#: ``bare`` means ``undeliverable`` without the message's headers.
Place: TypeAlias = Literal["levels", "paused", "undeliverable", "bare"]

ItemT = TypeVar("ItemT")

#: The queue that has to exist, if any; the message; and the function that returns its address.
ToPublish: TypeAlias = tuple[kombu.Queue | None, amqp.Message, Address]


@dataclass(slots=True)
class Early:
    """A task that arrived before it may run, or that this worker cannot run.

    Attributes:
        message: The message.
        ack: Acknowledges the message: the function that Celery passes to a strategy.
        destination: The queue that it was consumed from; the message's exchange and routing key.
        until: The end of the wait.
        due_ms: The due time for the message's new header, in milliseconds since 1970-01-01 UTC.
        waited: The message's parsed headers; None if the task has an ``eta`` and was never in the
            levels.
        hold: Called if the levels do not accept the task: lets the worker hold it, or asks the
            registry again. None to retry publishing.
        why: Why this worker cannot run the task; empty if the task is only early.
        place: Where the message goes. A task of a later version has a ``why``, and goes into the
            levels.
        is_held: Whether the prefetch count is raised for the task, because the task stays
            unacknowledged.
    """

    message: Message
    ack: Ack
    destination: Destination
    until: Due
    due_ms: int = 0
    waited: DelayHeaders | None = None
    hold: Action | None = None
    why: str = ""
    place: Place = "levels"
    is_held: bool = False


def waiting_task(
    message: Message, destination: Destination, due_ms: int, most: int
) -> WaitingMessage:
    """Convert a received task to a message that can be published again.

    Args:
        message: The task's message, with the exchange, routing key and headers of the task.
        destination: The exchange and the routing key that its consumer sees.
        due_ms: When the task is due, in milliseconds since 1970-01-01 UTC.
        most: The maximum size of a compressed body after decompression, in bytes.

    Raises:
        MessageTooLarge: The task's body is compressed, and exceeds ``most``.
    """
    size = len(message.body or "")
    if message.headers.get("compression") and size > most:
        raise exceptions.MessageTooLarge(size, most)
    received = celery_internals.as_received(message)
    return forwarding.delayed_task(received, destination, due_ms)


def publish_each(
    delays: Delays,
    items: Sequence[ItemT],
    made: Callable[[DelayedProducer, ItemT], ToPublish],
    settled: Callable[[ItemT, Exception | None], None],
    resends: int | None,
) -> None:
    """Publish one message per item; never raises.

    Args:
        delays: The ``app.rabbitdelay``.
        items: The items.
        made: Returns the message of an item; if it raises an error, only this item fails.
        settled: Called once per item, with its error if its message is not confirmed.
        resends: How often a message is resent.
    """
    unsettled = {id(item): item for item in items}

    def settle(item: ItemT, error: Exception | None) -> None:
        if unsettled.pop(id(item), None) is not None:
            settled(item, error)

    def publications(producer: DelayedProducer) -> Iterator[Publication]:
        for item in items:
            try:
                queue, message, address = made(producer, item)
                publication = Publication.of(message, address, item)
            except Exception as error:  # noqa: BLE001 - it fails this item only
                settle(item, error)
            else:
                publication.declare = producer.declarations(queue, ())["declare"]
                yield publication

    try:
        with borrowed_publisher(delays) as publisher:
            producer = DelayedProducer(publisher, **delays.settings.for_producer)
            publisher.publish_all(
                publications(producer),
                PublishPolicy(producer.timeout, resends=resends),
                redeclare=producer.declarations(None, ())["redeclare"],
                done=lambda publication: settle(publication.context, publication.error),
            )
    except Exception as error:  # noqa: BLE001 - it fails all unconfirmed items
        for item in items:
            settle(item, error)


class EarlyTasks(BatchThread[Early]):
    """Detects early tasks, and puts them back into the levels, in a thread.

    The thread publishes on a separate connection, so that the worker's tasks and its heartbeat do
    not wait for confirms. A message is acknowledged once the broker has confirmed the message that
    replaces it. If the worker dies before that, the broker redelivers the original.

    Args:
        consumer: The worker's consumer, on one connection.
    """

    name = "rabbitdelay-put-back"

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        settings = self._delays.settings
        self._topology = settings.topology
        self._early = forwarding.EarlyMessages(
            self._topology, milliseconds(settings.early_tolerance)
        )
        self._redelivery = forwarding.Redelivery(self._topology, settings.retry_for)
        self._later_versions = WarningLimit(logger, "Tasks of a later version", HOUR)
        self._failures = WarningLimit(logger, "Tasks that this worker cannot run", HOUR)

    def try_enqueue(
        self, delivery: Delivery, waited: DelayHeaders | None, takes_eta: bool, ask: Action | None
    ) -> bool:
        """Put a task back into the levels if it is early; return whether it was early.

        A task with an ``eta`` counts as early if it is due in more than one tick, and a task from
        the levels if it is due in more than ``rabbitdelay_early_tolerance``. If the levels do not
        accept a task, the worker holds it until it is due, and then asks the registry, if there is
        one.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: The task's parsed headers; None if it was not in the levels.
            takes_eta: Whether to put tasks with an ``eta`` into the levels.
            ask: Asks the registry about a task that has left the levels; None without a registry.
        """
        message, body = delivery.message, delivery.body
        task_id = celery_internals.id_of(message)
        if task_id in self._consumer.controller.state.revoked:
            return False
        due = None
        if waited is not None:
            until_ms = self._early.until(waited, lambda: _task_named(message))
            due = None if until_ms is None else Due.until(until_ms)
        if due is None:
            # The task has left the levels in time, or was never in the levels.
            waited = None
            due = self._due_by_eta(message, body) if takes_eta else None
        if due is None:
            return False

        run = partial(run_strategy, self._consumer, delivery, self.refuse_unrunnable)
        # Celery itself holds a task with an eta.
        hold = run if waited is None else partial(self._hold, due, ask or run)

        destination = self.destination(message, waited)
        if destination is None:
            if waited is None:
                return False
            hold()
            return True
        self.give(Early(message, delivery.ack, destination, due, due.at_ms, waited, hold))
        return True

    def _hold(self, due: Due, go_on: Action) -> None:
        """Hold a task until it is due, with the prefetch count raised for it."""

        def go_on_now() -> None:
            self._consumer.qos.decrement_eventually()
            go_on()

        self._consumer.qos.increment_eventually()
        self._consumer.timer.call_after(due.remaining_ms() / 1000, go_on_now)

    def put_back(
        self,
        delivery: Delivery,
        waited: DelayHeaders,
        until_ms: int,
        due_ms: int,
        otherwise: Action,
        is_paused: bool = False,
    ) -> None:
        """Put a task back into the levels.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: The message's parsed headers.
            until_ms: The end of the wait, in milliseconds since 1970-01-01 UTC.
            due_ms: The task's new due time, in the same unit.
            otherwise: Called in the event loop if the levels do not accept the task.
            is_paused: Whether the task goes to the queue of paused tasks, and into the levels only
                if that queue does not accept it.
        """
        destination = self.destination(delivery.message, waited)
        if destination is None:
            otherwise()
            return
        place: Place = "paused" if is_paused else "levels"
        given = delivery.message, delivery.ack, destination, Due.until(until_ms), due_ms
        self.give(Early(*given, waited, otherwise, place=place))

    def refuse(self, message: Message, ack: Ack, why: str) -> None:
        """Put a task into ``undeliverable``, with retries until it is confirmed.

        Args:
            message: The task's message.
            ack: Acknowledges the message: the function that Celery passes to a strategy.
            why: The reason.
        """
        logger.warning("%s is undeliverable: %s", _task_named(message), why)
        info = message.delivery_info
        destination = Destination(None, info["exchange"], info["routing_key"])
        self.give(Early(message, ack, destination, Due.after(0), why=why, place="undeliverable"))

    def refuse_unrunnable(self, message: Message, error: Exception) -> None:
        """Refuse a task for which Celery has raised an error.

        Args:
            message: The task's message.
            error: The error.
        """
        why = f"Celery cannot run it: {shortened(error)}"
        logger.debug(why, exc_info=error)

        def settle(*args: Any) -> None:
            if not message.acknowledged:  # by Celery, in the event loop
                message.ack_log_error(*args)

        self.refuse(message, settle, why)

    def refuse_unopened(self, message: Message, why: str) -> None:
        """Refuse a task that is too large or unreadable, unless a later version may read it.

        Args:
            message: The task's received message.
            why: The reason.
        """
        later = header_names.later_version(message.headers, message.content_type)
        if later is not None:
            self.leave_to_later_version(message, message.ack_log_error, later)
            return
        self.refuse(message, message.ack_log_error, why)

    def leave_to_later_version(self, message: Message, ack: Ack, why: str) -> None:
        """Return a task to the levels, because only a worker of a later version can read it.

        The message stays unchanged. Publishing is retried until the levels accept the message.

        Args:
            message: The task's received message.
            ack: As for :meth:`refuse`.
            why: Why this version cannot read it.
        """
        name = celery_internals.name_of_queue(self._consumer, message)
        if name is None:
            text = "%s stays unacknowledged, because its queue is unknown and %s"
            logger.warning(text, _task_named(message), why)
            return
        queue = self._consumer.app.amqp.queues.get(name) or kombu.Queue(name, no_declare=True)
        if self._later_versions.allows():
            logger.warning(forwarding.LATER_VERSION, _task_named(message), why)
        destination = Destination(queue, "", queue.name)
        self.give(Early(message, ack, destination, Due.after(0), why=why))

    def _due_by_eta(self, message: Message, body: object) -> Due | None:
        """Return when a task is due by its ``eta``; None unless it is more than a tick ahead."""
        eta = message.headers.get("eta")
        if eta is None:
            # Protocol 1, or a mixture with protocol 2: Celery's strategies also read the body.
            with suppress(Exception):  # a strategy reports an invalid body
                fields = message.payload if body is None else body
                eta = fields.get("eta") if isinstance(fields, Mapping) else None
        instant = eta_of(eta, self._consumer.app.timezone)
        if instant is None:
            return None
        due = Due.at(instant)
        return due if due.delay_ms > self._topology.layout.tick_ms else None

    def destination(self, message: Message, waited: DelayHeaders | None) -> Destination | None:
        """Return where a message came from; None if it cannot return there from the levels."""
        info, name = message.delivery_info, celery_internals.name_of_queue(self._consumer, message)
        queue: kombu.Queue | None = self._consumer.app.amqp.queues.get(name)
        if waited is not None:
            # The levels or distribution have reached the task's queue, even if it has no consumer
            # now.
            name = name or waited.queue
            if queue is None and name is not None:
                queue = kombu.Queue(name, no_declare=True)
        elif queue is not None and (queue.auto_delete or queue.exclusive):
            queue = None  # the queue is deleted with this worker
        if queue is None:
            return None
        return Destination(queue, info["exchange"], info["routing_key"])

    def work(self, batch: list[Early]) -> None:
        """Publish replacements of messages."""
        # Resends would block other messages. Instead, a retried message gets a new route.
        publish_each(self._delays, batch, self._replacement, self._settled, resends=0)

    def _replacement(self, producer: DelayedProducer, early: Early) -> ToPublish:
        """Return the replacement of a message."""
        if early.why:
            left = self._not_run_here(early)
            queue = early.destination.queue if early.place == "levels" else None
            return queue, left.message.amqp(), left.reroute or (lambda: left.address)
        message, queue, until = self._task(early)
        delayed = producer.routed(message, queue, until)
        if early.place == "paused":
            _, key = producer.address(delayed, Due.after(0))
            paused = self._topology.module_queues.paused.exchange.name
            return queue, delayed.message.amqp(), lambda: (paused, key)
        return queue, delayed.message.amqp(), partial(producer.address, delayed, until)

    def _not_run_here(self, early: Early) -> forwarding.Outgoing:
        """Return the unchanged message of a task that this worker cannot run."""
        queue, exchange, routing_key = early.destination
        received = celery_internals.as_received(early.message)
        if early.place == "levels":
            assert queue is not None
            later = self._redelivery.until_upgraded(received, early.why, queue.name)
            if later.reroute is None:
                logger.warning("%s is undeliverable: %s", _task_named(early.message), early.why)
            return later
        outgoing = forwarding.Outgoing(exchange, routing_key, WaitingMessage.unopened(received))
        left = forwarding.to_undeliverable(self._topology, outgoing, early.why)
        return forwarding.without_headers(left) if early.place == "bare" else left

    def _task(self, early: Early) -> tuple[WaitingMessage, kombu.Queue | None, Due]:
        """Return the message of a task for the levels, its queue, and the end of its wait."""
        waited, until, queue = early.waited, early.until, early.destination.queue
        assert queue is not None
        most = self._delays.settings.max_message_bytes
        message = waiting_task(early.message, early.destination, early.due_ms, most)
        registry = dict(message.headers.registry)
        if header_names.ONCE in registry:
            mark = header_names.Mark.of(registry[header_names.ONCE])
            registry[header_names.ONCE] = mark._replace(generation=mark.generation + 1).text
            if early.message.delivery_info.get("redelivered"):
                registry[header_names.REDELIVERED] = True
        message = message.saying(registry=registry)
        if waited is not None:
            again = message.saying(early=EarlyHeader(waited.early.times))
            message, until = forwarding.waiting_on(self._topology, again, until.at_ms)
        if waited is None or waited.queue is not None:
            return message, queue, until
        # The task came through distribution, so its queue may not be bound to the levels. The task
        # returns through distribution, which publishes it to this queue only.
        headers = message.headers
        again_from = headers.early._replace(
            exchange=headers.exchange, routing_key=headers.routing_key
        )
        message = message.saying(exchange="", routing_key=queue.name, early=again_from)
        return message, None, until

    def _settled(self, early: Early, error: Exception | None) -> None:
        """Acknowledge a replaced message; if its replacement failed, retry, or hold the task."""
        if error is None:
            acknowledge = partial(self.acknowledge, early.ack)
            self.act(partial(self._finish, early, acknowledge), is_acknowledgement=True)
        elif early.hold is None:
            self._try_refused_again(early, error)
        elif isinstance(error, exceptions.InvalidDelay) and is_ours(early.message):
            # The eta is too far ahead: a held task would take up a slot of the prefetch count.
            why = f"it cannot wait until its eta: {error}"
            self.act(
                partial(self._finish, early, partial(self.refuse, early.message, early.ack, why))
            )
        elif early.place == "paused" and (
            isinstance(error, exceptions.MessageNacked) or not isinstance(error, TEMPORARY_ERRORS)
        ):
            text = "%s cannot wait with the paused tasks, and returns to the delay levels: %s"
            logger.warning(text, _task_named(early.message), error)
            early.place = "levels"
            self.give(early)
        elif not isinstance(error, TEMPORARY_ERRORS) or early.until.remaining_ms() <= 0:
            text = "%s, due in %.1f s, cannot wait in the delay levels, so the worker holds it: %s"
            seconds = early.until.remaining_ms() / 1000
            logger.warning(text, _task_named(early.message), seconds, error)
            self.act(partial(self._finish, early, early.hold))
        else:
            if not early.is_held:
                text = "%s cannot enter the delay levels yet; retrying: %s"
                logger.warning(text, _task_named(early.message), error)
            self._try_again(early, RETRY_INTERVAL)

    def _try_refused_again(self, early: Early, error: Exception) -> None:
        """Retry publishing a task that this worker cannot run, if necessary without its headers.

        The task's headers may leave no room in a frame for this package's headers, or the broker
        may refuse the headers.
        """
        if _is_permanent(error) and early.place != "bare":
            text = "%s becomes undeliverable, without its headers, which cannot be published: %s"
            logger.warning(text, _task_named(early.message), error)
            early.why = f"{early.why}; {getattr(error, 'reason', error)}"
            early.place = "bare"
            self.give(early)
            return
        if self._failures.allows():
            text = "%s cannot run here, and could not be published elsewhere; retrying: %s"
            logger.warning(text, _task_named(early.message), error)
        self._try_again(early, TRY_AGAIN)

    def _try_again(self, early: Early, seconds: float) -> None:
        """Retry a message; raise the prefetch count, as Celery does for a task that it holds.

        The message stays unacknowledged, and would take up a slot of the prefetch count.
        """
        if not early.is_held:
            early.is_held = True
            self.act(self._consumer.qos.increment_eventually)
        self.give(early, seconds)

    def _finish(self, early: Early, action: Action) -> None:
        """Run a message's last action; lower the prefetch count if the message had raised it."""
        if early.is_held:
            early.is_held = False
            self._consumer.qos.decrement_eventually()
        action()


def _task_named(message: Message) -> str:
    """Return the beginning of a log line about a task."""
    task_id = celery_internals.id_of(message)
    return f"Task {celery_internals.shown(task_id)}" if task_id else "A task without an id"


def _is_permanent(error: Exception) -> bool:
    """Return whether a message can never be published, because AMQP or RabbitMQ refuses it.

    A missing permission is not permanent, because an operator can grant it.
    """
    if isinstance(error, exceptions.PermissionMissing):
        return False
    # A plain PublishError means that AMQP cannot encode the message.
    return isinstance(error, exceptions.MessageRefused) or type(error) is exceptions.PublishError
