"""Occurrences of schedules: the next one is published before one of them runs."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app.options import RegistryOptions
from celery_rabbitdelay.app.sending.task_messages import stored
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due, instant_of
from celery_rabbitdelay.levels.headers import (
    COPY,
    KEY,
    NESTED_HEADERS,
    ONCE,
    ORDER,
    SCHEDULE,
    DelayHeaders,
)
from celery_rabbitdelay.levels.schedule import Occurrence
from celery_rabbitdelay.publishing.message import kept_properties
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.registry.decision import Ticket, new_copy
from celery_rabbitdelay.registry.registry import Registration
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Delivery
from celery_rabbitdelay.worker.early_tasks import EarlyTasks, acknowledge_message, message_again

logger = get_logger(__name__)

#: Seconds until an occurrence that was not confirmed is published again.
TRY_AGAIN: Final = 1.0

#: Seconds between two looks for schedules whose next occurrence has not come; the first one comes
#: within the half of that. One worker at a time looks.
LOOK_EVERY: Final = 30.0

#: How many occurrences are remembered that could not be noted.
MAX_UNNOTED: Final = 1000

#: The headers that one occurrence has, and its retries have not.
_OF_OCCURRENCE: Final = (COPY, KEY, ORDER, SCHEDULE)


class Arrived(NamedTuple):
    """An occurrence that has arrived.

    Attributes:
        delivery: Its message, restored, as Celery has passed it.
        waited: What its headers said before it was restored.
        go_on: Runs, discards or acknowledges it, in the event loop, once the next one is published.
        is_copy: Whether another message of it has run. Then the next one was published by that,
            unless this one was sent again because that is not known.
    """

    delivery: Delivery
    waited: DelayHeaders
    go_on: Action
    is_copy: bool


class Occurrences(BatchThread[Arrived]):
    """Publishes the next occurrence of a schedule, and then lets the one run that has come.

    If the worker dies in between, RabbitMQ redelivers the one that has come; what follows it is
    published again, under the same id, and runs once.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Knows where a task came from.
    """

    name = "rabbitdelay-schedules"

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        self._registry = self._delays.registry
        self._early_tasks = early_tasks
        self._puts_beat = self._delays.settings.beat
        self._unnoted: list[tuple[Registration, Occurrence]] = []
        self._look_at = time.monotonic() + LOOK_EVERY * random.uniform(0, 0.5)  # noqa: S311 - jitter

    def follow(
        self, delivery: Delivery, waited: DelayHeaders, go_on: Action, *, is_copy: bool = False
    ) -> None:
        """Publish what follows an occurrence, and then go on with it; its retries are none.

        Args:
            delivery: Its message, restored, as Celery has passed it.
            waited: What its headers said before it was restored.
            go_on: As in :class:`Arrived`.
            is_copy: As in :class:`Arrived`.
        """
        table: Any = delivery.message.headers
        while isinstance(table, dict):
            for name in _OF_OCCURRENCE:
                table.pop(name, None)
            table = table.get(NESTED_HEADERS)
        self.give(Arrived(delivery, waited, go_on, is_copy))

    def begin(self) -> None:
        """Put the entries of beat, if workers have taken them over."""
        if self._puts_beat:
            self._delays.schedules.put_beat()
            self._puts_beat = False

    def own_work_in(self) -> float | None:
        """Return the seconds until the next look for what has not come."""
        return self._look_at - time.monotonic()

    def work(self, batch: list[Arrived]) -> None:
        """Publish what follows, and let the event loop go on with what has come."""
        occurrences = [Occurrence.of(each.waited.registry[SCHEDULE]) for each in batch]
        paused = self._paused([each.name if each is not None else "" for each in occurrences])
        for each, occurrence, is_paused in zip(batch, occurrences, paused, strict=True):
            try:
                self._follow(each, occurrence, is_paused)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._failed(each, error)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY
            try:
                self.begin()
                # First of all, or what they are about would be sent again.
                self._note([])
                if self._registry.schedules.may_heal():
                    self._delays.schedules.heal()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                logger.warning("Nobody has looked after the schedules: %s", error)

    def _paused(self, names: Sequence[str]) -> list[bool]:
        """Return for each schedule whether it is paused, as far as that is known."""
        try:
            found = self._registry.schedules.get(names)
        except RegistryUnavailable as error:
            logger.warning("Occurrences of schedules come although %s", error)
            return [False] * len(names)
        return [each is not None and each.is_paused for each in found]

    def _failed(self, arrived: Arrived, error: Exception) -> None:
        task_id = celery_internals.shown(celery_internals.id_of(arrived.delivery.message))
        if isinstance(error, TEMPORARY_ERRORS):
            logger.warning("Occurrence %s waits for the next to be published: %s", task_id, error)
            again = partial(self.give, arrived)
            self.act(partial(celery_internals.call_after, self._consumer, TRY_AGAIN, again))
        else:
            logger.error("Occurrence %s runs, and no other follows: %r", task_id, error)
            self.act(arrived.go_on)

    def _follow(self, arrived: Arrived, occurrence: Occurrence | None, is_paused: bool) -> None:
        words, task_id = arrived.waited.registry, celery_internals.id_of(arrived.delivery.message)
        if occurrence is None or (
            (words.get(KEY), task_id) != (occurrence.key, occurrence.task_id)
            or not (ORDER in words and ONCE in words)
        ):
            raise LookupError("its header cannot be read, or is that of another task")
        if arrived.is_copy and not self._is_newest(arrived.waited, occurrence):
            self.act(arrived.go_on)
            return
        runs, following = occurrence.at(time.time_ns() // NS_PER_MS)
        if following is None:
            self._registry.schedules.end(occurrence)
        else:
            self._publish(arrived.delivery, arrived.waited, following)
        if arrived.is_copy or (runs and not is_paused):
            self.act(arrived.go_on)
            return
        why = "its schedule is paused" if is_paused else "it is too late"
        logger.info("Occurrence %s does not run: %s.", occurrence.task_id, why)
        acknowledge = partial(acknowledge_message, self._consumer, arrived.delivery.ack)
        self.act(acknowledge, is_acknowledgement=True)

    def _is_newest(self, waited: DelayHeaders, occurrence: Occurrence) -> bool:
        order, task_id = self._registry.newest_under(occurrence.key)
        return bool(order == waited.registry[ORDER] and task_id == occurrence.task_id)

    def _publish(self, delivery: Delivery, waited: DelayHeaders, following: Occurrence) -> None:
        """Publish an occurrence as the one before it, and note it."""
        due = Due.at(instant_of(following.instant_ms))
        ticket, key = Ticket(0, int(waited.registry[ORDER])), following.key
        copy, words = new_copy(), {ONCE: new_copy(), SCHEDULE: following.text}
        says = {COPY: copy, KEY: key, **ticket.headers, **words}
        with self._delays.publisher() as publisher:
            producer = DelayedProducer(publisher, **self._delays.settings.for_producer)
            producer.says = {"due_ms": following.instant_ms, "registry": says}
            delayed = self._message(producer, delivery.message, waited, due, following.task_id)
            producer.publish_message(delayed, due)
        sent = Registration(following.task_id, copy, following.instant_ms, ticket=ticket, key=key)
        task = self._consumer.app.tasks.get(delivery.task)
        if RegistryOptions.of(self._delays.settings, task, {}, {}).track:
            sent = sent._replace(name=delivery.task, message=stored(delayed))
        self._note([(sent, following)])

    def _note(self, more: list[tuple[Registration, Occurrence]]) -> None:
        """Note occurrences that were published; what cannot be noted now is noted later."""
        self._unnoted = [*self._unnoted, *more][-MAX_UNNOTED:]
        try:
            states = self._registry.register([sent for sent, _ in self._unnoted])
            for (_, following), state in zip(self._unnoted, states, strict=True):
                if state != "superseded":
                    self._registry.schedules.follow(following)
            self._unnoted = []
        except RegistryUnavailable as error:
            logger.warning("%d occurrences are noted later: %s", len(self._unnoted), error)

    def _message(
        self,
        producer: DelayedProducer,
        former: Message,
        waited: DelayHeaders,
        due: Due,
        task_id: str,
    ) -> Delayed:
        """Return the message of an occurrence, made of the one before it."""
        destination = self._early_tasks.destination(former, waited)
        if destination is None:
            raise LookupError("its queue is unknown")
        users: dict[str, Any] = {**former.headers, "expires": None}
        for name in ("id", "root_id"):
            if users.get(name) == former.headers.get("id"):
                users[name] = task_id
        properties = {**kept_properties(former.properties), "correlation_id": task_id}
        return message_again(producer, former, destination, due, users, properties)
