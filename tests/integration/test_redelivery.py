"""A destination in trouble: its tasks are tried again, and no other task waits for them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.modules import MODULES, OPEN, check_in

#: Tasks for the queue in trouble: more than a level's dead-letter worker has places.
MANY = 40

#: Tasks for a queue that takes them.
FEW = 10

#: How many messages the full queue takes.
ROOM = 5


@pytest.fixture
def served(serve: Any) -> Any:
    """An application whose levels stand, and whose modules are served by one worker."""
    return serve(only="default", **OPEN)


@pytest.fixture
def full(make_queue: Any) -> Queue:
    """A queue that refuses messages once it holds a few; not declared."""
    bounded = {"x-max-length": ROOM, "x-overflow": "reject-publish"}
    return make_queue("full", queue_arguments={"x-queue-type": "quorum", **bounded})


def send(shop: Any, publisher: Publisher, queue: Queue, number: int, delay: float) -> None:
    producer = DelayedProducer(publisher, shop.rabbitdelay.topology, modules=MODULES)
    producer.publish_delayed(number, Destination(queue, "", queue.name), delay)


def waiting(connection: Connection, shop: Any) -> int:
    """Return how many messages are ready in the levels and the modules' queues."""
    return sum(count(connection, queue.name) for queue in shop.rabbitdelay.topology.queues)


def test_tasks_for_a_full_queue_come_when_there_is_room_and_hold_up_no_others(
    served: Any, connection: Connection, publisher: Publisher, full: Queue, target: Queue
) -> None:
    asked = time.time()
    for number in range(MANY):
        send(served, publisher, full, number, 1.5)
    for number in range(FEW):
        send(served, publisher, target, number, 1.5)
    # They come although the other queue takes no message any more.
    sound = take(connection, [target], FEW)
    # A quorum queue takes a few more than its bound.
    wait_for(lambda: count(connection, full.name) >= ROOM, "a full queue")
    assert count(connection, full.name) < MANY
    # A bounded queue never holds all of them.
    arrivals = [take(connection, [full], 1)[0] for _ in range(MANY)]

    assert sorted(arrival.body for arrival in sound) == list(range(FEW))
    assert Counter(arrival.body for arrival in arrivals) == Counter(range(MANY))
    for arrival in (*sound, *arrivals):
        assert arrival.at >= asked + 1.5
        assert arrival.message.headers[headers.QUEUE] == arrival.queue
    for arrival in arrivals:
        told = arrival.message.headers.keys()
        assert not {headers.ATTEMPTS, headers.REASON, "x-death"} & told
    wait_for(lambda: waiting(connection, served) == 0, "empty levels")


def test_a_task_for_an_exchange_that_is_missing_comes_when_it_is_there(
    served: Any, connection: Connection, make_queue: Any, prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-later", type="fanout")
    check_in(connection, served, "any", headers={"x-delay": 100, headers.EXCHANGE: exchange.name})
    wait_for(lambda: "there is no exchange" in served.worker.log, "the first attempt")
    queue = make_queue("later", exchange)
    queue(connection.default_channel).declare()
    (arrival,) = take(connection, [queue], 1)
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert set(arrival.message.headers) == {headers.DUE}
