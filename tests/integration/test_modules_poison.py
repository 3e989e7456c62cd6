"""Messages that no worker can finish go to ``undeliverable``, and take no others with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.entities import POISON_LIMIT
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.wire import Wire, requeue_frames
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.modules import OPEN, check_in, put_in_envelope
from tests.integration.shop import named
from tests.integration.unreadable import FAR_TIMESTAMP, LATIN_ID, LATIN_KEY, Raw, publish_with_key
from tests.integration.worker import Worker

#: Good messages before the bad one, and behind it.
AROUND = 10


@pytest.fixture
def serving(served_shop: Any) -> Any:
    """An application whose worker serves the modules, and lets check-in reach the tests' queues."""
    return served_shop


@pytest.fixture
def unserved(make_shop: Callable[..., Any], connection: Connection) -> Any:
    """An application whose levels and modules' queues stand, and which no worker serves yet."""
    shop = make_shop(**OPEN)
    declare(connection, shop.rabbitdelay.topology)
    return shop


def check_in_around(
    connection: Connection, shop: Any, target: Queue, bad: Callable[[], Any]
) -> None:
    """Check in good messages, a bad one amid them."""
    for number in range(2 * AROUND):
        if number == AROUND:
            bad()
        check_in(connection, shop, target.name, headers={"x-delay": 100, "id": number})


def assert_all_good_ones_arrive(connection: Connection, target: Queue) -> None:
    """Assert that each good message arrived; a connection that was lost may have doubled some."""
    came: set[int] = set()

    def all_came() -> bool:
        came.update(
            arrival.message.headers["id"]
            for arrival in take(connection, [target], min(count(connection, target.name), 1))
        )
        return came == set(range(2 * AROUND))

    wait_for(all_came, "the good messages")


def the_undeliverable(connection: Connection, topology: Topology) -> Any:
    """Take the only message that is undeliverable."""
    (arrival,) = take(connection, [topology.module_queues.undeliverable], 1)
    assert count(connection, topology.module_queues.undeliverable.name) == 0
    return arrival


@pytest.mark.parametrize(
    ("properties", "reason"),
    [(FAR_TIMESTAMP, "year 5"), (LATIN_ID, "UnicodeDecodeError")],
    ids=["timestamp", "latin-1"],
)
def test_a_message_whose_properties_python_cannot_read_is_undeliverable_at_once(
    serving: Any, connection: Connection, target: Queue, properties: bytes, reason: str
) -> None:
    topology = serving.rabbitdelay.topology
    channel: Any = connection.default_channel

    def publish() -> None:
        channel.basic_publish(
            Raw("bad", properties), topology.module_queues.checkin.exchange.name, target.name
        )

    check_in_around(connection, serving, target, publish)
    assert_all_good_ones_arrive(connection, target)
    arrival = the_undeliverable(connection, topology)
    assert arrival.body == "bad"
    assert reason in examine(arrival.message.headers, topology).reason
    assert arrival.message.headers[headers.UNREADABLE_PROPERTIES] == properties


def test_an_unreadable_message_without_a_body_is_undeliverable_too(
    serving: Any, connection: Connection
) -> None:
    topology = serving.rabbitdelay.topology
    channel: Any = connection.default_channel
    channel.basic_publish(
        Raw("", LATIN_ID), topology.module_queues.checkin.exchange.name, "test-nobody"
    )
    arrival = the_undeliverable(connection, topology)
    assert "UnicodeDecodeError" in examine(arrival.message.headers, topology).reason


def test_a_message_whose_routing_key_python_cannot_read_is_undeliverable_at_once(
    serving: Any, connection: Connection, target: Queue
) -> None:
    topology = serving.rabbitdelay.topology
    message = amqp.Message("bad", application_headers={"x-delay": 1, "own": "kept"})

    def publish() -> None:
        exchange = topology.module_queues.checkin.exchange.name
        publish_with_key(connection, exchange, LATIN_KEY, message)

    check_in_around(connection, serving, target, publish)
    assert_all_good_ones_arrive(connection, target)
    arrival = the_undeliverable(connection, topology)
    assert (
        r"its routing key is b'caf\xe9', which is"
        in examine(arrival.message.headers, topology).reason
    )
    assert arrival.message.headers["own"] == "kept"


