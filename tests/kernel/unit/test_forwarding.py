"""What a module publishes of a message that it does not deliver: early, refused, or undeliverable.

For how long an early or a refused message goes back into the levels, when it is given up, what it
keeps on the way, and what AMQP cannot carry.
"""

from collections.abc import Iterator
from typing import Any

import amqp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.kombu import Topology, clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import DelayHeaders, EarlyHeader, Failures
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.forwarding import Outgoing, Redelivery, encoded, to_undeliverable
from tests.kernel.unit.broker_model import BrokerModel
from tests.kernel.unit.clock import Clock, frozen
from tests.kernel.unit.waiting import said, waiting

NOW = 1_800_000_000_000
A_DAY = 86_400_000
TOPOLOGY = Topology()
SIX_SECONDS = Topology(layout=custom([("seconds", 6, 1)]))
UNDELIVERABLE = TOPOLOGY.module_queues.undeliverable.exchange.name
FRAME = 131_072

#: The longest pause, in seconds, before it is changed at random.
TEN_MINUTES = 600.0


@pytest.fixture(autouse=True, scope="module", name="standstill")
def no_time_passes() -> Iterator[Clock]:
    """A clock that stands still, so that a route does not depend on a busy machine."""
    with frozen(NOW / 1000) as stopped:
        yield stopped


@pytest.fixture
def wall(standstill: Clock) -> Iterator[Clock]:
    """That clock, which a test may put forward."""
    yield standstill
    standstill.now_ns = NOW * 1_000_000


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    found: dict[str, Any] = outgoing.message.headers.to_headers()
    return found


# Messages that leave the levels before they are due.


def due_in(delay_ms: int, **headers: Any) -> amqp.Message:
    where = {header_names.EXCHANGE: "office", header_names.ROUTING_KEY: "paper"}
    own: dict[str, Any] = {header_names.DUE: NOW + delay_ms, **where, **headers}
    return amqp.Message(b"body", application_headers=own, app_id="shop", priority=4)


def early_messages(topology: Topology = TOPOLOGY) -> forwarding.EarlyMessages:
    return forwarding.EarlyMessages(topology, 1000)


@pytest.mark.parametrize(
    ("due_ms", "expected"),
    [(NOW - 5, False), (NOW + 1000, False), (NOW + 1001, True), (NOW + A_DAY, True), (None, False)],
)
def test_a_message_is_early_by_more_than_what_is_tolerated(due_ms: Any, expected: bool) -> None:
    until_ms = early_messages().until(DelayHeaders(due_ms), str)
    assert until_ms == (due_ms if expected else None)
    if due_ms is not None:
        put_back = early_messages().put_back(waiting(due_in(due_ms - NOW)))
        assert (put_back is not None) == expected


@settings(max_examples=50)
@given(st.integers(1001, A_DAY), st.sampled_from([1, 0.1, 0.01]))
def test_a_message_goes_back_for_the_rest_and_less_than_a_tick(rest_ms: int, tick: float) -> None:
    topology = Topology(layout=clock(tick=tick))
    outgoing = early_messages(topology).put_back(waiting(due_in(rest_ms)))
    assert outgoing is not None
    route = topology.route(rest_ms / 1000, DISTRIBUTION)
    assert (outgoing.exchange, outgoing.routing_key) == (route.exchange, route.routing_key)
    walk = BrokerModel(topology, ()).walk(route)
    assert rest_ms <= walk.waited_ms < rest_ms + tick * 1000
    assert walk.delivered_to == {topology.module_queues.distribution.name}


