"""Celery's remote control and results, extended for waiting tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from celery import states
from celery.app.control import Control
from celery.result import AsyncResult
from kombu import Connection

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.seams import Addition, additions_of


class DelayingControl(Control):
    """Celery's control commands; the revoke of a waiting task lasts until the task is due."""

    def broadcast(self, command: str, arguments: Any = None, *more: Any, **options: Any) -> Any:
        """Broadcast a command to the workers, as in Celery; in tests, to the fake broker.

        Args:
            command: The command's name.
            arguments: The command's arguments.
            *more: Celery's other positional arguments.
            **options: Celery's keyword arguments.
        """
        delays: Delays = self.app.rabbitdelay  # type: ignore[attr-defined]
        if delays.fake_broker is None:
            return super().broadcast(command, arguments, *more, **options)
        return delays.fake_broker.broadcast(command, arguments or {})

    def revoke(self, task_id: Any, *more: Any, **options: Any) -> Any:
        """Revoke tasks in all workers, as in Celery, and in the registry, if there is one.

        Args:
            task_id: The id of a task, or a list of ids.
            *more: Celery's other positional arguments.
            **options: Celery's keyword arguments.
        """
        answer = super().revoke(task_id, *more, **options)
        for each in _additions(self):
            each.revoked([task_id] if isinstance(task_id, str) else list(task_id))
        return answer

    def purge(self, connection: Connection | None = None) -> int:
        """Discard all tasks in the application's queues, and cancel all waiting tracked tasks.

        Untracked waiting tasks stay, and run when they are due.

        Args:
            connection: As in Celery.

        Returns:
            How many tasks were discarded or cancelled.
        """
        discarded: int = super().purge(connection)
        return discarded + sum(each.purged() for each in _additions(self))

    discard_all = purge


def _additions(part: Any) -> Sequence[Addition]:
    """Return the additions of an application; none if its broker is not RabbitMQ."""
    delays: Delays = part.app.rabbitdelay
    return delays.part(additions_of) if delays.available else ()


#: The state of a tracked task that waits in the levels; one of Celery's custom states.
DELAYED: Final = "DELAYED"


class WaitingResult(AsyncResult):  # type: ignore[type-arg]
    """The result of a task, in the state ``DELAYED`` while a tracked task waits.

    Celery's state ``PENDING`` also stands for unknown tasks. With a registry, one round trip to
    Redis then shows whether the task is tracked and waits. Without a registry, or if Redis does not
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
