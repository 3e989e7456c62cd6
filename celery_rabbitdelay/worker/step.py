"""The bootsteps that make a worker ready for delayed tasks, at its start and after a reconnect."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps
from celery.worker.consumer.delayed_delivery import DelayedDelivery
from celery.worker.consumer.tasks import Tasks
from kombu import Connection
from kombu.common import Broadcast

from celery_rabbitdelay.declaration import ensure_destination
from celery_rabbitdelay.worker.gate import GatedStrategies
from celery_rabbitdelay.worker.relay import Relay

__all__ = ["DelayLevels", "Gate", "prepare"]

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
