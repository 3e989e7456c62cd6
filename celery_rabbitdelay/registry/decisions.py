"""Asks the registry whether due delayed tasks run, and carries out its decisions."""

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
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.registry import application
from celery_rabbitdelay.registry.application import RegistrySettings, registry_of
from celery_rabbitdelay.registry.decision import Arrival, Decision, Verdict
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.registry.plain_arrivals import PlainArrivals
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.batch_thread import Action, BatchThread
from celery_rabbitdelay.worker.celery_internals import Delivery, Hub
from celery_rabbitdelay.worker.celery_requests import run_strategy
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.restore import lateness, may_run_since

logger = get_logger(__name__)

#: The minimum and the maximum wait in the levels, in seconds, while Redis is down. Within these
#: limits, a task waits as long as Redis has been down, plus up to a quarter at random.
MIN_PAUSE: Final = 5.0
MAX_PAUSE: Final = 60.0

#: Seconds until the registry is asked again about a task that could not be put back.
ASK_AGAIN: Final = 5.0

#: The batch window in seconds, used if the worker's prefetch count allows ``MIN_GATHERED`` times
#: the tasks that have arrived. A round trip takes as much processor time for one task as for many
#: tasks: a large part of a task's total.
GATHER: Final = 0.004
MIN_GATHERED: Final = 8

#: The reason of a task that is undeliverable because decisions about it have expired.
FORGOTTEN: Final = (
    "it is late by more than rabbitdelay_registry_keep: the registry no longer knows whether it "
    "was cancelled or has run"
)

#: The signals for tasks that do not run.
DISCARDED: Final = {
    Verdict.CANCELLED: signals.cancelled,
    Verdict.SUPERSEDED: signals.superseded,
    Verdict.EXPIRED: signals.expired,
}

#: Why a task does not run, for the log.
REASONS: Final = {
    Verdict.CANCELLED: "it was cancelled",
    Verdict.SUPERSEDED: "it is superseded by a newer task with the key '{key}'",
    Verdict.EXPIRED: "its job '{job}' was aborted or has expired",
}

#: The counters of tasks that do not run, or that wait again.
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
    """A due task that has arrived.

    Attributes:
        delivery: The arguments from Celery's consumer, with the message as ``restore`` left it.
        waited: The delay headers that the message arrived with.
        arrival: The arguments for the registry.
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
    """Return how many milliseconds a task waits after ``away`` seconds without Redis."""
    pause = min(max(away, MIN_PAUSE), MAX_PAUSE) * random.uniform(1, 1.25)  # noqa: S311 - jitter
    return int(pause * 1000)


def may_hold(consumer: Any, number: int) -> bool:
    """Return whether a worker's prefetch count allows this number of messages."""
    count: int = consumer.qos.value
    return count == 0 or count >= number


def discard_as_revoked(consumer: Any, task_id: str, strategy: Callable[[], Any]) -> None:
    """Run a task's strategy so that the task counts as revoked.

    The strategy acknowledges the message, stores the result, updates the chord, and sends the
    signal and the event.
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
        delivery: The arguments from Celery's consumer, with the message as ``restore`` left it.
        waited: The delay headers that the message arrived with.
        arrival: The arguments for the registry.
        go_on: Runs or discards the task, in the event loop.
        put_back: Puts the task back into the levels until an instant, in milliseconds since 1970.
        is_cancelled: Whether the task was cancelled.
    """

    delivery: Delivery
    waited: DelayHeaders
    arrival: Arrival
    go_on: Action
    put_back: Callable[[int], None]
    is_cancelled: bool


