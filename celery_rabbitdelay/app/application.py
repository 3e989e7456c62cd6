"""A Celery application whose delayed tasks wait in RabbitMQ.

:class:`Celery` is a :class:`celery.Celery`; :func:`install` does the same for an existing
application. Each send first tries :meth:`.Copies.send`: a plain send is copied from a template
that Celery makes once, and is published at once. Any other send ends in ``Celery.send_task``, the
one place where a delay is taken over: Celery makes and routes the message, and only the producer
that publishes it is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from importlib.metadata import version
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

import celery
import click
from celery.canvas import Signature
from celery.exceptions import Reject, Retry
from celery.result import AsyncResult
from kombu import Producer

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import additions, celery_internals, task_sending
from celery_rabbitdelay.app.canvas import DelayingSignature
from celery_rabbitdelay.app.control import DelayingControl, WaitingResult
from celery_rabbitdelay.app.copies import Copies
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.options import (
    BESIDE_STAMPS,
    Args,
    DelayOptions,
    Kwargs,
    OwnOptions,
    Result,
    SendOptions,
    own_options,
    refuse_two_times,
    without_stamps,
)
from celery_rabbitdelay.app.pipelines import group_pipeline
from celery_rabbitdelay.app.seams import checked_added_options
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, milliseconds, plain
from celery_rabbitdelay.levels.shown_url import without_passwords
from celery_rabbitdelay.publishing.kombu_internals import cached_property

#: The kernel's bootsteps of a worker's consumer, as Celery imports them.
CONSUMER_STEPS = (
    "celery_rabbitdelay.worker.bootsteps:DelayLevels",
    "celery_rabbitdelay.worker.bootsteps:RestoreTasks",
)

#: The bootstep by which a worker serves the modules around the levels.
MODULES_STEP = "celery_rabbitdelay.worker.bootsteps:Modules"

#: The option of ``celery worker`` for the modules that it serves.
MODULES_OPTION = click.Option(
    ["--rabbitdelay-modules"],
    help="The modules that the worker serves: check-in, distribution, probe; separated by commas. "
    "Overrides the setting rabbitdelay_modules. Empty for none.",
)


P = ParamSpec("P")
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)
TaskT = TypeVar("TaskT", bound="celery.Task[Any, Any]")


#: Maximum seconds to wait before requeuing a task if its retry could not be sent.
MAX_REQUEUE_WAIT: Final = 10.0


if TYPE_CHECKING:
    _CeleryTask: TypeAlias = celery.Task[Any, Any]
else:
    _CeleryTask = celery.Task  # takes no arguments in Celery 5.5


class TaskAttributes:
    """Defaults of attributes for tasks that do not set them."""

    #: False to keep Celery's own behavior: a worker holds the task until it is due.
    rabbitdelay: bool = True

    #: Whether only the first message with the task's id runs.
    once: bool = False

    #: Whether the task is listed in the registry while it waits; None for ``rabbitdelay_track``.
    track: bool | None = None


class Task(_CeleryTask, TaskAttributes, Generic[P, ResultT_co]):
    """The base class of the application's tasks, mixed into the base class that the user chose.

    Use this class where a type is needed: as the ``base`` of a task, or as the type of ``self``.
    ``retry()`` accepts ``delay``, and raises if the retry cannot be published.
    """

    if TYPE_CHECKING:

        @property
        def app(self) -> Celery:
            """The application."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT_co:
            """Run the task in this process."""

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[ResultT_co]:
            """Send the task at once, with these arguments and without options."""

        def s(self, *args: object, **kwargs: object) -> DelayingSignature[ResultT_co]:
            """Create a signature with these arguments; Celery may put a result before them."""

        def si(self, *args: P.args, **kwargs: P.kwargs) -> DelayingSignature[ResultT_co]:
            """Create an immutable signature, with exactly these arguments."""

        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:
            """Call ``delay`` after the transaction; only with Django."""

        def apply_async_on_commit(
            self, args: Args = None, kwargs: Kwargs = None, **options: Unpack[DelayOptions]
        ) -> None:
            """Call ``apply_async`` after the transaction; only with Django."""

    def signature(self, *args: Any, **options: Any) -> DelayingSignature[ResultT_co]:
        """Create a signature of this task, as in Celery."""
        return DelayingSignature.of(super().signature(*args, **options))

    # As an alias of ``signature``, it would have an ambiguous type for pyright.
    def subtask(self, *args: Any, **options: Any) -> DelayingSignature[ResultT_co]:
        """Create a signature of this task; the former name of :meth:`signature`."""
        return self.signature(*args, **options)

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> DelayingSignature[ResultT_co]:
        """Create the signature of a retry, as in Celery; a ``delay`` replaces the countdown."""
        given, _ = without_stamps(options)
        if given.get("delay") is not None:
            options.pop("countdown", None)
        return super().signature_from_request(request, args, kwargs, *more, **options)  # type: ignore[return-value]

    subtask_from_request = signature_from_request

    def apply_async(
        self,
        args: Args = None,
        kwargs: Kwargs = None,
        *more: object,
        **options: Unpack[DelayOptions],
    ) -> AsyncResult[ResultT_co]:
        """Send the task like :meth:`celery.app.task.Task.apply_async`; also accepts ``delay``.

        With ``task_always_eager``, the task ignores the delay and runs at once, as with
        ``countdown``.

        Args:
            args: The task's positional arguments.
            kwargs: The task's keyword arguments.
            *more: Celery's other positional arguments.
            **options: Options of Celery and of this package; for ``delay``, see
                :meth:`celery_rabbitdelay.Celery.send_task`.

        Raises:
            TypeError: ``delay`` is combined with ``countdown`` or ``eta``, or has a wrong type.
            ValueError: The delay is not finite.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track`` is given without a registry.
        """
        passed: OwnOptions = {**options}
        if more:
            passed |= celery_internals.arguments_by_name(celery.Task.apply_async, 3, more)
        sent = self.app.rabbitdelay.part(Copies).send(self, args, kwargs, passed)
        if sent is not None:
            return sent
        given, stamps = without_stamps(passed)
        checked_added_options(given, self.app.rabbitdelay)
        delay: Delay | None = given.get("delay")
        if delay is not None and self.app.conf.task_always_eager:
            refuse_two_times(delay, given.get("countdown"), given.get("eta"))
            countdown = milliseconds(given.pop("delay")) / 1000
            passed = {**given, **stamps, "countdown": countdown}
            if countdown > 0:
                why = "with task_always_eager, the task runs at once"
                self.app.rabbitdelay.warn_treated_as_countdown(why)
        apply_async: Callable[..., AsyncResult[ResultT_co]] = super().apply_async
        return apply_async(**_if_given(args=args, kwargs=kwargs), **passed)

    def retry(
        self,
        args: Args = None,
        kwargs: Kwargs = None,
        exc: Exception | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        *,
        delay: Delay | None = None,
        **options: Unpack[SendOptions],
    ) -> Retry:
        """Retry the task like :meth:`celery.app.task.Task.retry`; also accepts ``delay``.

        If the retry cannot be sent, the task is not lost silently. If the error is temporary and
        the task has ``acks_late``, its message is requeued after a pause of up to 10 s, and the
        task runs again; each requeue counts towards the queue's delivery limit. Otherwise the task
        fails with the error. A ``delay`` in ``retry_kwargs`` counts like a countdown there:
        Celery's ``retry_backoff`` takes precedence.

        Raises:
            TypeError: ``delay`` is combined with ``countdown`` or ``eta``.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track`` is given without a registry.
        """
        given: OwnOptions = {**options}
        checked_added_options(given, self.app.rabbitdelay)
        eta = plain(eta, "eta")
        if delay is not None and countdown is not None and celery_internals.retries_by_itself():
            delay = None  # retry_backoff
        if delay is not None:
            refuse_two_times(delay, countdown, eta)
            countdown = milliseconds(delay) / 1000
            given["delay"] = plain(delay, "delay")
        if own := {name: given.pop(name) for name in own_options() if name in given}:
            given[BESIDE_STAMPS] = own
        # An application's override may accept these by keyword only.
        given |= _if_given(args=args, kwargs=kwargs, exc=exc, eta=eta, countdown=countdown)
        given |= _if_given(max_retries=max_retries)
        if not throw:
            given["throw"] = False
        try:
            return super().retry(**given)
        except Reject as rejected:
            # Celery would drop the message: the retry could not be sent.
            unsent = rejected.args[0] if rejected.args else None
            is_ours = isinstance(unsent, exceptions.RabbitDelayError)
            if not isinstance(unsent, Exception) or not (self.rabbitdelay or is_ours):
                raise
            if self.acks_late and isinstance(unsent, exceptions.TEMPORARY_ERRORS):
                # Without a pause, the message would come back and fail in a hot loop.
                time.sleep(min(max(countdown or 0.0, 1.0), MAX_REQUEUE_WAIT))
                raise Reject(unsent, requeue=True) from unsent
            raise unsent from None


