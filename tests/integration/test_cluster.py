"""Three nodes: where the leaders of the queues are, and what becomes of delays when one dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.conftest import LEVELS, SHORT
from tests.integration.modules import check_in, wait_until_served
from tests.integration.shop import make_app, named
from tests.integration.worker import Worker
from tests.node_control import evaluate

#: Messages that are checked in before a node dies, and as many after it.
MESSAGES = 40


#: Milliseconds; the node dies while the messages wait in the levels.
DELAY_MS = 3000


@pytest.fixture(scope="module")
def cluster(broker_root: Path | None) -> Iterator[list[RabbitMQServer]]:
    """Three nodes of one cluster."""
    with ExitStack() as stack:
        first = stack.enter_context(RabbitMQServer(broker_root))
        joining = [RabbitMQServer(broker_root, cluster_with=first) for _ in range(2)]
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


def test_the_death_of_the_node_that_leads_the_modules_queues_loses_nothing(
    cluster: list[RabbitMQServer], redis_url: str
) -> None:
    topology = Topology("dies", SHORT)
    with Connection(cluster[0].url) as connection:
        declare(connection, topology)
    led = leaders(cluster[0])
    (victim,) = (
        node for node in cluster if node.node == led[topology.module_queues.distribution.name]
    )
    others = [node for node in cluster if node is not victim]
    configuration = {
        "prefix": "dies",
        # The worker is connected to the node that dies.
        "broker_url": ";".join(node.url for node in (victim, *others)),
        "result_backend": redis_url,
        # Otherwise Celery's worker ends itself if it connects before the cluster has noticed that
        # the node is gone, which still holds its pidbox queue; see "Keep workers alive".
        "worker_enable_remote_control": False,
        "rabbitdelay_prefix": "dies",
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_checkin_allowed": ["dies-*"],
    }
    shop = make_app(configuration)
    target = Queue("dies-target", queue_arguments={"x-queue-type": "quorum"})
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
            wait_for(lambda: count(producing, topology.module_queues.checkin.name) == 0, "check-in")
            victim.kill()
            publish(range(MESSAGES, 2 * MESSAGES))
            wait_for(all_came, "all messages")
            assert "rabbitdelay connects again (check-in" in worker.log
    shop.close()
    assert [n for n, at in came.items() if at < published[n] + DELAY_MS / 1000] == []
    with Connection(others[0].url) as connection:
        assert count(connection, topology.module_queues.undeliverable.name) == 0
