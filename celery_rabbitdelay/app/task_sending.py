"""Where a task goes: Celery's own path, a worker that holds it, or the levels.

Celery always makes and routes the message. A task that goes into the levels is published by a
:class:`DelayedTaskProducer` instead of Celery's own producer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import celery
from celery.app.amqp import AMQP
from celery.app.defaults import DEFAULTS
from kombu import Connection, Exchange, Producer, Queue
from kombu.utils.uuid import uuid

from celery_rabbitdelay.app import canvas, celery_internals, pipelines, seams, signals
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import queue_label
from celery_rabbitdelay.app.options import (
    Options,
    OwnOptions,
    Result,
    refuse_two_times,
    without_stamps,
)
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, Due, milliseconds, plain, tolerance_milliseconds
from celery_rabbitdelay.publishing.destination import Destination, resolve
from celery_rabbitdelay.publishing.message import Declaration, Publication
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import BACKOFF, RESENDS, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher

#: The advice in the error about an option that would have no effect.
NO_PART: Final = "would do nothing, because its addition takes no part in this send: leave it out"


def publish_policy(
    app: celery.Celery, options: Options, retry: bool, retry_policy: Options
) -> PublishPolicy:
    """Return the timeout and the resends of a message, from the caller's options and the settings.

    Args:
        app: The application.
        options: The options of ``apply_async``, as the caller gave them.
        retry: Whether Celery allows resending.
        retry_policy: Celery's retry policy: the setting, overridden by the caller's option.
    """
    # Whether the caller, or a setting other than Celery's default, gives a number of retries.
    configured = app.conf.task_publish_retry_policy
    is_counted = configured != DEFAULTS["task_publish_retry_policy"] or "max_retries" in (
        options.get("retry_policy") or {}
    )
    retries: int | None = retry_policy.get("max_retries")
    if retry:
        resends = retries if is_counted else RESENDS
    else:
        # Celery 5.7 counts the retries of a callback itself, and turns off this package's retries.
        given = options.get("retry")
        is_on = app.conf.task_publish_retry if given is None else given
        resends = RESENDS if is_on and not is_counted and celery_internals.sends_a_callback() else 0
    # A web request waits for the send, so connecting fails as fast as in Celery. No request waits
    # for a task that a worker sends.
    has_own = is_counted or app.current_worker_task is not None
    intervals = [retry_policy.get(f"interval_{name}") for name in ("start", "step", "max")]
    first, step, longest = (
        default if value is None else float(value)
        for value, default in zip(intervals, BACKOFF, strict=True)
    )
    return PublishPolicy(
        resends=resends,
        backoff=(first, step, longest),
        reconnects=None if has_own else retries,
    )


class DelayedTaskProducer(DelayedProducer):
    """Publishes one task into the levels, and publishes events like any producer.

    Celery resolves exchange, routing key, headers and properties of a task as if it had no delay,
    sends its signals, and calls :meth:`publish`.

    Args:
        delays: The application's delay levels.
        name: The task's name; also an attribute of the object.
        due: When the task may start.
        options: The options of ``apply_async``, as the caller gave them.
        connection: The caller's own connection, to be used instead of the pool's.
        pipeline: The block that confirms the message; None if :meth:`publish` confirms it.
        came_from: The name of the queue that a retried task came from, if it is known.

    Attributes:
        body: The task's body, once Celery has made it: arguments, keyword arguments, and callbacks,
            chain and chord.
        options: The other options with which kombu makes the message.
        delayed: The task's message.
        policy: How long, and how often, to try to publish the message.
        declares: The functions by which a publisher declares the task's destination.
    """

    body: Any
    options: OwnOptions
    delayed: Delayed
    policy: PublishPolicy
    declares: dict[str, Declaration | None]

    def __init__(
        self,
        delays: Delays,
        name: str,
        due: Due,
        options: Options,
        connection: Connection | None = None,
        pipeline: pipelines.TaskPipeline | None = None,
        came_from: str | None = None,
    ) -> None:
        delays.check_protocol()
        # The publisher is borrowed once the message is made.
        publisher = Publisher(delays.pool.connection if connection is None else connection)
        super().__init__(publisher, **delays.settings.for_producer)
        self.amqp: AMQP = delays.app.amqp
        self._delays = delays
        self.name = name
        self._due = due
        self._given = options
        self._callers_connection = connection
        self._pipeline = pipeline
        self._came_from = came_from
        self._took = 0.0
        self._is_sent = False

    def publish(self, body: Any, **options: Any) -> None:  # type: ignore[override]
        """Publish the task into the levels; publish the event that follows it without a delay.

        If the task is a callback, Celery 5.7 repeats a failed call. All of these calls share one
        timeout.

        Args:
            body: The task's body.
            **options: The arguments of :meth:`kombu.Producer.publish`, as Celery passes them.
        """
        if self._is_sent:
            self._publish_event(body, options)
            return
        declare = options.pop("declare", None) or []
        destination = self._destination(
            options.pop("exchange"), options.pop("routing_key"), declare
        )
        retry, retry_policy = options.pop("retry", False), options.pop("retry_policy", None)
        policy = publish_policy(self._delays.app, self._given, retry, retry_policy or {})
        given = options.pop("confirm_timeout", None)
        timeout = self.timeout if given is None else Settings.checked("confirm_timeout", given)
        self.policy = policy._replace(
            timeout=max(timeout - self._took, pipelines.MIN_TIMEOUT),
            window=self._delays.settings.max_unconfirmed,
        )
        options.pop("timeout", None)
        began = time.monotonic()
        try:
            self.body, self.options = body, options
            self.delayed = self.delayed_message(body, destination, self._due, **options)
            self.declares = self.declarations(self.delayed.queue, declare)
            self.deliver()
        finally:
            self._took += time.monotonic() - began
        self._is_sent = True

    def deliver(self) -> None:
        """Publish the message that was made."""
        delayed, due = self.delayed, self._due
        sent = pipelines.PublishedTask(
            self.name, self._given["task_id"], due.at_ms, queue_label(delayed)
        )
        address = partial(self.address, delayed, due)
        try:
            publication = Publication.of(delayed.message.amqp(), address, sent)
        except RabbitDelayError:  # AMQP cannot carry it
            self._delays.recorder.record_send(sent.task, sent.queue, False, 0)
            raise
        pipelines.publish_task(
            *(self._delays, publication, self.policy, self.declares),
            *(self._pipeline, self._callers_connection),
        )

    def _publish_event(self, body: object, options: Options) -> None:
        if self._delays.fake_broker is not None:
            return
        borrowing: AbstractContextManager[Publisher]
        if self._pipeline is None:
            borrowing = pipelines.borrowed_publisher(self._delays, self._callers_connection)
        else:
            borrowing = nullcontext(self._pipeline.borrow(self.timeout))
        with borrowing as publisher:
            Producer(publisher.connection, auto_declare=False).publish(body, **options)

    def _destination(
        self, exchange: str | Exchange | None, routing_key: str | None, declare: Sequence[object]
    ) -> Destination:
        name = exchange.name if isinstance(exchange, Exchange) else exchange or ""
        queues = self.amqp.queues
        routed_to = [entity for entity in declare if isinstance(entity, Queue)]
        known = [*routed_to, *queues.values()]
        # A retry goes to the queue that the task came from.
        consumed = queues.consume_from if self._given.get("retries") else ()
        return resolve(name, routing_key or "", known, consumed, self._came_from)


class EtaProducer:
    """Publishes a task at once, with an ``eta`` until which a worker holds it.

    Plain Celery delays a task in this way, unless the application has a quorum queue and the task
    goes to a topic exchange: then Celery uses its native delayed delivery for a countdown or an
    eta.

    Args:
        producer: The producer that publishes the task.
        countdown: Seconds until the task may start.
        eta: The instant at which the task may start, if there is no countdown.
    """

    def __init__(
        self, producer: Producer, countdown: float | None, eta: datetime | str | None
    ) -> None:
        self._producer = producer
        when = wall_clock.now() + timedelta(seconds=countdown) if countdown else eta
        self._eta = when if when is None or isinstance(when, str) else when.isoformat()

    def publish(self, body: Any, *, headers: OwnOptions | None = None, **options: Any) -> Any:
        """Publish the task, or the event that follows it."""
        if headers and "eta" in headers:
            headers["eta"] = self._eta
        elif isinstance(body, dict) and "task" in body:
            # Celery's message protocol 1.
            body["eta"] = self._eta
        return self._producer.publish(body, headers=headers, **options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._producer, name)


#: The id of the task that is being sent, and the producer to publish it with: an application's own
#: ``send_task`` may not pass the producer on.
given_producer: ContextVar[tuple[str, Any] | None] = ContextVar("given_producer", default=None)


class TaskSending(seams.Send):
    """One call of ``Celery.send_task``; checks the options, and chooses the path of its task.

    Args:
        delays: The application's delay levels.
        name: The task's name.
        options: The options of ``send_task``.
        by_celery: Celery's ``send_task``, or the application's own, for a name and arguments.

    Attributes:
        delay: Seconds, or a timedelta, until the task may start; None with ``countdown`` or
            ``eta``.
        tolerance_ms: The milliseconds by which the task may start late.
        stamps: The stamps that have the name of an option of this package.
    """

    def __init__(
        self, delays: Delays, name: str, options: OwnOptions, by_celery: Callable[..., Result]
    ) -> None:
        former = header_names.own(celery_internals.headers_of_former(delays.app, options))
        if header_names.own(options.get("headers") or {}):
            options["headers"] = header_names.strip(options["headers"])
        given, self.stamps = without_stamps(options)
        added = seams.checked_added_options(given, delays)
        body_delay_is_restored = given.pop(canvas.BODY_DELAY_IS_RESTORED, False)
        if any(given.get(option) for option in canvas.SIGNATURE_OPTIONS):
            if not body_delay_is_restored and not given.get("retries"):
                given = canvas.restore_body_delay(given, given.get("delay"))
            given = canvas.translate_delays(given, delays)
        self.delay: Delay | None = given.pop("delay", None)
        tolerance = given.pop("tolerance", 0)
        if self.delay is not None:
            refuse_two_times(self.delay, given.get("countdown"), given.get("eta"))
        self.tolerance_ms = tolerance_milliseconds(tolerance)
        for option in added:
            given.pop(option)
        super().__init__(delays, name, None, given, added, former, has_id=False)
        self._by_celery = by_celery
        self._callers_producer: Producer | None = given.get("producer") or given.get("publisher")

    def send(self) -> Result:
        """Send the task. The first rule that applies decides the task's path.

        - no delay, and no option or header of an addition: Celery's own path
        - the broker is not RabbitMQ: Celery's own path; ``delay`` becomes a countdown
        - ``rabbitdelay=False``, or a countdown or eta without takeover: a worker, which holds it
        - the task is due already: Celery's own path, at once
        - any other task: the levels; :class:`.DelayedProducer` chooses between the task's queue and
          distribution

        A retry or a replacement carries the registry's headers even without a delay, since a later
        retry with a delay reads them.
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
        known = celery_internals.registered_task(self.delays.app, self.name)
        self.task = self.options.get("task_type") or known
        if not self.delays.is_available(self._callers_connection):
            why = "the broker is not RabbitMQ, so the option would do nothing"
            seams.refuse_unused(self.added, why)
            if self.delay is not None and milliseconds(self.delay) > 0:
                why = "the broker is not RabbitMQ, and a worker holds the task until it is due"
                self.delays.warn_treated_as_countdown(why)
            return self._send_by_celery()
        parts = seams.parts_of(self.delays, self.added, lambda each, _: each.to_send(self), NO_PART)
        is_known = bool(parts) and (has_options or self._is_continued)
        if has_delay and not self._takes_over() and not (self._is_continued and is_known):
            why = "the task does not wait in the delay levels, so the option would do nothing"
            seams.refuse_unused(self.added, why)
            return self._send_with_eta()
        eta = self.options.get("eta")
        due = self.delays.due(self.delay, countdown, eta, self.tolerance_ms)
        if due.is_past and not is_known:
            return self._send_with_eta()
        # A task of an addition takes this path even without a delay, since workers ask the
        # additions only about tasks from the levels.
        return self._send_into_levels(due, parts)

    @property
    def _is_continued(self) -> bool:
        """Whether the task retries or replaces a task that an addition knows."""
        return bool(self.former) and not header_names.REGISTRY.isdisjoint(self.former)

    @property
    def _callers_connection(self) -> Connection | None:
        producer = self._callers_producer
        connection: Connection | None = self.options.get("connection")
        return connection or (producer.connection if producer is not None else None)

    def _takes_over(self) -> bool:
        """Return whether ``rabbitdelay`` and ``takeover`` let the task wait in the levels."""
        if not getattr(self.task, "rabbitdelay", True):
            return False
        return self.delay is not None or self.delays.settings.takeover

    def _send_with_eta(self) -> Result:
        if not celery_internals.has_quorum_queue(self.delays.app):
            return self._send_by_celery()
        # Celery would use its native delayed delivery, but this package's workers do not declare
        # its queues.
        producer, connection = self._callers_producer, self.options.get("connection")
        if connection is not None:
            producer = self.delays.app.amqp.Producer(connection, auto_declare=False)
        given = self._celerys_options
        with self.delays.app.producer_or_acquire(producer) as acquired:
            holding = EtaProducer(acquired, given.get("countdown"), given.get("eta"))
            return self._send_by_celery(holding)

    def _send_into_levels(self, due: Due, parts: Sequence[seams.AddedToSend]) -> Result:
        delays, connection = self.delays, self._callers_connection
        delays.settings.check_delay(due)
        pipeline = None
        # A worker acknowledges a task as soon as its retry is sent.
        if not (self.options.get("retries") or any(part.is_alone for part in parts)):
            pipeline = pipelines.current_pipeline(delays, connection)
        # A retry returns to its queue; a replacement goes to the destination in its own options.
        came_from = self.former.get(header_names.QUEUE) if self.options.get("retries") else None
        producer = DelayedTaskProducer(
            delays, self.name, due, self.options, connection, pipeline, came_from
        )
        headers = [part.headers(due) for part in parts]
        producer.added_headers = {name: each[name] for each in headers for name in each}
        result = self._send_by_celery(producer)
        if pipeline is None:
            for part in parts:
                part.confirmed(result.id, due, producer.delayed)
            signals.send(signals.delayed, delays.app, result.id, due.at_ms)
        return result

    @property
    def _celerys_options(self) -> OwnOptions:
        """The caller's options as Celery knows them: ``delay`` becomes ``countdown``."""
        own = {} if self.delay is None else {"countdown": milliseconds(self.delay) / 1000}
        return {**self.options, **own, **self.stamps}

    def _send_by_celery(self, producer: DelayedTaskProducer | EtaProducer | None = None) -> Result:
        """Let Celery make, route and publish the message; with a producer, only make and route."""
        options = self._celerys_options
        if producer is not None:
            for name in ("countdown", "eta", "connection", "publisher"):
                options.pop(name, None)
            options["producer"] = producer
        given = None if producer is None else (self.options["task_id"], producer)
        token = given_producer.set(given)
        try:
            return self._by_celery(**options)
        finally:
            given_producer.reset(token)
