"""``app.rabbitdelay``: the delay levels of one Celery application."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import celery
from kombu import Connection
from kombu.transport import pyamqp
from kombu.utils.objects import cached_property

from celery_rabbitdelay.declaration import declare, ensure_complete, on_declared
from celery_rabbitdelay.publisher import Publisher
from celery_rabbitdelay.publisher_pool import PublisherPool
from celery_rabbitdelay.settings import Settings
from celery_rabbitdelay.topology import Topology

__all__ = ["RabbitDelay", "speaks_amqp"]

logger = logging.getLogger(__name__)


class RabbitDelay:
    """``app.rabbitdelay``: the delay levels of one application.

    Args:
        app: The application; its configuration is read when it is first needed.
    """

    def __init__(self, app: celery.Celery) -> None:
        self.app = app
        self._has_warned = False

    @cached_property
    def settings(self) -> Settings:
        """The application's ``rabbitdelay_*`` settings.

        Raises:
            InvalidSetting: One of them is wrong.
        """
        namespace: str | None = getattr(self.app, "namespace", None)
        return Settings.of(self.app.conf, namespace)

    @property
    def topology(self) -> Topology:
        """The levels as exchanges, queues and bindings; ``topology.route(delay, queue_name)``."""
        return self.settings.topology

    @cached_property
    def pool(self) -> PublisherPool:
        """The confirmed publishers of this process, as many as ``broker_pool_limit``."""
        return PublisherPool(self.app.connection_for_write(), self.app.conf.broker_pool_limit)

    @cached_property
    def available(self) -> bool:
        """Whether the application's broker is RabbitMQ, spoken to by py-amqp."""
        return speaks_amqp(self.app.connection_for_write())

    def warn_of_countdown(self, why: str) -> None:
        """Log that a delay does not wait in the levels but is what Celery's countdown is; once.

        Args:
            why: The reason, and what happens to the task.
        """
        if not self._has_warned:
            self._has_warned = True
            logger.warning("A delay is treated as Celery's own countdown: %s.", why)

    def close(self) -> None:
        """Close the connections of the pool."""
        if "pool" in self.__dict__:
            self.pool.close()

    @contextmanager
    def publisher(self, connection: Connection | None = None) -> Iterator[Publisher]:
        """Borrow a confirmed publisher.

        Args:
            connection: The caller's own connection, to be used instead of the pool's.

        Raises:
            NoPublisherFree: All of the pool were in use for ``rabbitdelay_confirm_timeout``.
        """
        if connection is None:
            with self.pool.acquire(self.settings.confirm_timeout) as publisher:
                yield publisher
        else:
            publisher = Publisher(connection)
            try:
                yield publisher
            finally:
                publisher.close_channel()

    def prepare(self, connection: Connection) -> None:
        """Make the levels stand on a broker, as a worker does on each new connection.

        In full, which takes a blink where everything stands: what somebody has deleted by hand is
        put back. Where operators declare, it is only checked.

        Raises:
            LayoutConflict: Another layout stands under the prefix.
            TopologyIncomplete: Something is missing, and must not be declared.
        """
        if self.settings.declare == "auto":
            declare(connection, self.topology)
        else:
            ensure_complete(connection, self.topology)

    def make_ready(self, queue_name: str, message_count: int, consumer_count: int) -> None:
        """Make a queue that was just declared ready for delayed tasks: kombu's ``on_declared``."""
        if self.available and self.settings.declare == "auto":
            with self.app.connection_for_write() as connection:
                queue = self.app.amqp.queues.get(queue_name)
                if queue is not None:
                    # Tasks may be sent to another broker than the one that it was declared on.
                    queue = queue(connection)
                    queue.on_declared = None
                    queue.declare()
                hook = on_declared(connection, self.topology)
                hook(queue_name, message_count, consumer_count)


def speaks_amqp(connection: Connection) -> bool:
    """Return whether a connection goes to an AMQP broker, by py-amqp."""
    return isinstance(connection.transport, pyamqp.Transport)
