"""A destination in trouble: its tasks are tried again, and no other task waits for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import Arrival, count, take, wait_until_waiting
from tests.integration.modules import MODULES, OPEN, check_in, put_in_envelope

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
def full(make_queue: Callable[..., Queue]) -> Queue:
    """A queue that refuses messages once it holds a few; not declared."""
    bounded = {"x-max-length": ROOM, "x-overflow": "reject-publish"}
    return make_queue("full", queue_arguments={"x-queue-type": "quorum", **bounded})


def send(shop: Any, publisher: Publisher, queue: Queue, number: int, delay: float) -> None:
    producer = DelayedProducer(publisher, shop.rabbitdelay.topology, modules=MODULES)
    producer.publish_delayed(number, Destination(queue, "", queue.name), delay)


def take_all_of(connection: Connection, queue: Queue, number: int) -> list[Arrival]:
    """Take messages until so many came; a bounded queue never holds all of them."""
    arrivals: list[Arrival] = []
    while len(arrivals) < number:
        arrivals += take(connection, [queue], 1)
    return arrivals


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
    arrivals = take_all_of(connection, full, MANY)

    assert sorted(arrival.body for arrival in sound) == list(range(FEW))
    assert Counter(arrival.body for arrival in arrivals) == Counter(range(MANY))
    for arrival in (*sound, *arrivals):
        assert arrival.at >= asked + 1.5
        assert arrival.message.headers[headers.QUEUE] == arrival.queue
    for arrival in arrivals:
        told = arrival.message.headers.keys()
        assert not {headers.ATTEMPTS, headers.REASON, "x-death"} & told
    wait_for(lambda: waiting(connection, served) == 0, "empty levels")


def test_other_tasks_of_distribution_pass_those_that_a_full_queue_refuses(
    served: Any, connection: Connection, full: Queue, target: Queue
) -> None:
    full(connection.default_channel).declare()
    where = {headers.EXCHANGE: "", headers.ROUTING_KEY: full.name}
    put_in_envelope(connection, served, [Item(b"x", {"id": n}) for n in range(1000)], **where)
    for number in range(FEW):
        check_in(connection, served, target.name, headers={"x-delay": 100, "id": number})
    sound = take(connection, [target], FEW)
    assert {arrival.message.headers["id"] for arrival in sound} == set(range(FEW))
    assert ROOM <= count(connection, full.name) < 1000
    distribution = served.rabbitdelay.topology.module_queues.distribution
    wait_until_waiting(connection, distribution.name, 0)
    assert "distribution: the queue" in served.worker.log
    assert "does not take a message" in served.worker.log


def test_a_task_for_an_exchange_that_is_missing_comes_when_it_is_there(
    served: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-later", type="fanout")
    check_in(connection, served, "any", headers={"x-delay": 100, headers.EXCHANGE: exchange.name})
    wait_for(lambda: "there is no exchange" in served.worker.log, "the first attempt")
    queue = make_queue("later", exchange)
    queue(connection.default_channel).declare()
    (arrival,) = take(connection, [queue], 1)
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert set(arrival.message.headers) == {headers.DUE}


def test_of_several_queues_of_an_exchange_the_others_of_a_full_one_get_few_copies(
    served: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-both", type="fanout")
    sound = make_queue("sound", exchange)
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    full = make_queue("full", exchange, queue_arguments=arguments)
    for queue in (sound, full):
        queue(connection.default_channel).declare()
    told = {"x-delay": 100, headers.EXCHANGE: exchange.name}
    check_in(connection, served, "any", headers={**told, "id": 0})
    wait_until_waiting(connection, full.name, 1)
    began = time.monotonic()
    check_in(connection, served, "any", headers={**told, "id": 1})
    # The second task once at each of its attempts.
    arrivals = take(connection, [sound], 2)
    assert [arrival.message.headers["id"] for arrival in arrivals] == [0, 1]
    # The next one is in a minute, or as late as these small levels take: not in a second.
    wait_until_waiting(connection, f"{prefix}.seconds.5", 1)
    assert count(connection, sound.name) <= (time.monotonic() - began) / 5.9
    came = take_all_of(connection, full, 2)
    assert [arrival.message.headers["id"] for arrival in came] == [0, 1]
