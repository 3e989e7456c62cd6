"""Celery's remote control of workers, and its results, both aware of tasks that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import celery
from celery import states
from celery.app.control import Control
from celery.result import AsyncResult
from kombu import Connection

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.seams import Addition, additions_of

#: The name of the control command, for ``celery inspect`` and ``control.broadcast``.
COMMAND: Final = "rabbitdelay_status"

#: The key in a worker's answer, beside its modules, for the delayed tasks that have arrived at it.
ARRIVALS: Final = "tasks"

#: The key in a worker's answer, on request, for the worker's versions and settings.
ABOUT: Final = "about"

#: Celery's answer of a worker that does not know the command, and the answer to show instead.
_UNKNOWN_COMMAND: Final = {"error": repr(KeyError(COMMAND))}
_PLAIN_WORKER: Final = {"error": "it runs without celery_rabbitdelay"}


class DelayingControl(Control):
    """Celery's control commands; a revoke of a task that waits lasts until the task is due."""

    def broadcast(self, command: str, arguments: Any = None, *more: Any, **options: Any) -> Any:
        """Broadcast a command to the workers, as in Celery; in tests, to the fake broker.

        Args:
            command: Its name.
            arguments: Its arguments.
            *more: Further arguments of Celery.
            **options: Further arguments of Celery.
        """
        fake_broker = _delays_of(self).fake_broker
        if fake_broker is None:
            return super().broadcast(command, arguments, *more, **options)
        return fake_broker.broadcast(command, arguments or {})

    def revoke(self, task_id: Any, *more: Any, **options: Any) -> Any:
        """Revoke tasks in all workers, as in Celery, and in the registry, if there is one.

        Args:
            task_id: The id of a task, or a list of ids.
            *more: Further arguments of Celery.
            **options: Further arguments of Celery.
        """
        answer = super().revoke(task_id, *more, **options)
        for each in _additions(self):
            each.revoked([task_id] if isinstance(task_id, str) else list(task_id))
        return answer

    def purge(self, connection: Connection | None = None) -> int:
        """Discard all tasks of the application's queues, and cancel the tracked ones that wait.

        Untracked waiting tasks stay, and run when they are due.

        Args:
            connection: As in Celery.

        Returns:
            How many tasks were discarded or cancelled.
        """
        discarded: int = super().purge(connection)
        return discarded + sum(each.purged() for each in _additions(self))

    discard_all = purge


def _delays_of(part: Any) -> Delays:
    delays: Delays = part.app.rabbitdelay
    return delays


def _additions(part: Any) -> Sequence[Addition]:
    """Return the additions of a part's application; none without RabbitMQ."""
    delays = _delays_of(part)
    return delays.part(additions_of) if delays.available else ()


def status_of_workers(
    app: celery.Celery, connection: Connection, timeout: float, about: bool = False
) -> dict[str, Mapping[str, Any]]:
    """Ask all workers for the status of their modules.

    Args:
        app: The application.
        connection: An open connection to its broker.
        timeout: Seconds to wait for the answers.
        about: Whether to ask also for versions and settings; earlier versions do not answer that.

    Returns:
        The answers by the workers' names. An answer has the counts of each module by its name, the
        counts of :data:`ARRIVALS`, and :data:`ABOUT` on request; or it is ``{"error": reason}`` if
        the worker cannot answer, for example because it runs without this package.
    """
    arguments = {ABOUT: True} if about else None
    answers = app.control.broadcast(
        COMMAND, arguments, reply=True, timeout=timeout, connection=connection
    )
    return {
        worker: _PLAIN_WORKER if answer == _UNKNOWN_COMMAND else answer
        for each in answers or ()
        for worker, answer in each.items()
    }


#: The state of a tracked task that waits in the levels; one of Celery's custom states.
DELAYED: Final = "DELAYED"


class WaitingResult(AsyncResult):  # type: ignore[type-arg]
    """The result of a task, in the state ``DELAYED`` while a tracked task waits.

    Celery's state ``PENDING`` means that nothing is known about a task. With a registry, one round
    trip to Redis then says whether the task is tracked and waits. If not, or if Redis does not
    answer, the state is ``PENDING``.
    """

    @property
    def state(self) -> Any:
        """The state of the task."""
        state = super().state
        if state != states.PENDING:
            return state
        return DELAYED if any(each.is_waiting(self.id) for each in _additions(self)) else state

    status = state
