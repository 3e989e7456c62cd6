"""Control commands: ``rabbitdelay_status``, and Celery's ``conf`` without passwords.

Importing this module registers the commands; ``conf`` replaces and calls Celery's own. Celery's
command line lists only the control commands that its own process has imported, so the command group
of this package imports this module, as a worker's bootsteps do.
"""

from __future__ import annotations

import logging
import platform
import time
from typing import Any, Final

import celery
from celery.utils.serialization import strtobool
from celery.worker import control
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app.control import ABOUT, ARRIVALS, COMMAND
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.levels.shown_url import without_passwords_in
from celery_rabbitdelay.modules.service import Service
from celery_rabbitdelay.worker.restore import RestoringStrategies

logger = logging.getLogger(__name__)

#: Maximum running tasks in an answer; the longest-running tasks come first.
MOST_RUNNING: Final = 20

#: Maximum characters of a setting in an answer.
MAX_SETTING: Final = 500

_celerys: Final[Any] = control


@inspect_command(
    name="conf",
    alias="dump_conf",
    signature="[include_defaults=False]",
    args=[("with_defaults", strtobool)],
)
def conf(state: object, with_defaults: bool = False, **options: object) -> dict[str, object]:
    """List configuration, without passwords."""
    shown: dict[str, object] = _celerys.conf(state, with_defaults, **options)
    # Celery has already hidden the values of names such as "password".
    return {name: without_passwords_in(value) for name, value in shown.items()}


@inspect_command(name=COMMAND, signature="[about=False]", args=[(ABOUT, strtobool)])
def rabbitdelay_status(
    state: Any, about: bool = False, **options: Any
) -> dict[str, dict[str, object]]:
    """Show the counts of the modules around the delay levels, and how late tasks and probes are."""
    consumer = state.consumer
    services: list[Service] = getattr(consumer.controller, "rabbitdelay_services", [])
    status = {service.name: service.status() for service in services}
    if isinstance(consumer.strategies, RestoringStrategies):
        status[ARRIVALS] = consumer.strategies.arrivals.status(about)
    if about:
        status[ABOUT] = {**_about(state.app), **_at_work(consumer)}
    return status


def _at_work(consumer: Any) -> dict[str, object]:
    """Return a worker's queues, pool, uptime in seconds, and running tasks."""
    controller = consumer.controller
    tasks = getattr(consumer, "task_consumer", None)
    running = sorted(worker_state.active_requests, key=lambda request: request.time_start or 0)
    now = time.monotonic()
    return {
        "queues": sorted(queue.name for queue in (tasks.queues if tasks else ())),
        "processes": getattr(controller.pool, "num_processes", None),
        "uptime": controller.info()["uptime"],
        "running": [
            {"name": request.name, "seconds": now - (request.time_start or now)}
            for request in running[:MOST_RUNNING]
        ],
    }


def _about(app: DelayingCelery) -> dict[str, object]:
    """Return a worker's versions, and its settings as text, without secrets."""
    versions = {
        "celery_rabbitdelay": __version__,
        "celery": celery.__version__,
        "python": platform.python_version(),
    }
    settings: Settings = app.rabbitdelay.settings
    layout = settings.topology.layout
    # A layout can be set in several ways, so its levels are shown.
    levels = ", ".join(f"{level.name} to {level.base - 1}" for level in layout.levels)
    shown = {**settings.shown, "layout": f"{layout.name}, zeros {layout.zeros}: {levels}"}
    return {
        "versions": versions,
        "settings": {
            name: (value if isinstance(value, str) else repr(value))[:MAX_SETTING]
            for name, value in shown.items()
        },
    }
