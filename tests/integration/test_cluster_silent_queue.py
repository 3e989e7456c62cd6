"""A queue whose node is frozen: RabbitMQ neither acks nor nacks its messages; others pass them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.conftest import LEVELS, SHORT
from tests.integration.modules import check_in, put_in_envelope, wait_until_served
from tests.integration.shop import make_app, named
from tests.integration.worker import Worker

#: Messages that distribution takes ahead of the first answer; eight times as many if none comes.
WINDOW = 50

#: Messages for the silent queue: more than these.
MANY = 500

#: Messages that are on their way to a queue when it stops answering.
LOAD = 20_000

#: Messages for a queue that answers.
FEW = 10


@pytest.fixture
def nodes(broker_root: Path | None) -> Iterator[list[RabbitMQServer]]:
    """Two nodes of one cluster."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQServer(broker_root))
        yield [first, stack.enter_context(RabbitMQServer(broker_root, cluster_with=first))]


@pytest.mark.parametrize(
    ("number", "timeout"), [(MANY, 300), (1, 3)], ids=["many", "one, until its time is up"]
)
def test_a_queue_that_does_not_answer_holds_up_no_other(
    nodes: list[RabbitMQServer], redis_url: str, number: int, timeout: float
) -> None:
    living, home = nodes
    configuration: dict[str, Any] = {
        "prefix": "silent",
        "broker_url": living.url,
        "result_backend": redis_url,
        "rabbitdelay_prefix": "silent",
        # Of one replica each, so that they need no majority of the two nodes.
        "rabbitdelay_queue_type": "classic",
        "queue_type": "classic",
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_checkin_allowed": ["silent-*"],
        "rabbitdelay_confirm_timeout": timeout,
        "rabbitdelay_max_unconfirmed": WINDOW,
    }
    shop = make_app(configuration)
    topology = Topology("silent", SHORT, "classic")
    arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
    silent = Queue("silent-lone", queue_arguments=arguments)
    sound = Queue("silent-sound")
    with Connection(home.url) as connection:
        silent(connection.default_channel).declare()
    with Connection(living.url) as connection, ExitStack() as stack:
        declare(connection, topology)
        sound(connection.default_channel).declare()
        worker = stack.enter_context(Worker(configuration, [named(shop, "default")]))
        wait_until_served(worker)
        told = {headers.EXCHANGE: "", headers.ROUTING_KEY: silent.name}
        # Before the first message of a channel to a quorum queue, RabbitMQ asks the queue's leader,
        # and the channel does nothing else until it answers.
        put_in_envelope(connection, shop, [Item(b"x")], **told)
        take(connection, [silent], 1)
        home.suspend()
        for each in range(number):
            put_in_envelope(connection, shop, [Item(b"x", {"id": each})], **told)
        if number == 1:
            # Nothing else is published that could tell whether the broker answers at all.
            wait_for(lambda: "did not confirm it in time" in worker.log, "the end of its time")
        for each in range(FEW):
            check_in(connection, shop, sound.name, headers={"x-delay": 100, "id": each})
        came = take(connection, [sound], FEW)
        assert {arrival.message.headers["id"] for arrival in came} == set(range(FEW))
        wait_until_waiting(connection, topology.module_queues.distribution.name, 0)

        home.resume()
        ids: set[int] = set()

        def all_came() -> bool:
            for arrival in take(connection, [silent], min(count(connection, silent.name), 100)):
                ids.add(arrival.message.headers["id"])
            return ids == set(range(number))

        wait_for(all_came, "the messages of the silent queue", timeout=180)
        assert count(connection, topology.module_queues.undeliverable.name) == 0
        assert "connects again" not in worker.log
    shop.close()


def test_a_queue_that_stops_answering_in_the_middle_of_many_messages_holds_up_no_other_for_long(
    nodes: list[RabbitMQServer], redis_url: str
) -> None:
    """RabbitMQ then reads nothing more from the connection, so the module takes another one."""
    living, home = nodes
    configuration: dict[str, Any] = {
        "prefix": "stops",
        "broker_url": living.url,
        "result_backend": redis_url,
        "rabbitdelay_prefix": "stops",
        # Of one replica each, so that they need no majority of the two nodes.
        "rabbitdelay_queue_type": "classic",
        "queue_type": "classic",
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_checkin_allowed": ["stops-*"],
    }
    shop = make_app(configuration)
    topology = Topology("stops", SHORT, "classic")
    arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
    stops, sound = Queue("stops-lone", queue_arguments=arguments), Queue("stops-sound")
    with Connection(home.url) as connection:
        stops(connection.default_channel).declare()
    with Connection(living.url) as connection, ExitStack() as stack:
        declare(connection, topology)
        sound(connection.default_channel).declare()
        worker = stack.enter_context(Worker(configuration, [named(shop, "default")]))
        wait_until_served(worker)
        told = {headers.EXCHANGE: "", headers.ROUTING_KEY: stops.name}
        items = [Item(b"x", {"id": each}) for each in range(LOAD)]
        put_in_envelope(connection, shop, items, **told)
        wait_for(lambda: count(connection, stops.name) > FEW, "the first messages", interval=0.01)
        home.suspend()
        for each in range(FEW):
            check_in(connection, shop, sound.name, headers={"x-delay": 100, "id": each})
        came = take(connection, [sound], FEW)
        assert {arrival.message.headers["id"] for arrival in came} == set(range(FEW))

        home.resume()
        ids: set[int] = set()

        def all_came() -> bool:
            for arrival in take(connection, [stops], min(count(connection, stops.name), 1000)):
                ids.add(arrival.message.headers["id"])
            return ids == set(range(LOAD))

        wait_for(all_came, "the messages of the queue that stopped", timeout=120)
        assert count(connection, topology.module_queues.undeliverable.name) == 0
    shop.close()
