"""What is published for a message of another delay mechanism, whoever has written it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key

from celery_rabbitdelay.kombu import DelayedProducer, Publisher, Topology
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ONCE, UNREADABLE
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.moving import adoption
from celery_rabbitdelay.operations.moving.mover import Stay

TOPOLOGY = Topology("test")
REPORTS = Exchange("reports", "topic")
QUEUES = [
    Queue("daily", REPORTS, "daily"),
    Queue("paper.daily", REPORTS, "paper.daily"),
    Queue("all", Exchange("news", "fanout"), "everyone"),
    Queue("plain", Exchange("plain", "direct"), "plain"),
]
MODULES = ("check-in", "distribution")


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
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def due_in(outgoing: Outgoing) -> float:
    due: int = outgoing.message.headers.to_headers()[header_names.DUE]
    return due / 1000 - time.time()


def test_a_native_task_waits_until_its_eta_and_then_goes_where_it_was_sent() -> None:
    given: dict[str, Any] = {"eta": in_seconds(40), ONCE: True}
    outgoing = native(calculate_routing_key(40, "paper.daily"), **given)
    headers = outgoing.message.headers.to_headers()
    assert 20 < due_in(outgoing) < 40.001
    told = (header_names.EXCHANGE, header_names.QUEUE, header_names.ROUTING_KEY, "eta", ONCE)
    assert [headers[name] for name in told] == ["reports", *["paper.daily"] * 2, None, True]


@pytest.mark.parametrize(
    ("eta", "seconds", "level", "least", "most"),
    [
        # Of 640 s, 512 are those of the queue that it is in.
        (None, 640, 9, 600, 640.001),
        ("soon", 640, 7, 60, 128.001),
        (5, 640, 7, 60, 128.001),
        # Earlier than the chain.
        (-3600.0, 40, 5, 20, 40.001),
    ],
)
def test_without_a_valid_eta_it_waits_as_long_as_the_chain_might(
    eta: Any, seconds: int, level: int, least: float, most: float
) -> None:
    given = in_seconds(eta) if isinstance(eta, float) else eta
    outgoing = native(calculate_routing_key(seconds, "daily"), level, eta=given)
    assert least < due_in(outgoing) <= most


def test_a_native_task_for_a_fanout_exchange_goes_through_distribution() -> None:
    outgoing = native(calculate_routing_key(40, "everyone"), eta=in_seconds(40))
    assert outgoing.routing_key.endswith(".%distribution")
    assert outgoing.message.headers.to_headers()[header_names.EXCHANGE] == "news"


@pytest.mark.parametrize(
    ("key", "modules", "headers", "reason"),
    [
        (calculate_routing_key(40, "plain"), MODULES, {}, "no queue of the application"),
        (calculate_routing_key(40, "nobody"), MODULES, {}, "no queue of the application"),
        ("daily", MODULES, {}, "28 bits"),
        (calculate_routing_key(40, "everyone"), (), {}, "distribution"),
        (calculate_routing_key(40, "daily"), (), {"eta": in_seconds(10**9)}, "capacity"),
        (calculate_routing_key(40, "daily"), MODULES, {UNREADABLE: "why"}, "cannot be read"),
        (calculate_routing_key(40, "daily"), MODULES, {"task": "own"}, "rabbitdelay=False"),
    ],
)
def test_a_native_task_stays_if_the_levels_cannot_take_it(
    key: str, modules: tuple[str, ...], headers: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Stay, match=reason):
        native(key, modules=modules, **headers)


def nservicebus(seconds: int, level: int, sent: datetime, **headers: Any) -> Outgoing:
    told = {
        "NServiceBus.TimeSent": f"{sent:%Y-%m-%d %H:%M:%S}:{sent.microsecond:06} Z",
        "NServiceBus.Transport.RabbitMQ.DelayInSeconds": str(seconds),
        **headers,
    }
    key = calculate_routing_key(seconds, "endpoint")
    queue = f"nsb.v2.delay-level-{level:02}"
    return adoption.nservicebus_chain(TOPOLOGY)(message(key, **told), queue)


def test_a_message_of_nservicebus_ends_where_its_chain_ends() -> None:
    outgoing = nservicebus(640, 9, datetime.now(UTC) - timedelta(seconds=100))
    headers = outgoing.message.headers.to_headers()
    assert 480 < due_in(outgoing) <= 540.001
    assert headers[header_names.EXCHANGE] == "nsb.v2.delay-delivery"
    assert headers[header_names.ROUTING_KEY] == "endpoint"
    with pytest.raises(Stay, match="CC"):
        nservicebus(40, 5, datetime.now(UTC), CC=["celery"])


def test_a_delayed_retry_of_nservicebus_is_not_early() -> None:
    # It has the time at which its message was sent first.
    outgoing = nservicebus(2052, 11, datetime.now(UTC) - timedelta(hours=2))
    assert due_in(outgoing) > 2000


@pytest.mark.parametrize(
    "told",
    [
        {"NServiceBus.TimeSent": "yesterday"},
        {"NServiceBus.TimeSent": "9999-12-31 23:59:59:999999 Z"},
        {"NServiceBus.Transport.RabbitMQ.DelayInSeconds": "-1"},
        {"NServiceBus.Transport.RabbitMQ.DelayInSeconds": str(2**28)},
    ],
)
def test_without_a_valid_time_nservicebus_waits_as_long_as_its_chain(told: dict[str, str]) -> None:
    assert 20 < due_in(nservicebus(40, 5, datetime.now(UTC), **told)) <= 40.001


def eta_task(**headers: Any) -> Outgoing:
    convert = adoption.eta_tasks(tasks(), TOPOLOGY, {queue.name: queue for queue in QUEUES})
    return convert(message("daily", "reports", **headers), "daily")


def test_a_task_with_an_eta_returns_to_its_queue() -> None:
    outgoing = eta_task(eta=in_seconds(40))
    assert 20 < due_in(outgoing) < 40.001
    assert outgoing.message.headers.to_headers()[header_names.QUEUE] == "daily"


@pytest.mark.parametrize("headers", [{}, {"eta": in_seconds(-5)}, {"x-delivery-count": 7}])
def test_a_task_that_is_not_delayed_stays(headers: dict[str, Any]) -> None:
    with pytest.raises(Stay, match=adoption.NOT_DELAYED):
        eta_task(**headers)


@pytest.mark.parametrize("header", ["x-delivery-count", "x-acquired-count"])
def test_a_task_that_was_given_back_often_is_published_to_its_queue_anew(header: str) -> None:
    # RabbitMQ would drop it after some more times.
    outgoing = eta_task(**{header: 8})
    assert (outgoing.exchange, outgoing.routing_key) == ("", "daily")
    assert header not in outgoing.message.headers.to_headers()