def test_a_message_for_an_exchange_that_clients_may_not_publish_to_is_undeliverable(
    serving: Any, connection: Connection, target: Queue, prefix: str
) -> None:
    """The broker closes the channel on which it is published, with all that is in flight."""
    topology = serving.rabbitdelay.topology
    channel: Any = connection.default_channel
    internal = f"{prefix}-internal"
    # kombu has no word for it.
    channel.send_method(
        (40, 10),
        "BssbbbbbF",
        (0, internal, "fanout", False, True, False, True, False, {}),
        wait=(40, 11),
    )
    told = {"x-delay": 100, headers.EXCHANGE: internal}
    check_in_around(
        connection,
        serving,
        target,
        lambda: check_in(connection, serving, target.name, headers={**told, "mine": 1}),
    )
    assert_all_good_ones_arrive(connection, target)
    arrival = the_undeliverable(connection, topology)
    Exchange(internal)(channel).delete()
    assert arrival.message.headers["mine"] == 1
    assert "internal exchange" in examine(arrival.message.headers, topology).reason


def test_of_an_envelope_only_the_message_that_the_broker_does_not_take_is_undeliverable(
    serving: Any, connection: Connection, target: Queue
) -> None:
    topology = serving.rabbitdelay.topology
    wrong = Item(b"x", {"id": AROUND, headers.EXPIRATION: "soon"})
    good = [Item(b"x", {"id": number}) for number in range(2 * AROUND)]
    told = {headers.EXCHANGE: "", headers.ROUTING_KEY: target.name}
    put_in_envelope(connection, serving, [*good[:AROUND], wrong, *good[AROUND:]], **told)
    assert_all_good_ones_arrive(connection, target)
    arrival = the_undeliverable(connection, topology)
    assert arrival.message.headers["id"] == AROUND
    assert "expiration" in examine(arrival.message.headers, topology).reason


def test_a_message_that_every_client_dies_of_is_undeliverable_after_the_limit(
    unserved: Any, configuration: dict[str, Any], connection: Connection, target: Queue
) -> None:
    """Delivered and never acknowledged, as by a worker whose process dies of it each time."""
    topology = unserved.rabbitdelay.topology
    check_in_around(
        connection,
        unserved,
        target,
        lambda: check_in(connection, unserved, target.name, headers={"x-delay": 100, "mine": 1}),
    )
    channel: Any = connection.default_channel
    for number in range(AROUND):
        good = channel.basic_get(topology.module_queues.checkin.name)
        assert good.headers["id"] == number
        channel.basic_ack(good.delivery_tag)
        check_in(connection, unserved, target.name, headers={"x-delay": 100, "id": number})
    for _ in range(POISON_LIMIT + 1):
        dying: Any
        with connection.channel() as dying:
            while (taken := dying.basic_get(topology.module_queues.checkin.name)) is None:
                pass
            assert taken.headers["mine"] == 1
    wait_for(
        lambda: count(connection, topology.module_queues.undeliverable.name) == 1, "the message"
    )
    with Worker({**configuration, **OPEN}, [named(unserved, "default")]):
        assert_all_good_ones_arrive(connection, target)
    arrival = the_undeliverable(connection, topology)
    assert arrival.message.headers["mine"] == 1
    (death,) = arrival.message.headers["x-death"]
    assert (death["queue"], death["reason"]) == (
        topology.module_queues.checkin.name,
        "delivery_limit",
    )
    reason = examine(arrival.message.headers, topology).reason
    assert f"delivery limit of {topology.module_queues.checkin.name} exceeded" in reason


def test_messages_that_a_worker_gives_back_do_not_count_towards_the_limit(
    connection: Connection, target: Queue
) -> None:
    """On RabbitMQ 4.3; on 3.10 and 4.0, whatever comes back counts."""
    channel: Any = connection.default_channel
    for _ in range(2):
        channel.basic_publish(amqp.Message("x"), "", target.name)
    wait_until_waiting(connection, target.name, 2)
    given_back = channel.basic_get(target.name)
    rejected = channel.basic_get(target.name)
    Wire(connection).write(requeue_frames(channel.channel_id, [given_back.delivery_tag]), 10)
    channel.basic_reject(rejected.delivery_tag, requeue=True)
    wait_until_waiting(connection, target.name, 2)
    counts = sorted(
        (channel.basic_get(target.name, no_ack=True).headers or {}).get("x-delivery-count", 0)
        for _ in range(2)
    )
    transport: Any = connection.connection
    version = [int(part) for part in transport.server_properties["version"].split(".")]
    assert counts == ([0, 1] if version >= [4, 3] else [1, 1])