@pytest.mark.parametrize(
    ("topology", "delay_ms", "exchange", "pause_ms"),
    [
        # A clock that is fifty years behind costs a day.
        (TOPOLOGY, 50 * 366 * A_DAY, "rabbitdelay.days.x1", A_DAY),
        # Nothing exceeds the capacity.
        (SIX_SECONDS, 60_000, "rabbitdelay.seconds.x1", 5000),
    ],
)
def test_nothing_goes_back_for_long(
    topology: Topology, delay_ms: int, exchange: str, pause_ms: int
) -> None:
    outgoing = early_messages(topology).put_back(waiting(due_in(delay_ms)))
    assert outgoing is not None
    assert outgoing.exchange == exchange
    assert outgoing.message.headers.to_headers()[header_names.DUE] == NOW + delay_ms
    assert forwarding.pause_ms(delay_ms, topology) == pause_ms


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offsets=st.lists(st.integers(-2 * A_DAY, 2 * A_DAY), min_size=1, max_size=5),
    late_ms=st.integers(0, 100_000),
    data=st.data(),
)
def test_wrong_clocks_delay_by_their_difference(
    wall: Clock, offsets: list[int], late_ms: int, data: st.DataObject
) -> None:
    """``offsets``: how far each worker's clock is behind that of the producer; ``late_ms``: how
    late the levels deliver."""
    tick_ms = TOPOLOGY.layout.tick_ms
    latest = max(0, *offsets) + tick_ms
    now, passes = NOW + late_ms, 0
    while True:
        behind = data.draw(st.sampled_from(offsets))
        wall.now_ns = (now - behind) * 1_000_000
        until_ms = early_messages().until(DelayHeaders(NOW), str)
        if until_ms is None:
            break
        pause = forwarding.pause_ms(until_ms - (now - behind), TOPOLOGY)
        now += -(-pause // tick_ms) * tick_ms
        passes += 1
        assert now <= NOW + max(latest, late_ms)
    # One for each clock that is further behind than those before, and one for each day.
    assert passes <= len(set(offsets)) + 2
    assert now - behind > NOW - 1001


def test_only_what_waited_for_less_than_it_was_put_back_for_is_counted_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[None] = []
    early = forwarding.EarlyMessages(TOPOLOGY, 1000, lambda: counted.append(None))
    for until_ms, count in ((NOW + 1000, 0), (NOW + 1001, 1), (NOW + 5000, 2)):
        put_back = EarlyHeader(1, until_ms).header()
        assert early.put_back(waiting(due_in(A_DAY, **put_back))) is not None
        # One warning is enough.
        assert (len(counted), len(caplog.records)) == (count, min(count, 1))
    assert all(word in caplog.text for word in ("message-ttl", "list_policies", "clocks"))


@pytest.mark.parametrize(
    ("until_ms", "noted_ms"),
    [(NOW + 5000, 0), (NOW + 9000, NOW + 9000), (NOW + 3 * A_DAY, NOW + A_DAY)],
)
def test_a_message_says_until_when_it_was_put_back_unless_that_is_its_due_time(
    until_ms: int, noted_ms: int
) -> None:
    again, _ = forwarding.waiting_on(TOPOLOGY, waiting(due_in(5000)), until_ms)
    assert again.headers.early == EarlyHeader(1, noted_ms)


# Messages that their destination does not take.


def message(**told: Any) -> Outgoing:
    properties: dict[str, Any] = {"application_headers": {header_names.DUE: NOW - 10}, **told}
    return Outgoing("office", "paper", waiting(amqp.Message(b"body", **properties)))


def middle(least: float, most: float) -> float:
    """No chance."""
    assert (least, most) == (0.75, 1.25)
    return 1.0


def redelivery(seconds: float = 86_400) -> Redelivery:
    return Redelivery(TOPOLOGY, seconds, middle)


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
    wall: Clock, makes_copies: bool, seconds: tuple[int, ...], pauses: list[float]
) -> None:
    received = DelayHeaders(redriven=2)
    found = []
    for attempt, second in enumerate(seconds, start=1):
        wall.now_ns = (NOW + second * 1000) * 1_000_000
        later = redelivery().after_failure(message(), received, "it is full", makes_copies)
        received = later.message.headers
        assert received.failures is not None
        assert (received.failures.attempts, received.redriven) == (attempt, 2)
        found.append(pause_of(later))
    assert found == pauses


