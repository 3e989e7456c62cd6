"""Queues that come and go, and brokers that do, while tasks wait in the levels."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import DeclarationRefused
from celery_rabbitdelay.publishing.declaration import missing
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.kernel.integration.arrivals import count, take, wait_until_waiting
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.trouble import virtual_host
from tests.kernel.integration.worker import Worker

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


def let_consume(shop: Any, worker: Worker, name: str) -> None:
    """Tell a worker to consume from a further queue, and wait until it does."""
    shop.control.add_consumer(name, destination=[worker.name], reply=True)
    wait_for(lambda: f"Started consuming from {name}" in worker.log, "the new consumer")


def test_a_worker_makes_its_queues_ready_and_those_that_it_is_told_to_consume(
    serve: Any, connection: Connection, broker_url: str, added: str
) -> None:
    dead = f"amqp://guest:guest@127.0.0.1:{free_port()}//"
    shop = serve(broker_url=[dead, broker_url])
    assert missing(connection, shop.rabbitdelay.topology) == ()
    publish_by_hand(shop, broker_url, named(shop, "second"), "id-0")
    assert shop.AsyncResult("id-0").get(timeout=PATIENCE)
    assert shop.tasks["retry"].apply_async(([], 1, {"delay": 0.2})).get(timeout=PATIENCE)

    let_consume(shop, shop.worker, added)

    publish_by_hand(shop, broker_url, added, "id-1")
    assert shop.AsyncResult("id-1").get(timeout=PATIENCE)


def test_a_queue_that_is_deleted_while_tasks_wait_for_it_holds_up_no_other(
    shop: Any, configuration: Any, connection: Connection, channel: Any, prefix: str
) -> None:
    gone, living, look = f"{prefix}.second", f"{prefix}.default", shop.tasks["look"]
    with Worker(configuration, [living]):
        lost = {look.apply_async(delay=4.3, queue=gone).id for _ in range(32)}
        # None, unless the machine was too slow for that.
        passed = channel.queue_delete(gone)
        asked = time.time()
        for result in [look.apply_async(delay=4.3, queue=living) for _ in range(10)]:
            assert 4.3 <= result.get(timeout=PATIENCE)["at"] - asked < 4.3 + GENEROUS
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
    assert count(connection, shop.rabbitdelay.topology.module_queues.undeliverable.name) == 0


def test_a_queue_that_nobody_knew_is_created_and_gets_its_delayed_task(
    shop: Any, configuration: Any, connection: Connection, added: str
) -> None:
    delayed = shop.tasks["look"].apply_async(delay=0.3, queue=added)
    # It is there, and bound, before any worker is.
    wait_until_waiting(connection, added, 1)
    undelayed = shop.tasks["look"].apply_async(queue=added)
    with Worker(configuration, [added]):
        seen = [result.get(timeout=PATIENCE) for result in (delayed, undelayed)]
    assert len({(one["exchange"], one["routing_key"]) for one in seen}) == 1


def test_a_worker_consumes_an_exclusive_queue_and_gets_delayed_tasks_and_retries_from_it(
    make_shop: Any, serve: Any, prefix: str
) -> None:
    here, exclusive = {"exclusive_queue": True}, f"{prefix}.exclusive"
    # It is the worker's to declare.
    with pytest.raises(DeclarationRefused, match=exclusive):
        make_shop(**here).tasks["look"].apply_async(delay=0.3, queue=exclusive)
    shop = serve(**here)
    operators = make_shop(rabbitdelay_declare="never", **here)
    assert operators.tasks["look"].apply_async(delay=0.3, queue=exclusive).get(timeout=PATIENCE)
    again = shop.tasks["retry"].apply_async(([], 1, {"delay": 0.2}), queue=exclusive, delay=0.2)
    for number, seen in enumerate(again.get(timeout=PATIENCE)):
        assert (seen["retries"], seen["headers"]["rabbitdelay-queue"]) == (number, exclusive)


@pytest.fixture
def hosts(session_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[tuple[str, str]]:
    """The URLs of two empty virtual hosts: two brokers, as far as a client can see."""
    with (
        virtual_host(session_rabbitmq, f"{prefix}-a") as one,
        virtual_host(session_rabbitmq, f"{prefix}-b") as other,
    ):
        yield one, other


def test_the_levels_stand_where_a_task_is_sent_to_and_nowhere_else(
    hosts: tuple[str, str], make_shop: Any, configuration: Any, prefix: str
) -> None:
    one, other = hosts
    shop = make_shop(broker_read_url=one, broker_write_url=other)
    topology = shop.rabbitdelay.topology
    result = shop.tasks["retry"].apply_async(([], 1, {"countdown": 0.3}), delay=0.3)
    with Connection(other) as connection:
        assert missing(connection, topology) == ()
    with Connection(one) as connection:
        assert len(missing(connection, topology)) > len(topology.queues)

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
