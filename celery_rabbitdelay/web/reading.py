"""One look at a server, shared by all who ask; and the connection that it is taken over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import datetime
from threading import Condition, Thread
from typing import Final, Generic, NamedTuple, TypeVar

import celery
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

#: Seconds for connecting to the broker, and for each of its answers.
CONNECT_TIMEOUT, ANSWER_TIMEOUT = 2.0, 5.0


def why(error: Exception) -> str:
    """Return the line that says why a server could not be asked, without passwords."""
    line = " ".join(str(error).split()) or type(error).__name__
    return shown_url.without_passwords(line)


class Reading(NamedTuple, Generic[_T]):
    """What a look has shown.

    Attributes:
        value: What it has shown; the last one, if this look has failed; None if none has succeeded.
        taken: When that was.
        error: Why this look has failed; None if it has not.
    """

    value: _T | None = None
    taken: datetime | None = None
    error: str | None = None


class Readings(Generic[_T]):
    """Looks at most once in a while, whoever asks and however many; and only if somebody asks.

    One of those who ask looks, in its own thread. All others get the reading before, however old;
    only if there is none, they wait.

    Args:
        look: Looks; it is not called by two threads at a time.
        period: Seconds for which a reading is new enough.
        in_background: Whether nobody waits for a look: those who ask get the reading before, which
            is empty at first.
    """

    def __init__(
        self, look: Callable[[], _T], period: float, *, in_background: bool = False
    ) -> None:
        self._in_background = in_background
        self._look = look
        self._period = period
        self._reading: Reading[_T] | None = None
        self._until = 0.0
        self._is_looking = False
        self._changed = Condition()

    def latest(self) -> Reading[_T]:
        """Return the latest reading."""
        with self._changed:
            while self._reading is None and self._is_looking and not self._in_background:
                self._changed.wait()
            is_new = time.monotonic() < self._until
            if self._is_looking or (self._reading is not None and is_new):
                return self._reading or Reading()
            self._is_looking = True
        if self._in_background:
            with suppress(RuntimeError):  # no thread can be started now
                Thread(target=self._look_behind, daemon=True).start()
                return self._reading or Reading()
        return self._look_anew()

    def _look_behind(self) -> None:
        try:
            self._look_anew()
        except Exception:  # a mistake of ours, and nobody waits for this thread
            logger.exception("A look at a server has failed")

    def _look_anew(self) -> Reading[_T]:
        reading = None
        try:
            reading = self._taken()
            return reading
        finally:
            # At once: whoever wakes without a reading looks again.
            with self._changed:
                self._is_looking = False
                if reading is not None:
                    self._reading, self._until = reading, time.monotonic() + self._period
                self._changed.notify_all()

    def outdate(self) -> None:
        """Look anew for the next who ask: what the latest reading shows has been changed."""
        with self._changed:
            self._until = 0.0

    def _taken(self) -> Reading[_T]:
        try:
            return Reading(self._look(), wall_clock.now())
        except AWAY as error:
            before = self._reading or Reading[_T]()
            return before._replace(error=why(error))


class Broker:
    """A connection to an application's broker that is opened when it is needed.

    It serves one thread at a time.

    Args:
        app: The application.
    """

    def __init__(self, app: celery.Celery) -> None:
        self._app = app
        self._connection: Connection | None = None

    def ask(self, question: Callable[[Connection], _T]) -> _T:
        """Ask something, again if the connection turns out to have been lost since the last time.

        Raises:
            kombu.exceptions.OperationalError: The broker cannot be reached.
            amqp.exceptions.AMQPError: It refuses to answer.
            OSError: It does not answer in time.
        """
        if self._connection is not None:
            with suppress(*AWAY):
                return self._asked(question)
        return self._asked(question)

    def _asked(self, question: Callable[[Connection], _T]) -> _T:
        if self._connection is None:
            # No heartbeats: nobody sends any while nobody looks.
            self._connection = self._app.connection_for_write(
                connect_timeout=CONNECT_TIMEOUT, heartbeat=0
            )
        try:
            connect(self._connection)
            with Wire(self._connection).answers_within(ANSWER_TIMEOUT):
                return question(self._connection)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, also to a broker that does not answer."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*AWAY):
                drop_connection(connection)


def ask_once(app: celery.Celery, question: Callable[[Connection], _T]) -> _T:
    """Ask an application's broker something over a connection of its own; see :class:`Broker`."""
    with closing(Broker(app)) as broker:
        return broker.ask(question)
