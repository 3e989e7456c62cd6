"""The state that all requests share: options, cached readings of the servers, actions."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from threading import Event, Lock, Thread
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import celery
from kombu import Connection
from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.metrics.reading import AWAY, Broker, Reading, Readings, why
from celery_rabbitdelay.operations.status import Status, rates_between, status_of
from celery_rabbitdelay.operations.workers import status_of_workers
from celery_rabbitdelay.registry.index import KindCounts
from celery_rabbitdelay.registry.states import Holds
from celery_rabbitdelay.web.options import Options, User
from celery_rabbitdelay.web.settings import WebSettings
from celery_rabbitdelay.web.shown import plain

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The timeouts for connecting to the broker, and for its answers, in seconds.
CONNECT_TIMEOUT, ANSWER_TIMEOUT = 2.0, 5.0

#: Seconds between two readings of the queues, of the kinds of waiting tasks, and of the workers.
STATUS_PERIOD, COUNTED_PERIOD, WORKERS_PERIOD = 2.0, 5.0, 10.0

#: Seconds for which the page Now waits for each of its new figures before it shows old ones; and
#: before it shows figures older than :data:`STALE`, or older than the last action of this process.
PATIENCE, LONG_PATIENCE = 0.1, 2.0

#: The age from which a reading counts as stale: nobody has looked at the page for some time.
STALE: Final = timedelta(minutes=1)

#: How many periods a reading may be old before a page says so.
OLD: Final = 2

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0

#: The most actions that run at a time; further actions are refused.
MOST_AT_ONCE: Final = 8

#: Seconds to wait for the end of an action, so that the page that follows shows its outcome.
SHORT: Final = 1.0

#: How many ended actions are remembered.
REMEMBERED: Final = 100


#: How long the registry keeps an action's progress, in seconds.
SHARED_FOR: Final = 3_600

#: The error for an unknown key.
UNKNOWN: Final = (
    "This process does not know an action with this key: the action ended long ago, or runs in "
    "another process of the page."
)

#: The answer of a worker.
Answer: TypeAlias = Mapping[str, Any]


class Glance(NamedTuple):
    """One reading of the queues.

    Attributes:
        status: The counts of the queues.
        rates: The changes per second since the last reading, by queue; empty at first. See
            :func:`.rates_between`.
    """

    status: Status
    rates: Mapping[str, float]


class Site:
    """The state that all requests share.

    Args:
        app: The application.
        given: Options that override the setting ``rabbitdelay_web``.

    Attributes:
        app: The application.
        delays: The application's delays.
        options: The options of the page.
        works: The actions.
        queues_broker: The connection that reads the queues.

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
        self.works = Works(delays)
        # Two connections, because one of them waits for the workers' answers.
        self.queues_broker, self._workers = self._broker(), self._broker()
        self._readings: dict[str, Readings[Any]] = {}
        self._changed = wall_clock.EPOCH
        self._before: Status | None = None

    def _broker(self) -> Broker:
        connection = self.app.connection_for_write(connect_timeout=CONNECT_TIMEOUT)
        return Broker(connection, ANSWER_TIMEOUT)

    def ask(self, question: Callable[[Connection], _T]) -> _T:
        """Ask the application's broker over a new connection; see :meth:`.Broker.ask`."""
        with closing(self._broker()) as broker:
            return broker.ask(question)

    def latest(
        self, name: str, look: Callable[[], _T], period: float, patience: float | None = None
    ) -> Reading[_T]:
        """Return the latest cached reading of a name; all requests share the cache.

        Args:
            name: The name of the reading.
            look: Reads anew. The function of the first call for a name stays in use.
            period: As for :class:`.Readings`.
            patience: The most seconds to wait for a new reading if there is an old reading that is
                not stale; None for no limit. With 0, the request never waits.
        """
        readings = self._readings.setdefault(name, Readings(look, period))
        reading = readings.latest(patience)
        oldest = max(self._changed, wall_clock.now() - STALE)
        if patience and reading.error is None and (reading.taken or wall_clock.EPOCH) < oldest:
            return readings.ended(None if reading.taken is None else LONG_PATIENCE)
        return reading

    def outdate(self, *names: str) -> None:
        """Expire the cached readings with these beginnings: an action has changed their subject."""
        self._changed = wall_clock.now()
        for name, readings in [*self._readings.items()]:
            if name.startswith(names):
                readings.outdate()

    def queues(self, patience: float | None = None) -> Reading[Glance]:
        """Return the message counts of all queues; for ``patience``, see :meth:`latest`."""

        def look() -> Glance:
            status = self.queues_broker.ask(lambda found: status_of(self.delays, found, timeout=0))
            before, self._before = self._before, status
            return Glance(status, {} if before is None else rates_between(before, status))

        return self.latest("queues", look, STATUS_PERIOD, patience)

    def workers(self) -> Reading[dict[str, Answer]]:
        """Return the workers' latest answers, by worker; no page waits for new answers."""

        def look() -> dict[str, Answer]:
            if self.delays.is_blocked():
                raise OperationalError("RabbitMQ blocks publishers, also of control messages")
            return self._workers.ask(
                lambda found: status_of_workers(self.app, found, WORKERS_TIMEOUT, about=True)
            )

        return self.latest("workers", look, WORKERS_PERIOD, patience=0)


