"""When a message that its destination does not take is tried again, and when it is given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import amqp
import pytest

from celery_rabbitdelay.kombu import Topology, custom
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.modules.forwarding import Outgoing, Redelivery
from tests.unit.clock import Clock, frozen
from tests.unit.waiting import said, waiting

TOPOLOGY = Topology()
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name

#: The longest pause, in seconds, before it is changed at random.
TEN_MINUTES = 600.0

#: An instant, in milliseconds since 1970.
NOW = 1_800_000_000_000


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    """A clock that stands still, so that a pause does not depend on a busy machine."""
    with frozen(NOW / 1000) as clock:
        yield clock


def middle(least: float, most: float) -> float:
    """No chance."""
    assert (least, most) == (0.75, 1.25)
    return (least + most) / 2


def redelivery(seconds: float = 86_400, topology: Topology = TOPOLOGY) -> Redelivery:
    return Redelivery(topology, seconds, middle)


def message(**told: Any) -> Outgoing:
    properties: dict[str, Any] = {"application_headers": {headers.DUE: NOW - 10}, **told}
    return Outgoing("office", "paper", waiting(amqp.Message(b"body", **properties)))


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    found: dict[str, Any] = outgoing.message.headers.to_headers()
    return found


def pause_of(outgoing: Outgoing) -> float:
    """Return the seconds of a route, read from the digits of the default clock's key."""
    *digits, _ = map(str, outgoing.routing_key.split("."))
    values = (86_400_000, 8_640_000, 864_000, 86_400, 3600, 60, 1, 0.1)
    return sum(int(digit) * value for digit, value in zip(digits, values, strict=True))


@pytest.mark.parametrize(
    ("makes_copies", "seconds", "pauses"),
    [
        (False, (0, 1, 10, 60, 3000, 80_000), [1.0, 1.0, 2.0, 12.0, TEN_MINUTES, TEN_MINUTES]),
        (True, (0, 60, 120, 240, 480, 960), [60.0, 60.0, 120.0, 240.0, 480.0, TEN_MINUTES]),
    ],
)
def test_the_pauses_grow_with_the_time_of_failing(
    clock: Clock, makes_copies: bool, seconds: tuple[int, ...], pauses: list[float]
) -> None:
    received = DelayHeaders(redriven=2)
    found = []
    for attempt, second in enumerate(seconds, start=1):
        clock.now_ns = (NOW + second * 1000) * 1_000_000
        later = redelivery().after_failure(message(), received, "it is full", makes_copies)
        received = later.message.headers
        assert received.failures is not None
        assert (received.failures.attempts, received.redriven) == (attempt, 2)
        found.append(pause_of(later))
    assert found == pauses


def test_a_pause_is_changed_at_random_by_up_to_a_quarter() -> None:
    random = Redelivery(TOPOLOGY, 60)
    pauses = {pause_of(random.after_failure(message(), DelayHeaders(), "")) for _ in range(50)}
    assert len(pauses) > 3
    # In the levels, it is rounded up to a tenth of a second.
    assert 0.75 <= min(pauses) < max(pauses) <= 1.3


@pytest.mark.parametrize("seconds", [0, 60])
def test_after_its_time_it_is_undeliverable_with_its_first_and_last_reason(
    clock: Clock, seconds: float
) -> None:
    tried = redelivery(seconds)
    received: dict[str, Any] = {}
    if seconds:
        for passed_ms in (0, 59_999):
            clock.now_ns += passed_ms * 1_000_000
            later = tried.after_failure(message(), said(received), "it is full")
            received = headers_of(later)
            assert later.exchange != UNDELIVERABLE
        clock.now_ns += 1_000_000
    last = tried.after_failure(message(), said(received), "it is gone")
    assert (last.exchange, last.reroute) == (UNDELIVERABLE, None)
    told = headers_of(last)
    assert (told[headers.EXCHANGE], told[headers.ROUTING_KEY]) == ("office", "paper")
    since = " (3 attempts since 2027-01-15 08:00:00 UTC; the first time: it is full)"
    assert told[headers.REASON] == "it is gone" + (since if seconds else "")


def failed(attempts: Any, since: Any, reason: Any) -> DelayHeaders:
    """What headers say of former attempts."""
    return said(
        {
            headers.ATTEMPTS: attempts,
            headers.FAILED_SINCE: since,
            headers.FIRST_REASON: reason,
        }
    )


@pytest.mark.parametrize(
    ("attempts", "since", "is_counted_on"),
    [
        (1, 1, True),
        (2**31, NOW, True),
        # When a clock of another machine is ahead.
        (1, 2**63 - 1, True),
        (0, NOW, False),
        (1, 0, False),
        (2**31 + 1, NOW, False),
        (1, 2**63, False),
    ],
)
def test_numbers_of_no_module_do_not_count(attempts: int, since: int, is_counted_on: bool) -> None:
    received = failed(attempts, since, "it was full")
    later = redelivery(seconds=NOW).after_failure(message(), received, "it is gone")
    assert headers_of(later) == {
        **headers_of(message()),
        headers.EXCHANGE: "office",
        headers.ROUTING_KEY: "paper",
        headers.ATTEMPTS: attempts + 1 if is_counted_on else 1,
        headers.FAILED_SINCE: min(since, NOW) if is_counted_on else NOW,
        headers.FIRST_REASON: "it was full" if is_counted_on else "it is gone",
        headers.REASON: "it is gone",
    }


def test_no_pause_is_above_the_capacity() -> None:
    topology = Topology(layout=custom([("seconds", 6, 1)]))
    later = redelivery(topology=topology).after_failure(message(), failed(9, NOW - 60_000, "x"), "")
    assert later.exchange == "rabbitdelay.seconds.x1"
    assert later.routing_key.startswith("5.")
