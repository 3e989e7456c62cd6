"""How many messages wait on the broker, asked so that nobody who wants to know is held up."""

from __future__ import annotations

import time
from threading import Condition, Thread
from typing import Final

from amqp.exceptions import AMQPError
from celery.utils.log import get_logger
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.backlog import Backlog, backlog_of
from celery_rabbitdelay.publishing.declaration import connect
from celery_rabbitdelay.publishing.kombu_internals import drop_connection
from celery_rabbitdelay.publishing.wire import Wire

logger = get_logger(__name__)

#: Seconds for which an answer of the broker is good enough, and for which it is told at all.
FRESH: Final = 5.0
STALE: Final = 60.0

#: Seconds that whoever asks waits for a new answer.
PATIENCE: Final = 1.0

#: Seconds that the broker has for its answers.
TIMEOUT: Final = 10.0

#: Seconds between two warnings that it does not answer.
WARN_EVERY: Final = 60.0

#: Seconds after which the connection is closed if nobody has asked.
IDLE: Final = 120.0


#: Raised where the broker cannot be reached, does not answer, or refuses to.
BROKER_ERRORS: Final = (OperationalError, AMQPError, OSError)


class BacklogReader:
    """Asks the broker in a thread and on a connection of its own, when somebody wants to know.

    An answer serves everybody for :data:`FRESH` seconds. If a new one takes longer than
    :data:`PATIENCE`, the former one is told, until it is :data:`STALE`.

    Args:
        connection: Template; each attempt to connect clones it.
        topology: The topology; nothing is declared.
    """

    def __init__(self, connection: Connection, topology: Topology) -> None:
        self._template = connection
        self._topology = topology
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_wanted = self._stopping = False
        self._answered_at = -STALE
        #: When the broker was last asked without success.
        self._failed_at = -FRESH
        self._warned_at = -WARN_EVERY
        self._backlog: Backlog | None = None

    def read(self) -> Backlog | None:
        """Return what waits; None if the broker has not answered for a while."""
        with self._changed:
            if not self._is_fresh() and not self._stopping:
                self._is_wanted = True
                self._start()
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_wanted, PATIENCE)
            is_stale = time.monotonic() - self._answered_at > STALE
            return None if is_stale else self._backlog

    def stop(self) -> None:
        """End the thread, and close its connection."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _is_fresh(self) -> bool:
        return time.monotonic() - max(self._answered_at, self._failed_at) < FRESH

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._run, name="rabbitdelay-backlog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._is_asked(None):
            try:
                self._serve()
            except BROKER_ERRORS as error:
                self._warn(error)
                self._answer(None)

    def _warn(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARN_EVERY:
            self._warned_at = now
            logger.warning("The metrics cannot tell what waits on the broker: %s", error)

    def _serve(self) -> None:
        """Answer on one connection, until nobody has asked for long."""
        # Without heartbeats: nobody may ask for longer than they allow.
        connection = self._template.clone(heartbeat=0)
        try:
            connect(connection)
            is_asked = True
            while is_asked:
                with Wire(connection).answers_within(TIMEOUT):
                    backlog = backlog_of(connection, self._topology)
                self._answer(backlog)
                is_asked = self._is_asked(IDLE)
            connection.release()
        finally:
            # Without AMQP's handshake, since the broker may not be answering.
            drop_connection(connection)

    def _is_asked(self, seconds: float | None) -> bool:
        """Wait until somebody asks; return False after some time, or when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_wanted or self._stopping, seconds)
            return self._is_wanted and not self._stopping

    def _answer(self, backlog: Backlog | None) -> None:
        with self._changed:
            now = time.monotonic()
            if backlog is None:
                self._failed_at = now
            else:
                self._backlog, self._answered_at = backlog, now
            self._is_wanted = False
            self._changed.notify_all()
