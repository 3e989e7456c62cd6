"""The bootstep that makes a worker ready for delayed tasks, at its start and after a reconnect."""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps
from celery.worker.consumer.tasks import Tasks
from kombu.common import Broadcast

from celery_rabbitdelay.declaration import declare, ensure_complete, ensure_destination
from celery_rabbitdelay.worker.gate import GatedStrategies

__all__ = ["DelayLevels"]

logger = logging.getLogger(__name__)


class DelayLevels(bootsteps.StartStopStep):
    """Declares the levels, binds the worker's queues, and puts the gate before its tasks.

    Celery starts the steps of its consumer anew on every connection, so that a broker that came
    back empty is made whole again.
    """

    requires = (Tasks,)

    def include_if(self, consumer: Any) -> bool:
        """Leave the step out where the broker is not RabbitMQ."""
        return bool(consumer.app.rabbitdelay.available)

    def start(self, consumer: Any) -> None:
        """Make the worker ready; Celery calls this on every new connection.

        Raises:
            InvalidSetting: A ``rabbitdelay_*`` setting is wrong; the worker ends.
            LayoutConflict: Another layout stands under the prefix; the worker ends.
        """
        delays = consumer.app.rabbitdelay
        with consumer.app.connection_for_write() as connection:
            if delays.settings.declare == "auto":
                # In full, which takes a blink where everything stands: what somebody has deleted
                # by hand is put back.
                declare(connection, delays.topology)
                for queue in consumer.app.amqp.queues.consume_from.values():
                    if not isinstance(queue, Broadcast):
                        ensure_destination(connection, delays.topology, queue)
            else:
                ensure_complete(connection, delays.topology)
        if not isinstance(consumer.strategies, GatedStrategies):
            consumer.strategies = GatedStrategies(consumer.strategies)
        logger.info(
            "Delay levels %r (%s) are in place.",
            delays.topology.prefix,
            delays.topology.fingerprint,
        )
