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
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Protocol, TypeVar, overload

import celery
import celery.result
import click
from celery.canvas import Signature
from kombu import Producer

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app import additions, canvas, celery_internals
from celery_rabbitdelay.app.control import DelayingControl, WaitingResult
from celery_rabbitdelay.app.copies import Copies
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.options import (
    refuse_two_times,
    without_stamps,
)
from celery_rabbitdelay.app.pipelines import group_pipeline
from celery_rabbitdelay.app.seams import checked_added_options
from celery_rabbitdelay.app.task import DelayingTask, P, ResultT_co
from celery_rabbitdelay.app.task_sending import (
    DelayedTaskProducer,
    EtaProducer,
    TaskSending,
    given_producer,
)
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import tolerance_milliseconds
from celery_rabbitdelay.levels.shown_url import without_passwords
from celery_rabbitdelay.publishing.kombu_internals import cached_property

#: The kernel's bootsteps of a worker's consumer, as Celery imports them.
CONSUMER_STEPS = (
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


ResultT = TypeVar("ResultT")
TaskT = TypeVar("TaskT", bound="celery.Task[Any, Any]")


class Task(DelayingTask[P, ResultT_co]):
    """The base class of the application's tasks, mixed into the one that the user chose.

    A :class:`celery.Task`, to be named where a type is: as a ``base``, or as that of ``self``.
    """

    if TYPE_CHECKING:

        @property
        def app(self) -> Celery:
            """The application."""


class TaskDecorator(Protocol):
    """``app.task`` and ``shared_task``, for type checkers: their tasks take our options."""

    @overload
    def __call__(self, fun: Callable[P, ResultT], /, **options: Any) -> Task[P, ResultT]: ...
    @overload
    def __call__(
        self,
        *,
        base: type[TaskT],
        rabbitdelay: bool = True,
        once: bool = False,
        track: bool | None = None,
        **options: Any,
    ) -> Callable[[Callable[..., Any]], TaskT]: ...
    @overload
    def __call__(
        self,
        *,
        bind: Literal[True],
        rabbitdelay: bool = True,
        once: bool = False,
        track: bool | None = None,
        **options: Any,
    ) -> Callable[[Callable[Concatenate[Any, P], ResultT]], Task[P, ResultT]]: ...
    @overload
    def __call__(
        self,
        *,
        bind: Literal[False] = False,
        rabbitdelay: bool = True,
        once: bool = False,
        track: bool | None = None,
        **options: Any,
    ) -> Callable[[Callable[P, ResultT]], Task[P, ResultT]]: ...


_shared_task: Any = celery.shared_task

#: Celery's own, known to type checkers with the options that this package adds.
shared_task: TaskDecorator = _shared_task


class Celery(DelayingCelery):
    """A :class:`celery.Celery` whose delays live in RabbitMQ; takes the same arguments.

    Tasks with ``countdown``, ``eta`` or ``delay`` wait in the levels, wherever Celery accepts these
    options. Tasks without a delay take Celery's own path, unchanged.
    """

    task: TaskDecorator  # type: ignore[assignment]

    if not TYPE_CHECKING:
        amqp = celery_internals.Mixed(celery_internals.DelayingAMQP.mixed_into)
        control = celery_internals.Mixed(partial(celery_internals.mixed, DelayingControl))
        AsyncResult = celery_internals.Mixed(partial(celery_internals.mixed, WaitingResult))
        Task = celery_internals.Mixed(partial(celery_internals.mixed, Task))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _add(self)

    @cached_property
    def rabbitdelay(self) -> RabbitDelay:
        """The application's delay levels: topology, settings, publishers."""
        return RabbitDelay(self)

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: tuple[Any, Any] = super().__reduce__()  # type: ignore[assignment]
        rebuild, (cls, *rest) = reduced
        return _rebuild, (rebuild, celery_internals.installed_on(cls), *rest)

    def now(self) -> datetime:
        """Return the time, in the application's time zone; a test that travels sets it."""
        return wall_clock.now().astimezone(self.timezone)

    def bugreport(self) -> str:
        """Return what ``celery report`` prints; Celery hides the passwords of its own URLs only."""
        ours = f"\npackage  -> celery-rabbitdelay:{__version__}"
        return ours + without_passwords(super().bugreport())

    def close(self) -> None:
        """Clean up after the application."""
        self.rabbitdelay.close()
        super().close()

    def send_task(
        self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> celery.result.AsyncResult[Any]:
        """Send a task by name, as :meth:`celery.Celery.send_task`, which takes ``delay`` as well.

        Args:
            name: The task's name.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            *more: Further positional arguments of Celery.
            **options: Options of Celery and ours: ``delay``, the seconds or a timedelta until it
                may start, where zero or less sends it at once; ``countdown`` or ``eta``, of which a
                naive one is in UTC, as in Celery; ``tolerance``, the seconds or a timedelta that it
                may start later if that saves stops.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``, or one of a wrong type.
            ValueError: A delay that is not finite, or an ``eta`` that is not ISO 8601.
            InvalidSetting: A ``rabbitdelay_*`` setting is wrong, or ``task_protocol`` is 1.
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
        its_args, its_kwargs = celery_internals.as_given(args, kwargs)
        by_celery = partial(super().send_task, name, *its_args, **its_kwargs)
        if more:
            options = celery_internals.positional(super().send_task, more) | options
        elif options.get("producer") is None and options.get("connection") is None:
            sent = self.rabbitdelay.part(Copies).send(name, args, kwargs, options)
            if sent is not None:
                return sent
        former = header_names.own(celery_internals.headers_of_former(self, options))
        if header_names.own(options.get("headers") or {}):
            options["headers"] = header_names.strip(options["headers"])
        given, stamps = without_stamps(options)
        added = checked_added_options(given, self.rabbitdelay)
        body_delay_is_restored = given.pop(canvas.BODY_DELAY_IS_RESTORED, False)
        if any(given.get(option) for option in canvas.SIGNATURE_OPTIONS):
            if not body_delay_is_restored and not given.get("retries"):
                given = canvas.restore_body_delay(given, given.get("delay"))
            takeover = self.rabbitdelay.settings.takeover
            word = "countdown" if takeover else "delay"
            check = partial(checked_added_options, delays=self.rabbitdelay)
            given = canvas.translate_delays(given, word, check)
        delay, tolerance = given.pop("delay", None), given.pop("tolerance", 0)
        if delay is not None:
            refuse_two_times(delay, given.get("countdown"), given.get("eta"))
        tolerance_ms = tolerance_milliseconds(tolerance)
        for option in added:
            given.pop(option)
        return TaskSending(
            delays=self.rabbitdelay,
            name=name,
            task=None,
            options=given,
            added=added,
            former=former,
            has_id=False,
            by_celery=by_celery,
            delay=delay,
            tolerance_ms=tolerance_ms,
            stamps=stamps,
        ).send()

    def producer_or_acquire(self, producer: Producer | None = None) -> Any:
        """Acquire a producer, as in Celery; a group's delayed members go through a pipeline."""
        given = given_producer.get()
        if producer is None and given and given.task_id == celery_internals.task_that_is_sent():
            producer = given.producer
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

    What the application has and makes stays, with a class of ours mixed in: the classes of its
    tasks and results, its queues, its remote control.

    Args:
        app: Any Celery application, Django's or a third party's. It stays the same object; only
            its class becomes a subclass of :class:`Celery` as well.
    """
    if isinstance(app, Celery):
        return app
    app.__class__ = celery_internals.combined_class(Celery, type(app))
    _add(app)
    installed: Any = app
    assert isinstance(installed, Celery)
    return installed


def _add(app: celery.Celery) -> None:
    """Add our steps to an application's workers, and mix our class into its tasks."""
    app.steps["consumer"].update(CONSUMER_STEPS)
    app.steps["worker"].add(MODULES_STEP)
    for each in filter(additions.exists, additions.entries):
        app.steps["consumer"].update(each.consumer_steps)
        app.steps["worker"].update(each.worker_steps)
        options = (click.Option([name], help=text) for name, text in each.worker_options.items())
        app.user_options["worker"].update(options)
    app.user_options["worker"].add(MODULES_OPTION)
    # Those that exist already get our class when they are assigned again.
    for name in ("amqp", "control", "AsyncResult", "Task"):
        if name in vars(app):
            setattr(app, name, vars(app)[name])
    celery_internals.MixingTasks.mix(app, Task)


def _rebuild(rebuild: Callable[..., celery.Celery], *arguments: Any) -> celery.Celery:
    """Unpickle an application: the class that :func:`install` made cannot be imported by name."""
    return install(rebuild(*arguments))
