"""What all requests share: the application, its options, and one look at each server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import celery
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_rabbitdelay.app.control import ABOUT, ARRIVALS, status_of_workers
from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import ManagementUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.operations.findings import Verification
from celery_rabbitdelay.operations.status import Status, rates_between, status_of
from celery_rabbitdelay.operations.undeliverable import (
    UndeliverableMessage,
    shown_body,
    undeliverable_messages,
)
from celery_rabbitdelay.operations.verify import verify_application
from celery_rabbitdelay.publishing.backlog import Backlog
from celery_rabbitdelay.publishing.kombu_internals import closing
from celery_rabbitdelay.publishing.management import ManagementAPI, management_api
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.web.options import Options
from celery_rabbitdelay.web.reading import Broker, Readings, ask_once
from celery_rabbitdelay.web.settings import WebSettings
from celery_rabbitdelay.web.work import Works

#: Seconds from one look to the next: at the queues, at the workers, at the tracked tasks, and for
#: faults, which takes some requests to the management API for each queue.
STATUS_PERIOD, WORKERS_PERIOD, DUE_PERIOD, FINDINGS_PERIOD = 2.0, 10.0, 5.0, 60.0

#: The same at what the management API has counted, which it does every five seconds.
ENTERING_PERIOD: Final = 5.0

#: The same for undeliverable messages; how many are read, and the bytes of a body that is kept.
UNDELIVERABLE_PERIOD, MOST_UNDELIVERABLE, MOST_BODY = 30.0, 1_000, 16_384

#: How many bytes of each body are shown and exported, as ``undeliverable list --full`` prints.
SHOWN_BODY: Final = 2_000

#: Seconds to wait for the workers' answers.
WORKERS_TIMEOUT: Final = 1.0

#: How far a histogram looks ahead, and how many bars it has.
HORIZONS: Final = {
    "minute": (timedelta(minutes=1), 12),
    "hour": (timedelta(hours=1), 12),
    "day": (timedelta(days=1), 24),
    "week": (timedelta(days=7), 7),
    "year": (timedelta(days=365), 12),
}


class Glance(NamedTuple):
    """One look at the queues, and how they have changed since the one before.

    Attributes:
        status: The look.
        rates: By how many messages a second each level and module queue has grown; empty for the
            first look.
    """

    status: Status
    rates: Mapping[str, float]


class Workers(NamedTuple):
    """The answers of the workers.

    Attributes:
        answers: What each worker answers, by its name.
        arrivals: The delayed tasks that they have received a second; None for the first look.
    """

    answers: Mapping[str, Mapping[str, Any]]
    arrivals: float | None


def modules_of(answer: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules in the answer of a worker."""
    return sorted(answer.keys() - {ABOUT, ARRIVALS, "error"})


class DueSoon(NamedTuple):
    """How many tracked tasks are due when.

    Attributes:
        start: The start of the first step.
        overdue: How many should have arrived by then.
        steps: How many are due in each step.
        totals: How many are due within each of :data:`HORIZONS`, without the overdue ones.
        later: How many are due after the last of these.
    """

    start: datetime
    overdue: int
    steps: list[int]
    totals: dict[str, int]
    later: int


class Kept(NamedTuple):
    """A message that could not be delivered, as far as it is kept.

    Attributes:
        message: The message, without its body if that is long.
        body: The beginning of its body: what :func:`.shown_body` returns.
    """

    message: UndeliverableMessage
    body: Mapping[str, Any]