class Counted(NamedTuple):
    """The kinds of the waiting tracked tasks.

    Attributes:
        holds: The pauses and open jobs that hold due tasks.
        kinds: The kinds, with their counts of tasks due before :attr:`.Holds.late_ms`.
    """

    holds: Holds
    kinds: list[KindCounts]


def counted(site: Site) -> Counted:
    """Return the cached kinds of the waiting tasks.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """

    def look() -> Counted:
        holds = Holds.at(site.delays, wall_clock.now())
        return Counted(holds, site.delays.registry.index.summary([holds.late_ms]).kinds)

    found = site.latest("kinds", look, COUNTED_PERIOD)
    if found.value is None or found.error is not None:
        raise RegistryUnavailable(found.error or "Redis has not answered yet")
    return found.value


def is_awaited(reading: Reading[Any], period: float) -> bool:
    """Return whether a page says that a reading is being taken: it has none, or an old one."""
    old = wall_clock.now() - OLD * timedelta(seconds=period)
    return reading.error is None and (reading.taken is None or reading.taken < old)


@dataclass(eq=False)
class Work:
    """An action.

    Attributes:
        user: The user who began the action.
        what: The action, in the past: "cancelled".
        about: The action's subject: "all tracked tasks".
        total: How many tasks or messages the action is expected to change.
        back: The path and the query of the page on which the action was begun.
        outcomes: The outcomes of selected tasks by their ids; None for a task that the action has
            not reached.
        key: A random word that identifies the action.
        began: When the action began.
        stopping: Set to stop the action after the current batch or message.
        done: How many tasks or messages the action has changed.
        state: ``running``, ``done``, ``stopped`` or ``failed``.
        error: The error that ended the action.
    """

    user: User
    what: str
    about: str
    total: int
    back: str = ""
    outcomes: dict[str, str | None] = field(default_factory=dict)
    key: str = field(default_factory=partial(secrets.token_urlsafe, 9))
    began: datetime = field(default_factory=wall_clock.now)
    stopping: Event = field(default_factory=Event)
    done: int = 0
    state: str = "running"
    error: str | None = None

    def run(self, does: Does, share: Callable[[Work], None]) -> None:
        """Run the action to its end, sharing its progress every second, and log its outcome."""
        share(self)
        state, next_time = "failed", time.monotonic() + SHORT
        try:
            for _ in does(self):
                if time.monotonic() >= next_time:
                    share(self)
                    next_time = time.monotonic() + SHORT
                if self.stopping.is_set():
                    break
            state = "stopped" if self.stopping.is_set() else "done"
        except AWAY as error:
            self.error = why(error)
        except Exception:
            self.error = "an unexpected error; the server's log has the details"
            logger.exception("rabbitdelay web: an action on %s has failed", self.about)
        try:
            outcome = f": {state}; {self.what}: {self.done}, expected: {self.total}"
            log_action(self.user, f"acted on {self.about}", [*self.outcomes] or None, outcome)
        finally:
            self.state = state
            share(self)

    def shown(self) -> dict[str, object]:
        """Return the content for a page."""
        return {**vars(self), "user": self.user.name, "stopping": self.stopping.is_set()}


