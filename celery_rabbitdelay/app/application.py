"""A Celery application whose delays wait in RabbitMQ.

:class:`Celery` is a :class:`celery.Celery`; :func:`install` does the same for an application that
exists already. All tasks are sent by ``Celery.send_task``, the one place where a delay is taken
over: Celery makes and routes the message, and only the producer that publishes it is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from typing import Any

import celery
import celery.result
import click
from celery.app import amqp as celery_amqp
from celery.app.control import Control
from celery.canvas import Signature
from kombu import Connection, Producer

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app import canvas, celery_internals
from celery_rabbitdelay.app.control import DelayingControl
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.options import checked_registry_options, refuse_two_times
from celery_rabbitdelay.app.sending.pipelines import group_pipeline
from celery_rabbitdelay.app.sending.task_producer import DelayedTaskProducer, EtaProducer
from celery_rabbitdelay.app.sending.task_sending import TaskSending
from celery_rabbitdelay.app.task import Task, TaskDecorator
from celery_rabbitdelay.app.waiting_tasks import WaitingResult
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Delay, tolerance_milliseconds
from celery_rabbitdelay.levels.plain_times import plain
from celery_rabbitdelay.levels.shown_url import without_passwords
from celery_rabbitdelay.publishing.kombu_internals import cached_property

#: The bootsteps that make a worker ready for delayed tasks, as Celery imports them.
WORKER_STEPS = (
    "celery_rabbitdelay.worker.bootsteps:DelayLevels",
    "celery_rabbitdelay.worker.bootsteps:RestoreTasks",
)

#: The bootstep by which a worker serves the modules around the levels.
MODULES_STEP = "celery_rabbitdelay.worker.bootsteps:Modules"

#: The option of ``celery worker`` that says which modules it serves.
MODULES_OPTION = click.Option(
    ["--rabbitdelay-modules"],
    help="Which of check-in, distribution and probe the worker serves, with commas between them; "
    "instead of the setting rabbitdelay_modules. Empty for none.",
)

#: The bootstep by which a worker serves its metrics.
METRICS_STEP = "celery_rabbitdelay.worker.metrics:ServeMetrics"

#: The option of ``celery worker`` that says on which port.
METRICS_PORT_OPTION = click.Option(
    ["--rabbitdelay-metrics-port"],
    help="The port on which the worker serves metrics to Prometheus, or an address with a port; "
    "instead of the setting rabbitdelay_metrics_port. Empty for none.",
)


class Celery(celery.Celery):
    """A :class:`celery.Celery` whose delays live in RabbitMQ; takes the same arguments.

    Tasks with ``countdown``, ``eta`` or ``delay`` wait in the levels, wherever Celery accepts these
    options. Tasks without a delay take Celery's own path, unchanged.
    """

    task: TaskDecorator  # type: ignore[assignment]

    def on_init(self) -> None:
        """Called by Celery at the end of its initialization."""
        super().on_init()
        _add_steps(self)

    @cached_property
    def rabbitdelay(self) -> RabbitDelay:
        """The application's delay levels: topology, settings, publishers."""
        return RabbitDelay(self)

    @cached_property
    def amqp(self) -> celery_amqp.AMQP:
        """Celery's AMQP features of the application."""
        amqp_class = celery_internals.combined_class(celery_internals.DelayingAMQP, self.amqp_cls)
        amqp: celery_amqp.AMQP = amqp_class(app=self)
        return amqp

    @cached_property
    def control(self) -> Control:
        """Celery's remote control of the application's workers."""
        control_class = celery_internals.combined_class(DelayingControl, self.control_cls)
        control: Control = control_class(app=self)
        return control

    @cached_property
    def AsyncResult(self) -> type[celery.result.AsyncResult[Any]]:  # noqa: N802
        """The class of the application's results."""
        return celery_internals.result_class(self, WaitingResult)

    def create_task_cls(self) -> type[celery.Task[Any, Any]]:
        """Create the base class of the application's tasks."""
        return celery_internals.task_class(
            self, celery_internals.combined_class(Task, self.task_cls)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: tuple[Any, Any] = super().__reduce__()  # type: ignore[assignment]
        rebuild, (cls, *rest) = reduced
        return _rebuild, (rebuild, celery_internals.installed_on(cls), *rest)

    def bugreport(self) -> str:
        """Return what ``celery report`` prints; Celery hides the passwords of its own URLs only."""
        ours = f"\npackage  -> celery-rabbitdelay:{__version__}"
        return ours + without_passwords(super().bugreport())

    def close(self) -> None:
        """Clean up after the application."""
        self.rabbitdelay.close()
        super().close()

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        task_id: str | None = None,
        producer: Producer | None = None,
        connection: Connection | None = None,
        *more: Any,
        delay: Delay | None = None,
        tolerance: Delay = 0,
        **options: Any,
    ) -> celery.result.AsyncResult[Any]:
        """Send a task by name, as :meth:`celery.Celery.send_task`, which takes ``delay`` as well.

        Args:
            name: The task's name.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            countdown: Seconds until it may start.
            eta: The instant at which it may start; a naive one is in UTC, as in Celery.
            task_id: Its id; a random one by default.
            producer: The caller's producer, whose connection is then used.
            connection: The caller's connection.
            *more: Further positional arguments of Celery.
            delay: Seconds, or a timedelta, until it may start; zero or less sends it at once.
            tolerance: Seconds, or a timedelta, that the task may start later if that saves stops.
            **options: Further options of Celery.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``, or one of a wrong type.
            ValueError: A delay that is not finite, or an ``eta`` that is not ISO 8601.
            DelayTooLong: The delay is above the layout's capacity, and ``rabbitdelay_modules``
                lacks check-in.
            NeedsDistribution: Not exactly one known queue gets the task, or its priority is above 4
                and the levels are quorum queues; and ``rabbitdelay_modules`` lacks distribution.
            PublishError: The broker did not confirm.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
            JobClosed: The job is not open.
            RegistryUnavailable: ``key``, ``job`` or ``track``, and Redis does not answer. Nothing
                was sent.
        """
        eta = plain(eta, "eta")
        if producer is None and connection is None and not more:
            times = {"delay": delay, "countdown": countdown, "eta": eta, "tolerance": tolerance}
            whole = {**times, "task_id": task_id, **options}
            sent = self.rabbitdelay.templates.send(name, args, kwargs, whole)
            if sent is not None:
                return sent
        given = checked_registry_options(options, self)
        former, options = _without_former_delay(options)
        body_delay_is_restored = options.pop(canvas.BODY_DELAY_IS_RESTORED, False)
        if any(options.get(name) for name in canvas.SIGNATURE_OPTIONS):
            if not body_delay_is_restored and not options.get("retries"):
                options = canvas.restore_body_delay(options, delay)
            takeover = self.rabbitdelay.settings.takeover
            word = "countdown" if takeover else "delay"
            check = partial(checked_registry_options, app=self)
            options = canvas.translate_delays(options, word, check)
        if delay is not None:
            refuse_two_times(delay, countdown, eta)
        tolerance_ms = tolerance_milliseconds(tolerance)
        for each in given:
            options.pop(each)
        by_celery: Callable[..., celery.result.AsyncResult[Any]] = partial(
            super().send_task, name, args, kwargs
        )
        if delay is None and not countdown and not eta and not any(given.values()):
            return by_celery(countdown, eta, task_id, producer, connection, *more, **options)
        if "expires" in options:
            options["expires"] = plain(options["expires"], "expires")
        return TaskSending(
            app=self,
            by_celery=by_celery,
            more=more,
            name=name,
            countdown=countdown,
            eta=eta,
            delay=delay,
            tolerance_ms=tolerance_ms,
            task_id=task_id,
            producer=producer,
            connection=connection,
            options=options,
            given=given,
            former=former,
        ).send()

    def producer_or_acquire(self, producer: Producer | None = None) -> Any:
        """Acquire a producer, as in Celery; a group's delayed members go through a pipeline."""
        stand_in = self.rabbitdelay.stand_in
        if stand_in is not None and not isinstance(producer, DelayedTaskProducer | EtaProducer):
            return nullcontext(stand_in.producer)
        acquiring = super().producer_or_acquire(producer)
        if not celery_internals.sends_a_group():
            return acquiring
        return group_pipeline(self.rabbitdelay, acquiring, producer is not None)

    def signature(self, *args: Any, **options: Any) -> canvas.DelayingSignature[Any]:
        """Create a signature bound to this application, as :meth:`celery.Celery.signature`."""
        signature: Any = super().signature(*args, **options)
        return canvas.DelayingSignature.of(signature) if type(signature) is Signature else signature


