"""Celery's ``inspect scheduled`` and ``query_task`` also show the tracked tasks that wait.

No worker holds these, so each worker with a registry answers for all of them. Importing this module
registers the commands in place of Celery's own, which they call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

from celery.worker import control
from celery.worker.control import inspect_command
from kombu.utils.functional import maybe_list

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry.application import has_registry, registry_of
from celery_rabbitdelay.registry.index import Filter, Index, Pending
from celery_rabbitdelay.registry.known_task import Said

logger = logging.getLogger(__name__)

#: How many tasks that wait are shown, the next ones.
MAX_SHOWN: Final = 100

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


def _waiting(
    state: Any, command: str, look_up: Callable[[Index], Iterable[Pending]]
) -> list[dict[str, Any]]:
    """Return tracked tasks that wait, as Celery shows those that a worker holds.

    None without a registry, or while Redis does not answer.
    """
    delays: Delays | None = getattr(state.app, "rabbitdelay", None)
    if delays is None or not has_registry(delays):
        return []
    index = registry_of(delays).index
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