#: Performs an action: counts in ``done``, and yields wherever the action can stop.
Does: TypeAlias = Callable[[Work], Iterator[None]]


def in_batches(batches: Iterator[int]) -> Does:
    """Return a function that works through batches, and can be stopped between two batches.

    Args:
        batches: Performs one batch at a time, and yields its size.
    """

    def does(work: Work) -> Iterator[None]:
        for number in batches:
            work.done += number
            yield

    return does


class Works:
    """The actions of this process, running or ended lately. Each runs in its own thread.

    Through the registry, the other processes of the page can show an action's progress.

    Args:
        delays: The application's delays.
    """

    def __init__(self, delays: RabbitDelay) -> None:
        self._delays = delays
        self._works: dict[str, Work] = {}
        self._lock = Lock()

    def begin(self, work: Work, does: Does) -> Work:
        """Begin an action, and wait a moment for its end.

        Raises:
            HTTPException: Too many actions are running.
        """
        with self._lock:
            ended = [key for key, each in self._works.items() if each.state != "running"]
            if len(self._works) - len(ended) >= MOST_AT_ONCE:
                busy = f"{MOST_AT_ONCE} actions are running: wait until one of them has ended."
                raise HTTPException(503, busy)
            for key in ended[: 1 - REMEMBERED]:
                del self._works[key]
            self._works[work.key] = work
        name = f"rabbitdelay-web-{work.key}"
        thread = Thread(target=work.run, args=(does, self._share), name=name, daemon=True)
        thread.start()
        thread.join(SHORT)
        return work

    def _share(self, work: Work) -> None:
        """Store an action's content in Redis; only the action's thread does so, in order."""
        if self._delays.has_registry:
            with suppress(RegistryUnavailable):
                index, text = self._delays.registry.index, json.dumps(plain(work.shown()))
                name = index.names.of("work", work.key)
                index.store.commands(lambda pipe: [pipe.set(name, text, ex=SHARED_FOR)])

    def shown(self, key: str) -> dict[str, object]:
        """Return the content of an action for a page.

        Raises:
            HTTPException: No action has the key.
            RegistryUnavailable: Redis does not answer.
        """
        if key in self._works or not self._delays.has_registry:
            return self.get(key).shown()
        index = self._delays.registry.index
        (text,) = index.store.commands(lambda pipe: [pipe.get(index.names.of("work", key))])
        if text is None:
            raise HTTPException(404, UNKNOWN)
        found = json.loads(text)
        return {**found, "began": datetime.fromisoformat(found["began"])}

    def get(self, key: str) -> Work:
        """Return the action with a key.

        Raises:
            HTTPException: No action of this process has the key.
        """
        found = self._works.get(key)
        if found is None:
            raise HTTPException(404, UNKNOWN)
        return found

    def all(self) -> list[Work]:
        """Return all actions, the newest first."""
        with self._lock:
            return list(self._works.values())[::-1]


def log_action(user: User, action: str, about: object = None, outcome: str = "") -> None:
    """Log an action of a user.

    Args:
        user: The user.
        action: The action, in the past: "paused the queue".
        about: The names of the things that the action is about.
        outcome: The outcome of the action.
    """
    shown = "" if about is None else f" {about!r:.1000}"
    logger.info("rabbitdelay web: user %r %s%s%s", user.name, action, shown, outcome)
