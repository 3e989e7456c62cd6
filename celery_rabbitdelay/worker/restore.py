"""Restore a delayed task when it arrives at a worker, as if it had been sent without a delay.

Anybody may have written a message. So a retry goes to the exchange that its headers name only if
distribution might publish there. With a signing key, a message that would ask the registry without
a valid signature is refused.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Final, Protocol, TypeAlias

from celery.utils.log import get_logger
from kombu import Message

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.destinations import distribution_reach
from celery_rabbitdelay.app.instruments import EARLY, LATENESS, TAKEN_OVER, Instrument
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import DelayHeaders, later_version
from celery_rabbitdelay.publishing.signature import NOT_SIGNED
from celery_rabbitdelay.worker import celery_internals
from celery_rabbitdelay.worker.celery_internals import Consumer, Delivery, name_of_queue
from celery_rabbitdelay.worker.early_tasks import EarlyTasks

logger = get_logger(__name__)

#: The seconds of a step, for how many steps a worker remembers its arrivals, and for how many of
#: them its status says how late the latest was.
STEP: Final = 60
STEPS: Final = 60
LATEST_STEPS: Final = 10

#: Seconds of lateness up to which the arrivals of each task are counted; the last count is of those
#: that were later.
BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

#: Of how many tasks they are counted in a step; further ones count as :data:`OTHER`.
MOST_TASKS: Final = 200
OTHER: Final = "(other)"


@dataclass
class Step:
    """The tasks that arrived in one step.

    Attributes:
        received: How many.
        latest: How many seconds late the latest of them was.
        by_task: How many were late up to each of :data:`BOUNDS`, and later, by the task's name.
    """

    received: int = 0
    latest: float = 0.0
    by_task: dict[str, list[int]] = field(default_factory=dict)


NO_ARRIVALS: Final = Step()


class Arrivals:
    """Notes how late delayed tasks are that run, for the worker's status.

    Attributes:
        received: How many delayed tasks have arrived, without those that were put back.
    """

    def __init__(self) -> None:
        self.received = 0
        #: The steps that had arrivals, of those that are remembered.
        self._steps: dict[int, Step] = {}

    def note(self, due_ms: object, task: str) -> None:
        """Note that a task of a name arrives now; see :func:`lateness`."""
        late, now = lateness(due_ms), _step_now()
        if now not in self._steps:
            self._steps = {at: each for at, each in self._steps.items() if at > now - STEPS}
        step = self._steps.setdefault(now, Step())
        self.received += 1
        step.received += 1
        step.latest = max(step.latest, late)
        name = task if task in step.by_task or len(step.by_task) < MOST_TASKS else OTHER
        counts = step.by_task.setdefault(name, [0] * (len(BOUNDS) + 1))
        counts[bisect_left(BOUNDS, late)] += 1

    def status(self, in_full: bool = False) -> dict[str, object]:
        """Return how many tasks have arrived, and how many seconds late the latest one was.

        Args:
            in_full: Whether to add for each minute of the last hour, this minute's first, how many
                have arrived (``received_by_minute``) and how late the latest was (``by_minute``;
                None if none has); and for each task how many were late up to each of
                ``late_bounds``, and later (``late_by_task``).
        """
        now = _step_now()
        minutes = [self._steps.get(now - ago, NO_ARRIVALS) for ago in range(STEPS)]
        latest = max(each.latest for each in minutes[:LATEST_STEPS])
        status: dict[str, object] = {"received": self.received, "latest": latest}
        if in_full:
            status["by_minute"] = [each.latest if each.received else None for each in minutes]
            status["received_by_minute"] = [each.received for each in minutes]
            status["late_bounds"] = [*BOUNDS]
            late: dict[str, list[int]] = {}
            for each in minutes:
                for task, counts in each.by_task.items():
                    before = late.get(task, [0] * len(counts))
                    late[task] = [*map(sum, zip(before, counts, strict=True))]
            status["late_by_task"] = late
        return status


def _step_now() -> int:
    return int(time.monotonic()) // STEP


def may_run_since(waited: DelayHeaders) -> int | None:
    """Return the later of its due time and the time until which a worker put it back.

    Lateness is counted from there.
    """
    return None if waited.due_ms is None else max(waited.due_ms, waited.early.until_ms)


def lateness(due_ms: object) -> float:
    """Return how many seconds late a task is now; 0 if it is not due, or nobody knows.

    Args:
        due_ms: The value of its header ``rabbitdelay-due``; any sender may have written it.
    """
    late_ms = wall_clock.ms() - due_ms if isinstance(due_ms, int) else 0
    return max(late_ms, 0) / 1000


class Origins:
    """Checks the exchange and the routing key that a message from the levels claims to have had.

    Celery publishes a retry of a task to where the task came from, and anybody who can put a
    message into the levels can write there what he likes. So a worker believes what distribution
    would publish to, and with a key, what is signed. For any other message, the origin is the queue
    that it was consumed from.

    Args:
        consumer: The worker's consumer.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._reach = distribution_reach(consumer.app)
        settings = consumer.app.rabbitdelay.settings
        self._signing_keys = settings.signing_keys if settings.signing_required else None

    def checked(
        self, message: Message, headers: DelayHeaders, exchange: str, routing_key: str
    ) -> tuple[str, str]:
        """Return the exchange and the key that a retry goes to, for those that the headers name."""
        queue = name_of_queue(self._consumer, message) or ""
        if (exchange, routing_key) == ("", queue):
            return exchange, routing_key
        if not self._is_signed(message, headers):
            why = "is not signed: see rabbitdelay_signing_key"
        elif not self._reaches(exchange, routing_key):
            why = "may not be published there: see rabbitdelay_distribution_allowed"
        else:
            return exchange, routing_key
        logger.warning(
            "Task %s claims the origin %r, and its retries go to the queue %r: it %s.",
            celery_internals.shown(message.headers.get("id")),
            (exchange, routing_key),
            queue,
            why,
        )
        return "", queue

    def is_forged(self, message: Message, headers: DelayHeaders) -> bool:
        """Return whether the registry would be asked with something that no key has signed.

        Anybody who may write to the levels could let a stranger's message count as that of a task,
        which does not run then.
        """
        return bool(headers.registry) and not self._is_signed(message, headers)

    def _is_signed(self, message: Message, headers: DelayHeaders) -> bool:
        keys = self._signing_keys
        return keys is None or keys.verifies(b"", message.properties, headers)

    def _reaches(self, exchange: str, routing_key: str) -> bool:
        try:
            return self._reach.names(exchange, routing_key)
        except UnprocessableMessage:
            return False