@pytest.mark.parametrize("seconds", [0, 60])
def test_after_its_time_it_is_undeliverable_with_its_first_and_last_reason(
    wall: Clock, seconds: float
) -> None:
    tried = redelivery(seconds)
    received: dict[str, Any] = {}
    if seconds:
        for passed_ms in (0, 59_999):
            wall.now_ns += passed_ms * 1_000_000
            later = tried.after_failure(message(), said(received), "it is full")
            received = headers_of(later)
            assert later.exchange != UNDELIVERABLE
        wall.now_ns += 1_000_000
    last = tried.after_failure(message(), said(received), "it is gone")
    assert (last.exchange, last.reroute) == (UNDELIVERABLE, None)
    told = headers_of(last)
    assert (told[header_names.EXCHANGE], told[header_names.ROUTING_KEY]) == ("office", "paper")
    since = " (3 attempts since 2027-01-15 08:00:00 UTC; the first time: it is full)"
    assert told[header_names.REASON] == "it is gone" + (since if seconds else "")


@pytest.mark.parametrize(
    ("attempts", "since", "is_counted_on"),
    [
        # When a clock of another machine is ahead.
        (2**31, 2**63 - 1, True),
        (1, 1, True),
        (0, NOW, False),
    ],
)
def test_numbers_of_no_module_do_not_count(attempts: int, since: int, is_counted_on: bool) -> None:
    before = [(header_names.ATTEMPTS, attempts), (header_names.FAILED_SINCE, since)]
    told = said({**dict(before), header_names.FIRST_REASON: "full"})
    failures = redelivery(NOW).after_failure(message(), told, "gone").message.headers.failures
    counted = (attempts + 1, min(since, NOW), "full")
    assert failures == (counted if is_counted_on else (1, NOW, "gone"))


def test_a_pause_is_no_longer_than_the_levels_reach(wall: Clock) -> None:
    tried = Redelivery(SIX_SECONDS, 86_400, middle)
    received = tried.after_failure(message(), DelayHeaders(), "full").message.headers
    wall.now_ns += 3_600_000 * 1_000_000
    later = tried.after_failure(message(), received, "full")
    assert (later.exchange, later.routing_key) == ("rabbitdelay.seconds.x1", "5.%distribution")


@pytest.mark.parametrize(
    ("queue_type", "obstacle", "is_lowered"),
    [
        ("quorum", None, True),
        ("quorum", "full", True),
        ("classic", None, True),
        ("classic", "full", False),  # its levels release it straight to its queue
    ],
)
def test_what_only_distribution_restores_is_lowered_for_distribution_and_for_quorum_queues(
    queue_type: Any, obstacle: str | None, is_lowered: bool
) -> None:
    tried = Redelivery(Topology(queue_type=queue_type), 86_400, middle)
    given = message(priority=9)._replace(obstacle=obstacle)
    later = tried.after_failure(given, DelayHeaders(), "full").message
    assert later.amqp().properties["priority"] == (4 if is_lowered else 9)


def of_later_version(**headers: Any) -> amqp.Message:
    """Return a message that this version cannot read."""
    made = due_in(-1000, **headers)
    made.properties["priority"], made.delivery_info = 9, {"routing_key": "reports"}
    return made


@pytest.mark.parametrize(
    ("headers", "added"),
    [
        ({}, {header_names.PRIORITY: 9}),
        ({header_names.SIGNATURE: "signed"}, {}),
        ({header_names.PRIORITY: 7}, {}),
    ],
)
def test_a_message_of_a_later_version_keeps_its_headers(
    headers: dict[str, Any], added: dict[str, Any]
) -> None:
    received = of_later_version(**headers)
    before = dict(received.properties["application_headers"])
    later = redelivery().until_upgraded(received, "version 9")
    counted = {header_names.ATTEMPTS: 1, header_names.FAILED_SINCE: NOW}
    found = headers_of(later)
    told = {header_names.FIRST_REASON, header_names.REASON}
    assert {name: each for name, each in found.items() if name not in told} == {
        **before,
        **added,
        **counted,
    }
    assert later.message.amqp().properties["priority"] == 4


def test_a_message_of_a_later_version_is_undeliverable_in_the_end_with_its_own_key() -> None:
    last = redelivery(0).until_upgraded(of_later_version(), "version 9")
    assert (last.exchange, last.routing_key, last.reroute) == (UNDELIVERABLE, "reports", None)


