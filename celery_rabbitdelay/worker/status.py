"""The control command ``rabbitdelay_status``: what a worker answers, and how to ask all workers.

Celery's command line lists the control commands that its own process has imported, so the
command group of this package imports this module, as a worker's bootsteps do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import celery
from celery.worker.control import inspect_command
from kombu import Connection

from celery_rabbitdelay.modules.service import ModuleService
from celery_rabbitdelay.worker.restore import RestoringStrategies

#: The control command, by which ``celery inspect`` and ``control.broadcast`` call it.
COMMAND: Final = "rabbitdelay_status"

#: Beside the names of the modules: the delayed tasks that have arrived at the worker.
ARRIVALS: Final = "tasks"


@inspect_command(name=COMMAND)
def rabbitdelay_status(state: Any, **options: Any) -> dict[str, dict[str, float]]:
    """Rates and backlog of the modules around the delay levels; how late delayed tasks arrive."""
    consumer = state.consumer
    services: list[ModuleService] = getattr(consumer.controller, "rabbitdelay_services", [])
    status = {each.module.name: each.statistics.status() for each in services if each.has_queue}
    if isinstance(consumer.strategies, RestoringStrategies):
        status[ARRIVALS] = consumer.strategies.arrivals.status()
    return status


def status_of_workers(
    app: celery.Celery, connection: Connection, timeout: float
) -> dict[str, Mapping[str, Any]]:
    """Ask all workers for the status of their modules.

    Args:
        app: The application.
        connection: An open connection to its broker.
        timeout: Seconds to wait for the answers.

    Returns:
        The answer of each worker by the worker's name: the counts of each module by the module's
        name, and those of :data:`ARRIVALS`; or ``{"error": reason}`` where the worker has no such
        command.
    """
    answers = app.control.broadcast(COMMAND, reply=True, timeout=timeout, connection=connection)
    return {worker: answer for each in answers or () for worker, answer in each.items()}
