"""A thread that serves a module, on one connection after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event, Thread
from typing import Any, Final

from kombu import Connection

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.modules.consumer import Module, Session
from celery_rabbitdelay.modules.statistics import Tally
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.wire import frame_handler

__all__ = ["Courier"]

logger = logging.getLogger(__name__)

#: Seconds that a worker which stops leaves the thread to finish what it has begun.
FAREWELL: Final = 10.0

#: Seconds between the loss of a connection and the next attempt, and the longest.
RECONNECT: Final = (0.5, 10.0)


class Courier:
    """Serves one module, on connections of its own, until it is stopped.

    Args:
        module: The module.
        connection: Where to; connections like it are opened.
        declare: Called with each new connection, to declare what the module needs.
        on_lost: Called when an open connection is lost, or the module fails on it.
    """

    def __init__(
        self,
        module: Module,
        connection: Connection,
        declare: Callable[[Connection], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.module = module
        self.tally = Tally()
        self.stopping = Event()
        self._connection = connection
        self._declare = declare
        self._on_lost = on_lost
        self._thread = Thread(target=self._run, name=f"rabbitdelay-{module.name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Take no more messages, finish those that were begun, and end."""
        self.stopping.set()
        self._thread.join(FAREWELL)

    def _run(self) -> None:
        shortest, longest = RECONNECT
        pause = shortest
        while not self.stopping.is_set():
            finished = self.tally.finished
            try:
                with self._connection.clone() as connection:
                    self._serve(connection)
            except Exception as lost:
                if self.tally.finished > finished:
                    pause = shortest
                expected = (*self._connection.recoverable_connection_errors, PublishError)
                details = not isinstance(lost, (*expected, *self._connection.channel_errors))
                logger.warning(
                    "%s: begins anew in %.1f s: %r", self.module.name, pause, lost, exc_info=details
                )
                self.stopping.wait(pause)
                pause = min(pause * 2, longest)

    def _serve(self, connection: Connection) -> None:
        options = connection.transport_options or {}
        connection.transport_options = {**options, "frame_handler": frame_handler}
        served = False
        try:
            connect(connection)
            served = self._serve_on(connection)
        finally:
            if not served:
                # Without a word to the broker, which may not be listening.
                connection.collect(socket_timeout=0.1)

    def _serve_on(self, connection: Connection) -> bool:
        try:
            transport: Any = connection.connection
            with transport.transport.having_timeout(self.module.timeout):
                self._declare(connection)
            logger.info("%s: serving the queue %s.", self.module.name, self.module.queue.name)
            return Session(self.module, connection, self.tally, self.stopping).serve()
        except Exception:
            self._on_lost()
            raise
