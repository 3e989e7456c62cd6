"""Where a task goes: Celery's own path, a worker that holds it, or the levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from celery.result import AsyncResult
from kombu import Connection, Producer
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.celery_internals import has_quorum_queue, registered_task
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.instruments import Recorder, queue_label
from celery_rabbitdelay.app.seams import AddedToSend, Send, additions_of
from celery_rabbitdelay.app.sending.pipelines import (
    PipelinedProducer,
    TaskPipeline,
    current_pipeline,
)
from celery_rabbitdelay.app.sending.task_producer import DelayedTaskProducer, EtaProducer
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import UnknownOption
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, plain
from celery_rabbitdelay.levels.headers import REGISTRY
from celery_rabbitdelay.publishing.producer import Delayed


class Given(NamedTuple):
    """What Celery is to publish a task with."""

    task_id: str
    producer: Any


#: That of the task which is sent just now: an application's own ``send_task`` may not pass it on.
given_producer: ContextVar[Given | None] = ContextVar("given_producer", default=None)


@dataclass
class TaskSending(Send):
    """One call of ``Celery.send_task``, and where it goes.

    Attributes:
        app: The application.
        by_celery: Celery's ``send_task``, or the application's own, for a name and arguments.
        delay: Seconds, or a timedelta, until it may start; None if ``countdown`` or ``eta`` says.
        tolerance_ms: Milliseconds that it may start later.
        stamps: The stamps that have the name of an option of this package.
    """

    app: DelayingCelery
    by_celery: Callable[..., AsyncResult[Any]]
    delay: Delay | None
    tolerance_ms: int
    stamps: Mapping[str, Any]

    def send(self) -> AsyncResult[Any]:
        """Send the task, to where these rules lead, the first one that applies.

        - no delay, and nothing that an addition has to know: Celery's own path
        - the broker is not RabbitMQ: the same; ``delay`` becomes a countdown
        - ``rabbitdelay=False``, or a countdown or eta without takeover: a worker, which holds it
        - the delay is over by now: Celery's own path, at once
        - all others: the levels; :class:`.DelayedProducer` chooses between the task's queue and
          distribution

        What the registry has to know goes with each message of a task: also with a retry, or a
        replacement, that has no delay, because the next one that has a delay looks for it there.
        """
        has_options = any(self.added.values())
        countdown = self.options.get("countdown")
        has_delay = self.delay is not None or countdown or self.options.get("eta")
        if not (has_delay or has_options or self._is_continued):
            return self._send_by_celery()
        for time_of in {"eta", "expires"} & self.options.keys():
            self.options[time_of] = plain(self.options[time_of], time_of)
        self.has_id = self.options.get("task_id") is not None
        self.options["task_id"] = self.options.get("task_id") or uuid()
        self.task = self.options.get("task_type") or registered_task(self.app, self.name)
        if not self.delays.is_available(self._callers_connection):
            self._refuse_added("the broker is not RabbitMQ")
            return self._send_to_other_broker()
        parts = [part for each in additions_of(self.delays) if (part := each.to_send(self))]
        is_known = bool(parts) and (has_options or self._is_continued)
        if has_delay and not self._takes_over() and not (self._is_continued and is_known):
            self._refuse_added("the task does not wait in the levels")
            return self._send_with_eta()
        eta = self.options.get("eta")
        due = self.delays.due(self.delay, countdown, eta, self.tolerance_ms)
        if due.is_past and not is_known:
            return self._send_with_eta()
        # Also without a delay: behind the levels, the additions are asked about it.
        send = partial(self._send_into_levels, due, parts)
        for part in parts:
            send = partial(part.around, due, send)
        began = time.monotonic()
        try:
            return send()
        finally:
            self.delays.warn_blocked_loop(time.monotonic() - began)

    @property
    def _is_continued(self) -> bool:
        """Whether the task retries, or replaces, one that an addition knows."""
        return bool(self.former) and not REGISTRY.isdisjoint(self.former)

    def _refuse_added(self, why: str) -> None:
        for name, value in self.added.items():
            if value is not False:
                raise UnknownOption(name, value, f"{why}, so the option would do nothing")

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
        if not getattr(self.task, "rabbitdelay", True):
            return False
        return self.delay is not None or self.delays.settings.takeover

    def _send_to_other_broker(self) -> AsyncResult[Any]:
        if self.delay is not None and milliseconds(self.delay) > 0:
            why = "the broker is not RabbitMQ, and a worker holds the task until it is due"
            self.delays.warn_treated_as_countdown(why)
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

    def _send_into_levels(self, due: Due, parts: Sequence[AddedToSend]) -> AsyncResult[Any]:
        delays = self.delays
        delays.check_protocol()
        delays.settings.check_delay(due)
        timeout = self.options.get("confirm_timeout")
        if timeout is not None:
            timeout = Settings.checked("confirm_timeout", timeout)
        # A worker acknowledges a task as soon as its retry is sent.
        if not (self.options.get("retries") or any(part.is_alone for part in parts)):
            pipeline = current_pipeline(delays, self._callers_connection)
            if pipeline is not None:
                return self._send_in_pipeline(pipeline, due, parts, timeout)
        added = _headers(parts, due)
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
            producer.says = added
            resent = publisher.resent
            try:
                result = self._send_by_celery(producer)
            finally:
                count_send(delays.recorder, self.name, producer, publisher.resent - resent)
        for part in parts:
            part.confirmed(result.id, due, producer.delayed)
        signals.send(signals.delayed, self.app, result.id, due.at_ms)
        return result

    def _send_in_pipeline(
        self,
        pipeline: TaskPipeline,
        due: Due,
        parts: Sequence[AddedToSend],
        timeout: float | None,
    ) -> AsyncResult[Any]:
        """Send a task in a block, which confirms it."""
        publisher = pipeline.borrow(timeout or self.delays.settings.confirm_timeout)
        producer = PipelinedProducer(
            pipeline, publisher, self.name, self._task_id, due, self.options, self._came_from
        )
        producer.says = _headers(parts, due)
        return self._send_by_celery(producer)

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


def _headers(parts: Iterable[AddedToSend], due: Due) -> dict[str, Any]:
    """Return what the message of a task says for additions."""
    return {
        "registry": {name: value for each in parts for name, value in each.headers(due).items()}
    }


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
