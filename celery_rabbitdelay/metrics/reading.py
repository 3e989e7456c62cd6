"""A look at a server that is shared by all who ask, and the connection that it is taken over."""

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

#: What is raised if a server cannot be reached, or refuses.
AWAY: Final = (OperationalError, AMQPError, OSError, RabbitDelayError)

#: Seconds that the broker has to confirm the end of a connection.
CLOSE_TIMEOUT: Final = 1.0


def why(error: Exception) -> str:
    """Return an error as one line, without passwords."""
    line = " ".join(str(error).split()) or type(error).__name__
    return shown_url.without_passwords(line)


class Reading(NamedTuple, Generic[_T]):
    """What a look has shown.

    Attributes:
        value: What the last successful look has shown; None if there was none.
        taken: When that look succeeded.
        error: Why the latest look has failed; None if it has not.
    """

    value: _T | None = None
    taken: datetime | None = None
    error: str | None = None


class Readings(Generic[_T]):
    """Caches what a look at a server shows; a caller after the period starts a new look.

    There is one look at a time, in a thread of its own. The caller that starts it waits for it. All
    others get the previous reading, or wait as well if there is none.

    Args:
        look: Looks at the server.
        period: Seconds for which a reading is new enough.
        patience: Seconds for which a caller waits at most; None: until the look has ended.
    """

    def __init__(
        self, look: Callable[[], _T], period: float, patience: float | None = None
    ) -> None:
        self._look = look
        self._period = period
        self._patience = patience
        self._reading: Reading[_T] | None = None
        self._until = 0.0
        self._is_looking = False
        self._changed = Condition()

    def latest(self, patience: float | None = None) -> Reading[_T]:
        """Return the latest reading, or an empty reading if none is ready in time.

        Args:
            patience: Seconds for which this caller waits at most, instead of those of all others.
        """
        patience = self._patience if patience is None else patience
        with self._changed:
            starts = not self._is_looking and time.monotonic() >= self._until
            if starts:
                Thread(target=self._read, name="rabbitdelay-reading", daemon=True).start()
                self._is_looking = True
            if starts or self._reading is None:
                self._changed.wait_for(lambda: not self._is_looking, patience)
            return self._reading or Reading()

    def outdate(self) -> None:
        """Have the next caller start a look: what the latest reading shows has been changed."""
        with self._changed:
            self._until = 0.0

    def _read(self) -> None:
        before = self._reading or Reading[_T]()
        try:
            reading = Reading(self._look(), wall_clock.now())
        except AWAY as error:
            reading = before._replace(error=why(error))
            if before.error is None:
                logger.warning("A server cannot be read: %s", reading.error)
        except Exception:
            logger.exception("Reading from a server has failed")
            reading = before._replace(error="an unexpected error, which is in the log")
        with self._changed:
            self._reading, self._until = reading, time.monotonic() + self._period
            self._is_looking = False
            self._changed.notify_all()


class Broker:
    """Asks a broker over a connection that is opened when it is needed; by one thread at a time.

    Args:
        connection: Template for the connection.
        timeout: Seconds that the broker has for each answer.

    Attributes:
        connection: The connection.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        # Without heartbeats: nobody sends any between two questions.
        self.connection = connection.clone(heartbeat=0)
        self._timeout = timeout

    def ask(self, question: Callable[[Connection], _T]) -> _T:
        """Ask something, again if the connection was lost since the last question.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
            amqp.exceptions.AMQPError: It refuses to answer.
            OSError: It does not answer in time.
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
        """Close the connection, also to a broker that does not answer."""
        with suppress(*AWAY):
            if self.connection.connected:
                with Wire(self.connection).answers_within(CLOSE_TIMEOUT):
                    self.connection.release()
        drop_connection(self.connection)
