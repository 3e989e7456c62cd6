"""What all requests share: the options, cached readings of the servers, and long actions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import celery
from kombu import Connection
from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay.app.control import status_of_workers
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics.reading import AWAY, Broker, Reading, Readings, why
from celery_rabbitdelay.operations.status import Status, rates_between, status_of
from celery_rabbitdelay.web.options import Options, User
from celery_rabbitdelay.web.settings import WebSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds for connecting to the broker, and for each of its answers.
CONNECT_TIMEOUT, ANSWER_TIMEOUT = 2.0, 5.0

#: Seconds from one look to the next: at the queues, and at the workers.
STATUS_PERIOD, WORKERS_PERIOD = 2.0, 10.0

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0

#: How many long actions run at a time; further ones are refused.
MOST_AT_ONCE: Final = 4

#: How many of those that have ended are remembered.
REMEMBERED: Final = 100


#: The answer of a worker.
Answer: TypeAlias = Mapping[str, Any]


class Glance(NamedTuple):
    """One look at the queues.

    Attributes:
        status: The look.
        rates: What has changed a second since the look before; empty for the first one. See
            :func:`.rates_between`.
    """

    status: Status
    rates: Mapping[str, float]


class Site:
    """What all requests to the page share.

    Args:
        app: The application.
        given: Options that override those of its setting.

    Attributes:
        app: The application.
        delays: Its delays.
        options: The options of the page.
        works: The long actions.
        queues_broker: Asks the broker about the queues.

    Raises:
        InvalidSetting: An option is unknown or wrong.
        TypeError: The delays of the application are not in RabbitMQ.
    """

    def __init__(self, app: celery.Celery, given: Mapping[str, object]) -> None:
        delays = getattr(app, "rabbitdelay", None)
        if not isinstance(delays, RabbitDelay):
            raise TypeError(
                f"the delays of {app!r} are not in RabbitMQ: make it a celery_rabbitdelay.Celery, "
                "or call celery_rabbitdelay.install(app)"
            )
        self.app = app
        self.delays = delays
        self.options = Options.of(delays.settings_of(WebSettings).web or {}, given)
        self.works = Works()
        # Each has a connection of its own: the workers' answers are waited for.
        self.queues_broker, self._workers = self._broker(), self._broker()
        self._readings: dict[str, Readings[Any]] = {}
        self._before: Status | None = None

    def _broker(self) -> Broker:
        connection = self.app.connection_for_write(connect_timeout=CONNECT_TIMEOUT)
        return Broker(connection, ANSWER_TIMEOUT)

    def ask(self, question: Callable[[Connection], _T]) -> _T:
        """Ask the application's broker over a connection of its own; see :meth:`.Broker.ask`."""
        with closing(self._broker()) as broker:
            return broker.ask(question)

    def latest(
        self, name: str, look: Callable[[], _T], period: float, patience: float | None = None
    ) -> Reading[_T]:
        """Return the latest reading of a name, which all requests share.

        Args:
            name: Its name.
            look: Looks; the first one that is given under the name counts.
            period: As for :class:`.Readings`.
            patience: Seconds for which this request waits at most; None: until the look has ended.
        """
        return self._readings.setdefault(name, Readings(look, period)).latest(patience)

    def outdate(self, name: str) -> None:
        """Have the next who ask for a reading look anew: an action has changed what it shows."""
        if name in self._readings:
            self._readings[name].outdate()

    def queues(self) -> Reading[Glance]:
        """Return how many messages wait where."""

        def look() -> Glance:
            status = self.queues_broker.ask(lambda found: status_of(self.delays, found, timeout=0))
            before, self._before = self._before, status
            return Glance(status, {} if before is None else rates_between(before, status))

        return self.latest("queues", look, STATUS_PERIOD)

    def workers(self) -> Reading[dict[str, Answer]]:
        """Return what each worker answers, by its name."""

        def look() -> dict[str, Answer]:
            if self.delays.is_blocked():
                raise OperationalError("they are asked by messages, and RabbitMQ blocks publishers")
            return self._workers.ask(
                lambda found: status_of_workers(self.app, found, WORKERS_TIMEOUT, about=True)
            )

        return self.latest("workers", look, WORKERS_PERIOD)


