"""Ask the workers for their status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import celery
from kombu import Connection

#: The name of the control command; see :mod:`.operations.worker_status`.
COMMAND: Final = "rabbitdelay_status"

#: The key for delayed tasks in a worker's answer, next to the keys for its modules.
ARRIVALS: Final = "tasks"

#: The key for versions and settings in a worker's answer; present on request.
ABOUT: Final = "about"

#: Celery's answer of a worker that does not know the command, and the answer to show instead.
_UNKNOWN_COMMAND: Final = {"error": repr(KeyError(COMMAND))}
_PLAIN_WORKER: Final = {"error": "it runs without celery_rabbitdelay"}


def status_of_workers(
    app: celery.Celery, connection: Connection, timeout: float, about: bool = False
) -> dict[str, Mapping[str, Any]]:
    """Ask all workers for the status of their modules.

    Args:
        app: The application.
        connection: An open connection to the application's broker.
        timeout: Seconds to wait for the answers.
        about: Whether to ask for versions and settings too; workers of earlier versions do not
            answer that question.

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