class TaskDecorator(Protocol):
    """``app.task`` and ``shared_task``, for type checkers: tasks accept this package's options."""

    @overload
    def __call__(self, fun: Callable[P, ResultT], /, **options: object) -> Task[P, ResultT]: ...
    @overload
    def __call__(
        self,
        *,
        base: type[TaskT],
        rabbitdelay: bool = True,
        once: bool = False,
        track: bool | None = None,
        **options: Any,
    ) -> Callable[[Callable[..., object]], TaskT]: ...
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

#: Celery's own decorator, typed with the options that this package adds.
shared_task: TaskDecorator = _shared_task


def _mixed(name: str, mix: Callable[[Any], object]) -> cached_property[object]:
    """Return a cached attribute of an application, with a class of this package mixed in.

    Celery, or the application's own class, makes the value when it is first needed. The class is
    also mixed into assigned values, as in Flask's recipe ``app.Task = ContextTask``.

    Args:
        name: The attribute's name.
        mix: Mixes the package's class into a value, unless the class is there already.
    """
    made = cached_property(lambda app: mix(getattr(super(Celery, app), name)))
    return made.setter(lambda _, value: mix(value))  # type: ignore[attr-defined,no-any-return]


def _if_given(**arguments: object) -> OwnOptions:
    """Drop arguments that are None: an application's override may have other defaults."""
    return {name: value for name, value in arguments.items() if value is not None}


