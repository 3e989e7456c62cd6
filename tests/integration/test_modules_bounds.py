"""One message never costs more than itself: what is too large, too many, too long or forged."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.bounds import MAX_HELD_BYTES
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.modules import OPEN, check_in, put_in_envelope, wait_until_served
from tests.integration.worker import Worker

MEBIBYTE = 2**20

#: What a worker may grow by beyond the bytes that a module holds: copies of single messages on
#: their way, and memory that Python does not give back.
MARGIN = 96 * MEBIBYTE


def peak_bytes(worker: Worker) -> int:
    """The most memory that the worker's main process has had, by proc(5)."""
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@pytest.fixture
def open_shop(make_shop: Callable[..., Any], connection: Connection) -> Any:
    """An application whose levels stand; check-in may reach the tests' queues."""
    shop = make_shop(**OPEN)
    declare(connection, shop.rabbitdelay.topology)
    return shop


def undeliverable(connection: Connection, topology: Topology, number: int = 1) -> list[Any]:
    arrivals = take(connection, [topology.module_queues.undeliverable], number)
    assert count(connection, topology.module_queues.undeliverable.name) == 0
    return arrivals


def reason(arrival: Any, topology: Topology) -> str:
    info = arrival.message.delivery_info
    return examine(arrival.message.headers, topology, info["routing_key"]).reason


@pytest.fixture
def settings() -> dict[str, Any]:
    return {**OPEN, "rabbitdelay_max_message_bytes": MEBIBYTE, "rabbitdelay_retry_for": 0}


@pytest.fixture
def bounded(open_shop: Any, configuration: dict[str, Any], settings: Any) -> Iterator[Any]:
    """The application, with a worker that takes a mebibyte."""
    with Worker({**configuration, **settings}) as worker:
        wait_until_served(worker)
        yield open_shop
        assert "connects again" not in worker.log


@pytest.fixture
def publish(connection: Connection) -> Callable[..., None]:
    """Publishes a message to an exchange, with a confirm."""
    channel: Any = connection.channel()
    channel.confirm_select()

    def publish(exchange: str, key: str, body: bytes, **properties: Any) -> None:
        channel.basic_publish_confirm(amqp.Message(body, **properties), exchange, key)

    return publish


def test_a_message_that_is_too_large_is_undeliverable_and_was_never_read(
    bounded: Any, connection: Connection, target: Queue, publish: Any
) -> None:
    topology = bounded.rabbitdelay.topology
    checkin = topology.module_queues.checkin.exchange.name
    told = {"x-delay": 1, "mine": 1, "rabbitdelay-reason": "all is well"}
    for size in (MEBIBYTE, MEBIBYTE + 1):
        publish(checkin, target.name, b"\0" * size, application_headers=told)
    (arrival,) = take(connection, [target], 1)
    assert len(arrival.message.body) == MEBIBYTE
    (arrival,) = undeliverable(connection, topology)
    assert len(arrival.message.body) == MEBIBYTE + 1
    assert arrival.message.headers["mine"] == 1
    assert reason(arrival, topology).startswith("a worker rejected it unread from")


def test_what_the_broker_refuses_in_undeliverable_too_is_put_there_by_the_broker(
    bounded: Any, connection: Connection, target: Queue
) -> None:
    """A message in an envelope has a header that closes the channel, wherever it is published."""
    topology = bounded.rabbitdelay.topology
    told = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: target.name}
    put_in_envelope(connection, bounded, [Item(b"bad", {"CC": "no list"})], **told)
    put_in_envelope(connection, bounded, [Item(b"good")], **told)
    (arrival,) = take(connection, [target], 1)
    assert arrival.message.body == b"good"
    (arrival,) = undeliverable(connection, topology)
    assert "CC" in reason(arrival, topology)


def test_a_client_forges_nothing_that_undeliverable_shows(
    bounded: Any, connection: Connection
) -> None:
    topology = bounded.rabbitdelay.topology
    forged = {
        header_names.DUE: 5,
        header_names.QUEUE: "secret",
        header_names.ROUTING_KEY: "secret",
        "rabbitdelay-reason": "all is well",
        "rabbitdelay-unreadable": "all is well",
        "x-death": [{"queue": "elsewhere", "reason": "rejected"}],
    }
    check_in(connection, bounded, "nowhere", headers={**forged, "x-delay": 7, "mine": 1})
    (arrival,) = undeliverable(connection, topology)
    assert reason(arrival, topology).startswith("check-in may not reach the queue 'nowhere'")
    assert arrival.message.headers.keys() == {
        "x-delay",
        "mine",
        "rabbitdelay-reason",
        header_names.EXCHANGE,
        header_names.ROUTING_KEY,
    }
    assert arrival.message.headers[header_names.ROUTING_KEY] == "nowhere"