class Site:
    """What all requests to the page share.

    Args:
        app: The application.
        given: Options that override those of its setting.

    Attributes:
        app: The application.
        delays: Its delays.
        options: What is configured.
        works: What takes long.
        glance: How many messages wait where.
        entering: How many messages a second enter the levels; nobody waits for it.
        workers: What the workers answer.
        due: How many tracked tasks are due when, by the name of a horizon.
        findings: What breaks a promise.
        undeliverable: The oldest messages that could not be delivered.

    Raises:
        InvalidSetting: An option is unknown or wrong.
        TypeError: The delays of the application are not in RabbitMQ.
    """

    def __init__(self, app: celery.Celery, given: Mapping[str, Any]) -> None:
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
        self._brokers = Broker(app), Broker(app)
        self._management: tuple[ManagementAPI, str] | None = None
        self._glance: Status | None = None
        self._answered: Status | None = None
        self.glance = Readings(self._look, STATUS_PERIOD)
        self.entering = Readings(self._look_at_entering, ENTERING_PERIOD, in_background=True)
        self.workers = Readings(self._look_at_workers, WORKERS_PERIOD)
        self.due = {name: Readings(partial(self._count, name), DUE_PERIOD) for name in HORIZONS}
        self.findings = Readings(self._verify, FINDINGS_PERIOD)
        self.undeliverable = Readings(self._read_undeliverable, UNDELIVERABLE_PERIOD)

    def close(self) -> None:
        """Close the connections to the broker."""
        for each in self._brokers:
            each.close()

    def _look(self) -> Glance:
        before = self._glance
        status = self._brokers[0].ask(
            lambda connection: status_of(self.delays, connection, timeout=0)
        )
        self._glance = status
        return Glance(status, {} if before is None else rates_between(before, status))

    def _look_at_entering(self) -> float:
        if self._management is None:
            with closing(self.app.connection_for_write()) as connection:
                api = management_api(connection, self.options.management)
                self._management = api, connection.virtual_host
        (api, virtual_host), self._management = self._management, None
        about = api.get("overview", columns="rates_mode,disable_stats")
        if about.get("rates_mode") == "none" or about.get("disable_stats"):
            raise ManagementUnavailable(api.url, "it keeps no statistics (management.rates_mode)")
        found = api.get(
            "exchanges", virtual_host, columns="name,message_stats.publish_in_details.rate"
        )
        self._management = api, virtual_host  # it has answered; otherwise another node may
        # An exchange counts what is published to it, and not what is dead-lettered into it.
        levels = {exchange.name for exchange in self.delays.topology.level_exchanges}
        counted = [each.get("message_stats", {}) for each in found if each["name"] in levels]
        return float(sum(each.get("publish_in_details", {}).get("rate", 0) for each in counted))

    def _look_at_workers(self) -> Workers:
        if self.delays.is_blocked():
            raise OperationalError("they are asked by messages, and RabbitMQ blocks publishers")
        answers = self._brokers[1].ask(
            lambda connection: status_of_workers(self.app, connection, WORKERS_TIMEOUT, about=True)
        )
        now = Status(time.monotonic(), _NO_BACKLOG, answers)
        before, self._answered = self._answered, now
        return Workers(answers, None if before is None else rates_between(before, now)[ARRIVALS])

    def _count(self, horizon: str) -> DueSoon:
        start = wall_clock.now()
        length, number = HORIZONS[horizon]
        steps = [start + length * step / number for step in range(1, number + 1)]
        ends = [start + length for length, _ in HORIZONS.values()]
        before = [Filter(due_before_ms=milliseconds_of(each)) for each in (start, *steps, *ends)]
        index = self.delays.registry.index
        overdue, *counts, all_of_them = index.counts([*before, Filter()])
        # A task that leaves meanwhile is counted in some of them only.
        of_steps = pairwise([overdue, *counts[:number]])
        each_step = [max(until - before, 0) for before, until in of_steps]
        totals = [max(count - overdue, 0) for count in counts[number:]]
        later = max(all_of_them - counts[-1], 0)
        return DueSoon(start, overdue, each_step, dict(zip(HORIZONS, totals, strict=True)), later)

    def _verify(self) -> Verification:
        management = self.options.management
        return ask_once(self.app, lambda found: verify_application(self.delays, found, management))

    def _read_undeliverable(self) -> list[Kept]:
        def kept(connection: Connection) -> list[Kept]:
            topology = self.delays.topology
            return [
                Kept(
                    each if len(each.body) <= MOST_BODY else each._replace(body=b""),
                    shown_body(each.body, SHOWN_BODY),
                )
                for each in undeliverable_messages(connection, topology, MOST_UNDELIVERABLE)
            ]

        return ask_once(self.app, kept)


_NO_BACKLOG: Final = Backlog({}, {}, {}, ())
