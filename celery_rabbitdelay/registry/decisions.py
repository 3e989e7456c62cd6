"""Delayed tasks that are due: the registry says whether they run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from celery.utils.dispatch import Signal
from celery.utils.log import get_logger

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.instruments import LATENESS
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import MAX_FORMER, ONCE, REDELIVERED, DelayHeaders
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.registry import application
from celery_rabbitdelay.registry.application import RegistrySettings, registry_of
from celery_rabbitdelay.registry.decision import Arrival, Decision, Verdict
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Delivery
from celery_rabbitdelay.worker.celery_requests import run_strategy
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.restore import lateness, may_run_since

logger = get_logger(__name__)

#: Seconds that a task waits in the levels while Redis is away: at first, and at most. In between,
#: as long as Redis has been away; up to a quarter is added at random.
MIN_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0

#: Seconds after which the registry is asked again about a task that the levels have not taken.
ASK_AGAIN: Final = 5.0

#: Seconds for which more tasks are awaited before the registry is asked, if the worker's prefetch
#: count allows so many times the tasks that have come. A round trip costs the worker much of the
#: processor time that a task takes, whether it is about one task or about many.
GATHER: Final = 0.004
MIN_GATHERED: Final = 8

#: The reason of a task that is undeliverable because it is too late to decide about it.
FORGOTTEN: Final = (
    "it is older than the registry's memory (rabbitdelay_registry_keep): whether it was cancelled, "
    "or has run, is not known any more"
)

#: The signals about tasks that do not run.
DISCARDED: Final = {
    Verdict.CANCELLED: signals.cancelled,
    Verdict.SUPERSEDED: signals.superseded,
    Verdict.EXPIRED: signals.expired,
}

#: What counts tasks that do not run, or not now.
COUNTED: Final = {
    Verdict.CANCELLED: application.CANCELLED,
    Verdict.SUPERSEDED: application.SUPERSEDED,
    Verdict.EXPIRED: application.EXPIRED,
    Verdict.REPLACED: application.DUPLICATES,
    Verdict.DUPLICATE: application.DUPLICATES,
    Verdict.LATER: application.RETURNED,
    Verdict.UNREADABLE: application.RETURNED,
    Verdict.FORGOTTEN: application.EXPIRED,
}


class _Due(NamedTuple):
    """A task that is due and has arrived.

    Attributes:
        delivery: Its message, restored, as Celery has passed it.
        waited: What its headers have said.
        arrival: What the registry is asked.
        queue: The queue that the message came from.
    """

    delivery: Delivery
    waited: DelayHeaders
    arrival: Arrival
    queue: str

    @property
    def shown_id(self) -> str:
        """The task's id, for the log."""
        return celery_internals.shown(self.arrival.task_id)


def pause_ms(away: float) -> int:
    """Return for how many milliseconds a task waits while Redis is away, by the seconds so far."""
    pause = min(max(away, MIN_PAUSE), MAX_PAUSE) * random.uniform(1, 1.25)  # noqa: S311 - jitter
    return int(pause * 1000)


def may_hold(consumer: Any, number: int) -> bool:
    """Return whether a worker's prefetch count allows this number of messages."""
    count: int = consumer.qos.value
    return count == 0 or count >= number


def discard_as_revoked(consumer: Any, task_id: str, strategy: Callable[[], Any]) -> None:
    """Run a task's strategy so that the task counts as revoked.

    The strategy acknowledges the message, stores the result, tells the chord, and sends the signal
    and the event.
    """
    revoked = consumer.controller.state.revoked
    was_revoked = task_id in revoked
    revoked.add(task_id)
    try:
        strategy()
    finally:
        if not was_revoked:
            revoked.discard(task_id)


class Arrived(NamedTuple):
    """A task about which the registry has decided.

    Attributes:
        delivery: Its message, restored, as Celery has passed it.
        waited: What its headers said before it was restored.
        go_on: Runs or discards it, in the event loop.
        put_back: Puts it back into the levels until an instant, in milliseconds since 1970.
        is_cancelled: Whether it does not run, because it was cancelled.
    """

    delivery: Delivery
    waited: DelayHeaders
    go_on: Action
    put_back: Callable[[int], None]
    is_cancelled: bool


