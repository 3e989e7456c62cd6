"""Where a task goes: Celery's own path, a worker that holds it, or the levels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from celery.result import AsyncResult
from kombu import Connection, Producer
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.celery_internals import (
    former_of_replacement,
    has_quorum_queue,
    is_sent_by_celery,
    registered_task,
)
from celery_rabbitdelay.app.metrics import Metrics, queue_label
from celery_rabbitdelay.app.options import NO_TICKET, RegistryOptions
from celery_rabbitdelay.app.sending.pipelines import (
    PipelinedProducer,
    TaskPipeline,
    current_pipeline,
)
from celery_rabbitdelay.app.sending.task_messages import stored
from celery_rabbitdelay.app.sending.task_producer import DelayedTaskProducer, EtaProducer
from celery_rabbitdelay.app.settings import checked
from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable, UnknownOption
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds
from celery_rabbitdelay.levels.headers import JOB, JOB_ID, KEY, UNKNOWN_LIFE
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.decision import Ticket, attempt_of, new_copy
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.record import holder_of
from celery_rabbitdelay.registry.registry import Registration, Registry

logger = logging.getLogger(__name__)

NS_PER_US: Final = 1000


@dataclass
class TaskSending:
    """One call of ``Celery.send_task`` that has a delay, or an option of the registry.

    Its options and its delay are checked.

    Attributes:
        app: The application, a :class:`.Celery`.
        by_celery: Celery's ``send_task`` for its name and arguments: takes countdown, eta, id,
            producer, connection, ``more``, and options.
        more: Celery's further positional arguments.
        name: The task's name.
        countdown: Seconds until it may start.
        eta: The instant at which it may start.
        delay: Seconds, or a timedelta, until it may start; None if ``countdown`` or ``eta`` says.
        tolerance_ms: Milliseconds that it may start later.
        task_id: Its id; None for a random one.
        producer: The caller's producer.
        connection: The caller's connection.
        options: Celery's options.
        given: The options of the registry.
        former: The headers of this package that a retried task had.
    """

    app: Any
    by_celery: Callable[..., AsyncResult[Any]]
    more: tuple[Any, ...]
    name: str
    countdown: float | None
    eta: datetime | str | None
    delay: Delay | None
    tolerance_ms: int
    task_id: str | None
    producer: Producer | None
    connection: Connection | None
    options: dict[str, Any]
    given: Mapping[str, Any]
    former: Mapping[str, Any]

    def send(self) -> AsyncResult[Any]:
        """Send the task, to where these rules lead, the first one that applies.

        - the broker is not RabbitMQ: Celery's own path; ``delay`` becomes a countdown
        - ``rabbitdelay=False``, or a countdown or eta without takeover: a worker, which holds it
        - the delay is over by now: Celery's own path, at once
        - all others: the levels; :class:`.DelayedProducer` chooses between the task's queue and
          distribution
        """
        self._has_id, self.task_id = self.task_id is not None, self.task_id or uuid()
        if not self.app.rabbitdelay.is_available(self._callers_connection):
            self._refuse_registry_options("the broker is not RabbitMQ")
            return self._send_to_other_broker()
        self.app.rabbitdelay.check_settings()
        has_delay = self.delay is not None or self.countdown or self.eta
        if has_delay and not self._takes_over():
            self._refuse_registry_options("the task does not wait in the levels")
            return self._send_with_eta()
        due = self.app.rabbitdelay.due(self.delay, self.countdown, self.eta, self.tolerance_ms)
        wanted = RegistryOptions.of(
            self.app.rabbitdelay.settings, self._task, self.given, self.former
        )
        if due.is_past and not any(self.given.values()):
            return self._send_by_celery()
        # Also without a delay: behind the levels, the registry is asked about it.
        began = time.monotonic()
        try:
            if wanted.unique_ms is not None:
                return self._send_first(due, wanted, wanted.unique_ms)
            return self._send_into_levels(due, wanted)
        finally:
            self.app.rabbitdelay.warn_blocked_loop(time.monotonic() - began)

    def _refuse_registry_options(self, why: str) -> None:
        for name, value in self.given.items():
            if value is not False:
                raise UnknownOption(name, value, f"{why}, so the registry cannot reach it")

    @property
    def _task(self) -> Any:
        return self.options.get("task_type") or registered_task(self.app, self.name)

    @property
    def _callers_producer(self) -> Producer | None:
        return self.producer or self.options.get("publisher")

    @property
    def _callers_connection(self) -> Connection | None:
        producer = self._callers_producer
        return self.connection or (producer.connection if producer is not None else None)

    def _takes_over(self) -> bool:
        """Whether a delay goes into the levels: see ``rabbitdelay=False`` and ``takeover``."""
        if not getattr(self._task, "rabbitdelay", True):
            return False
        return self.delay is not None or self.app.rabbitdelay.settings.takeover

    @property
    def _countdown(self) -> float | None:
        return self.countdown if self.delay is None else milliseconds(self.delay) / 1000

    def _send_to_other_broker(self) -> AsyncResult[Any]:
        countdown = self._countdown
        if self.delay is not None and (countdown or 0) > 0:
            why = "the broker is not RabbitMQ, and a worker holds the task until it is due"
            self.app.rabbitdelay.warn_treated_as_countdown(why)
        return self._send_by_celery(countdown, self.eta)

    def _send_with_eta(self) -> AsyncResult[Any]:
        if not has_quorum_queue(self.app):
            return self._send_by_celery(self._countdown, self.eta)
        # Celery would use its native delayed delivery, whose queues our workers do not declare.
        producer = self._callers_producer
        if self.connection is not None:
            producer = self.app.amqp.Producer(self.connection, auto_declare=False)
        with self.app.producer_or_acquire(producer) as acquired:
            eta_producer = EtaProducer(acquired, self._countdown, self.eta)
            return self._send_by_celery(producer=eta_producer)

    def _send_into_levels(self, due: Due, wanted: RegistryOptions) -> AsyncResult[Any]:
        delays = self.app.rabbitdelay
        delays.settings.check_delay(due)
        timeout = self.options.get("confirm_timeout")
        if timeout is not None:
            timeout = checked("confirm_timeout", timeout)
        # A worker acknowledges a task as soon as its retry is sent.
        if not (wanted.job or wanted.is_registered or self.options.get("retries")):
            pipeline = current_pipeline(delays, self._callers_connection)
            if pipeline is not None:
                return self._send_in_pipeline(pipeline, due, wanted, timeout)
        copy = new_copy() if wanted.is_registered else ""
        ticket, job_id = self._ask(due, wanted)
        began = time.monotonic()
        with delays.publisher(self._callers_connection, timeout) as publisher:
            producer = DelayedTaskProducer(
                publisher,
                self.app,
                due,
                self.options,
                came_from=self.former.get(header_names.QUEUE),
                waited=time.monotonic() - began,
            )
            producer.says = {"registry": wanted.headers(copy, ticket, job_id)}
            resent = publisher.resent
            try:
                result = self._send_by_celery(producer=producer)
            finally:
                count_send(delays.recorder, self.name, producer, publisher.resent - resent)
        if copy:
            retries, replaced = map(self.options.get, ("retries", "replaced_task_nesting"))
            attempt = attempt_of(retries, replaced)
            registration = Registration(result.id, copy, due.at_ms, attempt, ticket, wanted.key)
            if wanted.track:
                registration = registration._replace(
                    name=self.name,
                    job=wanted.job,
                    message=stored(producer.delayed, tolerance_ms=due.tolerance_ms),
                )
            register_sent(delays.registry, [registration])
        signals.send(signals.delayed, self.app, result.id, due.at_ms)
        return result

    def _send_first(self, due: Due, wanted: RegistryOptions, unique_ms: int) -> AsyncResult[Any]:
        """Send the task unless another one waits under its key; return the result of either."""
        self._refuse_unique(wanted.job, unique_ms)
        registry = self.app.rabbitdelay.registry
        holder = None
        with ExitStack() as stack:
            try:
                stack.enter_context(registry.alone_under(wanted.key))
                holder = holder_of(registry, wanted.key, unique_ms)
            except RegistryUnavailable as error:
                if not is_sent_by_celery():
                    raise
                logger.warning("Task %s is sent although %s.", self.task_id, error)
            if holder is None:
                return self._send_into_levels(due, wanted)
        logger.info("Task %s is left out: %s has its key %r.", self.task_id, holder, wanted.key)
        result_of = self.options.get("result_cls") or self.app.AsyncResult
        result: AsyncResult[Any] = result_of(holder)
        result.ignored = bool(self.options.get("ignore_result"))
        return result

    def _refuse_unique(self, job: str, unique_ms: int) -> None:
        """Refuse ``unique="first"`` where something would wait for a task that is left out.

        Raises:
            UnknownOption: So it is.
        """
        followed = ("group_id", "chord", "chain", "retries", "replaced_task_nesting")
        why = ""
        if any(map(self.options.get, followed)):
            why = "not in a canvas or for a retry: others would wait for what is left out"
        elif job:
            why = "cannot be combined with job: the first task may never run"
        elif unique_ms > milliseconds(self.app.rabbitdelay.settings.registry_keep):
            why = "unique_for is longer than rabbitdelay_registry_keep"
        if why:
            raise UnknownOption("unique", "first", why)

    def _send_in_pipeline(
        self, pipeline: TaskPipeline, due: Due, wanted: RegistryOptions, timeout: float | None
    ) -> AsyncResult[Any]:
        """Send a task that the registry does not know in a block, which confirms it."""
        publisher = pipeline.borrow(timeout or self.app.rabbitdelay.settings.confirm_timeout)
        assert self.task_id is not None
        came_from = self.former.get(header_names.QUEUE)
        producer = PipelinedProducer(
            pipeline, publisher, self.name, self.task_id, due, self.options, came_from
        )
        producer.says = {"registry": wanted.headers("", NO_TICKET)}
        return self._send_by_celery(producer=producer)

    def _ask(self, due: Due, wanted: RegistryOptions) -> tuple[Ticket, str]:
        """Ask the registry what the message has to carry: its ticket, and the id of its job.

        A retry, or a task that replaces another one, is of the same life as that one, and has its
        order and its job.

        Raises:
            JobClosed: The job is not open, and it is not Celery that sends what follows a task.
            RegistryUnavailable: Redis does not answer, likewise.
        """
        former = self.former or former_of_replacement(self.app, self.task_id, self.options)
        life, order = Ticket.of(former)
        if former.get(KEY, "") != wanted.key:
            order = 0
        job_id = former.get(JOB_ID, "") if former.get(JOB) == wanted.job else ""
        if not wanted.job and not wanted.is_registered:
            return NO_TICKET, ""
        registry = self.app.rabbitdelay.registry
        try:
            if wanted.job and not job_id:
                state, job_id = registry.jobs.join(wanted.job, due.at_ms)
                if state is not JobState.OPEN and not is_sent_by_celery():
                    raise JobClosed(wanted.job, "unknown" if state is None else state.value)
            if wanted.is_registered and (not former or (wanted.key and not order)):
                known = "" if former or not self._has_id else self.task_id
                (ticket,) = registry.ask([(known, wanted.key)])
                life, order = life if former else ticket.life, ticket.order
        except RegistryUnavailable as error:
            if not former and not is_sent_by_celery():
                raise
            logger.warning("Task %s is sent although %s.", self.task_id, error)
            life = life if former else UNKNOWN_LIFE
            order = order or wall_clock.ns() // NS_PER_US
        # A task that runs once has one life.
        return Ticket(0 if wanted.once else life, order if wanted.key else 0), job_id

    def _send_by_celery(
        self,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        producer: Any = None,
    ) -> AsyncResult[Any]:
        """Let Celery make, route and publish the message; with a producer, only make and route."""
        connection = self.connection if producer is None else None
        producer = self.producer if producer is None else producer
        return self.by_celery(
            countdown, eta, self.task_id, producer, connection, *self.more, **self.options
        )


def register_sent(registry: Registry, registrations: Sequence[Registration]) -> list[str]:
    """Register messages that the broker has confirmed; what Redis does not note is no error.

    The messages carry all that the registry has to know, and are registered when they arrive.

    Returns:
        As :meth:`.Registry.register`; empty if Redis does not answer.
    """
    try:
        return registry.register(registrations)
    except RegistryUnavailable as error:
        logger.warning(
            "%d tasks were sent, beginning with %s, and are neither listed nor supersede older "
            "ones before they arrive: %s",
            len(registrations),
            registrations[0].task_id,
            error,
        )
        return []


def count_send(metrics: Metrics, task: str, producer: DelayedTaskProducer, resent: int) -> None:
    """Count the one task that a producer has sent, or failed to.

    Args:
        metrics: The metrics.
        task: The task's name.
        producer: The producer.
        resent: How often the task's message was published again.
    """
    # It is missing if an error occurred before publishing.
    delayed: Delayed | None = getattr(producer, "delayed", None)
    if delayed is not None:
        metrics.record_send(task, queue_label(delayed), producer.is_sent, resent)
