"""Occurrences of schedules: the next one is published before one of them runs.

The rule: an occurrence that has arrived, and that the registry lets run, first publishes what
follows it, confirmed; then it is decided whether it runs, from how late it is, whether its schedule
is paused, and whether another run of it still goes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app import instruments, signals
from celery_rabbitdelay.app.beat import put_beat, state_of_beat
from celery_rabbitdelay.app.options import RegistryOptions
from celery_rabbitdelay.app.sending.task_messages import stored
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, instant_of
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
from celery_rabbitdelay.publishing.publication import RESENDS
from celery_rabbitdelay.registry.decision import Ticket, new_copy
from celery_rabbitdelay.registry.registry import Registration
from celery_rabbitdelay.registry.schedules import Came, Fate
from celery_rabbitdelay.worker import celery_internals, republishing
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Delivery
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.runs import POLL, Runs

logger = get_logger(__name__)

#: Seconds until an occurrence that was not confirmed is published again.
TRY_AGAIN: Final = 1.0

#: Seconds between two looks for schedules whose next occurrence has not come; the first one comes
#: within the half of that. One worker at a time looks.
LOOK_EVERY: Final = 30.0

#: How many occurrences are remembered that could not be noted.
MAX_UNNOTED: Final = 1000

#: For how many looks at the runs an occurrence waits for the end of another one in this worker,
#: before it is skipped or goes back into the levels.
LOOKS: Final = 4

#: The shortest and the longest pause, in milliseconds, of what waits for the end of a run;
#: in between, a tenth of the time that it has waited.
MIN_PAUSE_MS: Final = 2_000
MAX_PAUSE_MS: Final = 30_000

#: The headers that one occurrence has, and its retries have not.
_OF_OCCURRENCE: Final = (COPY, KEY, ORDER, SCHEDULE)

_WHY: Final[Mapping[Fate, str]] = {
    "late": "it is too late",
    "paused": "its schedule is paused",
    "overlapped": "another run of its schedule still goes",
}


#: What the registry has said of an occurrence: it runs; it was cancelled; another message of it has
#: run. Then the next one was published by that, unless this one was sent again because that is not
#: known.
OccurrenceKind = Literal["runs", "cancelled", "copy"]


class Arrived(NamedTuple):
    """An occurrence that has arrived.

    Attributes:
        delivery: Its message, restored, as Celery has passed it.
        waited: What its headers said before it was restored.
        go_on: Runs, discards or acknowledges it, in the event loop, once the next one is published.
        put_back: Puts it back into the levels until an instant, in milliseconds since 1970.
        kind: What the registry has said of it.
        looks: How often it was looked whether another run has ended; then the next is published.
    """

    delivery: Delivery
    waited: DelayHeaders
    go_on: Action
    put_back: Callable[[int], None]
    kind: OccurrenceKind
    looks: int = 0


class _Step(NamedTuple):
    """What is to be done about an occurrence that has arrived.

    Attributes:
        arrived: The occurrence as it has arrived.
        occurrence: What its header says.
        following: The one to be published; None if there is none.
        fate: What becomes of it, unless another run still goes.
    """

    arrived: Arrived
    occurrence: Occurrence
    following: Occurrence | None
    fate: Fate


def _each_once(steps: Sequence[_Step]) -> list[_Step]:
    """Return steps of which no two publish the same occurrence, if messages came twice."""
    seen: set[Occurrence | None] = set()
    kept = []
    for step in steps:
        kept.append(step._replace(following=None) if step.following in seen else step)
        seen.add(step.following)
    return kept


class Occurrences(BatchThread[Arrived]):
    """Publishes the next occurrence of a schedule, and then lets the one run that has come.

    If the worker dies in between, RabbitMQ redelivers the one that has come; what follows it is
    published again, under the same id, and runs once.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Knows where a task came from.

    Attributes:
        overdue: Seconds since the next occurrence of a schedule was due that has not come, of the
            one that is missed longest; 0: none is.
    """

    name = "rabbitdelay-schedules"

    #: What was published and could not be noted, also over connections that were lost since.
    _unnoted: ClassVar[dict[Occurrence, Registration]] = {}

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        self._registry = self._delays.registry
        self._early_tasks = early_tasks
        self._beat = ""
        self._look_at = time.monotonic() + LOOK_EVERY * random.uniform(0, 0.5)  # noqa: S311 - jitter
        self._runs = Runs(self._registry)
        self._heal_at = 0.0
        self.overdue = 0.0

    def begin(self) -> None:
        """Put the entries of beat, if workers have taken them over; again if Redis lost them."""
        if not self._delays.settings.beat:
            return
        schedules = self._delays.schedules
        state = state_of_beat(schedules) if self._beat else "lost"
        if state != "lost":
            self._beat = state
        elif self._beat != "former":  # workers of later code put theirs
            self._beat = "current" if put_beat(schedules) else "former"

    def own_work_in(self) -> float:
        """Return the seconds until the next look for what has not come."""
        return self._look_at - time.monotonic()

    def work(self, batch: list[Arrived]) -> None:
        """Publish what follows, and let the event loop go on with what has come."""
        if batch:
            self._work_on(batch)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY
            unseen = "Nobody has looked after the schedules: %s"
            try:
                with self._unless_away(unseen):
                    self._look_after_schedules()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                logger.warning(unseen, error)

    def _work_on(self, batch: list[Arrived]) -> None:
        steps: list[_Step] = []
        for each in batch:
            try:
                if (step := self._step(each)) is not None:
                    steps.append(step)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._failed(each, error)
        published, sent = self._published(self._paused(_each_once(steps)))
        fates = [(step, self._fate(step)) for step in published]
        now_ms = wall_clock.ms()
        came = {
            step.occurrence: Came(step.occurrence.due_ms, now_ms, fate)
            for step, fate in fates
            if fate is not None and step.arrived.kind != "copy"
        }
        self._note(sent, came)
        with self._unless_away("A backfill leaves out what is skipped now: %s"):
            # They have not run, and may be sent again.
            skipped = [each.task_id for each, (_, _, fate) in came.items() if fate in _WHY]
            self._registry.forget(skipped)
        for step, fate in fates:
            if fate is not None:
                self._go_on(step, fate)

    def _step(self, arrived: Arrived) -> _Step | None:
        """Return what is to be done about an occurrence; None if it just goes on.

        Raises:
            LookupError: Its header cannot be read, or is that of another task.
            ValueError: What follows it cannot be computed.
        """
        words = arrived.waited.registry
        task_id = celery_internals.id_of(arrived.delivery.message)
        occurrence = Occurrence.of(words[SCHEDULE])
        if occurrence is None or (
            (words.get(KEY), task_id) != (occurrence.key, occurrence.task_id)
            or not (ORDER in words and ONCE in words)
        ):
            raise LookupError("its header cannot be read, or is that of another task")
        if arrived.kind == "copy" and not self._is_newest(arrived.waited, occurrence):
            self.act(partial(self._let_run, arrived))
            return None
        waits = arrived.looks or (
            occurrence.overlap == "queue-one" and self._runs.is_queued(occurrence)
        )
        if waits and arrived.kind == "runs":  # what follows was published when it came first
            return _Step(arrived, occurrence, None, "ran")
        runs, following = occurrence.at(wall_clock.ms())
        if following is None:
            self._registry.schedules.end(occurrence)
        if arrived.kind == "cancelled":
            return _Step(arrived, occurrence, following, "cancelled")
        return _Step(arrived, occurrence, following, "ran" if runs else "late")

    def _is_newest(self, waited: DelayHeaders, occurrence: Occurrence) -> bool:
        order, task_id = self._registry.newest_under(occurrence.key)
        return bool(order == waited.registry[ORDER] and task_id == occurrence.task_id)

    def _paused(self, steps: list[_Step]) -> list[_Step]:
        """Return the same steps, with those of paused schedules, as far as that is known."""
        with self._unless_away("Occurrences of schedules come although %s"):
            found = self._registry.schedules.get([each.occurrence.name for each in steps])
            return [
                step._replace(fate="paused")
                if noted is not None and noted.is_paused and step.fate != "cancelled"
                else step
                for step, noted in zip(steps, found, strict=True)
            ]
        return steps

    def _published(
        self, steps: Sequence[_Step]
    ) -> tuple[list[_Step], dict[Occurrence, Registration]]:
        """Publish what follows occurrences; return those that go on, and what was published."""
        published = [step for step in steps if step.following is None]
        waiting = [step for step in steps if step.following is not None]
        made: dict[Occurrence, Registration] = {}

        def settled(step: _Step, error: Exception | None) -> None:
            if error is None:
                published.append(step)
            else:
                self._failed(step.arrived, error)

        if waiting:
            make = partial(self._following, made)
            republishing.publish_each(self._delays, waiting, make, settled, RESENDS)
        return published, {
            step.following: made[step.following] for step in published if step.following is not None
        }

    def _failed(self, arrived: Arrived, error: Exception) -> None:
        task_id = celery_internals.shown(celery_internals.id_of(arrived.delivery.message))
        if isinstance(error, (*TEMPORARY_ERRORS, RegistryUnavailable)):
            logger.warning("Occurrence %s waits, as the next is not published: %s", task_id, error)
            self.give(arrived, TRY_AGAIN)
        else:
            logger.error("Occurrence %s runs, and no other follows: %r", task_id, error)
            self.act(partial(self._let_run, arrived))

    def _following(
        self, made: dict[Occurrence, Registration], producer: DelayedProducer, step: _Step
    ) -> republishing.ToPublish:
        """Return the message of the occurrence that follows one, made of the message of that.

        What is to be registered of it is added to ``made``.
        """
        delivery, waited, following = step.arrived.delivery, step.arrived.waited, step.following
        assert following is not None
        due = Due.at(instant_of(following.due_ms))
        ticket, key = Ticket(0, int(waited.registry[ORDER])), following.key
        copy, words = new_copy(), {ONCE: new_copy(), SCHEDULE: following.text}
        says = {COPY: copy, KEY: key, **ticket.headers, **words}
        producer.says = {"due_ms": following.due_ms, "registry": says}
        delayed = self._message(producer, delivery.message, waited, due, following.task_id)
        sent = Registration(following.task_id, copy, following.due_ms, ticket=ticket, key=key)
        task = self._consumer.app.tasks.get(delivery.task)
        if RegistryOptions.of(self._delays.settings, task, {}, {}).track:
            sent = sent._replace(name=delivery.task, message=stored(delayed))
        made[following] = sent
        return delayed.queue, delayed.message.amqp(), partial(producer.address, delayed, due)

    def _message(
        self,
        producer: DelayedProducer,
        former: Message,
        waited: DelayHeaders,
        due: Due,
        task_id: str,
    ) -> Delayed:
        destination = self._early_tasks.destination(former, waited)
        if destination is None:
            raise LookupError("its queue is unknown")
        users: dict[str, Any] = {**former.headers, "expires": None}
        for name in ("id", "root_id"):
            if users.get(name) == former.headers.get("id"):
                users[name] = task_id
        properties = {**kept_properties(former.properties), "correlation_id": task_id}
        return republishing.message_again(producer, former, destination, due, users, properties)

    def _fate(self, step: _Step) -> Fate | None:
        """Return what becomes of an occurrence; None if it waits for the end of another run."""
        arrived, occurrence, fate = step.arrived, step.occurrence, step.fate
        if arrived.kind == "copy" or fate != "ran" or occurrence.overlap == "allow":
            return fate
        if occurrence.overlap == "queue-one" and not self._runs.try_queue(occurrence):
            return "overlapped"
        if self._runs.try_start(occurrence):
            return "ran"
        if arrived.looks < LOOKS:
            self.give(arrived._replace(looks=arrived.looks + 1), POLL)
            return None
        if occurrence.overlap == "skip":
            return "overlapped"
        now_ms = wall_clock.ms()
        pause_ms = (now_ms - occurrence.due_ms) // 10
        until_ms = now_ms + max(MIN_PAUSE_MS, min(pause_ms, MAX_PAUSE_MS))
        self.act(partial(arrived.put_back, until_ms))
        return None

    def _note(
        self, more: Mapping[Occurrence, Registration], came: Mapping[Occurrence, Came]
    ) -> None:
        """Note occurrences that were published; what cannot be noted now is noted later."""
        unnoted = {**self._unnoted, **more}
        self._unnoted.update(more)
        for each in list(self._unnoted)[:-MAX_UNNOTED]:
            del self._unnoted[each]
        with self._unless_away("What follows some occurrences is noted later: %s"):
            states = self._registry.register([*unnoted.values()]) if unnoted else []
            following = [
                each for each, state in zip(unnoted, states, strict=True) if state != "superseded"
            ]
            self._registry.schedules.follow(following, came)
            self._unnoted.clear()

    def _go_on(self, step: _Step, fate: Fate) -> None:
        arrived, occurrence = step.arrived, step.occurrence
        if arrived.kind == "copy":
            self.act(partial(self._let_run, arrived))
            return
        self._delays.recorder.record({instruments.OCCURRENCES: 1}, arrived.delivery.task, fate)
        if fate in ("ran", "cancelled"):
            self.act(partial(self._let_run, arrived))
            return
        if occurrence.overlap == "queue-one":
            self._runs.leave_queue(occurrence)
        logger.info("Occurrence %s does not run: %s.", occurrence.task_id, _WHY[fate])
        skipped = partial(signals.send, signals.skipped, self._consumer.app)
        self.act(partial(skipped, occurrence.task_id, occurrence.due_ms))
        acknowledge = partial(self.acknowledge, arrived.delivery.ack)
        self.act(acknowledge, is_acknowledgement=True)

    def _let_run(self, arrived: Arrived) -> None:
        """Let an occurrence go on, in the event loop; its retries are no occurrences."""
        table: Any = arrived.delivery.message.headers
        while isinstance(table, dict):
            for name in _OF_OCCURRENCE:
                table.pop(name, None)
            table = table.get(NESTED_HEADERS)
        try:
            arrived.go_on()
        finally:
            task_id = celery_internals.id_of(arrived.delivery.message)
            waits = partial(celery_internals.waits_for_rate, self._consumer, arrived.delivery)
            self._runs.given(task_id, waits)

    def _look_after_schedules(self) -> None:
        try:
            self.begin()
        except Exception as error:  # noqa: BLE001 - the schedules are looked after all the same
            logger.warning("The entries of beat are put later: %s", error)
        # First of all, or what they are about would be sent again.
        self._note({}, {})
        schedules = self._registry.schedules
        self.overdue = schedules.overdue_for(wall_clock.ms()) / 1000
        # When Redis comes back, each worker first notes what it has published.
        if time.monotonic() >= self._heal_at and schedules.may_heal():
            self._delays.schedules.heal()

    @contextmanager
    def _unless_away(self, what: str) -> Iterator[None]:
        """Leave a block if Redis does not answer, and say in the log what that means."""
        try:
            yield
        except RegistryUnavailable as error:
            self._heal_at = time.monotonic() + 2 * LOOK_EVERY
            logger.warning(what, error)
