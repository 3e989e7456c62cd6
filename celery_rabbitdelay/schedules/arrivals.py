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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

from celery.utils.log import get_logger
from kombu.utils.functional import LRUCache

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.exceptions import TEMPORARY_ERRORS, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import COPY, NESTED_HEADERS, SCHEDULE, TRACKED
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.registry.application import RegistrySettings, registry_of
from celery_rabbitdelay.registry.bootsteps import DecideOnArrival
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.decisions import Arrived, pause_ms
from celery_rabbitdelay.registry.record import stored
from celery_rabbitdelay.schedules import runs
from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.schedules.record import (
    Arriving,
    Decided,
    Fate,
    Records,
    of_task,
    registry_headers,
    send_each,
)
from celery_rabbitdelay.schedules.recurrence import OCCURRENCES, OVERDUE, Occurrence
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import BatchThread
from celery_rabbitdelay.worker.early_tasks import EarlyTasks, waiting_task
from celery_rabbitdelay.worker.restore import lateness

logger = get_logger(__name__)

#: Seconds until an occurrence is tried again whose follower was not confirmed.
TRY_AGAIN: Final = 1.0

#: Seconds between two looks for schedules whose next occurrence has not come; the first one comes
#: within the half of that. One worker at a time sends again what is missing.
LOOK_EVERY: Final = 30.0

#: Of how many schedules it is remembered what was decided last.
MAX_REMEMBERED: Final = 20_000

#: The shortest and the longest pause, in milliseconds, of what waits for the end of a run;
#: in between, a tenth of the time that it has waited.
MIN_PAUSE_MS: Final = 500
MAX_PAUSE_MS: Final = 30_000

#: By how many milliseconds the clocks of a worker and of Redis may differ. If they differ by more,
#: that of Redis counts, which is the same for all workers.
TOLERATED_MS: Final = 2_000