class Decisions(BatchThread[_Due]):
    """Asks the registry about the tasks that have arrived, in a thread of its own.

    So neither the worker's event loop nor tasks without a delay wait for Redis, and tasks that
    arrive together share a round trip. If Redis does not answer, ``rabbitdelay_registry_down`` says
    whether the tasks run, or go back into the levels for some seconds.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Puts tasks back into the levels.

    Attributes:
        takers: Functions by header name. A task with that header is given to the function, which
            runs or discards it. Schedules add one.
    """

    name = "rabbitdelay-decisions"

    def __init__(self, consumer: Any, early_tasks: EarlyTasks) -> None:
        super().__init__(consumer)
        self.takers: dict[str, Callable[[Arrived], None]] = {}
        self._early_tasks = early_tasks
        delays = consumer.app.rabbitdelay
        self._registry = registry_of(delays)
        self._runs_without = delays.settings_of(RegistrySettings).registry_down == "run"
        breaker = self._registry.breaker
        delays.recorder.gauges[application.BREAKER_OPEN] = lambda: breaker.is_open
        self._down_since: float | None = None
        self._failures = WarningLimit(logger, "Questions to the registry without an answer")
        self._unreadable = WarningLimit(logger, "Tasks whose record, key or job cannot be read")

    def ask(self, delivery: Delivery, waited: DelayHeaders) -> None:
        """Ask about a task; the event loop then does what the registry says.

        Args:
            delivery: The task's message, restored, as Celery has passed it.
            waited: What its headers have said.
        """
        message, body = delivery.message, delivery.body
        queue = celery_internals.name_of_queue(self._consumer, message) or ""
        said = waited
        if isinstance(body, Mapping):  # Celery's message protocol 1
            told = {"id": celery_internals.id_of(message), "retries": body.get("retries")}
            said = waited._replace(others={**waited.others, **told})
        arrival = Arrival.of(said, waited.due_ms or 0, queue, delivery.redelivered).named()
        self.give(_Due(delivery, waited, arrival, queue))

    def begin(self) -> None:
        """Say at the start whether Redis answers, and note since when all is tracked."""
        try:
            self._registry.breaker.call(self._registry.index.complete_since)
        except RegistryUnavailable as error:
            self._failed(error)

    def work(self, batch: list[_Due]) -> None:
        """Ask about tasks, and let the event loop do what the registry says."""
        try:
            decisions = self._decide(batch)
        except Exception:  # the thread has to live on
            logger.exception("The registry is asked again about %d tasks", len(batch))
            self._ask_again(batch)
        else:
            self.act(partial(self._carry_out_all, batch, decisions))

    def gather_for(self, first: int) -> float:
        """Return for how long to wait for more tasks, so that they share a round trip.

        Not if the prefetch count lets hardly any more of them come.
        """
        more = first * MIN_GATHERED
        return GATHER if may_hold(self._consumer, more) else 0.0

    def _ask_again(self, batch: Sequence[_Due]) -> None:
        for due in batch:
            # It may have been put back without a confirm, and that would follow the same arrival.
            self.give(due._replace(arrival=due.arrival.named()), ASK_AGAIN)

    def _decide(self, batch: Sequence[_Due]) -> list[Decision]:
        try:
            decisions = self._registry.breaker.call(lambda: self._ask_registry(batch))
        except RegistryUnavailable as error:
            self._failed(error)
            away = time.monotonic() - (self._down_since or time.monotonic())
            return [
                Decision(Verdict.RUN)
                if self._runs_without or not each.arrival.has_options
                else self._later(away)
                for each in batch
            ]
        if self._down_since is not None:
            seconds = time.monotonic() - self._down_since
            logger.warning("The registry answers again, after %.1f s.", seconds)
            self._down_since = None
        return decisions

    def _ask_registry(self, batch: Sequence[_Due]) -> list[Decision]:
        paused = self._registry.pauses.known()
        arrivals = [
            arrival._replace(paused_ms=paused_since(paused, delivery.task, queue))
            for delivery, _, arrival, queue in batch
        ]
        return self._registry.decide(arrivals)

    def _failed(self, error: RegistryUnavailable) -> None:
        self._down_since = self._down_since or time.monotonic()
        if not self._failures.allows():
            return
        what = "run" if self._runs_without else "go back into the levels until it answers"
        logger.warning(
            "Delayed tasks with an option of the registry %s (rabbitdelay_registry_down), and all "
            "others run: %s.",
            what,
            error,
        )

    def _later(self, away: float) -> Decision:
        """Return that a task asks again after as long as there was no answer, within bounds."""
        return Decision(Verdict.LATER, wall_clock.ms() + pause_ms(away), is_answer=False)

    def _carry_out_all(self, batch: Sequence[_Due], decisions: Sequence[Decision]) -> None:
        for due, decision in zip(batch, decisions, strict=True):
            try:
                self._carry_out(due, decision)
            except Exception:  # the others are carried out all the same
                logger.exception(
                    "Task %s failed on its arrival; RabbitMQ redelivers it", due.shown_id
                )

    def _carry_out(self, due: _Due, decision: Decision) -> None:
        self._count(due, decision.verdict)
        match decision.verdict:
            case Verdict.RUN:
                self._signal(signals.released, due)
                self._hand_on(due, partial(self._run_strategy, due))
            case Verdict.DUPLICATE | Verdict.REPLACED:
                # Another message of the task runs, or has run: its result is the task's.
                logger.info("Task %s does not run twice.", due.shown_id)
                self.acknowledge(due.delivery.ack)
            case Verdict.LATER:
                self._put_back(due, decision)
            case Verdict.FORGOTTEN:
                self._early_tasks.refuse(due.delivery.message, due.delivery.ack, FORGOTTEN)
            case Verdict.UNREADABLE:
                if self._unreadable.allows(decision.why):
                    logger.error(
                        "Task %s asks the registry again later: its record, key or job cannot be "
                        "read: %s",
                        due.shown_id,
                        decision.why,
                    )
                self._put_back(due, self._later(lateness(due.waited.due_ms)))
            case Verdict.CANCELLED:
                discard = partial(self._discard, due, decision.verdict)
                self._hand_on(due, discard, is_cancelled=True)
            case _:
                self._discard(due, decision.verdict)

    def _hand_on(self, due: _Due, go_on: Action, is_cancelled: bool = False) -> None:
        """Go on with a task, or give it to what takes it before."""
        header = next((each for each in self.takers if each in due.waited.registry), None)
        if header is None:
            go_on()
            return

        def put_back(until_ms: int) -> None:
            self._put_back(due, Decision(Verdict.LATER, until_ms))

        self.takers[header](Arrived(due.delivery, due.waited, go_on, put_back, is_cancelled))

    def _run_strategy(self, due: _Due) -> None:
        run_strategy(self._consumer, due.delivery, self._early_tasks.refuse_unrunnable)

    def _discard(self, due: _Due, verdict: Verdict) -> None:
        run = partial(self._run_strategy, due)
        discard_as_revoked(self._consumer, due.arrival.task_id, run)
        self._signal(DISCARDED[verdict], due)

    def _count(self, due: _Due, verdict: Verdict) -> None:
        asks_again = verdict in (Verdict.LATER, Verdict.UNREADABLE)
        if asks_again and due.waited.early.until_ms:
            return  # it was counted when it went back first
        if not asks_again:
            may_run_ms = may_run_since(due.waited) if verdict is Verdict.RUN else None
            self._consumer.strategies.arrivals.note(may_run_ms, due.delivery.task)
        values = {LATENESS: lateness(may_run_since(due.waited))}
        if verdict is not Verdict.RUN:
            values = {COUNTED[verdict]: 1}
        self._consumer.app.rabbitdelay.recorder.record(values, due.delivery.task, due.queue)

    def _signal(self, signal: Signal, due: _Due) -> None:
        signals.send(signal, self._consumer.app, due.arrival.task_id, due.waited.due_ms)

    def _put_back(self, due: _Due, decision: Decision) -> None:
        arrival = due.arrival
        if arrival.once:
            headers: dict[str, Any] = due.delivery.message.headers
            # If Redis has noted this arrival and its answer was lost, the next one is no duplicate.
            headers[ONCE] = arrival.mark.after(arrival.name).text
            if not decision.is_answer and len(arrival.mark.former) == MAX_FORMER:
                headers[REDELIVERED] = True
        due_ms = decision.until_ms if decision.is_new_due else arrival.due_ms
        otherwise = partial(self._ask_again, [due])
        self._early_tasks.put_back(
            due.delivery, due.waited, decision.until_ms, due_ms, otherwise, decision.is_paused
        )
