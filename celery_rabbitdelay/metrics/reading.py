"""A shared cache for the answers of a server, and a connection that queries a broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from threading import Condition, Thread
from typing import Final, Generic, NamedTuple, TypeVar

from amqp.exceptions import AMQPError
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.levels import shown_url, wall_clock
from celery_rabbitdelay.publishing.kombu_internals import connect, drop_connection
from celery_rabbitdelay.publishing.wire import Wire

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The errors if a server cannot be reached, or refuses a request.
AWAY: Final = (OperationalError, AMQPError, OSError, RabbitDelayError)

#: Seconds for the broker to confirm the end of a connection.
CLOSE_TIMEOUT: Final = 1.0


def why(error: Exception) -> str:
    """Return an error as one line, without passwords."""
    line = " ".join(str(error).split()) or type(error).__name__
    return shown_url.without_passwords(line)


class Reading(NamedTuple, Generic[_T]):
    """The result of a query to a server.

    Attributes:
        value: The result of the last successful query; None if no query has succeeded yet.
        taken: When that query began.
        error: Why the latest query failed; None if it succeeded.
    """

    value: _T | None = None
    taken: datetime | None = None
    error: str | None = None


class Readings(Generic[_T]):
    """Caches a reading of a server; the first caller after the period starts a new query.

    One query runs at a time, in its own thread. The caller that starts the query waits for its end.
    All other callers get the previous reading; before the first reading, and after
    :meth:`outdate`, they wait for a query that has begun since then.

    Args:
        look: Queries the server.
        period: Seconds for which a reading is cached.
        patience: The longest wait of a caller, in seconds; None to wait until the query has ended.
    """

    def __init__(
        self, look: Callable[[], _T], period: float, patience: float | None = None
    ) -> None:
        self._look = look
        self._period = period
        self._patience = patience
        self._reading: Reading[_T] | None = None
        self._until = 0.0
        self._changes = self._seen = 0
        self._is_looking = False
        self._changed = Condition()

    def latest(self, patience: float | None = None) -> Reading[_T]:
        """Return the latest reading, or an empty reading if none is ready in time.

        Args:
            patience: The longest wait of this caller, in seconds; None for the default.
        """
        patience = self._patience if patience is None else patience
        with self._changed:
            waits = self._reading is None or self._seen != self._changes
            if not self._is_looking and (waits or time.monotonic() >= self._until):
                Thread(target=self._read, name="rabbitdelay-reading", daemon=True).start()
                self._is_looking = waits = True
            return self.ended(patience) if waits else self._reading or Reading()

    def ended(self, patience: float | None) -> Reading[_T]:
        """Wait for the end of the running or required query; return the latest reading.

        Args:
            patience: The longest wait of this caller, in seconds; None for no limit.
        """
        with self._changed:
            seen = self._seen
            self._changed.wait_for(lambda: not self._is_looking or self._seen > seen, patience)
            return self._reading or Reading()

    def outdate(self) -> None:
        """Let later callers wait for a new query, because the subject of this reading has changed.

        A query that is running may have read the old state: another query follows it.
        """
        with self._changed:
            self._changes += 1

    def _read(self) -> None:
        """Query the server, and again if the subject has changed during the query."""
        is_over = False
        while not is_over:
            changes, reading = self._changes, self._queried()
            with self._changed:
                self._reading, self._seen = reading, changes
                self._until = time.monotonic() + self._period
                is_over = changes == self._changes
                self._is_looking = not is_over
                self._changed.notify_all()

    def _queried(self) -> Reading[_T]:
        before, began = self._reading or Reading[_T](), wall_clock.now()
        try:
            reading = Reading(self._look(), began)
        except AWAY as error:
            reading = before._replace(error=why(error))
            if before.error is None:
                logger.warning("rabbitdelay: cannot query RabbitMQ or Redis: %s", reading.error)
        except Exception:
            logger.exception("rabbitdelay: unexpected error while querying RabbitMQ or Redis")
            reading = before._replace(error="an unexpected error: see the log")
        return reading


class Broker:
    """Asks a broker over a connection that is opened on demand; for one thread at a time.

    Args:
        connection: The template of the connection.
        timeout: Seconds for an answer of the broker.

    Attributes:
        connection: The connection.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        # Heartbeats are off, because nothing sends heartbeats between two questions.
        self.connection = connection.clone(heartbeat=0)
        self._timeout = timeout

    def ask(self, question: Callable[[Connection], _T]) -> _T:
        """Ask a question; repeat it if the connection was lost since the last question.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
            amqp.exceptions.AMQPError: The broker refuses to answer.
            OSError: The broker does not answer in time.
        """
        if self.connection.connected:
            with suppress(*AWAY):
                return self._asked(question)
        return self._asked(question)

    def _asked(self, question: Callable[[Connection], _T]) -> _T:
        try:
            connect(self.connection)
            with Wire(self.connection).answers_within(self._timeout):
                return question(self.connection)
        except BaseException:
            drop_connection(self.connection)
            raise

    def close(self) -> None:
        """Close the connection, even if the broker does not answer."""
        with suppress(*AWAY):
            if self.connection.connected:
                with Wire(self.connection).answers_within(CLOSE_TIMEOUT):
                    self.connection.release()
        drop_connection(self.connection)
