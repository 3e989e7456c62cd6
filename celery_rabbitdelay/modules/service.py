"""Threads that serve a module, or send probes, on one connection after the other."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any, Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PermissionMissing, PublishError
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.modules.consumer import ConnectionStuck, ModuleConsumer
from celery_rabbitdelay.modules.module import Module, ModuleStatistics
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.kombu_internals import drop_connection
from celery_rabbitdelay.publishing.permissions import permissions_named
from celery_rabbitdelay.publishing.wire import Wire, reading_unreadable_properties

logger = logging.getLogger(__name__)

#: Seconds that a stopping worker waits for the thread to finish the messages it has begun.
STOP_TIMEOUT: Final = 10.0

#: Seconds from the loss of a connection to the first attempt to connect again, and the longest.
RECONNECT_PAUSES: Final = (0.5, 10.0)

#: Other errors that are logged without a traceback.
EXPECTED: Final = (PermissionMissing, PublishError, ConnectionStuck)


class Service(ABC):
    """A thread with connections of its own: when one is lost, it opens the next.

    Attributes:
        name: Its name, for the log.
        timeout: Seconds that an answer of the broker may take.
        max_bytes: The largest message that is read.
        connection: Template; each attempt to connect clones it.
        declare: Called with each new connection, to declare what is needed.
        on_lost: Called when an open connection is lost, or serving fails on it.
        stopping: Set once no more messages are to be taken.
    """

    name: str
    timeout: float
    max_bytes: int
    connection: Connection
    declare: Callable[[Connection], None]
    on_lost: Callable[[], None]
    stopping: Event
    #: Why the last connection was given up.
    _lost: Exception | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = Thread(target=self._run, name=f"rabbitdelay-{self.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more messages, finish those that were begun, and end the thread."""
        self.stopping.set()
        self._thread.join(STOP_TIMEOUT)

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return what it has done, for the worker's status."""

    @property
    @abstractmethod
    def _progress(self) -> int:
        """A number that grows while a connection is of use."""

    @abstractmethod
    def _serve_on(self, connection: Connection) -> bool:
        """Serve on an open connection; return whether everything that was begun is finished."""

    def _run(self) -> None:
        losses = WarningLimit(logger, f"{self.name}: lost connections")
        shortest, longest = RECONNECT_PAUSES
        pause = shortest
        while not self.stopping.is_set():
            progress = self._progress
            try:
                with self.connection.clone() as connection:
                    self._serve(connection)
            except Exception as lost:
                self._lost = lost
                if self._progress > progress or isinstance(lost, ConnectionStuck):
                    pause = shortest
                    losses.forget()
                errors = self.connection.recoverable_connection_errors
                # One kind for all errors that say that the broker is away.
                if losses.allows(OSError if isinstance(lost, errors) else type(lost)):
                    expected = (*errors, *self.connection.channel_errors, *EXPECTED)
                    logger.warning(
                        "rabbitdelay connects again (%s): %s",
                        self.name,
                        lost if isinstance(lost, PermissionMissing) else repr(lost),
                        exc_info=None if isinstance(lost, expected) else lost,
                    )
                self.stopping.wait(pause)
                pause = min(pause * 2, longest)

    def _serve(self, connection: Connection) -> None:
        reading_unreadable_properties(connection, self.max_bytes)
        finished = False
        try:
            connect(connection)
            try:
                with Wire(connection).answers_within(self.timeout):
                    self.declare(connection)
                finished = self._serve_on(connection)
            except Exception:
                self.on_lost()
                raise
        finally:
            if not finished:
                # Without AMQP's handshake, since the broker may not be answering.
                drop_connection(connection)


@dataclass(eq=False, repr=False)
class ModuleService(Service):
    """Serves one module, on connections of its own, until it is stopped.

    Attributes:
        module: The module.
        statistics: The counts of its messages.
    """

    module: Module
    connection: Connection
    declare: Callable[[Connection], None]
    on_lost: Callable[[], None]
    statistics: ModuleStatistics = field(default_factory=ModuleStatistics)
    stopping: Event = field(default_factory=Event)
    #: Destinations that have not answered, on any connection.
    _silent: set[str | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.name, self.timeout = self.module.name, self.module.timeout
        self.max_bytes = self.module.max_bytes

    def status(self) -> dict[str, Any]:
        """Return the counts of its messages."""
        return self.statistics.status()

    @property
    def _progress(self) -> int:
        return self.statistics.finished

    def _serve_on(self, connection: Connection) -> bool:
        logger.info("%s: serving the queue %s.", self.name, self.module.queue.name)
        consumer = ModuleConsumer(
            self.module,
            connection,
            self.statistics,
            self.stopping,
            self._silent,
            # Messages may be redelivered because one of them has crashed a worker.
            careful=not isinstance(self._lost, ConnectionStuck),
        )
        with permissions_named():
            return consumer.serve()