#: When the task was published, as Sentry's Celery integration notes it: float, seconds since
#: 1970-01-01 UTC. The time from then to the start is its ``messaging.message.receive.latency``.
SENTRY_ENQUEUED: Final = "sentry-task-enqueued-time"

#: What Celery's consumer calls with each message of one task.
Strategy: TypeAlias = Callable[..., object]


class Decisions(Protocol):
    """Decides about tasks that are due, in a thread; set by the bootstep of an addition."""

    def ask(self, delivery: Delivery, waited: DelayHeaders) -> None:
        """Run a task, discard it or put it back, now or later, in the event loop.

        Args:
            delivery: The task's message, restored, as Celery has passed it.
            waited: What its headers have said.
        """


class RestoringStrategies(dict[str, Strategy]):
    """The execution strategies of a worker's consumer; each receives restored messages.

    Celery sets them again on every connection and when the pool is restarted.

    Args:
        consumer: The consumer, whose present strategies are wrapped.
        takeover: Whether an ``eta`` waits in the levels; see ``rabbitdelay_takeover``.
        origins: Checks what a message says; None: it is believed.

    Attributes:
        early_tasks: Takes the tasks that are not due yet; None between two connections.
        decisions: Decides about the tasks that are due; None: all of them run.
        arrivals: How late the delayed tasks arrive.
    """

    def __init__(
        self, consumer: Consumer, takeover: bool = True, origins: Origins | None = None
    ) -> None:
        super().__init__()
        self.early_tasks: EarlyTasks | None = None
        self.decisions: Decisions | None = None
        self.arrivals = Arrivals()
        self._app = consumer.app
        self._consumer = consumer
        self._tasks = consumer.app.tasks
        self._takeover = takeover
        self._origins = origins
        self._delivery = consumer.app.rabbitdelay.topology.delivery.name
        self._has_static_prefetch = celery_internals.has_static_prefetch(consumer)
        for task_name, strategy in consumer.strategies.items():
            self[task_name] = strategy

    def __setitem__(self, task_name: str, strategy: Strategy) -> None:
        is_ours_to_hold = self._takeover and getattr(self._tasks[task_name], "rabbitdelay", True)
        takes_eta = is_ours_to_hold or self._has_static_prefetch

        @wraps(strategy)
        def restoring(message: Message, body: Any, ack: Any, *args: Any, **kwargs: Any) -> Any:
            go_on = partial(strategy, message, body, ack, *args, **kwargs)
            redelivered = bool((message.delivery_info or {}).get("redelivered"))
            try:
                delivery = Delivery(message, body, ack, go_on, task_name, redelivered)
                is_taken = self._take(delivery, takes_eta)
            except Exception:  # anybody may have written the message
                logger.exception("A message for the task %s is left to Celery.", task_name)
                is_taken = False
            return None if is_taken else go_on()

        super().__setitem__(task_name, restoring)

    def _take(self, delivery: Delivery, takes_eta: bool) -> bool:
        """Restore a message; return whether it is not passed to Celery, or not now."""
        message = delivery.message
        later = later_version(message.headers or {}, message.content_type)
        if later is not None:
            # Between two connections there is nothing to acknowledge: RabbitMQ redelivers it.
            if self.early_tasks is not None:
                self.early_tasks.leave_to_later_version(message, delivery.ack, later)
            return True
        origins = self._origins
        waited = restore(message, origins)
        if waited is None:
            # A retry, and what is put back, would carry them on, signed.
            header_names.drop_own(message.headers)
        elif origins is not None and origins.is_forged(message, waited):
            if self.early_tasks is not None:
                self.early_tasks.refuse(message, delivery.ack, NOT_SIGNED)
            return True
        self._hide_delivery(message)
        if self.early_tasks is None or (waited is None and not takes_eta):
            return False
        ask = None
        if self.decisions is not None and waited is not None and celery_internals.id_of(message):
            ask = partial(self.decisions.ask, delivery, waited)
        if self.early_tasks.try_enqueue(delivery, waited, takes_eta, ask):
            self._record(TAKEN_OVER if waited is None else EARLY, 1, delivery)
            return True
        if ask is not None:
            ask()
            return True
        if waited is not None:
            since_ms = may_run_since(waited)
            self.arrivals.note(since_ms, delivery.task)
            self._record(LATENESS, lateness(since_ms), delivery)
            signals.send(
                signals.released, self._app, celery_internals.id_of(message), waited.due_ms
            )
        return False

    def _hide_delivery(self, message: Message) -> None:
        """Replace a delivery exchange as the origin of a message by the queue that it came to.

        Distribution publishes by that exchange what is for a queue that only a binding reaches, and
        nothing is ever published there by name: a retry of the task would be undeliverable.
        """
        if message.delivery_info.get("exchange") == self._delivery:
            queue = name_of_queue(self._consumer, message)
            if queue is not None:
                message.delivery_info.update(exchange="", routing_key=queue)

    def _record(self, instrument: Instrument, value: float, delivery: Delivery) -> None:
        queue = name_of_queue(self._consumer, delivery.message) or ""
        self._app.rabbitdelay.recorder.record({instrument: value}, delivery.task, queue)