@dataclass(eq=False)
class _Came:
    """An occurrence that has arrived, and what is known of it so far.

    Attributes:
        arrived: Its task.
        arrival: The name of this arrival.
        went_on: Whether the rule has let it go on before.
        occurrence: What its message says.
        is_late: Whether it is too late to run.
        following_ms: The instant that follows it; None if none does.
        decided: What the rule says.
        following: The next occurrence, if its message is to be published.
        sent: That message, confirmed.
    """

    arrived: Arrived
    arrival: str
    went_on: bool = False
    occurrence: Occurrence = field(init=False)
    is_late: bool = False
    following_ms: int | None = None
    decided: Decided = field(init=False)
    following: Occurrence | None = None
    sent: Delayed | None = None

    @property
    def arriving(self) -> Arriving:
        """The question to the rule."""
        # Of what has gone on before, the rule may have forgotten that by now.
        came_before = self.arrived.delivery.redelivered or self.went_on
        return Arriving(self.occurrence, self.arrival, came_before, self.following_ms)


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
    _remembered: ClassVar[LRUCache[str, Arriving]] = LRUCache(limit=MAX_REMEMBERED)

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        self._registry = registry_of(self._delays)
        self._holds = self._delays.settings_of(RegistrySettings).registry_down == "hold"
        self._records = Records(self._registry)
        self._early_tasks = early_tasks
        self._beat: BeatEntries | None = None
        self._look_at = time.monotonic() + LOOK_EVERY * random.uniform(0, 0.5)  # noqa: S311 - jitter
        self._skew_ms = 0
        self.overdue = 0.0
        self._delays.recorder.gauges[OVERDUE] = lambda: self.overdue
        runs.forget_what_has_not_begun()

    def take(self, arrived: Arrived) -> None:
        """Take an occurrence that the registry lets run, or has cancelled."""
        self.give(_Came(arrived, new_copy()))

    def begin(self) -> None:
        """Compare clocks; put the entries of beat, or again if Redis has lost them."""
        with suppress(RegistryUnavailable):  # the next look says it as well
            self._note_clock()
        if self._delays.setting("beat"):
            self._beat = self._beat or BeatEntries(self._delays.schedules)
            self._beat.keep()

    def own_work_in(self) -> float:
        """Return the seconds until the next look for what has not come."""
        return self._look_at - time.monotonic()

    def work(self, batch: list[_Came]) -> None:
        """Publish what follows, and let the event loop go on with what has come."""
        if batch:
            self._work_on(batch)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY
            try:
                self._look_after_schedules()
            except Exception as error:  # noqa: BLE001 - the next look may succeed
                logger.warning("Looking after the schedules failed: %s", error)

    def _work_on(self, batch: list[_Came]) -> None:
        asked: list[_Came] = []
        for came in batch:
            try:
                if self._is_read(came):
                    asked.append(came)
            except Exception as error:  # noqa: BLE001 - the thread has to live on
                self._failed(came, error)
        fates = [(came, self._fate(came)) for came in self._published(self._decided(asked))]
        try:
            self._note(fates)
        except RegistryUnavailable as error:
            logger.warning("What became of occurrences of schedules is not noted: %s", error)
        for came, fate in fates:
            if fate is not None:
                self._go_on(came, fate)

    def _is_read(self, came: _Came) -> bool:
        """Read what a message says; return False if it goes back into the levels.

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
            return False
        runs_now, came.following_ms = occurrence.at(now_ms)
        # An occurrence that waits for the end of a run was not too late when it arrived.
        came.occurrence, came.is_late = occurrence, not (runs_now or occurrence.turns)
        return True

    def _decided(self, asked: Sequence[_Came]) -> Iterator[_Came]:
        """Yield the occurrences with what follows; what Redis does not decide waits."""
        answers: Sequence[Decided | None] = [None] * len(asked)
        try:
            answers = self._records.decide([came.arriving for came in asked])
        except RegistryUnavailable as error:
            logger.warning("It is not known which occurrences of schedules have run: %s", error)
        for came, answer in zip(asked, answers, strict=True):
            occurrence = came.occurrence
            if answer is None and self._holds:
                wait_ms = pause_ms(lateness(occurrence.due_ms))
                self._put_back(came, wait_ms, is_followed=occurrence.is_followed)
                continue
            decided = answer or Decided(True, came.following_ms, order=occurrence.order)
            came.decided, following_ms, came.following = decided, decided.following_ms, None
            if decided.goes_on:
                self._remember(came)
            if following_ms is not None and not (decided.goes_on and occurrence.is_followed):
                came.following = occurrence._replace(
                    instant_ms=following_ms, order=decided.order, turns=0, is_followed=False
                )
            yield came

    def _note_clock(self) -> None:
        asked_ms, redis_ms, now_ms = wall_clock.ms(), self._registry.now_ms(), wall_clock.ms()
        if now_ms < asked_ms:
            return  # the worker's clock was set back meanwhile
        # An answer that has taken long is no difference between clocks.
        skew_ms = redis_ms - min(max(redis_ms, asked_ms), now_ms)
        if abs(skew_ms) <= TOLERATED_MS:
            skew_ms = 0
        elif not self._skew_ms:
            logger.warning("The clock of Redis is %+.1f s ahead, and counts.", skew_ms / 1000)
        self._skew_ms = skew_ms

    def _remember(self, came: _Came) -> None:
        occurrence, decided = came.occurrence, came.decided
        before: Arriving | None = self._remembered.get(occurrence.name)
        if before is None or before.occurrence.instant_ms <= occurrence.instant_ms:
            following_ms = decided.following_ms
            self._remembered[occurrence.name] = came.arriving._replace(
                occurrence=occurrence._replace(order=decided.order),
                following_ms=came.following_ms if following_ms is None else following_ms,
            )

    def _published(self, decided: Iterator[_Came]) -> list[_Came]:
        """Publish what follows occurrences; return those of which it is confirmed."""
        published: list[_Came] = []
        waiting: list[_Came] = []
        for came in decided:
            (published if came.following is None else waiting).append(came)
        for came, outcome in send_each(self._delays, waiting, self._message, self._skew_ms):
            if isinstance(outcome, Exception):
                came.went_on = came.decided.goes_on
                self._failed(came, outcome)
            else:
                came.sent = outcome
                published.append(came)
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

    def _message(self, producer: DelayedProducer, came: _Came) -> Delayed:
        """Return the message of the occurrence that follows one, made of the message of that."""
        former, waited = came.arrived.delivery.message, came.arrived.waited
        following = came.following
        assert following is not None
        destination = self._early_tasks.destination(former, waited)
        if destination is None:
            raise LookupError("its queue is unknown")
        says, due_ms = registry_headers(following, TRACKED in waited.registry), following.due_ms
        most = self._delays.settings.max_message_bytes
        again = waiting_task(former, destination, due_ms, most)
        again = of_task(again, following.task_id, due_ms, says)
        return producer.routed(again, destination.queue, Due.until(due_ms - self._skew_ms))

    def _fate(self, came: _Came) -> Fate | None:
        """Return what becomes of an occurrence; None if it waits for a run's end, or is dropped."""
        occurrence, registry = came.occurrence, self._registry
        if not came.decided.goes_on:
            logger.info(
                "A message of occurrence %s is dropped: another one has come first, or its "
                "schedule was edited or deleted.",
                occurrence.task_id,
            )
            self._leave_out(came)
            return None
        if came.arrived.is_cancelled:
            return "cancelled"
        if came.decided.is_paused:
            return "paused"
        if came.is_late:
            return "late"
        if occurrence.overlap == "allow":
            return "ran"
        is_next = occurrence.overlap == "queue-one"
        if is_next and not runs.queue(registry, occurrence, runs.LEASE_MS):
            return "overlapped"
        if runs.try_start(registry, occurrence):
            return "ran"
        if not is_next:
            return "overlapped"
        wait_ms = (wall_clock.ms() - occurrence.due_ms) // 10
        pause = max(MIN_PAUSE_MS, min(wait_ms, MAX_PAUSE_MS))
        self._put_back(came, pause, is_followed=True)
        return None

    def _leave_out(self, came: _Came) -> None:
        """Acknowledge an occurrence that does not run."""
        # Another message of the same occurrence may be the one that waits for the end of a run.
        is_own = came.decided.goes_on or came.occurrence.turns
        if is_own and came.occurrence.overlap == "queue-one":
            runs.queue(self._registry, came.occurrence, 0)
        ack = came.arrived.delivery.ack
        self.act(partial(self.acknowledge, ack), is_acknowledgement=True)

    def _put_back(self, came: _Came, wait_ms: int, *, is_followed: bool) -> None:
        """Put an occurrence back into the levels; then the rule is asked again."""
        arrived, occurrence = came.arrived, came.occurrence
        again = occurrence._replace(turns=occurrence.turns + 1, is_followed=is_followed)

        def put_back() -> None:
            arrived.delivery.message.headers[SCHEDULE] = again.text
            arrived.put_back(wall_clock.ms() + wait_ms)

        self.act(put_back)

    def _note(self, fates: Sequence[tuple[_Came, Fate | None]]) -> None:
        """Note what became of occurrences, and what waits now."""
        listed: dict[str, int | None] = {}
        lost: list[tuple[Occurrence, str]] = []
        for came, _ in fates:
            if came.following is not None and came.sent is not None:
                listed[came.occurrence.name] = came.following.due_ms
                if came.decided.is_lost:
                    lost.append((came.following, stored(came.sent)))
            elif came.following_ms is None and came.decided.goes_on:
                listed[came.occurrence.name] = None
        known = [(came.occurrence, fate) for came, fate in fates if fate is not None]
        self._records.came(known, listed, lost)

    def _go_on(self, came: _Came, fate: Fate) -> None:
        arrived, occurrence = came.arrived, came.occurrence
        self._delays.recorder.record({OCCURRENCES: 1}, arrived.delivery.task, fate)
        if fate in ("ran", "cancelled"):
            self.act(partial(self._let_run, arrived))
            return
        logger.info("Occurrence %s does not run: %s.", occurrence.task_id, fate)
        skipped = partial(signals.send, signals.skipped, self._consumer.app)
        self.act(partial(skipped, occurrence.task_id, occurrence.due_ms))
        self._leave_out(came)

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
            runs.given(self._consumer, arrived.delivery)

    def _look_after_schedules(self) -> None:
        now_ms, remembered = wall_clock.ms(), self._remembered
        overdue = self._records.overdue(now_ms)
        self.overdue = max((now_ms - min(overdue.values(), default=now_ms)) / 1000, 0.0)
        # First of all, or what they are about would be sent again.
        known = [remembered[name] for name in overdue if name in remembered]
        self._records.decide(known, notes_again=True)
        if self._records.may_heal():
            self._delays.schedules.heal()
        self.begin()


class ScheduleStep(celery_internals.RabbitMQStep):
    """Takes occurrences of schedules before they run, on every connection of the consumer."""

    requires = (DecideOnArrival,)

    _arrivals: Arrivals | None = None

    def start(self, consumer: Any) -> None:
        """Begin to take occurrences, and to look for those that do not come."""
        strategies = consumer.strategies
        if strategies.decisions is not None:
            self._arrivals = Arrivals(consumer, strategies.early_tasks)
            self._arrivals.start()
            strategies.decisions.takers[SCHEDULE] = self._arrivals.take

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Let the event loop run what the thread needs from the worker's own thread."""
        if self._arrivals is not None:
            self._arrivals.register(hub)

    def stop(self, consumer: Any) -> None:
        """Take no more occurrences of the connection that is lost or closed."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.stop()
