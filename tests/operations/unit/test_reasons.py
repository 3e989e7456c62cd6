"""Why a message could not be delivered, read from its headers."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings

from celery_rabbitdelay.kombu import Layout, Topology, Undeliverable, custom, examine
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import UNREADABLE
from tests.kernel.unit.strategies import layouts

CLOCK = Topology()
DAY_TO_SECOND = [("days", 10, 86400), ("hours", 24, 3600), ("minutes", 60, 60), ("seconds", 60, 1)]
P, SKIP = (Topology("p", custom(DAY_TO_SECOND, zeros)) for zeros in ("bind", "skip"))
SHARDED = Topology("p", custom(DAY_TO_SECOND), shards=3)

#: When it was due.
DUE = datetime(2030, 3, 17, 17, 46, 40, 123_000, tzinfo=UTC)

BOUND = "no queue 'daily.reports' is bound to"
GAP = "a binding is missing between {} and {}"
DIGIT_7 = GAP.format("rabbitdelay.minutes.x1", "rabbitdelay.minutes.7")
#: The routing key of a message that no level took; and of one that has waited for two hours.
KEY, KEY_2 = "0.0.0.0.0.7.0.0.q", "0.0.0.0.2.7.0.0.q"


def found(*stops: str, key: str = "", **more: Any) -> dict[str, Any]:
    """The headers of a task that waited in ``stops``, as RabbitMQ hands them out."""
    deaths = [
        {"queue": stop, "reason": "expired", "count": 1, "routing-keys": [key]}
        for stop in reversed(stops)
    ]
    return {
        "id": "4d5e",
        "task": "shop.remind",
        headers.DUE: 1_900_000_000_123,
        headers.QUEUE: "daily.reports",
        headers.EXCHANGE: "",
        headers.ROUTING_KEY: "daily.reports",
        **({"x-death": deaths} if deaths else {}),
        **more,
    }


def test_what_is_known_of_a_message_is_read() -> None:
    key = "0.0.0.3.7.45.30.5.daily%2Ereports"
    message = found("rabbitdelay.days.3", "rabbitdelay.ms.500", key=key)
    seen = examine(message, CLOCK)
    assert seen == Undeliverable(
        task_id="4d5e",
        task="shop.remind",
        queue="daily.reports",
        due=DUE,
        reason="no queue 'daily.reports' is bound to rabbitdelay.delivery",
        last_stop="rabbitdelay.ms.500",
    )
    # It lies there since its first failure, or its last stop.
    died = datetime(2030, 1, 2, 3, 4, 5)  # py-amqp's are naive, in UTC
    message["x-death"][0]["time"] = died
    assert examine(message, CLOCK).since == died.replace(tzinfo=UTC)
    failed = {headers.ATTEMPTS: 2, headers.FIRST_REASON: "full"}
    message.update(failed, **{headers.FAILED_SINCE: 1_900_000_000_123})
    assert examine(message, CLOCK).since == DUE
    # All of it can be printed.
    seen = examine(dict.fromkeys(("id", "task", headers.QUEUE, headers.REASON), "\ud800"), CLOCK)
    assert (seen.task_id, seen.task, seen.queue, seen.reason) == ("\\ud800",) * 4


@pytest.mark.parametrize(
    ("message", "topology", "key", "reason"),
    [
        (found("rabbitdelay.hours.2", key=KEY_2), CLOCK, None, DIGIT_7),
        (found(), CLOCK, KEY, DIGIT_7),
        (found(), CLOCK, "0.0.0.0.0.0.0.0.q", f"{BOUND} rabbitdelay.delivery"),
        *(
            (
                found("p.days.1", key="1.0.0.7.q"),
                each,
                None,
                GAP.format("p.hours.x1", "p.seconds.7"),
            )
            for each in (P, SKIP)
        ),
        (
            *(found("p.hours.1", key="0.1.0.0.q"), P, None),
            f"{BOUND} p.delivery, or {GAP.format('p.minutes.x1', 'p.delivery')}",
        ),
        (
            *(found("p.hours.1.s2", key="s2.0.1.0.7.q"), SHARDED, None),
            GAP.format("p.minutes.x1", "p.seconds.7.s2"),
        ),
        (
            *(found("rabbitdelay.meditation", key="q"), CLOCK, None),
            "rabbitdelay.meditated had no binding to rabbitdelay.checkin",
        ),
        (
            *(found("rabbitdelay.ms.500", key="0.0.0.0.0.0.0.5.%distribution"), CLOCK, None),
            GAP.format("rabbitdelay.delivery", "rabbitdelay.distribution"),
        ),
        (found("p.days.1", **{headers.REASON: "no number"}, key="1.0.0.7.q"), P, None, "no number"),
        ({UNREADABLE: "its key"}, CLOCK, "?", "its properties cannot be read: its key"),
        ({UNREADABLE: "x", headers.REASON: "a module's"}, CLOCK, None, "a module's"),
    ],
)
def test_the_reason_is_said(message: Any, topology: Topology, key: str | None, reason: str) -> None:
    assert examine(message, topology, key).reason == reason


@given(layouts)
@settings(max_examples=20)
def test_in_every_layout_the_stop_behind_each_stop_is_missed(layout: Layout) -> None:
    topology = Topology("p", layout)
    route = topology.route(timedelta(milliseconds=layout.capacity_ms), "q")
    for position, following in enumerate(route.stops):
        message = found(*route.stops[:position], key=route.routing_key)
        reason = examine(message, topology, route.routing_key).reason
        assert reason.endswith(f" and {following}")
    arrived = examine(found(*route.stops, key=route.routing_key), topology)
    assert arrived.reason == "no queue 'daily.reports' is bound to p.delivery"
    assert arrived.last_stop == route.stops[-1]


def test_a_message_of_another_layout_is_said_to_be_one() -> None:
    assert "no routing key was given" in examine({}, CLOCK).reason
    weeks = found("rabbitdelay.weeks.1", key="1.0.q")
    assert examine(weeks, CLOCK).reason.startswith("it came from rabbitdelay.weeks.1, and its")
    for key in ("celery", "9.q", "0.0.0.0.0.7.0.0.0.q", "a.b.c.d.e.f.g.h.q"):
        assert f"{key!r} does not belong to this layout" in examine({}, CLOCK, key).reason


NO_DEATH = "not RabbitMQ's own"
NO_INSTANT = f"{headers.DUE} is {{!r}}, not "
TOO_LATE = 253_402_300_800_000


@pytest.mark.parametrize(
    ("odd", "notes"),
    [
        *(
            ({headers.DUE: due}, f"{NO_INSTANT.format(due)}milliseconds since 1970")
            for due in ("soon", True, -1, float("nan"), [1])
        ),
        ({headers.DUE: TOO_LATE}, f"{NO_INSTANT.format(TOO_LATE)}an instant before the year 10000"),
        *(({name: 5}, f"its header {name} is 5, not a string") for name in ("id", "task")),
        *(({"x-death": death}, f"is {death!r}, {NO_DEATH}") for death in (5, [5], ["x"])),
        ({"x-death": [{"queue": 5}]}, "[{'queue': 5}], " + NO_DEATH),
        ({"x-death": [{"queue": "q", "routing-keys": [5]}]}, NO_DEATH),
        ({"x-death": [{"routing-keys": ["0." * 10**6]}]}, NO_DEATH),
        ({"id": 5, headers.DUE: "soon"}, "since 1970; its header id is 5, not a string"),
    ],
)
def test_a_header_that_cannot_be_read_is_named_beside_the_reason(odd: Any, notes: str) -> None:
    seen = examine({**found(), **odd}, CLOCK, KEY)
    assert seen.reason.startswith(f"{DIGIT_7}; its header ")
    assert all(f"; its header {name} is " in seen.reason for name in odd)
    assert seen.reason.endswith(notes)
    assert len(seen.reason) < 500
    assert (seen.due, seen.last_stop) == (None if headers.DUE in odd else DUE, None)


@pytest.mark.parametrize("keys", [[], None, "", [KEY_2, "copied.to"], KEY_2])
def test_the_first_of_several_routing_keys_counts_or_else_that_of_the_message(keys: Any) -> None:
    death = {"queue": "rabbitdelay.hours.2", "routing-keys": keys}
    message = examine({"x-death": [death]}, CLOCK, None if keys else KEY_2)
    assert (message.last_stop, message.reason) == ("rabbitdelay.hours.2", DIGIT_7)


def test_why_it_left_a_modules_queue_says_the_broker() -> None:
    stop = "rabbitdelay.distribution"
    forged = {headers.REASON: "all is well", UNREADABLE: "all is well"}
    for cause, reason in (
        ("rejected", f"a worker rejected it unread from {stop}: it is larger than"),
        ("maxlen", f"{stop} was full: a policy sets max-length"),
        ("delivery_limit", f"delivery limit of {stop} exceeded: no worker acknowledged it"),
        ("expired", f"it expired in {stop}, before a worker took it: by its own expiration, or"),
        (b"\xff", f"delivery limit of {stop} exceeded: no worker acknowledged it"),
    ):
        dead = found(stop, key="q", **forged)
        dead["x-death"][0]["reason"] = cause
        message = examine(dead, CLOCK)
        assert message.reason.startswith(reason)
        assert message.last_stop == stop