class Celery(DelayingCelery):
    """A :class:`celery.Celery` whose delayed tasks wait in RabbitMQ; takes the same arguments.

    Tasks with ``countdown``, ``eta`` or ``delay`` wait in the levels, wherever Celery accepts these
    options. Celery sends tasks without a delay as usual.
    """

    task: TaskDecorator  # type: ignore[assignment]

    if not TYPE_CHECKING:
        amqp = _mixed("amqp", celery_internals.DelayingAMQP.mixed_into)
        control = _mixed("control", partial(celery_internals.mixed, DelayingControl))
        AsyncResult = _mixed("AsyncResult", partial(celery_internals.mixed, WaitingResult))
        Task = _mixed("Task", partial(celery_internals.mixed, Task))

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _add(self)

    @cached_property
    def rabbitdelay(self) -> RabbitDelay:
        """Return the application's delay levels: topology, settings, publishers."""
        return RabbitDelay(self)

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: tuple[Any, Any] = super().__reduce__()  # type: ignore[assignment]
        rebuild, (cls, *rest) = reduced
        return _rebuild, (rebuild, celery_internals.installed_on(cls), *rest)

    def now(self) -> datetime:
        """Return the current time in the application's time zone; time travel in tests sets it."""
        return wall_clock.now().astimezone(self.timezone)

    def bugreport(self) -> str:
        """Return the text of ``celery report``, without the passwords in ``rabbitdelay_*`` keys."""
        ours = f"\npackage  -> celery-rabbitdelay:{version('celery-rabbitdelay')}"
        return ours + without_passwords(super().bugreport())

    def close(self) -> None:
        """Close the application's connections."""
        self.rabbitdelay.close()
        super().close()

    def send_task(
        self, name: str, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> Result:
        """Send a task by name like :meth:`celery.Celery.send_task`; also accepts ``delay``.

        Args:
            name: The task's name.
            args: The task's positional arguments.
            kwargs: The task's keyword arguments.
            *more: Celery's other positional arguments.
            **options: Options of Celery and of this package: ``delay``, the seconds or a timedelta
                until the task may start, where zero or less sends it at once; ``countdown`` or
                ``eta`` as in Celery, where a naive ``eta`` is in UTC; ``tolerance``, the seconds or
                a timedelta by which the task may start late if that saves stops.

        Raises:
            TypeError: ``delay`` is combined with ``countdown`` or ``eta``, or a time has a wrong
                type.
            ValueError: A delay is not finite, or an ``eta`` is not ISO 8601.
            InvalidSetting: A ``rabbitdelay_*`` setting is invalid, or ``task_protocol`` is 1.
            DelayTooLong: The delay is above the layout's capacity, and ``rabbitdelay_modules``
                lacks check-in.
            NeedsDistribution: ``rabbitdelay_modules`` lacks distribution. A task needs distribution
                unless exactly one known queue gets it, and also if its priority is above 4 and the
                levels are quorum queues.
            PublishError: The broker did not confirm the message.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track`` is given without a registry.
            JobClosed: The job is not open.
            RegistryUnavailable: Redis does not answer, and ``key``, ``job`` or ``track`` is given.
                Nothing was sent.
        """
        by_celery = partial(super().send_task, name, **_if_given(args=args, kwargs=kwargs))
        if more:
            options |= celery_internals.arguments_by_name(celery.Celery.send_task, 4, more)
        if options.get("producer") is None and options.get("connection") is None:
            sent = self.rabbitdelay.part(Copies).send(name, args, kwargs, options)
            if sent is not None:
                return sent
        return task_sending.TaskSending(self.rabbitdelay, name, options, by_celery).send()

    def producer_or_acquire(self, producer: Producer | None = None) -> Any:
        """Acquire a producer, as in Celery; a group's delayed members go through a pipeline."""
        task_id, given = task_sending.given_producer.get() or ("", None)
        if producer is None and given and task_id == celery_internals.task_that_is_sent():
            producer = given
        fake_broker = self.rabbitdelay.fake_broker
        ours = task_sending.DelayedTaskProducer, task_sending.EtaProducer
        if fake_broker is not None and not isinstance(producer, ours):
            return nullcontext(fake_broker.producer)
        acquiring = super().producer_or_acquire(producer)
        if not celery_internals.sends_a_group():
            return acquiring
        return group_pipeline(self.rabbitdelay, acquiring, producer is not None)

    def signature(self, *args: Any, **options: Any) -> DelayingSignature[Any]:
        """Create a signature bound to this application, like :meth:`celery.Celery.signature`."""
        signature: Any = super().signature(*args, **options)
        return DelayingSignature.of(signature) if type(signature) is Signature else signature


def install(app: celery.Celery) -> Celery:
    """Make delayed tasks of an existing application wait in RabbitMQ; return the application.

    The application keeps its own classes of tasks, results, queues and remote control. This
    function mixes a class of this package into each of these classes.

    Args:
        app: Any Celery application, Django's or a third party's. The application stays the same
            object; its class also becomes a subclass of :class:`Celery`.
    """
    if isinstance(app, Celery):
        return app
    app.__class__ = celery_internals.combined_class(Celery, type(app))
    _add(app)
    assert isinstance(app, Celery)
    return app


def _add(app: celery.Celery) -> None:
    """Add this package's steps to the workers of an application, and its class to the tasks."""
    app.steps["consumer"].update(CONSUMER_STEPS)
    app.steps["worker"].add(MODULES_STEP)
    for each in filter(additions.exists, additions.entries):
        app.steps["consumer"].update(each.consumer_steps)
        app.steps["worker"].update(each.worker_steps)
        options = (click.Option([name], help=text) for name, text in each.worker_options.items())
        app.user_options["worker"].update(options)
    app.user_options["worker"].add(MODULES_OPTION)
    # If the attribute exists already, assign it again, which mixes in this package's class.
    for name in ("amqp", "control", "AsyncResult", "Task"):
        if name in vars(app):
            setattr(app, name, vars(app)[name])
    celery_internals.MixingTasks.mix(app, Task)


def _rebuild(rebuild: Callable[..., celery.Celery], *arguments: object) -> celery.Celery:
    """Unpickle an application: the class that :func:`install` made cannot be imported by name."""
    return install(rebuild(*arguments))