def install(app: celery.Celery[Any]) -> Celery:
    """Make the delays of an existing application live in RabbitMQ; return the application.

    Call it right after the application is created. A task that was defined before has no
    ``retry(delay=...)``, does not check a delay with ``task_always_eager``, and its signatures may
    lose a delay as the body of a chord. Everything else works for it too.

    Args:
        app: Any Celery application, Django's or a third party's. It stays the same object; only
            its class becomes a subclass of :class:`Celery` as well.
    """
    if isinstance(app, Celery):
        return app
    app.__class__ = celery_internals.combined_class(Celery, type(app))
    celery_internals.forget_classes(app)
    _add_steps(app)
    _make_delaying(app)
    installed: Any = app
    assert isinstance(installed, Celery)
    return installed


def _add_steps(app: celery.Celery) -> None:
    app.steps["consumer"].update(WORKER_STEPS)
    app.steps["worker"].update((MODULES_STEP, METRICS_STEP))
    app.user_options["worker"].update((MODULES_OPTION, METRICS_PORT_OPTION))


def _make_delaying(app: celery.Celery) -> None:
    """Turn what an application has made already into :class:`DelayingAMQP` and the like."""
    control: Any = app.__dict__.get("control")
    if control is not None:
        control.__class__ = celery_internals.combined_class(DelayingControl, type(control))
    amqp: Any = app.__dict__.get("amqp")
    if amqp is not None:
        amqp.__class__ = celery_internals.combined_class(celery_internals.DelayingAMQP, type(amqp))
        if "queues" in amqp.__dict__:
            amqp._delaying(amqp.queues)


def _rebuild(rebuild: Callable[..., celery.Celery], *arguments: Any) -> celery.Celery:
    """Unpickle an application: the class that :func:`install` made cannot be imported by name."""
    return install(rebuild(*arguments))


def _without_former_delay(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Remove the headers of an earlier delay; for a retry, return them as well."""
    headers = options.get("headers")
    if not headers or not any(name.startswith(header_names.OWN_PREFIX) for name in headers):
        return {}, options
    former = dict(headers) if options.get("retries") else {}
    return former, {**options, "headers": header_names.strip(headers)}
