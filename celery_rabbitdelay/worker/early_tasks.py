"""Early tasks: a task that arrives at a worker before it may run goes into the levels.

There are three kinds. A producer that does not know the levels (plain Celery, another language, an
older version) sends a task at once, with an ``eta`` in the future; Celery would hold it in the
worker until then. A task may leave the levels before it is due; see ``modules/forwarding.py``.
Celery would start it at once. And the registry may say that a task waits on.
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

#: Seconds until a task that does not run here is published again, if that has failed.
TRY_AGAIN: Final = 5.0

#: Where a message goes: into the levels, to the queue of paused tasks, or to ``undeliverable``;
#: ``bare`` means there without its headers.
Place: TypeAlias = Literal["levels", "paused", "undeliverable", "bare"]

ItemT = TypeVar("ItemT")

#: The queue that has to exist, if a message is for one; the message; and where it is published.
ToPublish: TypeAlias = tuple[kombu.Queue | None, amqp.Message, Address]


@dataclass(slots=True)
class Early:
    """A message that arrived before it may run, or that does not run here.

    Attributes:
        message: The message.
        ack: Acknowledges it: the function that Celery passes to a strategy.
        destination: The queue that it was consumed from, its exchange and its routing key.
        until: Until when it is to wait.
        due_ms: Its due time, from its header, in milliseconds since 1970-01-01 UTC.
        waited: Its parsed headers; None if it has an ``eta`` and was never in the levels.
        hold: Called if the levels do not take it: passes the task to Celery, which holds it.
        why: Why the task does not run here; empty if it is only early.
        place: Where it goes. With a ``why``, the levels pass it on to a worker of a later version.
        is_held: Whether the prefetch count was raised for it, because it stays unacknowledged.
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
    """Return a task that was received and restored, to be published again.

    Args:
        message: Its message.
        destination: The exchange and the routing key that its consumer sees.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        most: The bytes of a compressed body that a worker decompresses.

    Raises:
        MessageTooLarge: Its body is compressed, and has more.
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
    """Publish a message for each item. Raises nothing.

    Args:
        delays: The ``app.rabbitdelay``.
        items: What messages are made of.
        made: Makes the message of an item; what it raises is the error of that item alone.
        settled: Called once with each item, and with its error if its message is not confirmed.
        resends: How often each is sent again.
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
            except Exception as error:  # noqa: BLE001 - the others are published
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
                done=lambda each: settle(each.context, each.error),
            )
    except Exception as error:  # noqa: BLE001 - it is the error of all that are not confirmed
        for item in items:
            settle(item, error)