def restore(message: Message, origins: Origins | None = None) -> DelayHeaders | None:
    """Undo what the levels did to a message. Any other message stays as it is.

    The exchange and the routing key become those that the message would have had without a delay:
    Celery sends a retry to them. The broker's dead-letter headers are removed. The due time and the
    queue stay readable in ``task.request.headers``. Sentry's time in the queue begins when the task
    is due. A message that comes from distribution needs nothing more, unless a worker has put it
    back into the levels: then it is given back to one queue, by the default exchange.

    Args:
        message: The message.
        origins: Checks the exchange and the routing key that the headers name; None: they are
            believed.

    Returns:
        What its headers have said; None if it was not delayed.
    """
    given: dict[str, Any] = message.headers
    if not given or header_names.DUE not in given:
        return None
    headers, _ = header_names.parse(given)
    exchange, routing_key = headers.early.exchange, headers.early.routing_key
    if header_names.QUEUE in given:
        exchange, routing_key = headers.exchange, headers.routing_key
        if None in (headers.queue, exchange, routing_key):
            return None
    if exchange is not None and routing_key is not None:
        if origins is not None:
            exchange, routing_key = origins.checked(message, headers, exchange, routing_key)
        message.delivery_info.update(exchange=exchange, routing_key=routing_key)
    said = DelayHeaders(headers.due_ms, queue=headers.queue, registry=headers.registry)
    kept, restored = said.to_headers(), dict(headers.others)
    nested = restored.get(header_names.NESTED_HEADERS)
    for table in (restored, nested) if isinstance(nested, dict) else (restored,):
        table.update(kept)
        if SENTRY_ENQUEUED in table and headers.due_ms is not None:
            table[SENTRY_ENQUEUED] = headers.due_ms / 1000
    given.clear()
    given.update(restored)
    if header_names.REDELIVERED in headers.registry:
        message.delivery_info["redelivered"] = True
    return headers
