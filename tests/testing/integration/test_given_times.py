"""Times of other libraries and of applications' own classes, wherever a time comes in.

Each is taken as the same time of the standard library, and what waits on the broker is the same.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pandas as pd
import pytest
from celery import chord

from celery_rabbitdelay import InvalidDelay, InvalidDelayType
from celery_rabbitdelay.app.pipelines import borrowed_publisher
from celery_rabbitdelay.kombu import DelayedProducer, Due, Topology, clock, custom, resolve
from celery_rabbitdelay.registry.record import restored
from celery_rabbitdelay.testing import recorded
from tests.given_times import KINDS, PLAIN, Kind
from tests.kernel.integration.conftest import application, small_configuration
from tests.kernel.unit.clock import frozen

HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)
TIMES: Final = ("delay", "countdown", "eta", "expires", "tolerance")
NOW: Final = datetime(2033, 5, 6, 7, 8, 9, 123456, UTC)


def _look(*args: Any) -> None:
    """Stand for a task that is sent."""


@pytest.fixture(scope="module")
def app(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application with a registry, and without a worker."""
    registry = {"rabbitdelay_registry_url": redis_url, "rabbitdelay_track": "all"}
    with application(small_configuration(module_broker_url, redis_url, **registry)) as app:
        app.task(name="look-at-it", shared=False)(_look)
        with frozen(NOW.timestamp()):
            yield app


Entrance = Callable[[Any, Kind], Any]


def _sent(app: Any, **options: Any) -> Any:
    """When a task is due, and what its message says of that."""
    task_id = app.tasks["look-at-it"].apply_async(("x",), **options).id
    (message,) = app.rabbitdelay.registry.index.messages([task_id])
    said = restored(message, task_id).message.headers
    times = [said.others.get(name) for name in ("eta", "expires")]
    return app.rabbitdelay.show(task_id).due, said.due_ms, times


def _many(app: Any, kind: Kind) -> Any:
    ids = [uuid4().hex, uuid4().hex]
    rows = [
        {"args": ("x",), "delay": kind.length(HOUR), "task_id": ids[0]},
        {"args": ("x",), "eta": kind.at(NOW + HOUR), "task_id": ids[1]},
    ]
    app.rabbitdelay.send_many("look-at-it", rows, tolerance=kind.length(MINUTE))
    return [app.rabbitdelay.show(each).due for each in ids]


def _postponed(app: Any, kind: Kind) -> Any:
    result = app.tasks["look-at-it"].apply_async(("x",), delay=HOUR)
    found = []
    for how in ({"delay": kind.length(2 * HOUR)}, {"eta": kind.at(NOW + MINUTE)}):
        app.rabbitdelay.postpone(result, **how)
        found.append(app.rabbitdelay.show(result).due)
    return found


def _filtered(app: Any, kind: Kind) -> Any:
    key, waits = uuid4().hex, app.rabbitdelay
    for hours in range(5):
        _sent(app, delay=hours * HOUR + MINUTE, key=f"{key}-{hours}")
    between = {"due_after": kind.at(NOW + HOUR), "due_before": kind.at(NOW + 3 * HOUR)}
    listed = [each.key for each in waits.pending(**between) if key in str(each.key)]
    counted = [waits.count(key=f"{key}-{each}", **between) for each in (1, 4)]
    cancelled = [waits.cancel_pending(key=f"{key}-{each}", **between) for each in (1, 4)]
    names = [each.removeprefix(key) for each in listed]
    return names, counted, cancelled


def _scheduled(app: Any, kind: Kind) -> Any:
    schedules, name = app.rabbitdelay.schedules, uuid4().hex
    given: dict[str, Any] = {
        "start": kind.at(NOW + HOUR),
        "end": kind.at(NOW + 500 * HOUR),
        "jitter": kind.length(MINUTE),
        "catch_up": kind.length(HOUR),
        "exclude": [kind.day(date(2033, 5, 7))],
    }
    put = schedules.put(name, "look-at-it", "0 9 * * *", ("x",), **given)
    found = [put.recurrence, put.catch_up, put.jitter, schedules.next(name)]
    schedules.put(name, "look-at-it", kind.length(HOUR), ("x",))
    found.append(schedules.next(name))
    schedules.delete(name)
    return found


