"""Threads that serve a module, or send probes, on one connection after the other."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any, Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PermissionMissing, PublishError
from celery_rabbitdelay.levels.warning_limit import WARN_EVERY
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


class Losses:
    """Logs lost connections: one line for all modules that lose theirs together.

    A module that cannot connect is named again after :data:`.WARN_EVERY` seconds, or if the error
    is of another kind.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._lost: dict[str, tuple[Exception, type[Exception], bool]] = {}
        self._logged: dict[tuple[str, type[Exception]], float] = {}

    def lost(self, name: str, error: Exception, kind: type[Exception], is_expected: bool) -> None:
        """Note that a module connects again, without logging it yet.

        Args:
            name: Its name.
            error: Why.
            kind: Its kind; one for all that says that the broker is away.
            is_expected: Whether to leave out the traceback.
        """
        with self._lock:
            self._lost[name] = error, kind, is_expected

    def connected(self, name: str) -> None:
        """Note that a module is connected."""
        with self._lock:
            self._lost.pop(name, None)

    def was_of_use(self, name: str) -> None:
        """Note that the last connection of a module was of use: its loss is logged anew."""
        with self._lock:
            self._logged = {key: at for key, at in self._logged.items() if key[0] != name}

    def log(self) -> None:
        """Log what was lost and not logged lately."""
        now = time.monotonic()
        with self._lock:
            lost = dict(self._lost)
            keys = {(name, kind): now for name, (_, kind, _) in lost.items()}
            is_new = any(now - self._logged.get(key, -math.inf) >= WARN_EVERY for key in keys)
            if is_new:
                self._logged.update(keys)
        if not is_new:
            return
        shown = {
            str(error) if isinstance(error, PermissionMissing) else repr(error): None
            for error, _, _ in lost.values()
        }
        unexpected = next(
            (error for error, _, is_expected in lost.values() if not is_expected), None
        )
        names, why = ", ".join(sorted(lost)), "; ".join(shown)
        logger.warning("rabbitdelay connects again (%s): %s", names, why, exc_info=unexpected)


#: Those of this process.
_losses: Final = Losses()


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
        shortest, longest = RECONNECT_PAUSES
        pause = shortest
        while not self.stopping.is_set():
            progress = self._progress
            try:
                with self.connection.clone() as connection:
                    self._serve(connection)
            except Exception as lost:  # noqa: BLE001 - logged below, together with the other modules'
                self._lost = lost
                if self._progress > progress or isinstance(lost, ConnectionStuck):
                    pause = shortest
                    _losses.was_of_use(self.name)
                errors = self.connection.recoverable_connection_errors
                expected = (*errors, *self.connection.channel_errors, *EXPECTED)
                kind = OSError if isinstance(lost, errors) else type(lost)
                _losses.lost(self.name, lost, kind, isinstance(lost, expected))
                # The other modules lose their connections in the meantime.
                self.stopping.wait(pause)
                _losses.log()
                pause = min(pause * 2, longest)

    def _serve(self, connection: Connection) -> None:
        reading_unreadable_properties(connection, self.max_bytes)
        finished = False
        try:
            connect(connection)
            try:
                with Wire(connection).answers_within(self.timeout):
                    self.declare(connection)
                _losses.connected(self.name)
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
