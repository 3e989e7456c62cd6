"""The bootsteps by which a worker asks the registry, and returns what was paused."""

from __future__ import annotations

from typing import Any

from celery_rabbitdelay.registry import inspect  # noqa: F401 - registers control commands
from celery_rabbitdelay.registry.application import has_registry
from celery_rabbitdelay.registry.decisions import Decisions
from celery_rabbitdelay.registry.resumes import Resumes
from celery_rabbitdelay.worker.bootsteps import Modules, RestoreTasks
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep


class DecideOnArrival(RabbitMQStep):
    """Asks the registry about each delayed task that is due; see :class:`.Decisions`."""

    requires = (RestoreTasks,)

    def __init__(self, consumer: Any, **options: Any) -> None:
        self._decisions: Decisions | None = None
        super().__init__(consumer, **options)

    def start(self, consumer: Any) -> None:
        """Begin to ask about the tasks of a new connection."""
        if not has_registry(consumer.app.rabbitdelay):
            return
        strategies = consumer.strategies
        self._decisions = strategies.decisions = Decisions(consumer, strategies.early_tasks)
        self._decisions.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Let the event loop run what the thread needs from the worker's own thread."""
        if self._decisions is not None:
            self._decisions.register(hub)

    def stop(self, consumer: Any) -> None:
        """Ask nothing more about tasks of the connection that is lost or closed."""
        decisions, self._decisions = self._decisions, None
        if decisions is not None:
            consumer.strategies.decisions = None
            decisions.stop()


class ReturnPaused(RabbitMQStep):
    """Returns tasks to their queues after a resume; see :class:`.Resumes`."""

    requires = (Modules,)

    def __init__(self, worker: Any, **options: Any) -> None:
        self._resumes: Resumes | None = None
        super().__init__(worker, **options)

    def start(self, worker: Any) -> None:
        """Begin to look for what was paused and is not any more."""
        if has_registry(worker.app.rabbitdelay):
            self._resumes = Resumes(worker.app.rabbitdelay)
            self._resumes.start()

    def stop(self, worker: Any) -> None:
        """Return nothing more."""
        resumes, self._resumes = self._resumes, None
        if resumes is not None:
            resumes.stop()