def test_a_message_that_expires_before_a_worker_takes_it_is_undeliverable(
    open_shop: Any, connection: Connection, target: Queue, publish: Any
) -> None:
    topology = open_shop.rabbitdelay.topology
    told = {"x-delay": 1, "rabbitdelay-reason": "all is well"}
    checkin = topology.module_queues.checkin.exchange.name
    publish(checkin, target.name, b"x", expiration="1", application_headers=told)
    (arrival,) = undeliverable(connection, topology)
    assert reason(arrival, topology).startswith("it expired in")
    assert "expiration" not in arrival.message.properties


def test_a_flood_of_large_messages_is_held_within_bounds(
    open_shop: Any,
    configuration: dict[str, Any],
    connection: Connection,
    target: Queue,
    publish: Any,
) -> None:
    """They wait at the broker, for a consumer that has a prefetch count of 1,000 by then."""
    topology = open_shop.rabbitdelay.topology
    checkin = topology.module_queues.checkin
    large = 3 * MAX_HELD_BYTES // MEBIBYTE
    with Worker({**configuration, **OPEN}) as worker:
        wait_until_served(worker)
        publish(checkin.exchange.name, target.name, b"small")
        take(connection, [target], 1)
        before = peak_bytes(worker)
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            for number in range(large):
                body = b"%09d" % number + b"\0" * MEBIBYTE
                publish(checkin.exchange.name, target.name, body)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        wait_for(lambda: count(connection, target.name) >= large, "the flood", timeout=120)
        grown = peak_bytes(worker) - before
        assert "bytes of messages are held" in worker.log
        assert "connects again" not in worker.log
        # Messages as small as most raise the prefetch again: none is late for the large ones.
        for _ in range(500):
            check_in(connection, open_shop, target.name)
        wait_for(lambda: count(connection, target.name) >= large + 500, "the small ones")
    assert grown < MAX_HELD_BYTES + MARGIN
    arrivals = take(connection, [target], large + 500)
    came = {each.message.body[:9] for each in arrivals if len(each.message.body) > MEBIBYTE}
    assert came == {b"%09d" % number for number in range(large)}
    assert count(connection, topology.module_queues.undeliverable.name) == 0


def test_an_exchange_that_the_worker_may_not_ask_for_is_published_to_without_asking(
    private_rabbitmq: RabbitMQServer,
    open_shop: Any,
    configuration: dict[str, Any],
    connection: Connection,
    target: Queue,
    prefix: str,
) -> None:
    """From RabbitMQ 4.3 on, asking takes the permission to configure it."""
    topology = open_shop.rabbitdelay.topology
    private_rabbitmq.ctl("add_user", prefix, "secret")
    hidden = f"{prefix}-hidden"
    configure = f"^(?!{hidden}).*"
    private_rabbitmq.ctl("set_permissions", prefix, configure, ".*", ".*")
    url = private_rabbitmq.url.replace("guest:guest", f"{prefix}:secret")
    channel: Any = connection.channel()
    channel.exchange_declare(f"{hidden}-one", "fanout", durable=True, auto_delete=False)
    channel.queue_bind(target.name, f"{hidden}-one")
    settings = {**configuration, **OPEN, "broker_url": url, "rabbitdelay_retry_for": 0}
    try:
        with Worker(settings) as worker:
            for name in (f"{hidden}-one", f"{hidden}-missing", f"{hidden}-one"):
                headers = {"x-delay": 1, header_names.EXCHANGE: name}
                check_in(connection, open_shop, "key", headers=headers)
            take(connection, [target], 2)
            (arrival,) = undeliverable(connection, topology)
            assert reason(arrival, topology) == f"there is no exchange '{hidden}-missing'"
            assert "connects again" not in worker.log
    finally:
        channel.exchange_delete(f"{hidden}-one")
        private_rabbitmq.ctl("delete_user", prefix)