class Verb(NamedTuple):
    """How pages and the log name an action.

    Attributes:
        doing: While it runs: "cancelling".
        done: Afterwards: "cancelled".
    """

    doing: str
    done: str


@dataclass(eq=False)
class Work:
    """A long action.

    Attributes:
        user: Who has begun it.
        verb: What it does.
        about: To what: "all tracked tasks".
        total: How many that are, as far as it is known.
        back: The path and the query of the page that it was begun on.
        key: A random word that names it.
        began: When it was begun.
        stopping: Set to stop it after the current batch or message.
        done: How many are done.
        state: ``running``, ``done``, ``stopped`` or ``failed``.
        error: Why it has failed.
    """

    user: User
    verb: Verb
    about: str
    total: int
    back: str = ""
    key: str = field(default_factory=partial(secrets.token_urlsafe, 9))
    began: datetime = field(default_factory=wall_clock.now)
    stopping: Event = field(default_factory=Event)
    done: int = 0
    state: str = "running"
    error: str | None = None

    def run(self, does: Does) -> None:
        """Do it to its end, and log how it ended."""
        state = "failed"
        try:
            does(self)
            state = "stopped" if self.stopping.is_set() else "done"
        except AWAY as error:
            self.error = why(error)
        except HTTPException as refused:
            self.error = refused.detail
        except Exception:
            self.error = "an unexpected error, which is in the log"
            logger.exception("The work %s has failed", self.key)
        try:
            what = f"{self.verb.done} {self.about} ({state}, of {self.total})"
            log_action(self.user, what, self.done)
        finally:
            self.state = state

    def shown(self) -> dict[str, object]:
        """Return what a page shows."""
        names = "key", "about", "began", "done", "total", "state", "error", "back"
        what = self.verb.doing if self.state == "running" else self.verb.done
        shown = {name: getattr(self, name) for name in names}
        return {"user": self.user.name, "what": what, **shown}


#: Does what a work is about: counts in ``done``, and returns early if it is stopping.
Does: TypeAlias = Callable[[Work], None]


def in_batches(batches: Iterator[int]) -> Does:
    """Return a function that works through batches, and can be stopped between two of them.

    Args:
        batches: Yields how many were done after each batch.
    """

    def does(work: Work) -> None:
        for number in batches:
            work.done += number
            if work.stopping.is_set():
                return

    return does


class Works:
    """The long actions of this process that run, or have ended lately; each has a thread."""

    def __init__(self) -> None:
        self._works: dict[str, Work] = {}
        self._lock = Lock()

    def begin(
        self, user: User, verb: Verb, about: str, total: int, does: Does, back: str = ""
    ) -> Work:
        """Begin a long action.

        Raises:
            HTTPException: Too many run already.
        """
        work = Work(user, verb, about, total, back)
        with self._lock:
            ended = [key for key, each in self._works.items() if each.state != "running"]
            if len(self._works) - len(ended) >= MOST_AT_ONCE:
                many = f"{MOST_AT_ONCE} actions run already; wait until one of them has ended"
                raise HTTPException(503, many)
            for key in ended[: 1 - REMEMBERED]:
                del self._works[key]
            self._works[work.key] = work
        name = f"rabbitdelay-web-{work.key}"
        Thread(target=work.run, args=(does,), name=name, daemon=True).start()
        return work

    def get(self, key: str) -> Work | None:
        """Return the action with a key."""
        return self._works.get(key)

    def all(self) -> list[Work]:
        """Return all of them, the last one first."""
        with self._lock:
            return list(self._works.values())[::-1]


def log_action(user: User, what: str, number: int, about: object = None) -> None:
    """Log what a user has done.

    Args:
        user: Who.
        what: What was done, in the past.
        number: To how many.
        about: To which.
    """
    shown = "" if about is None else f" {about!r:.1000}"
    logger.info("%r has %s: %d%s", user.name, what, number, shown)
