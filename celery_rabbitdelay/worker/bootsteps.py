"""The bootsteps of a worker: ready for delayed tasks on every connection, and the modules."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final

from celery import bootsteps
from celery.worker.components import Pool
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from celery.worker.consumer.tasks import Tasks
from celery.worker.control import inspect_command
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.app.settings import checked_modules
from celery_rabbitdelay.modules.checkin import CheckIn
from celery_rabbitdelay.modules.consumer import Module
from celery_rabbitdelay.modules.distribution import distribute
from celery_rabbitdelay.modules.service import Courier
from celery_rabbitdelay.publishing.declaration import ensure_destination
from celery_rabbitdelay.worker.early_tasks import Relay
from celery_rabbitdelay.worker.restore import GatedStrategies

__all__ = ["DelayLevels", "Gate", "Modules", "prepare"]

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
            delays.topology.identity.fingerprint,
        )


class Gate(bootsteps.StartStopStep):
    """Puts the gate before the worker's tasks, and a relay beside them."""

    requires = (DelayLevels,)

    def include_if(self, consumer: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(consumer.app.rabbitdelay.available)

    def start(self, consumer: Any) -> None:
        """Put the gate up, with a relay for the new connection."""
        if not isinstance(consumer.strategies, GatedStrategies):
            consumer.strategies = GatedStrategies(consumer)
        if consumer.app.rabbitdelay.settings.takeover:
            consumer.strategies.relay = Relay(consumer)
            consumer.strategies.relay.start()

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        """Have the event loop run what the relay cannot do in its own thread."""
        if consumer.strategies.relay is not None:
            consumer.strategies.relay.register(hub)

    def stop(self, consumer: Any) -> None:
        """End the relay of the connection that is lost or closed."""
        strategies = consumer.strategies
        if isinstance(strategies, GatedStrategies) and strategies.relay is not None:
            relay, strategies.relay = strategies.relay, None
            relay.stop()


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
        queue = topology.modules.checkin
        receive = CheckIn(topology, _Allowed(app, settings.checkin_allowed)).receive
    else:
        queue, receive = topology.modules.distribution, distribute
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


class _Allowed:
    """Which destinations check-in may reach.

    Args:
        app: The application.
        patterns: The names of queues and exchanges; None for those that the application knows.
    """

    def __init__(self, app: Any, patterns: Sequence[str] | None) -> None:
        self._app = app
        self._patterns = patterns

    def __call__(self, exchange: str, routing_key: str) -> bool:
        name = exchange or routing_key
        if self._patterns is not None:
            return any(fnmatchcase(name, pattern) for pattern in self._patterns)
        queues = self._app.amqp.queues
        if not exchange:
            return dict.__contains__(queues, name)
        sources = [
            source
            for queue in queues.values()
            for source in (queue.exchange, *(binding.exchange for binding in queue.bindings))
        ]
        return any(source is not None and source.name == name for source in sources)


@inspect_command(name="rabbitdelay_status")
def rabbitdelay_status(state: Any, **options: Any) -> dict[str, dict[str, float]]:
    """Rates and backlog of the modules around the delay levels."""
    couriers: list[Courier] = getattr(state.consumer.controller, "rabbitdelay_couriers", [])
    return {courier.module.name: courier.tally.status() for courier in couriers}