class EarlyTasks(BatchThread[Early]):
    """Tells which tasks are early, and puts them back into the levels, in a thread.

    The thread publishes on a connection of its own, so neither the worker's tasks nor its heartbeat
    wait for a confirm. A message is acknowledged once the broker has confirmed the message that
    replaces it. If the worker dies before that, the broker delivers the original again.

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
        self._failures = WarningLimit(logger, "Tasks that do not run here", HOUR)

    def try_enqueue(
        self, delivery: Delivery, waited: DelayHeaders | None, takes_eta: bool, ask: Action | None
    ) -> bool:
        """Take a task that is not due yet; return whether it was taken.

        A task with an ``eta`` counts as early if it is due in more than one tick; one that comes
        from the levels, if it is due in more than ``rabbitdelay_early_tolerance``. If the levels do
        not take the latter, the worker holds it until it is due, and then asks the registry, if
        there is one.

        Args:
            delivery: The task's message, as Celery has passed it.
            waited: What its headers have said; None if it was not in the levels.
            takes_eta: Whether to take a task for its ``eta``.
            ask: Asks the registry about a task that has left the levels; None without one.
        """
        message, body = delivery.message, delivery.body
        task_id = celery_internals.id_of(message)
        if task_id in self._consumer.controller.state.revoked:
            return False
        due = None
        if waited is not None:
            until_ms = self._early.until(waited, lambda: f"Task {celery_internals.shown(task_id)}")
            due = None if until_ms is None else Due.until(until_ms)
        if due is None:
            # It was released in time, or never waited.
            waited = None
            due = self._due_by_eta(message, body) if takes_eta else None
        if due is None:
            return False

        run = partial(run_strategy, self._consumer, delivery, self.refuse_unrunnable)
        # Celery itself holds a task until its eta.
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
        """Hold a task until it is due, beside those that the prefetch count allows."""

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
        place: Place = "paused" if is_paused else "levels"
        given = delivery.message, delivery.ack, destination, Due.until(until_ms), due_ms
        self.give(Early(*given, waited, otherwise, place=place))

    def refuse(self, message: Message, ack: Ack, why: str) -> None:
        """Put a task into ``undeliverable``; while that does not take it, try again.

        Args:
            message: The task's message.
            ack: Acknowledges the message; the function that Celery passes to a strategy.
            why: The reason.
        """
        name = celery_internals.shown(celery_internals.id_of(message))
        logger.warning("Task %s is undeliverable: %s", name, why)
        info = message.delivery_info
        destination = Destination(None, info["exchange"], info["routing_key"])
        self.give(Early(message, ack, destination, Due.after(0), why=why, place="undeliverable"))

    def refuse_unrunnable(self, message: Message, error: Exception) -> None:
        """Refuse a task about which Celery has raised an error.

        Args:
            message: The task's message.
            error: The error.
        """
        why = f"Celery cannot run it: {shortened(error)}"
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
        self.refuse(message, message.ack_log_error, why)

    def leave_to_later_version(self, message: Message, ack: Ack, why: str) -> None:
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
        if self._later_versions.allows():
            task = f"Task {celery_internals.shown(message.headers.get('id'))}"
            logger.warning(forwarding.LATER_VERSION, task, why)
        destination = Destination(queue, "", queue.name)
        self.give(Early(message, ack, destination, Due.after(0), why=why))

    def _due_by_eta(self, message: Message, body: object) -> Due | None:
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
        publish_each(self._delays, batch, self._replacement, self._settled, resends=0)

    def _replacement(self, producer: DelayedProducer, early: Early) -> ToPublish:
        """Return what replaces a message."""
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
        """Return the message of a task that does not run here, as it was received."""
        queue, exchange, routing_key = early.destination
        received = celery_internals.as_received(early.message)
        if early.place == "levels":
            assert queue is not None
            later = self._redelivery.until_upgraded(received, early.why, queue.name)
            if later.reroute is None:
                logger.warning("A task is undeliverable: %s", early.why)
            return later
        outgoing = forwarding.Outgoing(exchange, routing_key, WaitingMessage.unopened(received))
        left = forwarding.to_undeliverable(self._topology, outgoing, early.why)
        return forwarding.without_headers(left) if early.place == "bare" else left

    def _task(self, early: Early) -> tuple[WaitingMessage, kombu.Queue | None, Due]:
        """Return a task as it goes back into the levels, the queue that gets it, and until when."""
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
        # It has passed through distribution, and does so again: nobody may have bound its queue to
        # the levels. Distribution publishes by exchange and key: to this queue, and to no other.
        said = message.headers
        again_from = said.early._replace(exchange=said.exchange, routing_key=said.routing_key)
        message = message.saying(exchange="", routing_key=queue.name, early=again_from)
        return message, None, until

    def _settled(self, early: Early, error: Exception | None) -> None:
        """Acknowledge a message, or try it again; if that is no use, the worker holds it."""
        if error is None:
            acknowledge = partial(self.acknowledge, early.ack)
            self.act(partial(self._finish, early, acknowledge), is_acknowledgement=True)
        elif early.hold is None:
            self._try_refused_again(early, error)
        elif isinstance(error, exceptions.InvalidDelay) and is_ours(early.message):
            # A client's eta, after the latest due time: held, it would keep others from the worker.
            why = f"it cannot wait until its eta: {error}"
            self.act(
                partial(self._finish, early, partial(self.refuse, early.message, early.ack, why))
            )
        elif early.place == "paused" and (
            isinstance(error, exceptions.MessageNacked) or not isinstance(error, TEMPORARY_ERRORS)
        ):
            logger.warning("A paused task goes back into the levels: %s", error)
            early.place = "levels"
            self.give(early)
        elif not isinstance(error, TEMPORARY_ERRORS) or early.until.remaining_ms() <= 0:
            logger.warning(
                "Task %s is due in %.1f s and cannot wait in the levels, so the worker holds it: "
                "%s",
                celery_internals.shown(early.message.headers.get("id")),
                early.until.remaining_ms() / 1000,
                error,
            )
            self.act(partial(self._finish, early, early.hold))
        else:
            if not early.is_held:
                logger.warning("A task that is not due could not be put into the levels: %s", error)
            self._try_again(early, RETRY_INTERVAL)

    def _try_refused_again(self, early: Early, error: Exception) -> None:
        """Put a task that does not run here into ``undeliverable``, or try it again.

        Its headers may leave no room in a frame for those that are added, and the broker may refuse
        it: then it goes there without its headers.
        """
        if _is_permanent(error) and early.place != "bare":
            logger.warning("A task is undeliverable, without its headers: %s", error)
            early.why = f"{early.why}; {getattr(error, 'reason', error)}"
            early.place = "bare"
            self.give(early)
            return
        if self._failures.allows():
            text = "A task that does not run here could not be published, and is tried again: %s"
            logger.warning(text, error)
        self._try_again(early, TRY_AGAIN)

    def _try_again(self, early: Early, seconds: float) -> None:
        """Try a message again; raise the prefetch count, as Celery does for a task that it holds.

        The message stays unacknowledged, and others would wait for it.
        """
        if not early.is_held:
            early.is_held = True
            self.act(self._consumer.qos.increment_eventually)
        self.give(early, seconds)

    def _finish(self, early: Early, action: Action) -> None:
        """Lower the prefetch count if it was raised for a message, and acknowledge or hold it."""
        if early.is_held:
            early.is_held = False
            self._consumer.qos.decrement_eventually()
        action()


def _is_permanent(error: Exception) -> bool:
    """Return whether a message can never be published: AMQP or RabbitMQ does not take it.

    Not if the user lacks a permission, which an operator can give.
    """
    if isinstance(error, exceptions.PermissionMissing):
        return False
    # Of the class itself are those that AMQP cannot write.
    return isinstance(error, exceptions.MessageRefused) or type(error) is exceptions.PublishError
