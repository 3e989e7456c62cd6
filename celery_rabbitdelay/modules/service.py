"""A thread that serves a module, on one connection after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PermissionMissing, PublishError
from celery_rabbitdelay.modules.attempts import ModuleStatistics
from celery_rabbitdelay.modules.consumer import ConnectionStuck, Module, ModuleConsumer
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.publishing.kombu_internals import drop_connection
from celery_rabbitdelay.publishing.permissions import permissions_named
from celery_rabbitdelay.publishing.wire import Wire

logger = logging.getLogger(__name__)

#: Seconds that a stopping worker waits for the thread to finish the messages it has begun.
STOP_TIMEOUT: Final = 10.0

#: Seconds from the loss of a connection to the first attempt to connect again, and the longest.
RECONNECT_PAUSES: Final = (0.5, 10.0)

#: Other errors that are logged without a traceback.
EXPECTED: Final = (PermissionMissing, PublishError, ConnectionStuck)


@dataclass(eq=False, repr=False)
class ModuleService:
    """Serves one module, on connections of its own, until it is stopped.

    Attributes:
        module: The module.
        connection: Template; each attempt to connect clones it.
        declare: Called with each new connection, to declare what the module needs.
        on_lost: Called when an open connection is lost, or the module fails on it.
        statistics: The counts of its messages.
        stopping: Set once no more messages are to be taken.
    """

    module: Module
    connection: Connection
    declare: Callable[[Connection], None]
    on_lost: Callable[[], None]
    statistics: ModuleStatistics = field(default_factory=ModuleStatistics)
    stopping: Event = field(default_factory=Event)
    #: Destinations that have not answered, on any connection.
    _silent: set[str | None] = field(default_factory=set)
    #: Whether messages may be redelivered because one of them has crashed a worker.
    _careful: bool = True

    def start(self) -> None:
        """Start the thread."""
        name = f"rabbitdelay-{self.module.name}"
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more messages, finish those that were begun, and end the thread."""
        self.stopping.set()
        self._thread.join(STOP_TIMEOUT)

    def _run(self) -> None:
        shortest, longest = RECONNECT_PAUSES
        pause = shortest
        while not self.stopping.is_set():
            finished = self.statistics.finished
            try:
                with self.connection.clone() as connection:
                    self._serve(connection)
            except Exception as lost:
                self._careful = not isinstance(lost, ConnectionStuck)
                if self.statistics.finished > finished or not self._careful:
                    pause = shortest
                errors = self.connection.recoverable_connection_errors
                expected = (*errors, *self.connection.channel_errors, *EXPECTED)
                logger.warning(
                    "%s: connects again in %.1f s: %s",
                    self.module.name,
                    pause,
                    lost if isinstance(lost, PermissionMissing) else repr(lost),
                    exc_info=not isinstance(lost, expected),
                )
                self.stopping.wait(pause)
                pause = min(pause * 2, longest)

    def _serve(self, connection: Connection) -> None:
        reading_unreadable_properties(connection, self.module.max_bytes)
        finished = False
        try:
            connect(connection)
            finished = self._serve_on(connection)
        finally:
            if not finished:
                # Without AMQP's handshake, since the broker may not be answering.
                drop_connection(connection)

    def _serve_on(self, connection: Connection) -> bool:
        try:
            with Wire(connection).answers_within(self.module.timeout):
                self.declare(connection)
                logger.info("%s: serving the queue %s.", self.module.name, self.module.queue.name)
            consumer = ModuleConsumer(
                self.module,
                connection,
                self.statistics,
                self.stopping,
                self._silent,
                self._careful,
            )
            with permissions_named():
                return consumer.serve()
        except Exception:
            self.on_lost()
            raise