class Decisions(BatchThread[_Due]):
    """Asks the registry about arrived tasks, in a separate thread.

    Because of this thread, the worker's event loop and tasks without a delay do not wait for Redis.
    Tasks that arrive together share a round trip. The thread also decides about tasks without an
    option of the registry that :class:`.PlainArrivals` does not let run. If Redis does not answer,
    ``rabbitdelay_registry_down`` decides whether tasks run or go back into the levels for a while.

    Args:
        consumer: The worker's consumer, on one connection.
        early_tasks: Puts tasks back into the levels.

    Attributes:
        takers: Maps the names of headers to functions. If a task has such a header, the function
            runs or discards the task. Schedules add a function.
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
        self._plain: PlainArrivals[_Due] | None = None
        self._down_since: float | None = None
        self._failures = WarningLimit(logger, "Requests that the registry did not answer")
        self._unreadable = WarningLimit(logger, "Tasks whose record, key or job cannot be read")

    def ask(self, delivery: Delivery, waited: DelayHeaders) -> None:
        """Ask the registry about a task; the event loop then carries out the decision.

        Args:
            delivery: The arguments from Celery's consumer, with the restored message.
            waited: The delay headers that the message arrived with.
        """
        message, body = delivery.message, delivery.body
        queue = celery_internals.name_of_queue(self._consumer, message) or ""
        headers = waited
        if isinstance(body, Mapping):  # Celery's message protocol 1
            of_body = {"id": celery_internals.id_of(message), "retries": body.get("retries")}
            headers = waited._replace(others={**waited.others, **of_body})
        arrival = Arrival.of(headers, waited.due_ms or 0, queue, delivery.redelivered).named()
        due = _Due(delivery, waited, arrival, queue)
        if not waited.registry and self._plain is not None and self._plain.is_open:
            self._plain.give(arrival.task_id, due)
        else:
            self.give(due)

    def register(self, hub: Hub) -> None:
        """Let the event loop run the thread's actions, and query Redis about plain tasks."""
        super().register(hub)
        if not self._registry.store.is_cluster:
            self._plain = PlainArrivals(
                hub, self._registry, self._run_all, self._give_all, self.gather_for
            )

    def stop(self) -> None:
        """End the thread and the connection of the event loop."""
        super().stop()
        if self._plain is not None:
            self._plain.close()

    def begin(self) -> None:
        """Log an error of Redis at the start, and record the start of the index."""
        try:
            self._registry.breaker.call(self._registry.index.complete_since)
        except RegistryUnavailable as error:
            self._failed(error)

    def work(self, batch: list[_Due]) -> None:
        """Ask about a batch of tasks, and let the event loop carry out the decisions."""
        try:
            decisions = self._decide(batch)
        except Exception:  # the thread must survive
            logger.exception("Cannot decide about %d due tasks; retrying", len(batch))
            self._ask_again(batch)
        else:
            self.act(partial(self._carry_out_all, batch, decisions))
        plain = self._plain
        if plain is not None and (connection := plain.connected()) is not None:
            self.act(partial(plain.open, connection))

    def gather_for(self, first: int) -> float:
        """Return the batch window in seconds; 0 if the prefetch count is too small for a batch."""
        more = first * MIN_GATHERED
        return GATHER if may_hold(self._consumer, more) else 0.0

    def _run_all(self, batch: Sequence[_Due]) -> None:
        self._down_since = None
        self._carry_out_all(batch, [Decision(Verdict.RUN)] * len(batch))

    def _give_all(self, batch: Sequence[_Due]) -> None:
        for due in batch:
            self.give(due)

    def _ask_again(self, batch: Sequence[_Due]) -> None:
        for due in batch:
            # An unconfirmed copy of the message may be in the levels. The copy cannot replace the
            # renamed arrival.
            self.give(due._replace(arrival=due.arrival.named()), ASK_AGAIN)

    def _decide(self, batch: Sequence[_Due]) -> list[Decision]:
        try:
            decisions = self._registry.breaker.call(lambda: self._ask_registry(batch))
        except RegistryUnavailable as error:
            self._failed(error)
            away = time.monotonic() - (self._down_since or time.monotonic())
            return [
                Decision(Verdict.RUN)
                if self._runs_without or not due.arrival.has_options
                else self._later(away)
                for due in batch
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
        fate = "run" if self._runs_without else "go back into the delay levels until it answers"
        logger.warning(
            "The registry does not answer (%s). Delayed tasks that use the registry %s "
            "(rabbitdelay_registry_down). All other tasks run.",
            error,
            fate,
        )

    def _later(self, away: float) -> Decision:
        """Decide that a task waits about as long as Redis was down, and is then decided again."""
        return Decision(Verdict.LATER, wall_clock.ms() + pause_ms(away), is_answer=False)

    def _carry_out_all(self, batch: Sequence[_Due], decisions: Sequence[Decision]) -> None:
        for due, decision in zip(batch, decisions, strict=True):
            try:
                self._carry_out(due, decision)
            except Exception:  # must not stop the other tasks of the batch
                logger.exception(
                    "Cannot handle task %s on its arrival; RabbitMQ redelivers it", due.shown_id
                )

    def _carry_out(self, due: _Due, decision: Decision) -> None:
        self._count(due, decision.verdict)
        match decision.verdict:
            case Verdict.RUN:
                self._signal(signals.released, due)
                self._hand_on(due, partial(self._run_strategy, due))
            case Verdict.DUPLICATE | Verdict.REPLACED:
                # Another message of the task runs or has run, and stores the task's result.
                logger.info("Task %s: a duplicate message is dropped.", due.shown_id)
                self.acknowledge(due.delivery.ack)
            case Verdict.LATER:
                self._put_back(due, decision)
            case Verdict.FORGOTTEN:
                self._early_tasks.refuse(due.delivery.message, due.delivery.ack, FORGOTTEN)
            case Verdict.UNREADABLE:
                if self._unreadable.allows(decision.why):
                    logger.error(
                        "Task %s goes back into the delay levels, because its record, key or job "
                        "cannot be read: %s",
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
        """Pass a task to the function for one of its headers, if any; otherwise let it run."""
        header = next((name for name in self.takers if name in due.waited.registry), None)
        if header is None:
            go_on()
            return

        def put_back(until_ms: int) -> None:
            self._put_back(due, Decision(Verdict.LATER, until_ms))

        arrived = due.delivery, due.waited, due.arrival
        self.takers[header](Arrived(*arrived, go_on, put_back, is_cancelled))

    def _run_strategy(self, due: _Due) -> None:
        run_strategy(self._consumer, due.delivery, self._early_tasks.refuse_unrunnable)

    def _discard(self, due: _Due, verdict: Verdict) -> None:
        arrival, shown = due.arrival, celery_internals.shown
        why = REASONS[verdict].format(key=shown(arrival.key), job=shown(arrival.job))
        logger.info("Task %s[%s] does not run: %s.", shown(due.delivery.task), due.shown_id, why)
        run = partial(self._run_strategy, due)
        discard_as_revoked(self._consumer, arrival.task_id, run)
        self._signal(DISCARDED[verdict], due)

    def _count(self, due: _Due, verdict: Verdict) -> None:
        asks_again = verdict in (Verdict.LATER, Verdict.UNREADABLE)
        if asks_again and due.waited.early.until_ms:
            return  # counted when the task first went back
        values = {LATENESS: lateness(may_run_since(due.waited))}
        if verdict is not Verdict.RUN:
            values = {COUNTED[verdict]: 1}
        self._consumer.app.rabbitdelay.recorder.record(values, due.delivery.task, due.queue)

    def _signal(self, signal: Signal, due: _Due) -> None:
        signals.send(signal, self._consumer.app, due.arrival.task_id, due.waited.due_ms)

    def _put_back(self, due: _Due, decision: Decision) -> None:
        arrival = due.arrival
        if arrival.once:
            due.delivery.message.headers.update(arrival.put_back(decision.is_answer))
        due_ms = decision.until_ms if decision.is_new_due else arrival.due_ms
        otherwise = partial(self._ask_again, [due])
        self._early_tasks.put_back(
            due.delivery, due.waited, decision.until_ms, due_ms, otherwise, decision.is_paused
        )
