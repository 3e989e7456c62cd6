"""The status of a worker: its modules, how late its delayed tasks were, versions and settings.

The control command ``rabbitdelay_status`` returns the status. Importing this module registers the
command; the bootstep counts the tasks.
"""

from __future__ import annotations

import platform
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import celery
from celery.worker import state as worker_state
from celery.worker.control import inspect_command

from celery_rabbitdelay import __version__
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.instruments import LATENESS, Instrument
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.operations.workers import ABOUT, ARRIVALS, COMMAND
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep, Worker

#: The length of a step in seconds, the number of steps for which a worker remembers its tasks, and
#: the number of steps over which its status shows the maximum lateness.
STEP: Final = 60
STEPS: Final = 60
LATEST_STEPS: Final = 10

#: The upper bounds of the histogram of lateness, in seconds; one more bucket counts later tasks.
BOUNDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)

#: The maximum number of task names with a histogram in a step; other tasks count as :data:`OTHER`.
MOST_TASKS: Final = 200
OTHER: Final = "(other)"

#: The maximum number of running tasks in an answer; the longest-running tasks come first.
MOST_RUNNING: Final = 20

#: The maximum number of characters of a setting in an answer.
MAX_SETTING: Final = 500


@dataclass
class Step:
    """The delayed tasks that a worker gave to Celery to run in one step.

    Attributes:
        received: The number of tasks.
        latest: The maximum lateness of the tasks, in seconds.
        by_task: The histogram of lateness per task name, with the buckets of :data:`BOUNDS`.
    """

    received: int = 0
    latest: float = 0.0
    by_task: dict[str, list[int]] = field(default_factory=dict)


NO_ARRIVALS: Final = Step()


class Arrivals:
    """The number and the lateness of the delayed tasks that a worker gave to Celery to run."""

    def __init__(self) -> None:
        self._received = 0
        #: The remembered steps that had arrivals.
        self._steps: dict[int, Step] = {}

    def __call__(self, values: Mapping[Instrument, float], *labels: str) -> None:
        """Record how late a task is; a listener of :class:`.Recorder`."""
        if LATENESS not in values:
            return
        (task, _), late, now = labels, values[LATENESS], _step_now()
        if now not in self._steps:
            self._steps = {at: step for at, step in self._steps.items() if at > now - STEPS}
        step = self._steps.setdefault(now, Step())
        self._received += 1
        step.received += 1
        step.latest = max(step.latest, late)
        name = task if task in step.by_task or len(step.by_task) < MOST_TASKS else OTHER
        counts = step.by_task.setdefault(name, [0] * (len(BOUNDS) + 1))
        counts[bisect_left(BOUNDS, late)] += 1

    def status(self, in_full: bool = False) -> dict[str, object]:
        """Return the number of tasks, and their recent maximum lateness in seconds.

        Args:
            in_full: Whether to add the history of the last hour, the current minute first: tasks
                (``received_by_minute``), maximum lateness (``by_minute``; None without tasks), and
                the histogram of lateness per task (``late_by_task``, with ``late_bounds``).
        """
        now = _step_now()
        minutes = [self._steps.get(now - ago, NO_ARRIVALS) for ago in range(STEPS)]
        latest = max(step.latest for step in minutes[:LATEST_STEPS])
        status: dict[str, object] = {"received": self._received, "latest": latest}
        if in_full:
            status["by_minute"] = [step.latest if step.received else None for step in minutes]
            status["received_by_minute"] = [step.received for step in minutes]
            status["late_bounds"] = [*BOUNDS]
            late: dict[str, list[int]] = {}
            for step in minutes:
                for task, counts in step.by_task.items():
                    before = late.get(task, [0] * len(counts))
                    late[task] = [*map(sum, zip(before, counts, strict=True))]
            status["late_by_task"] = late
        return status


def _step_now() -> int:
    return int(time.time()) // STEP


class CountArrivals(RabbitMQStep):
    """Counts the delayed tasks of a worker's application in this process, for its status."""

    def start(self, worker: Worker) -> None:
        """Start counting delayed tasks."""
        worker.rabbitdelay_arrivals = Arrivals()
        worker.app.rabbitdelay.recorder.listeners.append(worker.rabbitdelay_arrivals)

    def stop(self, worker: Worker) -> None:
        """Stop counting delayed tasks."""
        worker.app.rabbitdelay.recorder.listeners.remove(worker.rabbitdelay_arrivals)


@inspect_command(name=COMMAND)
def rabbitdelay_status(
    state: Any, about: bool = False, **options: Any
) -> dict[str, dict[str, object]]:
    """Show the counts of the modules around the delay levels, and how late tasks and probes are."""
    worker = state.consumer.controller
    status = {each.name: each.status() for each in getattr(worker, "rabbitdelay_services", ())}
    if hasattr(worker, "rabbitdelay_arrivals"):
        status[ARRIVALS] = worker.rabbitdelay_arrivals.status(about)
    if about:
        status[ABOUT] = {**_about(state.app), **_at_work(state.consumer)}
    return status


def _at_work(consumer: Any) -> dict[str, object]:
    """Return a worker's queues, pool, uptime in seconds, and running tasks."""
    controller = consumer.controller
    tasks = getattr(consumer, "task_consumer", None)
    running = sorted(worker_state.active_requests, key=lambda request: request.time_start or 0)
    now = time.time()  # as Celery's time_start
    return {
        "queues": sorted(queue.name for queue in (tasks.queues if tasks else ())),
        "processes": getattr(controller.pool, "num_processes", None),
        "uptime": controller.info()["uptime"],
        "running": [
            {"name": request.name, "seconds": max(now - (request.time_start or now), 0.0)}
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
