"""The bootstep by which a worker serves schedules."""

from __future__ import annotations

from typing import Any

from celery_rabbitdelay.levels.headers import SCHEDULE
from celery_rabbitdelay.schedules.arrivals import Arrivals
from celery_rabbitdelay.schedules.occurrence import OVERDUE
from celery_rabbitdelay.worker.bootsteps import RestoreTasks
from celery_rabbitdelay.worker.celery_internals import RabbitMQStep


class ScheduleStep(RabbitMQStep):
    """Takes occurrences of schedules before they run, on every connection of the consumer."""

    requires = (RestoreTasks,)

    def __init__(self, consumer: Any, **options: Any) -> None:
        self._arrivals: Arrivals | None = None
        super().__init__(consumer, **options)

    def start(self, consumer: Any) -> None:
        """Begin to take occurrences, and to look for those that do not come."""
        strategies = consumer.strategies
        if strategies.decisions is not None:
            arrivals = self._arrivals = Arrivals(consumer, strategies.early_tasks)
            arrivals.start()
            strategies.decisions.takers[SCHEDULE] = arrivals.take
            consumer.app.rabbitdelay.recorder.gauges[OVERDUE] = lambda: arrivals.overdue

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Let the event loop run what the thread needs from the worker's own thread."""
        if self._arrivals is not None:
            self._arrivals.register(hub)

    def stop(self, consumer: Any) -> None:
        """Take no more occurrences of the connection that is lost or closed."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            consumer.app.rabbitdelay.recorder.gauges.pop(OVERDUE, None)
            arrivals.stop()
