"""The bootsteps of a worker: ready for delayed tasks on every connection, and the modules."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

from celery import bootsteps
from celery.worker.components import Pool
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from celery.worker.consumer.tasks import Tasks
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.app.settings import checked_modules
from celery_rabbitdelay.modules.allowed import AllowedDestinations
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.consumer import Module
from celery_rabbitdelay.modules.distribution import distribute
from celery_rabbitdelay.modules.service import Courier
from celery_rabbitdelay.publishing.declaration import ensure_destination
from celery_rabbitdelay.worker.early_tasks import EarlyTasks
from celery_rabbitdelay.worker.restore import RestoringStrategies
from celery_rabbitdelay.worker.status import rabbitdelay_status

__all__ = [
    "DelayLevels",
    "Modules",
    "RestoreTasks",
    "allowed_destinations",
    "prepare",
    "rabbitdelay_status",
]

logger = logging.getLogger(__name__)


def prepare(app: Any, connection: Connection) -> None:
    """Make a broker ready for a worker: the levels, and the worker's queues bound to them.

    Where operators declare, it is only looked whether the levels stand.

    Raises:
        LayoutConflict: Another layout stands under the prefix.
        TopologyIncomplete: Something is missing, and must not be declared.
    """
    delays = app.rabbitdelay
    delays.prepare(connection)
    if delays.settings.declare == "auto":
        for queue in app.amqp.queues.consume_from.values():
            if not isinstance(queue, Broadcast):
                ensure_destination(connection, delays.topology, queue)


class DelayLevels(bootsteps.StartStopStep):
    """Declares the levels and binds the worker's queues.

    Celery starts the steps of its consumer anew on every connection, so that a broker that came
    back empty is made whole again.
    """

    requires = (Tasks, DelayedDelivery)

    def include_if(self, consumer: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(consumer.app.rabbitdelay.available)

    def include(self, consumer: Any) -> bool:
        """Stand in for Celery's own step, which would declare its native delayed delivery."""
        included: bool = super().include(consumer)
        if included:
            consumer.steps[:] = [
                step for step in consumer.steps if not isinstance(step, DelayedDelivery)
            ]
        return included

    def start(self, consumer: Any) -> None:
        """Make the broker ready; Celery calls this on every new connection.

        Raises:
            InvalidSetting: A ``rabbitdelay_*`` setting is wrong; the worker ends.
            LayoutConflict: Another layout stands under the prefix; the worker ends.
        """
        delays = consumer.app.rabbitdelay
        with consumer.app.connection_for_write() as connection:
            prepare(consumer.app, connection)
        logger.info(
            "Delay levels %r (%s) are in place.",
            delays.topology.prefix,
            delays.topology.fingerprint,
        )


class RestoreTasks(bootsteps.StartStopStep):
    """Restores each delayed task on its arrival, and puts early tasks into the levels.

    Early tasks are those that arrive before they are due; see :class:`EarlyTasks`.
    """

    requires = (DelayLevels,)

    def include_if(self, consumer: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(consumer.app.rabbitdelay.available)

    def start(self, consumer: Any) -> None:
        """Wrap the execution strategies, and begin to take early tasks of the new connection."""
        if not isinstance(consumer.strategies, RestoringStrategies):
            consumer.strategies = RestoringStrategies(consumer)
        if consumer.app.rabbitdelay.settings.takeover:
            consumer.strategies.early_tasks = EarlyTasks(consumer)
            consumer.strategies.early_tasks.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Let the event loop run what early tasks need from the worker's own thread."""
        if consumer.strategies.early_tasks is not None:
            consumer.strategies.early_tasks.register(hub)

    def stop(self, consumer: Any) -> None:
        """Take no more early tasks of the connection that is lost or closed."""
        strategies = consumer.strategies
        if isinstance(strategies, RestoringStrategies) and strategies.early_tasks is not None:
            early_tasks, strategies.early_tasks = strategies.early_tasks, None
            early_tasks.stop()


#: How many messages a module takes from its queue before they are done. Distribution fewer: one of
#: its messages may be an envelope.
PREFETCH: Final = {"check-in": 1000, "distribution": 300}

#: Seconds after which both sides take a silent connection for lost.
HEARTBEAT: Final = 60


class Modules(bootsteps.StartStopStep):
    """Serves check-in and distribution, each in a thread and on a connection of its own.

    They start after the pool, so that no process of the pool is forked out of them, and go on
    when the worker's own consumer connects anew.

    Args:
        worker: The worker.
        rabbitdelay_modules: What the command line says; None for what the settings say.
        **options: The worker's other options.
    """

    requires = (Pool,)

    def __init__(self, worker: Any, rabbitdelay_modules: str | None = None, **options: Any) -> None:
        self._given = rabbitdelay_modules
        self._couriers: list[Courier] = []
        worker.rabbitdelay_couriers = self._couriers
        super().__init__(worker, **options)

    def include_if(self, worker: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(worker.app.rabbitdelay.available)

    def start(self, worker: Any) -> None:
        """Start the modules.

        Raises:
            InvalidSetting: There is no such module; the worker ends.
        """
        settings = worker.app.rabbitdelay.settings
        modules = settings.modules if self._given is None else checked_modules(self._given)
        self._couriers += [_courier(worker.app, name) for name in modules]
        for courier in self._couriers:
            courier.start()

    def stop(self, worker: Any) -> None:
        """Finish what the modules have begun, and end them."""
        for courier in self._couriers:
            courier.stopping.set()
        while self._couriers:
            self._couriers.pop().stop()


def _courier(app: Any, name: str) -> Courier:
    settings = app.rabbitdelay.settings
    topology = settings.topology
    if name == "check-in":
        queue = topology.checkin
        receive = CheckIn(topology, allowed_destinations(app).includes).receive
    else:
        queue, receive = topology.distribution, distribute
    module = Module(
        name,
        topology,
        queue,
        receive,
        prefetch=min(PREFETCH[name], settings.window),
        window=settings.window,
        timeout=settings.confirm_timeout,
    )
    connection = app.connection_for_write(heartbeat=HEARTBEAT)
    return Courier(module, connection, partial(prepare, app))


def allowed_destinations(app: Any) -> AllowedDestinations:
    """Return where check-in may publish: what the setting says, or else what the queues do.

    The queues are those of the configuration. ``app.amqp.queues`` grows with every queue that the
    application sends to or that the worker is told to consume from.
    """
    patterns = app.rabbitdelay.settings.checkin_allowed
    if patterns is not None:
        return AllowedDestinations.matching(patterns)
    # Where task_queues is unset, Celery makes the default queue.
    return AllowedDestinations.of_queues(app.amqp.Queues(app.conf.task_queues).values())
