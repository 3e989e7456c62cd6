"""What is published for a message of another delay mechanism, whoever has written it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, timedelta
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_rabbitdelay.kombu import DelayedProducer, Publisher, Topology
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ONCE, UNREADABLE
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving import adoption
from celery_rabbitdelay.operations.moving.mover import Stay
from tests.unit.clock import frozen

TOPOLOGY = Topology("test")
REPORTS = Exchange("reports", "topic")
QUEUES = [
    Queue("daily", REPORTS, "daily"),
    Queue("paper.daily", REPORTS, "paper.daily"),
    Queue("all", Exchange("news", "fanout"), "everyone"),
    Queue("plain", Exchange("plain", "direct"), "plain"),
]
MODULES = ("check-in", "distribution")


@pytest.fixture(autouse=True)
def standstill() -> Iterator[None]:
    with frozen(1_900_000_000):
        yield


def tasks(modules: tuple[str, ...] = MODULES) -> adoption.TaskMessages:
    producer = DelayedProducer(Publisher(Connection("amqp://")), TOPOLOGY, modules=modules)
    return adoption.TaskMessages(producer, UTC, lambda name: None, lambda name: name == "own")


def message(key: str, exchange: str = "", **headers: Any) -> amqp.Message:
    made = amqp.Message(
        b"[[], {}, {}]",
        application_headers={"id": "1", "task": "remind", **headers},
        content_type="application/json",
        content_encoding="utf-8",
    )
    made.delivery_info = {"exchange": exchange, "routing_key": key, "delivery_tag": 1}
    return made


def native(
    key: str, level: int = 5, modules: tuple[str, ...] = MODULES, **headers: Any
) -> Outgoing:
    convert = adoption.native_chain(tasks(modules), QUEUES)
    return convert(message(key, **headers), f"celery_delayed_{level}")


def in_seconds(seconds: float) -> str:
    return (wall_clock.now() + timedelta(seconds=seconds)).isoformat()


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    headers: dict[str, Any] = outgoing.message.headers.to_headers()
    return headers


def due_in(outgoing: Outgoing) -> float:
    return (headers_of(outgoing)[header_names.DUE] - wall_clock.ms()) / 1000


def test_a_native_task_waits_until_its_eta_and_then_goes_where_it_was_sent() -> None:
    outgoing = native(calculate_routing_key(40, "paper.daily"), eta=in_seconds(39), **{ONCE: True})
    assert due_in(outgoing) == 39
    told = (header_names.EXCHANGE, header_names.QUEUE, header_names.ROUTING_KEY, "eta", ONCE)
    found = [headers_of(outgoing)[name] for name in told]
    assert found == ["reports", "paper.daily", "paper.daily", None, True]
    fanout = native(calculate_routing_key(40, "everyone"), eta=in_seconds(40))
    assert fanout.routing_key.endswith(".%distribution")
    assert headers_of(fanout)[header_names.EXCHANGE] == "news"


@pytest.mark.parametrize(
    ("eta", "seconds", "level", "longest"),
    [
        # Of 640 s, 512 are those of the queue that it is in.
        (None, 640, 9, 640),
        ("soon", 640, 7, 128),
        (5, 640, 7, 128),
        # Earlier than the chain.
        (-3600.0, 40, 5, 40),
    ],
)
def test_without_a_valid_eta_it_waits_as_long_as_the_chain_might(
    eta: Any, seconds: int, level: int, longest: int
) -> None:
    given = in_seconds(eta) if isinstance(eta, float) else eta
    outgoing = native(calculate_routing_key(seconds, "daily"), level, eta=given)
    assert due_in(outgoing) == longest


@pytest.mark.parametrize(
    ("key", "modules", "headers", "reason"),
    [
        (calculate_routing_key(40, "plain"), MODULES, {}, "no queue of the application"),
        ("daily", MODULES, {}, "28 bits"),
        (calculate_routing_key(40, "everyone"), (), {}, "distribution"),
        (calculate_routing_key(40, "daily"), (), {"eta": "2060-01-01T00:00:00Z"}, "capacity"),
        (calculate_routing_key(40, "daily"), MODULES, {UNREADABLE: "why"}, "cannot be read"),
        (calculate_routing_key(40, "daily"), MODULES, {"task": "own"}, "rabbitdelay=False"),
    ],
)
def test_a_native_task_stays_if_the_levels_cannot_take_it(
    key: str, modules: tuple[str, ...], headers: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Stay, match=reason):
        native(key, modules=modules, **headers)


def nservicebus(seconds: int, level: int, ago: float = 0, **headers: Any) -> Outgoing:
    sent = wall_clock.now() - timedelta(seconds=ago)
    told = {
        "NServiceBus.TimeSent": f"{sent:%Y-%m-%d %H:%M:%S}:{sent.microsecond:06} Z",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": str(seconds),
        **headers,
    }
    key, queue = calculate_routing_key(seconds, "endpoint"), f"nsb.v2.delay-level-{level:02}"
    return adoption.nservicebus_chain(TOPOLOGY)(message(key, **told), queue)


def test_a_message_of_nservicebus_ends_where_its_chain_ends() -> None:
    outgoing = nservicebus(640, 9, 100)
    told = headers_of(outgoing)
    assert due_in(outgoing) == 540
    assert told[header_names.EXCHANGE] == "nsb.v2.delay-delivery"
    assert told[header_names.ROUTING_KEY] == "endpoint"
    with pytest.raises(Stay, match="CC"):
        nservicebus(40, 5, CC=["celery"])
    # A delayed retry has the time at which its message was sent first: it is not early.
    assert due_in(nservicebus(2052, 11, 7200)) == 2052


def test_without_a_valid_time_nservicebus_waits_as_long_as_its_chain() -> None:
    sent, delay = "NServiceBus.TimeSent", "NServiceBus.Transport.RabbitMQ.DelayInSeconds"
    for told in (
        *({sent: "yesterday"}, {sent: "9999-12-31 23:59:59:999999 Z"}),
        *({delay: "-1"}, {delay: str(2**28)}),
    ):
        assert due_in(nservicebus(40, 5, **told)) == 40


def eta_task(**headers: Any) -> Outgoing:
    convert = adoption.eta_tasks(tasks(), TOPOLOGY, {queue.name: queue for queue in QUEUES})
    return convert(message("daily", "reports", **headers), "daily")


def test_a_task_with_an_eta_returns_to_its_queue_and_others_stay() -> None:
    outgoing = eta_task(eta=in_seconds(40))
    assert (due_in(outgoing), headers_of(outgoing)[header_names.QUEUE]) == (40, "daily")
    for headers in ({}, {"eta": in_seconds(-5)}, {"x-delivery-count": 7}):
        with pytest.raises(Stay, match=adoption.NOT_DELAYED):
            eta_task(**headers)
    # One that was given back often is published anew: RabbitMQ would drop it after some more times.
    for header in ("x-delivery-count", "x-acquired-count"):
        outgoing = eta_task(**{header: 8})
        assert (outgoing.exchange, outgoing.routing_key) == ("", "daily")
        assert header not in headers_of(outgoing)
