"""The task base class: ``retry()`` accepts ``delay``, and raises if it cannot be published.

An eager task never reaches ``send_task``, so its delay is checked here. The module also declares
``delay`` and our other options for type checkers, with celery-types and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    Unpack,
)

import celery
from celery.exceptions import Reject, Retry
from celery.result import AsyncResult

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.canvas import DelayingSignature
from celery_rabbitdelay.app.celery_internals import as_given, retries_by_itself
from celery_rabbitdelay.app.copies import Copies
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.options import (
    BESIDE_STAMPS,
    DelayOptions,
    SendOptions,
    own_options,
    refuse_two_times,
    without_stamps,
)
from celery_rabbitdelay.app.seams import checked_added_options
from celery_rabbitdelay.levels.delay import Delay, milliseconds, plain

P = ParamSpec("P")
ResultT_co = TypeVar("ResultT_co", covariant=True)

#: Errors of publishing after which another attempt may succeed.
TEMPORARY_ERRORS: Final = (
    exceptions.MessageNacked,
    exceptions.ConfirmTimeout,
    exceptions.ConnectionBlocked,
    exceptions.ConnectionLost,
    exceptions.NoPublisherFree,
)

#: Maximum seconds to wait before a task whose retry could not be sent is requeued.
MAX_REQUEUE_WAIT: Final = 10.0


class TaskAttributes:
    """Defaults of the attributes that neither a task nor its own base class sets."""

    #: False: this task keeps Celery's own behavior; a worker holds it until it is due.
    rabbitdelay: bool = True

    #: Whether only the first message with the task's id runs.
    once: bool = False

    #: Whether the task is listed in the registry while it waits; None for ``rabbitdelay_track``.
    track: bool | None = None


class DelayingTask(celery.Task, TaskAttributes, Generic[P, ResultT_co]):  # type: ignore[type-arg]
    """The methods of the application's tasks that differ from Celery's."""

    if TYPE_CHECKING:

        @property
        def app(self) -> DelayingCelery:
            """The application."""

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ResultT_co:
            """Run the task here."""

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[ResultT_co]:
            """Send the task with these arguments and without options; not after a delay."""

        def s(self, *args: Any, **kwargs: Any) -> DelayingSignature[ResultT_co]:
            """Create a signature with these arguments, or the last ones of them."""

        def si(self, *args: P.args, **kwargs: P.kwargs) -> DelayingSignature[ResultT_co]:
            """Create a signature with these arguments, which no result is added to."""

        def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> None:
            """Call ``delay`` after the transaction; only with Django."""

        def apply_async_on_commit(
            self, args: Any = None, kwargs: Any = None, **options: Unpack[DelayOptions]
        ) -> None:
            """Call ``apply_async`` after the transaction; only with Django."""

    def signature(self, *args: Any, **options: Any) -> DelayingSignature[ResultT_co]:
        """Create a signature of this task, as in Celery."""
        return DelayingSignature.of(super().signature(*args, **options))

    subtask = signature

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> DelayingSignature[ResultT_co]:
        """Create the signature of a retry, as in Celery; a ``delay`` replaces the countdown."""
        given, _ = without_stamps(options)
        if given.get("delay") is not None:
            options.pop("countdown", None)
        signature: DelayingSignature[ResultT_co]
        signature = super().signature_from_request(request, args, kwargs, *more, **options)  # type: ignore[assignment]
        return signature

    subtask_from_request = signature_from_request

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *more: Any,
        **options: Unpack[DelayOptions],
    ) -> AsyncResult[ResultT_co]:
        """Send the task, as :meth:`celery.app.task.Task.apply_async`, which takes ``delay`` too.

        With ``task_always_eager`` the task runs at once, whatever its delay, as with ``countdown``.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            *more: Further positional arguments of Celery.
            **options: Options of Celery and ours; ``delay`` as
                :meth:`celery_rabbitdelay.Celery.send_task` takes it.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``, or one of a wrong type.
            ValueError: A delay that is not finite.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
        """
        passed: dict[str, Any] = {**options}
        if not more:
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
        its_args, its_kwargs = as_given(args, kwargs, *more)
        apply_async: Callable[..., AsyncResult[ResultT_co]] = super().apply_async
        return apply_async(*its_args, **its_kwargs, **passed)

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Exception | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        *,
        delay: Delay | None = None,
        **options: Unpack[SendOptions],
    ) -> Retry:
        """Retry the task, as :meth:`celery.app.task.Task.retry`, which takes ``delay`` as well.

        A retry that could not be sent is not lost in silence. If the error may pass and the task
        has ``acks_late``, its message is requeued after a pause of up to 10 s, and the task runs
        again; each time counts towards the queue's delivery limit. Otherwise the task fails with
        the error. A ``delay`` in ``retry_kwargs`` counts like a countdown there: Celery's
        ``retry_backoff`` comes before it.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
        """
        given: dict[str, Any] = {**options}
        checked_added_options(given, self.app.rabbitdelay)
        eta = plain(eta, "eta")
        if delay is not None and countdown is not None and retries_by_itself():
            delay = None  # retry_backoff
        if delay is not None:
            refuse_two_times(delay, countdown, eta)
            countdown = milliseconds(delay) / 1000
            given["delay"] = plain(delay, "delay")
        if own := {name: given.pop(name) for name in own_options() if name in given}:
            given[BESIDE_STAMPS] = own
        of_celery = {"args": args, "kwargs": kwargs, "exc": exc, "eta": eta}
        of_celery |= {"countdown": countdown, "max_retries": max_retries}
        # An override of the application's may know these by name only, or have its own defaults.
        given |= {name: value for name, value in of_celery.items() if value is not None}
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
            if self.acks_late and isinstance(unsent, TEMPORARY_ERRORS):
                # Without a pause, the message would come back and fail in a hot loop.
                time.sleep(min(max(countdown or 0.0, 1.0), MAX_REQUEUE_WAIT))
                raise Reject(unsent, requeue=True) from unsent
            raise unsent from None
