"""Check-in, meditation and distribution: modules that a worker serves, and any AMQP client uses."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue, binding

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from tests.integration.arrivals import take
from tests.integration.modules import Client, client, wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import Worker

__all__ = ["client"]


def test_a_client_that_knows_nothing_of_python_delays_a_message(
    client: Client, connection: Connection, make_queue: Any, prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-news", type="topic")
    queue = make_queue("news", exchange, "paper.#")
    queue(client.channel).declare()
    published = time.time()
    topology = client.topology
    url = connection.as_uri(include_password=True)
    if url.endswith("//"):  # rabbitmq-c writes the default virtual host otherwise
        url = url.removesuffix("/") + "%2F"
    command = [
        *("amqp-publish", "-u", url),
        *("-e", topology.module_queues.checkin.exchange.name, "-r", "paper.daily", "-b", "hello"),
        *("-H", "x-delay: 500", "-H", f"{headers.EXCHANGE}: {exchange.name}"),
    ]
    subprocess.run(command, check=True)
    (arrival,) = client.take(queue)
    assert arrival.at >= published + 0.5
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert arrival.message.delivery_info["routing_key"] == "paper.daily"
    assert set(arrival.message.headers) == {headers.DUE}


@pytest.mark.parametrize("kind", ["fanout", "headers", "topic", "direct"])
def test_every_queue_gets_it_once_that_would_get_it_without_a_delay(
    client: Client, connection: Connection, make_queue: Any, prefix: str, kind: str
) -> None:
    exchange = Exchange(f"{prefix}-{kind}", type=kind)
    keys = {"topic": ["paper.#", "*.daily"], "direct": ["paper.daily"] * 2}.get(kind, ["", ""])
    matching = {"x-match": "all", "colour": "red"} if kind == "headers" else None
    queues = [
        make_queue(f"{kind}-{number}", bindings=[binding(exchange, key, matching)])
        for number, key in enumerate(keys)
    ]
    for queue in queues:
        queue(client.channel).declare()
    published = time.time()
    told = {"x-delay": 300, headers.EXCHANGE: exchange.name, "colour": "red"}
    client.check_in("paper.daily", told, priority=7, expiration=60)
    arrivals = take(connection, queues, len(queues))
    assert {arrival.queue for arrival in arrivals} == {queue.name for queue in queues}
    for arrival in arrivals:
        assert arrival.at >= published + 0.3
        info, properties = arrival.message.delivery_info, arrival.message.properties
        assert (info["exchange"], info["routing_key"]) == (exchange.name, "paper.daily")
        assert (properties["priority"], properties["expiration"]) == (7, "60000")
        assert arrival.message.headers.keys() == {"colour", headers.DUE}


@pytest.mark.parametrize(
    ("key", "given", "reason"),
    [
        ("test-q", {"x-delay": "soon"}, "'soon', not a number"),
        ("celery", {"x-delay": 5}, "may not reach the queue 'celery'"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "amq.topic"}, "may not reach the exchange"),
        ("test-nobody", {"x-delay": 5}, "no queue for the key"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "test-none"}, "there is no exchange"),
    ],
)
def test_what_cannot_be_read_or_delivered_is_undeliverable_with_its_reason(
    client: Client, key: str, given: dict[str, Any], reason: str
) -> None:
    client.check_in(key, {**given, "mine": 1})
    ((told, message),) = client.undeliverable()
    assert reason in told
    assert message.headers["mine"] == 1
    assert message.payload == "hello"


def test_a_delay_above_the_capacity_is_kept(client: Client, target: Queue, prefix: str) -> None:
    """In the levels of 5.9 s, a message and a task, which meditate first."""
    assert client.topology.layout.capacity_ms == 5900
    published = time.time()
    client.check_in(target.name, {"x-delay": 6500})
    result = client.shop.tasks["look"].apply_async(delay=6.5)
    (arrival,) = client.take(target, timeout=PATIENCE)
    assert arrival.message.delivery_info["routing_key"] == target.name
    for at in (arrival.at, result.get(timeout=PATIENCE)["at"]):
        assert at >= published + 6.5


@pytest.mark.parametrize("priority", [0, 9])
def test_a_task_for_a_fanout_exchange_reaches_all_its_queues(
    client: Client, make_queue: Any, priority: int
) -> None:
    mirror = client.shop.amqp.queues[named(client.shop, "mirror")]
    unknown = make_queue("unknown", bindings=[binding(mirror.exchange)])
    unknown(client.channel).declare()
    before, look = time.time(), client.shop.tasks["look"]
    result = look.apply_async(delay=0.5, queue=mirror.name, priority=priority)
    (arrival,) = client.take(unknown)
    # The application's own queue is served by the worker.
    seen = result.get(timeout=PATIENCE)
    assert min(arrival.at, seen["at"]) >= before + 0.5
    assert arrival.message.headers["id"] == result.id
    assert arrival.message.delivery_info["exchange"] == mirror.exchange.name == seen["exchange"]
    assert arrival.message.properties["priority"] == priority


def test_the_command_line_says_which_modules_a_worker_serves(configuration: Any, shop: Any) -> None:
    with Worker(configuration, None, "--rabbitdelay-modules=distribution") as worker:
        wait_until_served(worker, "distribution")
        assert "check-in: serving" not in worker.log


def test_all_messages_of_an_envelope_reach_their_queue_or_are_undeliverable(
    client: Client, target: Queue
) -> None:
    items = [Item(b"x", {"id": number}) for number in range(1000)]
    client.put_in_envelope(target.name, *items)
    client.put_in_envelope("test-nobody", *items)
    came = [arrival.message.headers["id"] for arrival in client.take(target, 1000)]
    found = [message.headers["id"] for _, message in client.undeliverable(1000)]
    assert sorted(came) == sorted(found) == list(range(1000))
    assert client.count(target) == 0
