"""Where a task goes: Celery's own path, a worker that holds it, or the levels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from celery.result import AsyncResult
from kombu import Connection, Producer
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.celery_internals import (
    has_quorum_queue,
    is_sent_by_celery,
    registered_task,
)
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.instruments import Recorder, queue_label
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
from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, plain
from celery_rabbitdelay.levels.headers import JOB, JOB_ID, KEY, REGISTRY, UNKNOWN_LIFE
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.decision import Ticket, attempt_of, new_copy
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.record import holder_of
from celery_rabbitdelay.registry.registry import Registration, Registry

logger = logging.getLogger(__name__)

NS_PER_US: Final = 1000


class Given(NamedTuple):
    """What Celery is to publish a task with."""

    task_id: str
    producer: Any


#: That of the task which is sent just now: an application's own ``send_task`` may not pass it on.
given_producer: ContextVar[Given | None] = ContextVar("given_producer", default=None)


@dataclass
class TaskSending:
    """One call of ``Celery.send_task``.

    Its options and its delay are checked.

    Attributes:
        app: The application, a :class:`.Celery`.
        by_celery: Celery's ``send_task``, or the application's own, for a name and arguments.
        name: The task's name.
        delay: Seconds, or a timedelta, until it may start; None if ``countdown`` or ``eta`` says.
        tolerance_ms: Milliseconds that it may start later.
        options: Celery's options that the caller has given, and no others.
        stamps: The stamps that have the name of an option of this package.
        registry_options: The options of the registry.
        former: The headers of this package that the task had which this one retries or replaces.
    """

    app: DelayingCelery
    by_celery: Callable[..., AsyncResult[Any]]
    name: str
    delay: Delay | None
    tolerance_ms: int
    options: dict[str, Any]
    stamps: Mapping[str, Any]
    registry_options: Mapping[str, Any]
    former: Mapping[str, Any]

    def send(self) -> AsyncResult[Any]:
        """Send the task, to where these rules lead, the first one that applies.

        - no delay, and nothing that the registry has to know: Celery's own path
        - the broker is not RabbitMQ: the same; ``delay`` becomes a countdown
        - ``rabbitdelay=False``, or a countdown or eta without takeover: a worker, which holds it
        - the delay is over by now: Celery's own path, at once
        - all others: the levels; :class:`.DelayedProducer` chooses between the task's queue and
          distribution

        What the registry has to know goes with each message of a task: also with a retry, or a
        replacement, that has no delay, because the next one that has a delay looks for it there.
        """
        is_continued = not REGISTRY.isdisjoint(self.former)
        has_options = any(self.registry_options.values())
        countdown = self.options.get("countdown")
        has_delay = self.delay is not None or countdown or self.options.get("eta")
        if not (has_delay or has_options or is_continued):
            return self._send_by_celery()
        for time_of in {"eta", "expires"} & self.options.keys():
            self.options[time_of] = plain(self.options[time_of], time_of)
        self._has_id = self.options.get("task_id") is not None
        self.options["task_id"] = self.options.get("task_id") or uuid()
        if not self.app.rabbitdelay.is_available(self._callers_connection):
            self._refuse_registry_options("the broker is not RabbitMQ")
            return self._send_to_other_broker()
        wanted = RegistryOptions.of(
            self.app.rabbitdelay.settings, self._task, self.registry_options, self.former
        )
        is_known = has_options or (is_continued and any(wanted))
        if has_delay and not self._takes_over() and not (is_continued and is_known):
            self._refuse_registry_options("the task does not wait in the levels")
            return self._send_with_eta()
        eta = self.options.get("eta")
        due = self.app.rabbitdelay.due(self.delay, countdown, eta, self.tolerance_ms)
        if due.is_past and not is_known:
            return self._send_with_eta()
        # Also without a delay: behind the levels, the registry is asked about it.
        began = time.monotonic()
        try:
            if wanted.unique_ms is not None:
                return self._send_first(due, wanted, wanted.unique_ms)
            return self._send_into_levels(due, wanted)
        finally:
            self.app.rabbitdelay.warn_blocked_loop(time.monotonic() - began)

    def _refuse_registry_options(self, why: str) -> None:
        for name, value in self.registry_options.items():
            if value is not False:
                raise UnknownOption(name, value, f"{why}, so the registry cannot reach it")

    @property
    def _task(self) -> Any:
        return self.options.get("task_type") or registered_task(self.app, self.name)

    @property
    def _task_id(self) -> str:
        task_id: str = self.options["task_id"]
        return task_id

    @property
    def _came_from(self) -> str | None:
        """The queue that a retry returns to; a replacement goes where its own options say."""
        return self.former.get(header_names.QUEUE) if self.options.get("retries") else None

    @property
    def _callers_producer(self) -> Producer | None:
        return self.options.get("producer") or self.options.get("publisher")

    @property
    def _callers_connection(self) -> Connection | None:
        producer = self._callers_producer
        connection: Connection | None = self.options.get("connection")
        return connection or (producer.connection if producer is not None else None)

    def _takes_over(self) -> bool:
        """Whether a delay goes into the levels: see ``rabbitdelay=False`` and ``takeover``."""
        if not getattr(self._task, "rabbitdelay", True):
            return False
        return self.delay is not None or self.app.rabbitdelay.settings.takeover

    def _send_to_other_broker(self) -> AsyncResult[Any]:
        if self.delay is not None and milliseconds(self.delay) > 0:
            why = "the broker is not RabbitMQ, and a worker holds the task until it is due"
            self.app.rabbitdelay.warn_treated_as_countdown(why)
        return self._send_by_celery()

    def _send_with_eta(self) -> AsyncResult[Any]:
        if not has_quorum_queue(self.app):
            return self._send_by_celery()
        # Celery would use its native delayed delivery, whose queues our workers do not declare.
        producer, connection = self._callers_producer, self.options.get("connection")
        if connection is not None:
            producer = self.app.amqp.Producer(connection, auto_declare=False)
        with self.app.producer_or_acquire(producer) as acquired:
            given = self._celerys_options
            return self._send_by_celery(
                EtaProducer(acquired, given.get("countdown"), given.get("eta"))
            )

    def _send_into_levels(self, due: Due, wanted: RegistryOptions) -> AsyncResult[Any]:
        delays = self.app.rabbitdelay
        delays.check_protocol()
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
                came_from=self._came_from,
                waited=time.monotonic() - began,
            )
            producer.says = {"registry": wanted.headers(copy, ticket, job_id)}
            resent = publisher.resent
            try:
                result = self._send_by_celery(producer)
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
                logger.warning("Task %s is sent although %s.", self._task_id, error)
            if holder is None:
                return self._send_into_levels(due, wanted)
        logger.info("Task %s is left out: %s has its key %r.", self._task_id, holder, wanted.key)
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
        producer = PipelinedProducer(
            pipeline, publisher, self.name, self._task_id, due, self.options, self._came_from
        )
        producer.says = {"registry": wanted.headers("", NO_TICKET)}
        return self._send_by_celery(producer)

    def _ask(self, due: Due, wanted: RegistryOptions) -> tuple[Ticket, str]:
        """Ask the registry what the message has to carry: its ticket, and the id of its job.

        A retry, or a task that replaces another one, is of the same life as that one, and has its
        order and its job.

        Raises:
            JobClosed: The job is not open, and it is not Celery that sends what follows a task.
            RegistryUnavailable: Redis does not answer, likewise.
        """
        former = self.former
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
                known = "" if former or not self._has_id else self._task_id
                (ticket,) = registry.ask([(known, wanted.key)])
                life, order = life if former else ticket.life, ticket.order
        except RegistryUnavailable as error:
            if not former and not is_sent_by_celery():
                raise
            logger.warning("Task %s is sent although %s.", self._task_id, error)
            life = life if former else UNKNOWN_LIFE
            order = order or wall_clock.ns() // NS_PER_US
        # A task that runs once has one life.
        return Ticket(0 if wanted.once else life, order if wanted.key else 0), job_id

    @property
    def _celerys_options(self) -> dict[str, Any]:
        """The caller's options in Celery's words: a ``delay`` is a countdown."""
        own = {} if self.delay is None else {"countdown": milliseconds(self.delay) / 1000}
        return {**self.options, **own, **self.stamps}

    def _send_by_celery(self, producer: Any = None) -> AsyncResult[Any]:
        """Let Celery make, route and publish the message; with a producer, only make and route."""
        options = self._celerys_options
        if producer is not None:
            for name in ("countdown", "eta", "connection", "publisher"):
                options.pop(name, None)
            options["producer"] = producer
        token = given_producer.set(None if producer is None else Given(self._task_id, producer))
        try:
            return self.by_celery(**options)
        finally:
            given_producer.reset(token)


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


def count_send(recorder: Recorder, task: str, producer: DelayedTaskProducer, resent: int) -> None:
    """Count the one task that a producer has sent, or failed to.

    Args:
        recorder: Records it.
        task: The task's name.
        producer: The producer.
        resent: How often the task's message was published again.
    """
    # It is missing if an error occurred before publishing.
    delayed: Delayed | None = getattr(producer, "delayed", None)
    if delayed is not None:
        recorder.record_send(task, queue_label(delayed), producer.is_sent, resent)
