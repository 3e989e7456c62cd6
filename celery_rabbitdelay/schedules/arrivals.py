"""Occurrences that have arrived: what follows one is published before it runs.

The rule is in ``lua/decide.lua``. A message that goes on publishes what follows it, confirmed; then
it is decided whether it runs: whether its schedule is paused, how late it is, and whether another
run still goes. If the worker dies in between, RabbitMQ redelivers it, and all of that happens
again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from celery.utils.log import get_logger

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, instant_of
from celery_rabbitdelay.levels.headers import COPY, NESTED_HEADERS, SCHEDULE, TRACKED
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import RESENDS
from celery_rabbitdelay.registry.application import register_sent, registry_of
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.decisions import MAX_PAUSE, Arrived, pause_ms
from celery_rabbitdelay.registry.registry import Registration
from celery_rabbitdelay.registry.settings import RegistrySettings
from celery_rabbitdelay.registry.stored_message import stored
from celery_rabbitdelay.schedules.beat import put_beat, state_of_beat
from celery_rabbitdelay.schedules.messages import is_tracked, registration_of, says_of, with_id
from celery_rabbitdelay.schedules.occurrence import OCCURRENCES, Occurrence
from celery_rabbitdelay.schedules.record import Arriving, Came, Decided, Fate, Records
from celery_rabbitdelay.schedules.recurrence import INVALID
from celery_rabbitdelay.schedules.runs import Runs
from celery_rabbitdelay.worker import celery_internals, republishing
from celery_rabbitdelay.worker.batch_thread import BatchThread
from celery_rabbitdelay.worker.early_tasks import EarlyTasks, waiting_task
from celery_rabbitdelay.worker.lateness import lateness

logger = get_logger(__name__)

#: Seconds until an occurrence is tried again whose follower was not confirmed.
TRY_AGAIN: Final = 1.0

#: Seconds between two looks for schedules whose next occurrence has not come; the first one comes
#: within the half of that. One worker at a time sends again what is missing.
LOOK_EVERY: Final = 30.0

#: Seconds to wait for more occurrences when several have come at once.
GATHER: Final = 0.02

#: Of how many schedules it is remembered what was decided last.
MAX_REMEMBERED: Final = 20_000

#: The seconds between two looks whether another run has ended, and how many there are, before an
#: occurrence is skipped or goes back into the levels.
LOOK_AGAIN: Final = 0.5
LOOKS: Final = 4

#: The shortest and the longest pause, in milliseconds, of what waits for the end of a run;
#: in between, a tenth of the time that it has waited.
MIN_PAUSE_MS: Final = 2_000
MAX_PAUSE_MS: Final = 30_000

#: By how many milliseconds the clocks of a worker and of Redis may differ. If they differ by more,
#: that of Redis counts, which is the same for all workers.
TOLERATED_MS: Final = 2_000

_WHY: Final[dict[Fate, str]] = {
    "late": "it is too late",
    "paused": "its schedule is paused",
    "overlapped": "another run of its schedule still goes",
}


class _Came(NamedTuple):
    """An occurrence that has arrived.

    Attributes:
        arrived: Its task.
        arrival: The name of this arrival.
        looks: How often it was looked whether another run has ended.
        went_on: Whether the rule has let it go on before.
    """

    arrived: Arrived
    arrival: str
    looks: int = 0
    went_on: bool = False


class _Step(NamedTuple):
    """What is to be done about an occurrence that has arrived.

    Attributes:
        came: The occurrence as it has arrived.
        arriving: The question to the rule.
        is_late: Whether it is too late to run.
        decided: The answer of the rule.
        following: The next occurrence, if its message is to be published.
        published: Its message, once it is confirmed.
    """

    came: _Came
    arriving: Arriving
    is_late: bool
    decided: Decided = Decided(True, None)
    following: Occurrence | None = None
    published: Delayed | None = None

    @property
    def occurrence(self) -> Occurrence:
        """What its message says."""
        return self.arriving.occurrence


class Arrivals(BatchThread[_Came]):
    """Publishes the next occurrence of a schedule, and then lets the one run that has come.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Knows where a task came from.

    Attributes:
        overdue: Seconds since the next occurrence of a schedule was due that has not come, of the
            one that is missed longest; 0: none is.
    """

    name = "rabbitdelay-schedules"

    #: The latest decision of this worker about each schedule. It outlives a lost connection, and
    #: restores what a Redis that was restarted from an older copy has forgotten.
    _remembered: ClassVar[dict[str, Arriving]] = {}

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        self._registry = registry_of(self._delays)
        self._records = Records(self._registry)
        self._early_tasks = early_tasks
        self._beat = ""
        self._look_at = time.monotonic() + LOOK_EVERY * random.uniform(0, 0.5)  # noqa: S311 - jitter
        self._runs = Runs(self._registry)
        self._skew_ms = 0
        self.overdue = 0.0

    def take(self, arrived: Arrived) -> None:
        """Take an occurrence that the registry lets run, or has cancelled."""
        self.give(_Came(arrived, new_copy()))

    def begin(self) -> None:
        """Put the entries of beat, if workers have taken them over; again if Redis lost them."""
        with suppress(RegistryUnavailable):  # the first answer says it as well
            asked_ms = wall_clock.ms()
            self._note_clock(self._registry.now_ms(), asked_ms)
        if not self._delays.uses("beat"):
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

    def gather_for(self, first: int) -> float:
        """Return for how long to wait for more occurrences, so that they share a round trip.

        Not for a single one, nor if the prefetch count lets hardly any more of them come.
        """
        gathers = first > 1 and celery_internals.may_hold(self._consumer, 2 * first)
        return GATHER if gathers else 0.0

    def work(self, batch: list[_Came]) -> None:
        """Publish what follows, and let the event loop go on with what has come."""
        if batch:
            self._work_on(batch)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY
            try:
                self._look_after_schedules()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                logger.warning("Nobody has looked after the schedules: %s", error)

    def _work_on(self, batch: list[_Came]) -> None:
        steps: list[_Step] = []
        for each in batch:
            try:
                if (step := self._step(each)) is not None:
                    steps.append(step)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._failed(each, error)
        fates = [(step, self._fate(step)) for step in self._published(self._decided(steps))]
        try:
            self._note(fates)
        except RegistryUnavailable as error:
            logger.warning("What became of occurrences of schedules is not noted: %s", error)
        for step, fate in fates:
            if fate is not None:
                self._go_on(step, fate)

    def _step(self, came: _Came) -> _Step | None:
        """Return what is to be asked about an occurrence; None if it goes back into the levels.

        Raises:
            LookupError: Its header cannot be read, or is that of another task.
        """
        delivery, waited, _, put_back, _ = came.arrived
        occurrence = Occurrence.of(waited.registry[SCHEDULE])
        if occurrence is None or celery_internals.id_of(delivery.message) != occurrence.task_id:
            raise LookupError("its header cannot be read, or is that of another task")
        now_ms = wall_clock.ms() + self._skew_ms
        if self._skew_ms and occurrence.due_ms > now_ms + TOLERATED_MS:
            self.act(partial(put_back, occurrence.due_ms - self._skew_ms))
            return None
        try:
            runs, following_ms = occurrence.at(now_ms)
        except INVALID as error:
            # Another worker may have a missing package installed; an edit mends any other error.
            logger.error("Occurrence %s waits, as none follows: %s", occurrence.task_id, error)
            self.act(partial(put_back, wall_clock.ms() + int(MAX_PAUSE * 1000)))
            return None
        # An occurrence that waits for the end of a run was not too late when it arrived.
        is_late = not (runs or came.looks or occurrence.turns)
        # Of what has gone on before, the rule may have forgotten that by now.
        came_before = delivery.redelivered or came.went_on
        arriving = Arriving(occurrence, came.arrival, came_before, following_ms)
        return _Step(came, arriving, is_late)

    def _decided(self, steps: list[_Step]) -> Iterator[_Step]:
        """Yield the steps with what follows; what Redis does not decide waits."""
        if not steps:
            return
        asked_ms = wall_clock.ms()
        try:
            answers = self._records.decide([each.arriving for each in steps])
        except RegistryUnavailable as error:
            logger.warning("It is not known which occurrences of schedules have run: %s", error)
            answers = [None] * len(steps)
        for step, answer in zip(steps, answers, strict=True):
            occurrence, order = step.occurrence, step.occurrence.order
            if (
                answer is None
                and self._delays.settings_of(RegistrySettings).registry_down == "hold"
            ):
                wait_ms = pause_ms(lateness(occurrence.due_ms))
                self._put_back(step, wait_ms, is_followed=occurrence.is_followed)
                continue
            decided = answer or Decided(True, step.arriving.following_ms, order=order)
            if answer is not None:
                self._note_clock(answer.now_ms, asked_ms)
            following, is_followed = None, bool(step.came.looks or occurrence.is_followed)
            if decided.goes_on and not step.came.looks:
                self._remember(step, decided)
            if decided.following_ms is not None and not (decided.goes_on and is_followed):
                following = occurrence._replace(
                    instant_ms=decided.following_ms,
                    order=decided.order,
                    turns=0,
                    is_followed=False,
                )
            yield step._replace(decided=decided, following=following)

    def _note_clock(self, redis_ms: int, asked_ms: int) -> None:
        # An answer that has taken long is no difference between clocks.
        skew_ms = redis_ms - min(max(redis_ms, asked_ms), wall_clock.ms())
        if abs(skew_ms) <= TOLERATED_MS:
            skew_ms = 0
        elif not self._skew_ms:
            logger.warning("The clock of Redis is %+.1f s ahead, and counts.", skew_ms / 1000)
        self._skew_ms = skew_ms

    def _remember(self, step: _Step, decided: Decided) -> None:
        name, following_ms = step.occurrence.name, decided.following_ms
        arriving = step.arriving._replace(
            occurrence=step.occurrence._replace(order=decided.order),
            following_ms=step.arriving.following_ms if following_ms is None else following_ms,
        )
        before = self._remembered.pop(name, None)
        if before is not None and before.occurrence.instant_ms > step.occurrence.instant_ms:
            arriving = before
        self._remembered[name] = arriving
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)))

    def _drop(self, step: _Step) -> None:
        """Acknowledge an occurrence that was edited or deleted, or of which another message ran."""
        occurrence = step.occurrence
        if occurrence.turns or step.came.looks:
            self._runs.leave_queue(occurrence)
        logger.info(
            "A message of occurrence %s is dropped: another one has come first, or its schedule "
            "was edited or deleted.",
            occurrence.task_id,
        )
        ack = step.came.arrived.delivery.ack
        self.act(partial(self.acknowledge, ack), is_acknowledgement=True)

    def _published(self, steps: Iterator[_Step]) -> list[_Step]:
        """Publish what follows occurrences; return the steps of which it is confirmed."""
        published: list[_Step] = []
        waiting: list[_Step] = []
        made: dict[int, Delayed] = {}
        for step in steps:
            (published if step.following is None else waiting).append(step)

        def make(producer: DelayedProducer, step: _Step) -> republishing.ToPublish:
            assert step.following is not None
            due = Due.at(instant_of(step.following.due_ms - self._skew_ms))
            delayed = made[id(step)] = self._message(producer, step, step.following, due)
            return delayed.queue, delayed.message.amqp(), partial(producer.address, delayed, due)

        def settled(step: _Step, error: Exception | None) -> None:
            if error is None:
                published.append(step._replace(published=made[id(step)]))
            else:
                self._failed(step.came._replace(went_on=step.decided.goes_on), error)

        if waiting:
            republishing.publish_each(self._delays, waiting, make, settled, RESENDS)
        return published

    def _failed(self, came: _Came, error: Exception) -> None:
        message = came.arrived.delivery.message
        task_id = celery_internals.shown(celery_internals.id_of(message))
        if isinstance(error, (*TEMPORARY_ERRORS, RegistryUnavailable)):
            logger.warning("Occurrence %s waits, as the next is not published: %s", task_id, error)
            self.give(came, TRY_AGAIN)
        else:
            logger.error("Occurrence %s runs, and no other follows: %r", task_id, error)
            self.act(partial(self._let_run, came.arrived))

    def _message(
        self, producer: DelayedProducer, step: _Step, following: Occurrence, due: Due
    ) -> Delayed:
        """Return the message of the occurrence that follows one, made of the message of that."""
        delivery, waited = step.came.arrived.delivery, step.came.arrived.waited
        former, task_id = delivery.message, following.task_id
        destination = self._early_tasks.destination(former, waited)
        if destination is None:
            raise LookupError("its queue is unknown")
        says = says_of(following, TRACKED in waited.registry)
        again = waiting_task(former, destination, self._delays.settings.max_message_bytes)
        others = {**with_id(again.headers.others, task_id), "expires": None}
        again = again.having(correlation_id=task_id)
        again = again.saying(due_ms=following.due_ms, registry=says, others=others)
        return producer.routed(again, destination.queue, due)

    def _fate(self, step: _Step) -> Fate | None:
        """Return what becomes of an occurrence; None if it waits for a run's end, or is dropped."""
        came, occurrence = step.came, step.occurrence
        if not step.decided.goes_on:
            self._drop(step)
            return None
        if came.arrived.is_cancelled:
            return "cancelled"
        if step.decided.is_paused:
            return "paused"
        if step.is_late:
            return "late"
        if occurrence.overlap == "allow":
            return "ran"
        if occurrence.overlap == "queue-one" and not self._runs.try_queue(occurrence):
            return "overlapped"
        if self._runs.try_start(occurrence):
            return "ran"
        if came.looks < LOOKS:
            self.give(came._replace(looks=came.looks + 1, went_on=True), LOOK_AGAIN)
            return None
        if occurrence.overlap == "skip":
            return "overlapped"
        wait_ms = (wall_clock.ms() - occurrence.due_ms) // 10
        self._put_back(step, max(MIN_PAUSE_MS, min(wait_ms, MAX_PAUSE_MS)), is_followed=True)
        return None

    def _put_back(self, step: _Step, wait_ms: int, *, is_followed: bool) -> None:
        """Put an occurrence back into the levels; then the rule is asked again."""
        arrived, occurrence = step.came.arrived, step.occurrence
        again = occurrence._replace(turns=occurrence.turns + 1, is_followed=is_followed)

        def put_back() -> None:
            arrived.delivery.message.headers[SCHEDULE] = again.text
            arrived.put_back(wall_clock.ms() + wait_ms)

        self.act(put_back)

    def _note(self, fates: Sequence[tuple[_Step, Fate | None]]) -> None:
        """Note what became of occurrences, and what waits now."""
        came: list[tuple[Occurrence, Came]] = []
        listed: dict[str, int | None] = {}
        lost: list[tuple[Occurrence, str]] = []
        tracked: list[Registration] = []
        for step, fate in fates:
            occurrence, following, published = step.occurrence, step.following, step.published
            if fate is not None:
                came.append((occurrence, Came(occurrence.due_ms, wall_clock.ms(), fate)))
            if step.arriving.following_ms is None and step.decided.goes_on:
                listed[occurrence.name] = None
            if following is not None and published is not None:
                listed[occurrence.name] = following.due_ms
                if step.decided.is_lost:
                    lost.append((following, stored(published)))
                if is_tracked(published):
                    tracked.append(registration_of(published, following.due_ms))
        self._records.came(came, listed, lost)
        if tracked:
            register_sent(self._registry, tracked)

    def _go_on(self, step: _Step, fate: Fate) -> None:
        arrived, occurrence = step.came.arrived, step.occurrence
        self._delays.recorder.record({OCCURRENCES: 1}, arrived.delivery.task, fate)
        if fate in ("ran", "cancelled"):
            self.act(partial(self._let_run, arrived))
            return
        if occurrence.overlap == "queue-one":
            self._runs.leave_queue(occurrence)
        logger.info("Occurrence %s does not run: %s.", occurrence.task_id, _WHY[fate])
        skipped = partial(signals.send, signals.skipped, self._consumer.app)
        self.act(partial(skipped, occurrence.task_id, occurrence.due_ms))
        self.act(partial(self.acknowledge, arrived.delivery.ack), is_acknowledgement=True)

    def _let_run(self, arrived: Arrived) -> None:
        """Let an occurrence go on, in the event loop; its retries are no occurrences."""
        table: Any = arrived.delivery.message.headers
        while isinstance(table, dict):
            for name in (COPY, SCHEDULE):
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
        now_ms, remembered = wall_clock.ms(), self._remembered
        overdue = self._records.overdue(now_ms)
        self.overdue = max((now_ms - min(overdue.values(), default=now_ms)) / 1000, 0.0)
        # First of all, or what they are about would be sent again.
        self._records.decide_again([remembered[name] for name in overdue if name in remembered])
        if self._records.may_heal():
            self._delays.schedules.heal()
