"""Celery's remote control of workers, which also knows the tasks that wait."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import celery
from amqp.exceptions import AMQPError
from celery.app.control import Control
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay.publishing.refusals import missing_permission

logger = logging.getLogger(__name__)

#: The control command, by which ``celery inspect`` and ``control.broadcast`` call it.
COMMAND: Final = "rabbitdelay_status"

#: Beside the names of the modules: the delayed tasks that have arrived at the worker.
ARRIVALS: Final = "tasks"

#: Beside the names of the modules, if it is asked for: the worker's versions and settings.
ABOUT: Final = "about"

#: The most ids in one revoke: each worker writes all of them into one line of its log.
TOLD_AT_ONCE: Final = 100


class DelayingControl(Control):
    """Celery's control commands; a revoke of a task that waits lasts until the task is due."""

    def broadcast(self, command: str, arguments: Any = None, *more: Any, **options: Any) -> Any:
        """Broadcast a command to the workers, as in Celery; in tests, none of them may answer.

        Args:
            command: Its name.
            arguments: Its arguments.
            *more: Further arguments of Celery.
            **options: Further arguments of Celery.
        """
        app: Any = self.app
        if app.rabbitdelay.stand_in is None:
            return super().broadcast(command, arguments, *more, **options)
        return app.rabbitdelay.stand_in.broadcast(command, arguments or {})

    def revoke(self, task_id: Any, *more: Any, **options: Any) -> Any:
        """Tell all workers not to run tasks, as in Celery; the registry, if there is one, as well.

        Args:
            task_id: The id of a task, or a list of ids.
            *more: Further arguments of Celery.
            **options: Further arguments of Celery.
        """
        answer = super().revoke(task_id, *more, **options)
        app: Any = self.app
        if app.rabbitdelay.has_registry:
            ids = [task_id] if isinstance(task_id, str) else list(task_id)
            app.rabbitdelay.registry.cancel(ids)
        return answer

    def revoke_by_stamped_headers(self, headers: Any, *more: Any, **options: Any) -> Any:
        """Tell all workers not to run tasks with these stamps; the tracked ones are cancelled.

        A task that waits and is not tracked runs if every worker was restarted until it is due.

        Args:
            headers: The stamps.
            *more: Further arguments of Celery.
            **options: Further arguments of Celery.
        """
        answer = super().revoke_by_stamped_headers(headers, *more, **options)
        app: Any = self.app
        if app.rabbitdelay.has_registry:
            app.rabbitdelay.cancel_stamped(headers)
        return answer

    def purge(self, connection: Connection | None = None) -> int:
        """Discard all tasks of the application's queues, and cancel the tracked ones that wait.

        Tasks that wait and are not tracked stay, and run when they are due.

        Args:
            connection: As in Celery.

        Returns:
            How many tasks were discarded or cancelled.
        """
        discarded: int = super().purge(connection)
        app: Any = self.app
        return discarded + (app.rabbitdelay.cancel_pending() if app.rabbitdelay.has_registry else 0)

    discard_all = purge


def revoke_by_celery(app: celery.Celery, task_ids: list[str]) -> None:
    """Tell all workers not to start tasks that they have received, as Celery alone does.

    This matters for the tasks that a worker holds at the moment. It is no error if workers cannot
    be reached, or if the broker's user may not reach them: the registry knows.
    """
    try:
        for start in range(0, len(task_ids), TOLD_AT_ONCE):
            Control.revoke(app.control, task_ids[start : start + TOLD_AT_ONCE])
    except (AMQPError, OperationalError, OSError) as error:
        why = missing_permission(error) or error
        logger.warning("The cancel counts, but workers that hold a task do not know of it: %s", why)


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
        The answer of each worker by the worker's name: the counts of each module by the module's
        name, those of :data:`ARRIVALS`, and :data:`ABOUT` if it is asked for; or
        ``{"error": reason}`` where the worker has no such command.
    """
    arguments = {ABOUT: True} if about else None
    answers = app.control.broadcast(
        COMMAND, arguments, reply=True, timeout=timeout, connection=connection
    )
    return {worker: answer for each in answers or () for worker, answer in each.items()}
