"""Handles arrived occurrences: publishes the next occurrence before the arrived one runs.

``lua/decide.lua`` decides whether a message is processed or dropped. If it is processed, the worker
first publishes the following occurrence and waits for its confirm. Only then does the arrived
occurrence run, unless its schedule is paused, it is too late, or another run has not ended. If the
worker dies in between, RabbitMQ redelivers the message, and all steps are repeated.
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
from celery_rabbitdelay.levels.headers import (
    COPY,
    NESTED_HEADERS,
    ONCE,
    REDELIVERED,
    SCHEDULE,
    TRACKED,
)
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.registry.application import RegistrySettings, registry_of
from celery_rabbitdelay.registry.bootsteps import DecideOnArrival
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

#: Seconds until an occurrence is tried again if the following occurrence was not confirmed.
TRY_AGAIN: Final = 1.0

#: Seconds between two checks for missing occurrences; the first check comes within half this time.
#: One worker at a time sends missing occurrences again.
CHECK_EVERY: Final = 30.0

#: The number of schedules whose last decision a worker remembers.
MAX_REMEMBERED: Final = 20_000

#: The shortest and the longest pause, in milliseconds, of an occurrence that waits for the end of a
#: run; within these limits, the pause is a tenth of the time waited so far.
MIN_PAUSE_MS: Final = 500
MAX_PAUSE_MS: Final = 30_000

#: The tolerated difference between the clocks of a worker and of Redis, in milliseconds. Beyond it,
#: the clock of Redis counts, because it is the same for all workers.
TOLERATED_MS: Final = 2_000


@dataclass(eq=False)
class _Came:
    """An arrived occurrence and the state of its handling.

    Attributes:
        arrived: The task of the occurrence, which the registry has released or cancelled.
        went_on: Whether the rule has already accepted the occurrence.
        occurrence: The occurrence in the message's header.
        is_late: Whether the occurrence is too late to run.
        following_ms: The following instant; None after the last instant.
        decided: The decision of the rule.
        following: The next occurrence to publish; None if no occurrence has to be published.
        sent: The confirmed message of the following occurrence.
    """

    arrived: Arrived
    went_on: bool = False
    occurrence: Occurrence = field(init=False)
    is_late: bool = False
    following_ms: int | None = None
    decided: Decided = field(init=False)
    following: Occurrence | None = None
    sent: Delayed | None = None

    @property
    def arriving(self) -> Arriving:
        """The arguments for the rule."""
        arrival, occurrence = self.arrived.arrival, self.occurrence
        mark = arrival.mark._replace(name=occurrence.message)
        # Redis may have lost the record that the message was processed.
        came_before = arrival.redelivered or self.went_on
        arrival = arrival._replace(mark=mark, redelivered=came_before)
        return Arriving(occurrence, arrival, self.following_ms)


class Arrivals(BatchThread[_Came]):
    """Publishes the following occurrence of a schedule, then lets the arrived occurrence run.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Finds the queue from which a task came.

    Attributes:
        overdue: Seconds since the longest missing occurrence was due; 0 if no occurrence is
            missing.
    """

    name = "rabbitdelay-schedules"

    #: The worker's latest decision per schedule. These decisions outlive a lost connection, and
    #: restore decisions that Redis lost when it restarted from an older copy.
    _remembered: ClassVar[LRUCache[str, Arriving]] = LRUCache(limit=MAX_REMEMBERED)

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self._delays = consumer.app.rabbitdelay
        self._registry = registry_of(self._delays)
        self._holds = self._delays.settings_of(RegistrySettings).registry_down == "hold"
        self._records = Records(self._registry)
        self._early_tasks = early_tasks
        self._beat: BeatEntries | None = None
        self._check_at = time.monotonic() + CHECK_EVERY * random.uniform(0, 0.5)  # noqa: S311 - jitter
        self._skew_ms = 0
        self.overdue = 0.0
        self._delays.recorder.gauges[OVERDUE] = lambda: self.overdue
        runs.forget_what_has_not_begun()

    def take(self, arrived: Arrived) -> None:
        """Queue an occurrence that the registry has released or cancelled."""
        self.give(_Came(arrived))

    def begin(self) -> None:
        """Compare the clocks, and store the entries of beat as schedules unless Redis has them."""
        with suppress(RegistryUnavailable):  # the next check logs the error
            self._note_clock()
        if self._delays.setting("beat"):
            self._beat = self._beat or BeatEntries(self._delays.schedules)
            self._beat.keep()

    def own_work_in(self) -> float:
        """Return the seconds until the next check for missing occurrences."""
        return self._check_at - time.monotonic()

    def work(self, batch: list[_Came]) -> None:
        """Publish the following occurrences, and pass the arrived occurrences to the event loop."""
        if batch:
            self._work_on(batch)
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_EVERY
            try:
                self._check_schedules()
            except Exception as error:  # noqa: BLE001 - the next check may succeed
                logger.warning(
                    "rabbitdelay schedules: cannot check for missing occurrences: %s", error
                )

    def _work_on(self, batch: list[_Came]) -> None:
        asked: list[_Came] = []
        for came in batch:
            try:
                if self._is_read(came):
                    asked.append(came)
            except Exception as error:  # noqa: BLE001 - the thread must survive
                self._failed(came, error)
        fates = [(came, self._fate(came)) for came in self._published(self._decided(asked))]
        try:
            self._note(fates)
        except RegistryUnavailable as error:
            logger.warning("rabbitdelay schedules: cannot store fates of occurrences: %s", error)
        for came, fate in fates:
            if fate is not None:
                self._go_on(came, fate)

    def _is_read(self, came: _Came) -> bool:
        """Parse an occurrence's header; return False if the occurrence goes back into the levels.

        Raises:
            LookupError: The header cannot be read, or belongs to another task.
        """
        arrived = came.arrived
        occurrence = Occurrence.of(arrived.waited.registry[SCHEDULE])
        if occurrence is None or arrived.arrival.task_id != occurrence.task_id:
            raise LookupError("its header cannot be read, or belongs to another task")
        now_ms = wall_clock.ms() + self._skew_ms
        if self._skew_ms and occurrence.due_ms > now_ms + TOLERATED_MS:
            self.act(partial(arrived.put_back, occurrence.due_ms - self._skew_ms))
            return False
        runs_now, came.following_ms = occurrence.at(now_ms)
        # An occurrence that waits for the end of a run was not too late when it arrived.
        came.occurrence, came.is_late = occurrence, not (runs_now or occurrence.turns)
        return True

    def _decided(self, asked: Sequence[_Came]) -> Iterator[_Came]:
        """Yield decided occurrences; if Redis does not answer, put them back or let them run."""
        answers: Sequence[Decided | None] = [None] * len(asked)
        try:
            answers = self._records.decide([came.arriving for came in asked])
        except RegistryUnavailable as error:
            logger.warning("rabbitdelay schedules: Redis did not decide on occurrences: %s", error)
        for came, answer in zip(asked, answers, strict=True):
            occurrence = came.occurrence
            if answer is None and self._holds:
                wait_ms = pause_ms(lateness(occurrence.due_ms))
                self._put_back(came, wait_ms, is_answer=False)
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
        # A slow answer of Redis must not count as a difference between the clocks.
        skew_ms = redis_ms - min(max(redis_ms, asked_ms), now_ms)
        if abs(skew_ms) <= TOLERATED_MS:
            skew_ms = 0
        elif not self._skew_ms:
            logger.warning(
                "rabbitdelay schedules: the clock of Redis is %+.1f s ahead of this worker's; "
                "schedules follow Redis.",
                skew_ms / 1000,
            )
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
        """Publish the following occurrences; return the arrivals without a failed publication."""
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
            logger.warning(
                "Occurrence %s waits, because the next occurrence cannot be published: %s",
                task_id,
                error,
            )
            self.give(came, TRY_AGAIN)
        else:
            logger.error(
                "Occurrence %s runs, but the next occurrence cannot be published: %r",
                task_id,
                error,
            )
            self.act(partial(self._let_run, came.arrived))

    def _message(self, producer: DelayedProducer, came: _Came) -> Delayed:
        """Make the following occurrence's message from the arrived occurrence's message."""
        former, waited = came.arrived.delivery.message, came.arrived.waited
        following = came.following
        assert following is not None
        destination = self._early_tasks.destination(former, waited)
        if destination is None:
            raise LookupError("its queue is unknown")
        registry, due_ms = registry_headers(following, TRACKED in waited.registry), following.due_ms
        most = self._delays.settings.max_message_bytes
        again = waiting_task(former, destination, due_ms, most)
        again = of_task(again, following.task_id, due_ms, registry)
        return producer.routed(again, destination.queue, Due.until(due_ms - self._skew_ms))

    def _fate(self, came: _Came) -> Fate | None:
        """Decide the fate of an occurrence; return None if it waits or is dropped."""
        occurrence, registry = came.occurrence, self._registry
        if not came.decided.goes_on:
            logger.info(
                "Occurrence %s: a message is dropped, because another one came first or the "
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
        self._put_back(came, pause, is_answer=True)
        return None

    def _leave_out(self, came: _Came) -> None:
        """Acknowledge an occurrence that does not run."""
        # If the message is dropped, another message of the occurrence may still need the place.
        if came.decided.goes_on and came.occurrence.overlap == "queue-one":
            runs.queue(self._registry, came.occurrence, 0)
        ack = came.arrived.delivery.ack
        self.act(partial(self.acknowledge, ack), is_acknowledgement=True)

    def _put_back(self, came: _Came, wait_ms: int, *, is_answer: bool) -> None:
        """Put an occurrence back into the levels; the rule decides again when it returns.

        Args:
            came: The occurrence.
            wait_ms: How long the occurrence waits, in milliseconds.
            is_answer: Whether Redis has decided on the occurrence; if so, the next occurrence was
                published.
        """
        arrived, occurrence = came.arrived, came.occurrence
        is_followed = is_answer or occurrence.is_followed
        again = occurrence._replace(turns=occurrence.turns + 1, is_followed=is_followed)
        headers = {SCHEDULE: again.text, **arrived.arrival.put_back(is_answer)}

        def put_back() -> None:
            arrived.delivery.message.headers.update(headers)
            arrived.put_back(wall_clock.ms() + wait_ms)

        self.act(put_back)

    def _note(self, fates: Sequence[tuple[_Came, Fate | None]]) -> None:
        """Record the fates of occurrences, and the occurrences that are waiting now."""
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
        """Pass an occurrence to the worker, in the event loop; its retries are ordinary tasks."""
        table: Any = arrived.delivery.message.headers
        while isinstance(table, dict):
            for name in (COPY, ONCE, REDELIVERED, SCHEDULE):
                table.pop(name, None)
            table = table.get(NESTED_HEADERS)
        try:
            arrived.go_on()
        finally:
            runs.given(self._consumer, arrived.delivery)

    def _check_schedules(self) -> None:
        now_ms, remembered = wall_clock.ms(), self._remembered
        overdue = self._records.overdue(now_ms)
        self.overdue = max((now_ms - min(overdue.values(), default=now_ms)) / 1000, 0.0)
        # Restore lost decisions first; otherwise decided occurrences would be sent again.
        known = [remembered[name] for name in overdue if name in remembered]
        self._records.decide(known, notes_again=True)
        if self._records.may_heal():
            self._delays.schedules.heal()
        self.begin()


class ScheduleStep(celery_internals.RabbitMQStep):
    """Takes over occurrences of schedules before they run, on every connection of the consumer."""

    requires = (DecideOnArrival,)

    _arrivals: Arrivals | None = None

    def start(self, consumer: Any) -> None:
        """Begin to take occurrences and to check for missing ones."""
        strategies = consumer.strategies
        if strategies.decisions is not None:
            self._arrivals = Arrivals(consumer, strategies.early_tasks)
            self._arrivals.start()
            strategies.decisions.takers[SCHEDULE] = self._arrivals.take

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Let the event loop run the thread's callbacks in the worker's main thread."""
        if self._arrivals is not None:
            self._arrivals.register(hub)

    def stop(self, consumer: Any) -> None:
        """Stop taking occurrences from a lost or closed connection."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.stop()
