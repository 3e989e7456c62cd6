"""Nodes that die and nodes that freeze: no delay is lost, and no queue holds up another one."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count, take, wait_until_waiting
from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.modules import check_in, put_in_envelope, wait_until_served
from tests.kernel.integration.shop import make_app, named
from tests.kernel.integration.trouble import resumed
from tests.kernel.integration.worker import Worker
from tests.node_control import evaluate
from tests.rabbitmq_node import RabbitMQNode

#: Messages that are checked in before a node dies, and as many after it.
MESSAGES = 40

#: Milliseconds; the node dies while the messages wait in the levels.
DELAY_MS = 3000

QUORUM: dict[str, Any] = {"x-queue-type": "quorum"}

#: Messages that are on their way to a queue when it stops answering.
LOAD = 20_000

#: Messages for a queue that answers.
FEW = 10


@pytest.fixture(scope="module")
def cluster(broker_root: Path | None) -> Iterator[list[RabbitMQNode]]:
    """Three nodes of one cluster."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQNode(broker_root))
        joining = [RabbitMQNode(broker_root, cluster_with=first) for _ in range(2)]
        nodes = [first, *(stack.enter_context(node) for node in joining)]
        for node in nodes:
            shorten_timeouts(node)
        yield nodes


def shorten_timeouts(node: RabbitMQServer) -> None:
    """Let a node try again after 5 s, until it is started the next time.

    By default, 180 s until a message that is on its way to the next level is sent again when the
    node of that level's queue has died; and on 4.3, 60 s until the messages of a consumer whose
    node has died return to their queue.
    """
    for setting in (
        "dead_letter_worker_publisher_confirm_timeout",
        "consumer_disconnected_timeout",
    ):
        evaluate(node, f"application:set_env(rabbit, {setting}, 5000)")


def leaders(node: RabbitMQServer) -> dict[str, str]:
    """Return the node that leads each quorum queue."""
    lines = node.ctl("list_queues", "name", "type", "leader").splitlines()
    rows = [line.split("\t") for line in lines]
    return {row[0]: row[2] for row in rows if row[1:2] == ["quorum"]}


def test_a_queue_that_stops_answering_in_the_middle_of_many_messages_holds_up_no_other_for_long(
    cluster: list[RabbitMQNode], redis_url: str, prefix: str
) -> None:
    """RabbitMQ then reads nothing more from the connection, so the module takes another one."""
    living, home, _ = cluster
    configuration: dict[str, Any] = {
        **small_configuration(living.url, redis_url, prefix),
        # Of one replica each, so that they need no majority of the nodes.
        "rabbitdelay_queue_type": "classic",
        "queue_type": "classic",
        "rabbitdelay_checkin_allowed": [f"{prefix}-*"],
    }
    shop: Any = make_app(configuration)
    lone = Queue(f"{prefix}-lone", queue_arguments={**QUORUM, "x-quorum-initial-group-size": 1})
    sound = Queue(f"{prefix}-sound")
    with Connection(home.url) as at_home:
        lone(at_home.default_channel).declare()
    ids: set[int] = set()

    def all_came() -> bool:
        ready = min(count(connection, lone.name), 1000)
        ids.update(arrival.message.headers["id"] for arrival in take(connection, [lone], ready))
        return ids == set(range(LOAD))

    with Connection(living.url) as connection, resumed(home):
        declare(connection, shop.rabbitdelay.topology)
        sound(connection.default_channel).declare()
        with Worker(configuration, [named(shop, "default")]) as worker:
            wait_until_served(worker)
            items = [Item(b"x", {"id": each}) for each in range(LOAD)]
            to = {headers.EXCHANGE: "", headers.ROUTING_KEY: lone.name}
            put_in_envelope(connection, shop, items, **to)
            arrived = partial(count, connection, lone.name)
            wait_for(lambda: arrived() > FEW, "the first messages", interval=0.01)
            home.suspend()
            for _ in range(FEW):
                check_in(connection, shop, sound.name, headers={"x-delay": 100})
            take(connection, [sound], FEW, timeout=180)
            home.resume()
            wait_for(all_came, "the messages of the lone queue", timeout=120)
        undeliverable = shop.rabbitdelay.topology.module_queues.undeliverable
        assert count(connection, undeliverable.name) == 0
    shop.close()


def test_the_death_of_the_node_that_leads_the_modules_queues_loses_nothing(
    cluster: list[RabbitMQNode], redis_url: str, prefix: str
) -> None:
    configuration = {
        **small_configuration(cluster[0].url, redis_url, prefix),
        # Otherwise Celery's worker ends itself if it connects before the cluster has noticed that
        # the node is gone, which still holds its pidbox queue; see "Keep workers alive".
        "worker_enable_remote_control": False,
        "rabbitdelay_checkin_allowed": [f"{prefix}-*"],
    }
    shop = make_app(configuration)
    topology = shop.rabbitdelay.topology
    with Connection(cluster[0].url) as connection:
        declare(connection, topology)
    leader = leaders(cluster[0])[topology.module_queues.distribution.name]
    (victim,) = (node for node in cluster if node.node == leader)
    others = [node for node in cluster if node is not victim]
    # The worker is connected to the node that dies.
    configuration["broker_url"] = ";".join(node.url for node in (victim, *others))
    target = Queue(f"{prefix}-target", queue_arguments=QUORUM)
    published: dict[int, float] = {}
    came: dict[int, float] = {}

    def publish(numbers: range) -> None:
        for number in numbers:
            published[number] = time.time()
            check_in(producing, shop, target.name, headers={"x-delay": DELAY_MS, "id": number})

    def all_came() -> bool:
        waiting = min(count(producing, target.name), MESSAGES)
        for arrival in take(producing, [target], waiting):
            came.setdefault(arrival.message.headers["id"], arrival.at)
        return came.keys() == published.keys()

    with Connection(others[0].url, transport_options={"confirm_publish": True}) as producing:
        target(producing.default_channel).declare()
        with Worker(configuration, [named(shop, "default")]) as worker:
            wait_until_served(worker)
            publish(range(MESSAGES))
            wait_until_waiting(producing, topology.module_queues.checkin.name, 0)
            victim.kill()
            publish(range(MESSAGES, 2 * MESSAGES))
            wait_for(all_came, "all messages")
            assert "rabbitdelay check-in: reconnecting" in worker.log
        assert count(producing, topology.module_queues.undeliverable.name) == 0
    shop.close()
    assert [n for n, at in came.items() if at < published[n] + DELAY_MS / 1000] == []