def _in_canvas(app: Any, kind: Kind) -> Any:
    note = app.tasks["look-at-it"]
    times = {"eta": kind.at(NOW + HOUR), "expires": kind.at(NOW + 2 * HOUR)}
    follows = note.s("y").set(delay=kind.length(MINUTE), tolerance=kind.length(MINUTE))
    with recorded(app) as sent:
        whole = note.s("x").set(delay=kind.length(HOUR)).clone()
        whole.apply_async(link=follows, link_error=note.s("z").set(**times))
        chord([note.s("x")], note.s("y").set(delay=kind.length(MINUTE))).apply_async(delay=HOUR)
        note.signature(("x",), eta=kind.at(NOW + HOUR)).apply_async()
        bodies = [each.message.decode()[2] for each in sent.recorded]
        return [each.due for each in sent.all()], [
            _options(body[name]) for body in bodies for name in ("callbacks", "errbacks", "chord")
        ]


def _options(signatures: Any) -> Any:
    each = signatures if isinstance(signatures, list) else [signatures]
    return [
        {name: value for name, value in one["options"].items() if name in TIMES}
        for one in each
        if one
    ]


def _by_kombu(app: Any, kind: Kind) -> Any:
    topology = Topology("any", custom([("seconds", 9, kind.length(HOUR))]))
    route = topology.route(kind.length(4 * HOUR), "a", tolerance=kind.length(HOUR))
    due = Due.after(kind.length(HOUR)), Due.at(kind.at(NOW + HOUR)), Due.at(kind.at(NOW))
    with borrowed_publisher(app.rabbitdelay) as publisher:
        producer = DelayedProducer(publisher, **app.rabbitdelay.settings.for_producer)
        queue = app.amqp.queues[app.conf.task_default_queue]
        producer.publish_delayed(b"", resolve("", queue.name, [queue]), kind.length(HOUR))
    return route, clock(tick=kind.length(timedelta(seconds=0.1))), due


ENTRANCES: Final[dict[str, Entrance]] = {
    "delay": lambda app, kind: _sent(app, delay=kind.length(HOUR)),
    "eta": lambda app, kind: _sent(app, eta=kind.at(NOW + HOUR)),
    "tolerance": lambda app, kind: _sent(app, delay=HOUR, tolerance=kind.length(MINUTE)),
    "expires": lambda app, kind: _sent(app, delay=HOUR, expires=kind.at(NOW + 2 * HOUR)),
    "send_many": _many,
    "postpone": _postponed,
    "filters": _filtered,
    "schedules": _scheduled,
    "canvas": _in_canvas,
    "kombu": _by_kombu,
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_time_of_any_class_is_that_of_the_standard_library(app: Any, entrance: str) -> None:
    """Of a class whose methods all raise: each is read by the standard library's own."""
    assert ENTRANCES[entrance](app, KINDS["own"]) == ENTRANCES[entrance](app, PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_so_is_one_of_another_library(app: Any, kind: str) -> None:
    for entrance in ("delay", "eta", "expires", "schedules", "canvas"):
        assert ENTRANCES[entrance](app, KINDS[kind]) == ENTRANCES[entrance](app, PLAIN)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"eta": pd.NaT}, InvalidDelay),
        ({"eta": pd.Timestamp(np.datetime64("20000-01-01", "s"))}, InvalidDelay),
        ({"eta": np.datetime64("2050-01-01")}, InvalidDelayType),
        ({"delay": pd.NaT}, InvalidDelayType),
        ({"delay": np.timedelta64(5, "m")}, InvalidDelayType),
        ({"delay": 5, "tolerance": pd.NaT}, InvalidDelayType),
        ({"delay": 5, "expires": pd.NaT}, InvalidDelay),
    ],
    ids=str,
)
def test_what_the_standard_library_cannot_hold_is_refused(
    app: Any, given: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(reversed(given))):
        app.tasks["look-at-it"].apply_async(("x",), **given)
