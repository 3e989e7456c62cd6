"""The task base class: ``retry()`` accepts ``delay``, and raises if it cannot be published.

An eager task never reaches ``send_task``, so its delay is checked here.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any, Final

import celery
from celery.exceptions import Reject

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.canvas import DelayingSignature
from celery_rabbitdelay.app.options import refuse_two_times, refuse_without_registry
from celery_rabbitdelay.levels.delay import Delay, milliseconds

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


class DelayingTask(celery.Task):  # type: ignore[type-arg]
    """The base class of the application's tasks, mixed with the one that the user chose."""

    abstract = True

    #: False: this task keeps Celery's own behavior; a worker holds it until it is due.
    rabbitdelay: bool = True

    #: Whether only the first message with the task's id runs.
    once: bool = False

    #: Whether the task is listed in the registry while it waits; None for ``rabbitdelay_track``.
    track: bool | None = None

    def signature(self, *args: Any, **options: Any) -> DelayingSignature:
        """Create a signature of this task, as in Celery."""
        return DelayingSignature.of(super().signature(*args, **options))

    subtask = signature

    def signature_from_request(
        self, request: Any = None, args: Any = None, kwargs: Any = None, *more: Any, **options: Any
    ) -> DelayingSignature:
        """Create the signature of a retry, as in Celery; a ``delay`` replaces the countdown."""
        if options.get("delay") is not None:
            options.pop("countdown", None)
        signature = super().signature_from_request(request, args, kwargs, *more, **options)
        assert isinstance(signature, DelayingSignature)
        return signature

    subtask_from_request = signature_from_request

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        *more: Any,
        delay: Delay | None = None,
        **options: Any,
    ) -> Any:
        """Send the task, as :meth:`celery.app.task.Task.apply_async`, which takes ``delay`` too.

        With ``task_always_eager`` the task runs at once, whatever its delay, as with ``countdown``.

        Args:
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            *more: Further positional arguments of Celery.
            delay: As :meth:`celery_rabbitdelay.Celery.send_task` takes it.
            **options: Further options of Celery.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``, or one of a wrong type.
            ValueError: A delay that is not finite.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
        """
        app: Any = self.app
        refuse_without_registry(options, app)
        if delay is not None:
            if app.conf.task_always_eager:
                refuse_two_times(delay, options.get("countdown"), options.get("eta"))
                options["countdown"] = milliseconds(delay) / 1000
                if options["countdown"] > 0:
                    why = "with task_always_eager, the task runs at once"
                    app.rabbitdelay.warn_treated_as_countdown(why)
            else:
                options["delay"] = delay
        return super().apply_async(args, kwargs, *more, **options)

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
        **options: Any,
    ) -> Any:
        """Retry the task, as :meth:`celery.app.task.Task.retry`, which takes ``delay`` as well.

        A retry that could not be sent is not lost in silence. If the error may pass and the task
        has ``acks_late``, its message is requeued after a pause of up to 10 s, and the task runs
        again; each time counts towards the queue's delivery limit. Otherwise the task fails with
        the error.

        Raises:
            TypeError: ``delay`` together with ``countdown`` or ``eta``.
            RegistryRequired: ``key``, ``job``, ``once`` or ``track``, and there is no registry.
        """
        app: Any = self.app
        refuse_without_registry(options, app)
        if delay is not None:
            refuse_two_times(delay, countdown, eta)
            countdown = milliseconds(delay) / 1000
            options["delay"] = delay
        try:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        except Reject as rejected:
            if not self.rabbitdelay:
                raise
            # Celery would drop the message: the retry could not be sent.
            unsent = rejected.args[0]
            if self.acks_late and isinstance(unsent, TEMPORARY_ERRORS):
                # Without a pause, the message would come back and fail in a hot loop.
                time.sleep(min(max(countdown or 0.0, 1.0), MAX_REQUEUE_WAIT))
                raise Reject(unsent, requeue=True) from unsent
            raise unsent from None
