"""Control commands: ``rabbitdelay_status``, and those of Celery that have to show more, or less.

``celery inspect scheduled`` and ``query_task`` also show the tracked tasks that wait in the levels:
no worker holds these, so each worker with a registry answers for all of them. ``celery inspect
conf`` hides the passwords in all URLs. Importing this module registers the commands in place of
Celery's own, which they call. Celery's command line lists the control commands that its own process
has imported, so the command group of this package imports this module, as a worker's bootsteps do.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

import celery
from celery.utils.serialization import strtobool
from celery.worker import control
from celery.worker.control import inspect_command
from kombu.utils.functional import maybe_list

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app.control import ABOUT, ARRIVALS, COMMAND
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.known_task import Said
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.shown_url import without_passwords_in
from celery_rabbitdelay.modules.service import Service
from celery_rabbitdelay.registry.index import Filter, Index, Pending
from celery_rabbitdelay.worker.restore import RestoringStrategies

logger = logging.getLogger(__name__)

#: How many tasks that wait are shown, the next ones.
MAX_SHOWN: Final = 100

#: The most characters of a setting in an answer.
MAX_SETTING: Final = 500

#: The priority that Celery shows for tasks that a worker holds for their eta.
PRIORITY: Final = 6

_celerys: Final[Any] = control


@inspect_command(name="scheduled", alias="dump_schedule")
def scheduled(state: Any, **options: Any) -> list[Mapping[str, Any]]:
    """List of currently scheduled ETA/countdown tasks, and of tracked tasks that wait next."""
    held: list[Mapping[str, Any]] = _celerys.scheduled(state, **options)
    waiting = _waiting(state, "scheduled", lambda index: islice(index.pending(Filter()), MAX_SHOWN))
    return [*held, *waiting]


@inspect_command(name="query_task", variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: Any, **options: Any) -> dict[str, Any]:
    """Query for task information by id, also of tracked tasks that wait."""
    found: dict[str, Any] = _celerys.query_task(state, ids, **options)
    missing = [task_id for task_id in maybe_list(ids) or () if task_id not in found]
    waiting = _waiting(state, "query_task", lambda index: index.tasks(missing)) if missing else []
    requests = [each["request"] for each in waiting]
    return {**found, **{each["id"]: ("scheduled", each) for each in requests}}


@inspect_command(
    name="conf",
    alias="dump_conf",
    signature="[include_defaults=False]",
    args=[("with_defaults", strtobool)],
)
def conf(state: Any, with_defaults: bool = False, **options: Any) -> dict[str, Any]:
    """List configuration, without passwords."""
    shown: dict[str, Any] = _celerys.conf(state, with_defaults, **options)
    # Each is for itself: Celery has hidden the texts under names such as "password".
    return {name: without_passwords_in(value) for name, value in shown.items()}


def _waiting(
    state: Any, command: str, look_up: Callable[[Index], Iterable[Pending]]
) -> list[dict[str, Any]]:
    """Return tracked tasks that wait, as Celery shows those that a worker holds.

    None without a registry, or while Redis does not answer.
    """
    delays = getattr(state.app, "rabbitdelay", None)
    if delays is None or not delays.has_registry:
        return []
    index = delays.registry.index
    try:
        tasks = list(look_up(index))
        messages = index.short_messages([each.task_id for each in tasks])
    except RegistryUnavailable as error:
        logger.warning("inspect %s: tasks in the levels are not shown: %s", command, error)
        return []
    return [
        _shown(task, Said.by(message), state.hostname)
        for task, message in zip(tasks, messages, strict=True)
    ]


def _shown(task: Pending, said: Said, hostname: str) -> dict[str, Any]:
    """Return a task as Celery shows one that this worker holds."""
    eta = task.due.isoformat()
    request = {
        "id": task.task_id,
        "name": said.shadow or task.task,
        "args": said.args,
        "kwargs": said.kwargs,
        "type": task.task,
        "hostname": hostname,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {
            "exchange": said.exchange,
            "routing_key": said.routing_key,
            "priority": said.priority,
            "redelivered": False,
        },
        "worker_pid": None,
        "eta": eta,
        "key": task.key,
        "job": task.job,
    }
    return {"eta": eta, "priority": PRIORITY, "request": request}


@inspect_command(name=COMMAND, signature="[about=False]", args=[(ABOUT, strtobool)])
def rabbitdelay_status(
    state: Any, about: bool = False, **options: Any
) -> dict[str, dict[str, Any]]:
    """Rates and backlog of the modules around the delay levels; how late tasks and probes are."""
    consumer = state.consumer
    services: list[Service] = getattr(consumer.controller, "rabbitdelay_services", [])
    status = {each.name: each.status() for each in services}
    if isinstance(consumer.strategies, RestoringStrategies):
        status[ARRIVALS] = consumer.strategies.arrivals.status()
        if about:
            status[ARRIVALS]["by_minute"] = consumer.strategies.arrivals.by_minute()
    if about:
        status[ABOUT] = _about(state.app)
    return status


def _about(app: DelayingCelery) -> dict[str, Any]:
    """Return the versions of a worker, and its settings as text, without secrets."""
    versions = {
        "celery_rabbitdelay": __version__,
        "celery": celery.__version__,
        "python": platform.python_version(),
    }
    delays = getattr(app, "rabbitdelay", None)
    if delays is None:
        return {"versions": versions, "settings": {}}
    settings: Settings = delays.settings
    layout = settings.topology.layout
    # The same layout may be written in several ways.
    levels = ", ".join(f"{level.name} to {level.base - 1}" for level in layout.levels)
    shown = {**settings.shown, "layout": f"{layout.name}, zeros {layout.zeros}: {levels}"}
    return {
        "versions": versions,
        "settings": {
            name: (value if isinstance(value, str) else repr(value))[:MAX_SETTING]
            for name, value in shown.items()
        },
    }
