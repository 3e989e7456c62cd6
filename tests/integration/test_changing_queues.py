"""Queues that come and go, and brokers that do, while tasks wait in the levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import DeclarationRefused
from celery_rabbitdelay.publishing.declaration import (
    missing,
    queue_counts,
)
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.shop import PATIENCE, named
from tests.integration.trouble import virtual_host
from tests.integration.worker import Worker
from tests.node_control import evaluate, text

#: How late a task may be on a noisy machine; what is tested is that it is never early.
GENEROUS = 60.0


def publish_by_hand(app: Any, url: str, queue_name: str, task_id: str) -> None:
    """Send a task into the levels without a producer of ours, which would bind the queue."""
    route = app.rabbitdelay.topology.route(0.2, queue_name)
    message = app.amqp.create_task_message(task_id, "look", ())
    with Connection(url) as connection:
        connection.Producer().publish(
            message.body,
            exchange=route.exchange,
            routing_key=route.routing_key,
            headers=message.headers,
            serializer="json",
            **message.properties,
        )


@pytest.fixture
def added(channel: Any, prefix: str) -> Iterator[str]:
    """The name of a queue that no application knows; it is deleted when the test is over."""
    name = f"{prefix}.added"
    yield name
    channel.queue_delete(name)
    channel.exchange_delete(name)


@pytest.fixture
def two_hosts(private_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[tuple[str, str]]:
    """The URLs of two empty virtual hosts: two brokers, as far as a client can see."""
    with (
        virtual_host(private_rabbitmq, f"{prefix}-a") as one,
        virtual_host(private_rabbitmq, f"{prefix}-b") as other,
    ):
        yield one, other


def fail_over(live: str) -> list[str]:
    """URLs of brokers of which only the last lives."""
    return [*(f"amqp://guest:guest@127.0.0.1:{free_port()}//" for _ in range(2)), live]


def let_consume(shop: Any, worker: Worker, name: str) -> None:
    """Tell a worker to consume from a further queue, and wait until it does."""
    shop.control.add_consumer(name, destination=[worker.name], reply=True)
    wait_for(lambda: f"Started consuming from {name}" in worker.log, "the new consumer")


def test_a_worker_makes_its_queues_ready_and_those_that_it_is_told_to_consume(
    serve: Callable[..., Any],
    connection: Connection,
    broker_url: str,
    added: str,
) -> None:
    shop = serve(broker_url=fail_over(broker_url))
    assert missing(connection, shop.rabbitdelay.topology) == ()
    publish_by_hand(shop, broker_url, named(shop, "second"), "id-0")
    assert shop.AsyncResult("id-0").get(timeout=PATIENCE)
    assert shop.tasks["retry"].apply_async(([], 1, {"delay": 0.2})).get(timeout=PATIENCE)

    let_consume(shop, shop.worker, added)

    publish_by_hand(shop, broker_url, added, "id-1")
    assert shop.AsyncResult("id-1").get(timeout=PATIENCE)


def test_a_queue_that_is_deleted_while_tasks_wait_for_it_holds_up_no_other(
    shop: Any, configuration: dict[str, Any], connection: Connection, channel: Any, prefix: str
) -> None:
    gone, living, delay = f"{prefix}.second", f"{prefix}.default", 4.3
    topology, look = shop.rabbitdelay.topology, shop.tasks["look"]
    with Worker(configuration, [living]):
        lost = {look.apply_async(delay=delay, queue=gone).id for _ in range(32)}
        # None, unless the machine was too slow for that.
        passed = channel.queue_delete(gone)
        due = {}
        for _ in range(10):
            asked = time.time()
            due[look.apply_async(delay=delay, queue=living)] = asked + delay
        for result, instant in due.items():
            assert 0 <= result.get(timeout=PATIENCE)["at"] - instant < GENEROUS
        # Distribution tries again, and finds the queue when it is there again, even if unbound.
        queue = shop.amqp.queues[gone]
        queue(channel).queue_declare()
        arrivals = take(connection, [queue], 32 - passed)
    came = {arrival.message.headers["id"] for arrival in arrivals}
    assert (len(came), came <= lost) == (32 - passed, True)
    for arrival in arrivals:
        told = arrival.message.headers
        assert told["rabbitdelay-due"] <= arrival.at * 1000
        assert told["rabbitdelay-queue"] == gone
        assert not {"x-death", "rabbitdelay-attempts", "rabbitdelay-reason"} & told.keys()
    assert count(connection, topology.module_queues.undeliverable.name) == 0


def test_a_queue_that_nobody_knew_is_created_and_gets_its_delayed_task(
    shop: Any, configuration: dict[str, Any], connection: Connection, added: str
) -> None:
    delayed = shop.tasks["look"].apply_async(delay=0.3, queue=added)
    # It is there, and bound, before any worker is.
    wait_until_waiting(connection, added, 1)
    undelayed = shop.tasks["look"].apply_async(queue=added)
    with Worker(configuration, [added]):
        seen = [result.get(timeout=PATIENCE) for result in (delayed, undelayed)]
    assert len({(one["exchange"], one["routing_key"]) for one in seen}) == 1


def test_a_worker_consumes_an_exclusive_queue_and_gets_delayed_tasks_and_retries_from_it(
    make_shop: Callable[..., Any], serve: Callable[..., Any], prefix: str
) -> None:
    here, exclusive = {"exclusive_queue": True}, f"{prefix}.exclusive"
    # It is the worker's to declare.
    with pytest.raises(DeclarationRefused, match=exclusive):
        make_shop(**here).tasks["look"].apply_async(delay=0.3, queue=exclusive)

    shop = serve(**here)
    seen = shop.tasks["look"].apply_async(delay=0.3, queue=exclusive).get(timeout=PATIENCE)
    assert seen["headers"]["rabbitdelay-queue"] == exclusive
    operators = make_shop(rabbitdelay_declare="never", **here)
    assert operators.tasks["look"].apply_async(delay=0.3, queue=exclusive).get(timeout=PATIENCE)
    again = shop.tasks["retry"].apply_async(([], 1, {"delay": 0.2}), queue=exclusive, delay=0.2)
    first, second = again.get(timeout=PATIENCE)
    assert second["headers"]["rabbitdelay-queue"] == exclusive
    assert (first["retries"], second["retries"]) == (0, 1)


def test_a_worker_s_own_queue_for_a_broadcast_is_reached_from_the_levels(
    shop: Any, configuration: dict[str, Any], connection: Connection, broker_url: str, prefix: str
) -> None:
    """As a task is that was early, and that the distribution of another application returns."""
    # Its own distribution would know the queue.
    here: dict[str, Any] = {"broadcast_queue": True, "rabbitdelay_modules": []}
    name = f"{prefix}.one"
    with Worker({**configuration, **here}):
        publish_by_hand(shop, broker_url, name, prefix)
        assert shop.AsyncResult(prefix).get(timeout=PATIENCE)["routing_key"] == name
    connection.default_channel.exchange_delete(f"{prefix}.everybody")  # type: ignore[attr-defined]
    # The binding goes with the queue, and the queue with its worker.
    gone = {name: None}
    wait_for(lambda: queue_counts(connection, [Queue(name)]) == gone, "the end of the queue")


def has_no_queue(server: RabbitMQServer, url: str) -> bool:
    host = text(url.rsplit("/", 1)[1])
    return "[]" in evaluate(server, f"rabbit_amqqueue:list_names({host})")


def test_the_levels_stand_where_a_task_is_sent_to_and_nowhere_else(
    private_rabbitmq: RabbitMQServer,
    two_hosts: tuple[str, str],
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    prefix: str,
) -> None:
    one, other = two_hosts
    shop = make_shop(broker_read_url=one, broker_write_url=other)
    topology = shop.rabbitdelay.topology
    result = shop.tasks["retry"].apply_async(([], 1, {"countdown": 0.3}), delay=0.3)
    with Connection(other) as connection:
        assert missing(connection, topology) == ()
    assert has_no_queue(private_rabbitmq, one)

    crossed = {**configuration, "broker_read_url": other, "broker_write_url": one}
    with Worker(crossed) as worker, Connection(one) as connection:
        # The worker takes the task from where it reads, and sends its retry to where it writes.
        (arrival,) = take(connection, [Queue(f"{prefix}.default")], 1)
        assert arrival.message.headers["id"] == result.id
        assert arrival.message.headers["retries"] == 1

        added = f"{prefix}.added"
        let_consume(shop, worker, added)
        publish_by_hand(shop, one, added, "id-3")
        (arrival,) = take(connection, [Queue(added)], 1)
        assert arrival.message.headers["id"] == "id-3"
