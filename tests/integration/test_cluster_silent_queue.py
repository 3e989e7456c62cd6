"""A queue whose node is frozen: RabbitMQ neither acks nor nacks its messages; others pass them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.conftest import small_configuration
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


class Stage(NamedTuple):
    """A worker on one node, a queue on the other one, which can be frozen, and a sound queue."""

    home: RabbitMQServer
    connection: Connection
    shop: Any
    worker: Worker
    lone: Queue
    sound: Queue

    def put(self, *items: Item) -> None:
        """Put an envelope for the lone queue into distribution."""
        told = {headers.EXCHANGE: "", headers.ROUTING_KEY: self.lone.name}
        put_in_envelope(self.connection, self.shop, list(items), **told)

    def assert_nobody_is_held_up(self) -> None:
        """Assert that messages for the sound queue arrive."""
        for each in range(FEW):
            own = {"x-delay": 100, "id": each}
            check_in(self.connection, self.shop, self.sound.name, headers=own)
        came = take(self.connection, [self.sound], FEW, timeout=180)
        assert {arrival.message.headers["id"] for arrival in came} == set(range(FEW))

    def resume_and_assert_all_come(self, number: int, timeout: float) -> None:
        """Let the node go on, and wait until all messages of the lone queue have come."""
        self.home.resume()
        ids: set[int] = set()

        def all_came() -> bool:
            ready = min(count(self.connection, self.lone.name), 1000)
            for arrival in take(self.connection, [self.lone], ready):
                ids.add(arrival.message.headers["id"])
            return ids == set(range(number))

        wait_for(all_came, "the messages of the lone queue", timeout)
        undeliverable = self.shop.rabbitdelay.topology.module_queues.undeliverable
        assert count(self.connection, undeliverable.name) == 0


@pytest.fixture(scope="module")
def nodes(broker_root: Path | None) -> Iterator[list[RabbitMQServer]]:
    """Two nodes of one cluster."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQServer(broker_root))
        yield [first, stack.enter_context(RabbitMQServer(broker_root, cluster_with=first))]


@pytest.fixture
def make_stage(
    nodes: list[RabbitMQServer], redis_url: str, prefix: str
) -> Iterator[Callable[..., Stage]]:
    """Makes a stage whose worker has these settings."""
    living, home = nodes
    with Connection(living.url) as connection, ExitStack() as stack:
        stack.callback(home.resume)

        def make(**settings: Any) -> Stage:
            configuration: dict[str, Any] = {
                **small_configuration(living.url, redis_url, prefix),
                # Of one replica each, so that they need no majority of the two nodes.
                "rabbitdelay_queue_type": "classic",
                "queue_type": "classic",
                "rabbitdelay_checkin_allowed": [f"{prefix}-*"],
                **settings,
            }
            shop = make_app(configuration)
            stack.callback(shop.close)
            arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 1}
            lone = Queue(f"{prefix}-lone", queue_arguments=arguments)
            sound = Queue(f"{prefix}-sound")
            with Connection(home.url) as at_home:
                lone(at_home.default_channel).declare()
            declare(connection, shop.rabbitdelay.topology)
            sound(connection.default_channel).declare()
            worker = stack.enter_context(Worker(configuration, [named(shop, "default")]))
            wait_until_served(worker)
            return Stage(home, connection, shop, worker, lone, sound)

        yield make


def test_a_queue_that_does_not_answer_holds_up_no_other(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rabbitdelay_confirm_timeout=300, rabbitdelay_max_unconfirmed=WINDOW)
    # Before the first message of a channel to a quorum queue, RabbitMQ asks the queue's leader, and
    # the channel does nothing else until it answers.
    stage.put(Item(b"x"))
    take(stage.connection, [stage.lone], 1)
    stage.home.suspend()
    for each in range(MANY):
        stage.put(Item(b"x", {"id": each}))
    stage.assert_nobody_is_held_up()
    distribution = stage.shop.rabbitdelay.topology.module_queues.distribution
    wait_until_waiting(stage.connection, distribution.name, 0)
    stage.resume_and_assert_all_come(MANY, timeout=180)
    assert "connects again" not in stage.worker.log


def test_a_queue_that_stops_answering_in_the_middle_of_many_messages_holds_up_no_other_for_long(
    make_stage: Callable[..., Stage],
) -> None:
    """RabbitMQ then reads nothing more from the connection, so the module takes another one."""
    stage = make_stage()
    stage.put(*(Item(b"x", {"id": each}) for each in range(LOAD)))
    arrived = partial(count, stage.connection, stage.lone.name)
    wait_for(lambda: arrived() > FEW, "the first messages", interval=0.01)
    stage.home.suspend()
    stage.assert_nobody_is_held_up()
    stage.resume_and_assert_all_come(LOAD, timeout=120)