# What AMQP cannot carry, and what is undeliverable.


def outgoing(exchange: str = "x", routing_key: str = "k", **options: Any) -> Outgoing:
    return Outgoing(exchange, routing_key, waiting(amqp.Message(b"body", **options)))


@pytest.mark.parametrize(
    ("fits", "too_long"),
    [
        (("x" * 255, "k"), ("x" * 256, "k")),
        (("x", "é" * 127 + "k"), ("x", "é" * 128)),
        (("x", "\ud800" * 85), ("x", "\ud800" * 86)),
    ],
)
def test_a_name_has_at_most_255_bytes(fits: tuple[str, str], too_long: tuple[str, str]) -> None:
    assert encoded(outgoing(*fits), FRAME)
    with pytest.raises(UnprocessableMessage, match="has more than 255 bytes"):
        encoded(outgoing(*too_long), FRAME)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": "high"}, "a header or property cannot be written"),
        ({"application_headers": {"what": object()}}, "a header or property cannot be written"),
        ({"application_headers": {"long": "x" * 130_000}}, "its headers and properties take 130"),
        # The broker would close the channel at these.
        *(
            ({"expiration": value}, "its expiration is")
            for value in ("", "soon", "-1", "1.5", "4294967296", "\u0663", 5, b"5")
        ),
    ],
)
def test_what_amqp_cannot_carry_is_known_before_it_is_sent(options: Any, reason: str) -> None:
    with pytest.raises(UnprocessableMessage) as caught:
        encoded(outgoing(**options), FRAME)
    assert caught.value.reason.startswith(reason)
    assert len(caught.value.reason) < 500
    explained = to_undeliverable(TOPOLOGY, outgoing(**options), caught.value.reason)
    bare = forwarding.without_headers(explained)
    written = encoded(bare, FRAME).message()
    assert (bare.exchange, bare.routing_key, written.body) == (UNDELIVERABLE, "", b"body")
    assert written.properties["application_headers"] == {header_names.REASON: caught.value.reason}


def test_headers_and_properties_fill_a_frame_but_for_two_kilobytes() -> None:
    large = outgoing(application_headers={"h": "v" * 500})
    size = len(encoded(large, FRAME).properties)
    assert encoded(large, size + 2048)
    with pytest.raises(UnprocessableMessage, match=f"take {size} bytes, more than {size - 1}"):
        encoded(large, size + 2047)


def test_a_message_is_undeliverable_with_its_first_destination_and_the_last_reason() -> None:
    refused = message(application_headers={"mine": 1, "x-death": []}, expiration="60")
    once = to_undeliverable(TOPOLOGY, refused, "it is full")
    assert (once.exchange, once.routing_key) == (UNDELIVERABLE, "paper")
    told = {
        "mine": 1,
        header_names.EXCHANGE: "office",
        header_names.ROUTING_KEY: "paper",
        header_names.EXPIRATION: "60",
    }
    failed = {header_names.ATTEMPTS: 1, header_names.FAILED_SINCE: NOW}
    why = {header_names.REASON: "it is full", header_names.FIRST_REASON: "it is full"}
    assert headers_of(once) == {**told, **failed, **why}
    # With its expiration, the message would vanish from undeliverable as well.
    properties = once.message.amqp().properties
    assert (once.message.body, properties.get("expiration")) == (b"body", None)
    twice = to_undeliverable(TOPOLOGY, once._replace(exchange="other"), "it is gone")
    why = {header_names.REASON: "it is gone", header_names.FIRST_REASON: "it is full"}
    assert headers_of(twice) == {**told, **failed, **why, header_names.ATTEMPTS: 2}
    earlier = DelayHeaders(failures=Failures(9, NOW - 60_000, "it was full"))
    at_last = headers_of(to_undeliverable(TOPOLOGY, refused, "it is gone", earlier))
    assert at_last[header_names.FAILED_SINCE] == NOW - 60_000
    assert at_last[header_names.ATTEMPTS] == 10
