"""The producers that Celery publishes a delayed task with, and how often they try."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import celery
from celery.app.amqp import AMQP
from celery.app.defaults import DEFAULTS
from kombu import Exchange, Producer, Queue

from celery_rabbitdelay.app.celery_internals import sends_a_callback
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.publishing.destination import Destination, resolve
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import BACKOFF, RESENDS, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher


def publish_policy(
    app: celery.Celery, options: Mapping[str, Any], retry: bool, retry_policy: Mapping[str, Any]
) -> PublishPolicy:
    """Return how often a message is sent again, by the caller's options and the settings.

    Args:
        app: The application.
        options: The options of ``apply_async``, as the caller has given them.
        retry: Whether Celery wants the message to be sent again.
        retry_policy: Celery's retry policy: the setting, with what the caller has given.
    """
    # Whether somebody has given a number of retries: the caller, or a setting that is not Celery's.
    configured = app.conf.task_publish_retry_policy
    is_counted = configured != DEFAULTS["task_publish_retry_policy"] or "max_retries" in (
        options.get("retry_policy") or {}
    )
    retries: int | None = retry_policy.get("max_retries")
    if retry:
        resends = retries if is_counted else RESENDS
    else:
        # Celery 5.7 counts the retries of a callback itself, and turns ours off.
        given = options.get("retry")
        is_on = app.conf.task_publish_retry if given is None else given
        resends = RESENDS if is_on and not is_counted and sends_a_callback() else 0
    # Connecting fails as fast as in Celery, for the sake of web requests. For a worker's task,
    # nobody waits.
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


#: Seconds that publishing has in any case, however long the wait for a publisher was.
MIN_TIMEOUT: Final = 0.1


class DelayedTaskProducer(DelayedProducer):
    """Publishes one task into the levels, and everything else (events) as any producer does.

    Celery resolves exchange, routing key, headers and properties of a task as if it had no delay,
    sends its signals, and calls :meth:`publish`.

    Args:
        publisher: The publisher to use.
        app: The application.
        due: When the task may start.
        options: The options of ``apply_async``, as the caller has given them.
        came_from: The name of the queue that a retried task came from, if it is known.
        waited: Seconds that were spent waiting for the publisher; they count towards the timeout.

    Attributes:
        body: The task's body, once Celery has made it: arguments, keyword arguments, and callbacks,
            chain and chord.
        options: The other options with which kombu makes the message.
        delayed: The task's message.
        is_sent: Whether the broker has confirmed it.
    """

    def __init__(
        self,
        publisher: Publisher,
        app: DelayingCelery,
        due: Due,
        options: Mapping[str, Any] = {},
        came_from: str | None = None,
        waited: float = 0.0,
    ) -> None:
        super().__init__(publisher, **app.rabbitdelay.settings.for_producer)
        self._app = app
        self.amqp: AMQP = app.amqp
        self._due = due
        self._given = options
        self._came_from = came_from
        self._waited = waited
        self.is_sent = False
        self.body: Any
        self.options: dict[str, Any]
        self.delayed: Delayed

    def publish(self, body: Any, **options: Any) -> None:  # type: ignore[override]
        """Publish the task into the levels, or an event that follows the task without a delay.

        Celery 5.7 calls it again if it has failed, where the task is a callback. The timeout is one
        for all of these calls.

        Args:
            body: The task's body.
            **options: What :meth:`kombu.Producer.publish` takes, as Celery gives it.
        """
        if self.is_sent:
            if self._app.rabbitdelay.stand_in is None:
                super().publish(body, **options)
            return
        declare = options.pop("declare", None) or []
        destination = self._destination(
            options.pop("exchange"), options.pop("routing_key"), declare
        )
        retry, retry_policy = options.pop("retry", False), options.pop("retry_policy", None)
        policy = publish_policy(self._app, self._given, retry, retry_policy or {})
        given = options.pop("confirm_timeout", None)
        timeout = self.timeout if given is None else Settings.checked("confirm_timeout", given)
        policy = policy._replace(timeout=max(timeout - self._waited, MIN_TIMEOUT))
        options.pop("timeout", None)
        began = time.monotonic()
        try:
            self.body, self.options = body, options
            self.delayed = self.delayed_message(body, destination, self._due, **options)
            self.publish_message(self.delayed, self._due, policy, declare)
        finally:
            self._waited += time.monotonic() - began
        self.is_sent = True

    def _destination(
        self, exchange: str | Exchange | None, routing_key: str | None, declare: list[Any]
    ) -> Destination:
        name = exchange.name if isinstance(exchange, Exchange) else exchange or ""
        queues = self.amqp.queues
        routed_to = [entity for entity in declare if isinstance(entity, Queue)]
        known = [*routed_to, *queues.values()]
        # A retry is sent to where the task came from.
        consumed = queues.consume_from if self._given.get("retries") else ()
        return resolve(name, routing_key or "", known, consumed, self._came_from)


class EtaProducer:
    """Publishes a task at once, with an ``eta`` until which a worker holds it.

    This is how Celery delays a task, unless the application has a quorum queue and the task goes to
    a topic exchange: given a countdown or an eta, Celery then uses its native delayed delivery.

    Args:
        producer: The producer that publishes the task.
        countdown: Seconds until the task may start.
        eta: The instant at which it may start, if there is no countdown.
    """

    def __init__(
        self, producer: Producer, countdown: float | None, eta: datetime | str | None
    ) -> None:
        self._producer = producer
        when = wall_clock.now() + timedelta(seconds=countdown) if countdown else eta
        self._eta = when if when is None or isinstance(when, str) else when.isoformat()

    def publish(self, body: Any, *, headers: dict[str, Any] | None = None, **options: Any) -> Any:
        """Publish the task, or the event that follows it."""
        if headers and "eta" in headers:
            headers["eta"] = self._eta
        elif isinstance(body, dict) and "task" in body:
            # Celery's message protocol 1.
            body["eta"] = self._eta
        return self._producer.publish(body, headers=headers, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)
