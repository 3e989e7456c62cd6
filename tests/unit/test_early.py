"""Messages that leave the levels before they are due: for how long they go back, and how."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import amqp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Message

from celery_rabbitdelay.kombu import Topology, clock, custom
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE, DelayHeaders, EarlyHeader
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.bounds import EarlyWarning
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.worker.celery_internals import LATEST_ETA_MS, give_eta
from celery_rabbitdelay.worker.restore import restore
from tests.unit.broker_model import BrokerModel
from tests.unit.clock import frozen
from tests.unit.waiting import said, waiting

NOW = 1_800_000_000_000
A_DAY = 86_400_000
TOPOLOGY = Topology()


@pytest.fixture(autouse=True, scope="module")
def standstill() -> Any:
    """No time passes, so that a route does not depend on a busy machine."""
    with frozen(NOW / 1000):
        yield


def due_in(delay_ms: int, **headers: Any) -> amqp.Message:
    where = {header_names.EXCHANGE: "office", header_names.ROUTING_KEY: "paper"}
    own: dict[str, Any] = {header_names.DUE: NOW + delay_ms, **where, **headers}
    return amqp.Message(b"body", application_headers=own, app_id="shop", priority=4)


def early_messages(topology: Topology = TOPOLOGY) -> forwarding.EarlyMessages:
    return forwarding.EarlyMessages(topology, 1000)


@pytest.mark.parametrize(
    ("due_ms", "expected"),
    [(NOW - 5, None), (NOW + 1000, None), (NOW + 1001, 1001), (NOW + A_DAY, A_DAY), (None, None)],
)
def test_a_message_is_early_by_more_than_what_is_tolerated(due_ms: Any, expected: Any) -> None:
    assert forwarding.early_ms(DelayHeaders(due_ms), NOW, 1000) == expected
    if due_ms is not None:
        put_back = early_messages().put_back(waiting(due_in(due_ms - NOW)))
        assert (put_back is None) == (expected is None)


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


@pytest.mark.parametrize("content_type", ["application/json", ENVELOPE])
def test_it_goes_back_as_it_came_but_for_what_the_broker_added(content_type: str) -> None:
    message = due_in(5000, **{"x-death": [{"queue": "rabbitdelay.seconds.5"}], "x-mine": 1})
    message.properties["content_type"] = content_type
    # Not opened: the body of this envelope cannot even be read.
    distribution = Distribution(TOPOLOGY, early_messages().put_back)
    (outgoing,) = distribution.receive(message)
    properties = outgoing.message.amqp().properties
    assert outgoing.message.body == b"body"
    assert (properties["app_id"], properties["priority"]) == ("shop", 4)
    assert properties["content_type"] == content_type
    assert properties["application_headers"] == {
        header_names.DUE: NOW + 5000,
        header_names.EXCHANGE: "office",
        header_names.ROUTING_KEY: "paper",
        header_names.EARLY: {"times": 1},
        "x-mine": 1,
    }
    (outgoing,) = distribution.receive(outgoing.message.amqp())
    assert outgoing.message.headers.to_headers()[header_names.EARLY] == {"times": 2}


@pytest.mark.parametrize(
    ("topology", "delay_ms", "exchange", "pause_ms"),
    [
        # A clock that is fifty years behind costs a day.
        (TOPOLOGY, 50 * 366 * A_DAY, "rabbitdelay.days.x1", A_DAY),
        # Nothing exceeds the capacity.
        (Topology(layout=custom([("seconds", 6, 1)])), 60_000, "rabbitdelay.seconds.x1", 5000),
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


@given(
    st.lists(st.integers(-2 * A_DAY, 2 * A_DAY), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.data(),
)
def test_wrong_clocks_delay_by_their_difference(
    offsets: list[int], late_ms: int, data: st.DataObject
) -> None:
    """``offsets``: how far each worker's clock is behind that of the producer; ``late_ms``: how
    late the levels deliver."""
    tick_ms = TOPOLOGY.layout.tick_ms
    latest = max(0, *offsets) + tick_ms
    now, passes = NOW + late_ms, 0
    while True:
        behind = data.draw(st.sampled_from(offsets))
        by_ms = forwarding.early_ms(DelayHeaders(NOW), now - behind, 1000)
        if by_ms is None:
            break
        pause = forwarding.pause_ms(by_ms, TOPOLOGY)
        now += -(-pause // tick_ms) * tick_ms
        passes += 1
        assert now <= NOW + max(latest, late_ms)
    # One for each clock that is further behind than those before, and one for each day.
    assert passes <= len(set(offsets)) + 2
    assert now - behind > NOW - 1001


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((each.header()[header_names.EARLY], each) for each in (EarlyHeader(3, NOW, "o", "p"),)),
        *((value, EarlyHeader()) for value in (None, 3, {}, {"times": "often"})),
        ({"times": 1, "until": "soon"}, EarlyHeader(1)),
        ({"times": 2, "exchange": "office", "routing-key": 7}, EarlyHeader(2)),
    ],
)
def test_the_header_is_read_as_it_was_written_and_a_stranger_s_does_no_harm(
    value: Any, expected: EarlyHeader
) -> None:
    assert said({header_names.EARLY: value}).early == expected


def test_distribution_passes_on_what_a_worker_needs_to_restore_a_task() -> None:
    own = EarlyHeader(2, 0, "office", "paper").header()
    message = due_in(0, **{header_names.EXCHANGE: "", header_names.ROUTING_KEY: "queue"}, **own)
    (outgoing,) = Distribution(TOPOLOGY, early_messages().put_back).receive(message)
    headers = outgoing.message.headers.to_headers()
    assert (outgoing.exchange, outgoing.routing_key) == ("", "queue")

    arrived: Any = Message(
        headers=dict(headers), delivery_info={"exchange": "", "routing_key": "queue"}
    )
    waited = restore(arrived)
    assert waited is not None
    assert (waited.due_ms, waited.early.times, waited.queue) == (NOW, 2, None)
    assert arrived.delivery_info == {"exchange": "office", "routing_key": "paper"}
    # The task sees what it sees of any delayed task.
    assert arrived.headers == {header_names.DUE: NOW}


def test_one_warning_names_policies_and_clocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    warning = EarlyWarning(logging.getLogger("test"))
    for number in range(2):
        warning.warn(f"Task {number}", 3600.0)
    for each in ("Task 0", "3600.0 s", "message-ttl", "list_policies", "clocks"):
        assert each in caplog.messages[0]
    warning.reset()
    warning.warn("Task 2", 2.0)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "DEBUG", "WARNING"]


def test_only_what_waited_for_less_than_it_was_put_back_for_is_counted_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[None] = []
    early = forwarding.EarlyMessages(TOPOLOGY, 1000, lambda: counted.append(None))
    for until_ms, count in ((NOW + 1000, 0), (NOW + 1001, 1)):
        put_back = header_names.EarlyHeader(1, until_ms).header()
        assert early.put_back(waiting(due_in(A_DAY, **put_back))) is not None
        assert (len(counted), len(caplog.records)) == (count, count)


@pytest.mark.parametrize("due_ms", [NOW + 123, 2**63 - 1])
@pytest.mark.parametrize("body", [None, {"task": "t", "eta": None}])
def test_what_cannot_go_back_gets_an_eta_for_celery(due_ms: int, body: Any) -> None:
    message = Message(headers={"task": "t"})
    give_eta(message, body, due_ms)
    eta = datetime.fromisoformat(message.headers["eta"])
    assert eta.timestamp() * 1000 == pytest.approx(min(due_ms, LATEST_ETA_MS))
    assert eta.tzinfo == UTC
    if body is not None:
        assert body["eta"] == message.headers["eta"]
