"""What the application needs of the broker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kombu import Queue

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels.topology import Topology


@dataclass(frozen=True)
class Application:
    """The topology, and how an application uses it.

    Attributes:
        topology: The topology.
        destinations: The queues that tasks are sent to, with their arguments.
        may_declare: Whether the application declares what is missing (``rabbitdelay_declare``).
        modules: Which modules its workers serve, of "check-in" and "distribution".
        may_refuse: Glob patterns for the names of queues that are known to refuse messages.
        early_tolerance: Seconds that clocks may differ before a worker puts due tasks back.
    """

    topology: Topology
    destinations: tuple[Queue, ...] = ()
    may_declare: bool = True
    modules: Sequence[str] = ("check-in", "distribution")
    may_refuse: Sequence[str] = ()
    early_tolerance: float = 1.0

    @classmethod
    def of(cls, delays: RabbitDelay) -> Application:
        """Return what a Celery application needs, by its settings and ``task_queues``."""
        settings = delays.settings
        return cls(
            topology=delays.topology,
            destinations=tuple(delays.app.amqp.queues.values()),
            may_declare=settings.declare == "auto",
            modules=settings.modules,
            may_refuse=settings.may_refuse,
            early_tolerance=settings.early_tolerance,
        )
