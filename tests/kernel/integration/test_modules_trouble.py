"""The modules beside a broker in trouble, and a topology that is incomplete or taken away."""

import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.modules.service import STOP_TIMEOUT
from celery_rabbitdelay.publishing.declaration import declare, delete, missing
from celery_rabbitdelay.testing import RabbitMQServer, ServerNotStarted, wait_for
from tests.kernel.integration.modules import OPEN, Client, wait_until_served
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.trouble import alarm, suspended
from tests.node_control import is_any_blocked

#: Where only operators declare.
NEVER = {**OPEN, "rabbitdelay_declare": "never"}

#: Messages that are due when the broker is in trouble.
MESSAGES = 200


def assert_delays(connection: Connection, shop: Any, target: Queue) -> None:
    """Assert that a message that is checked in arrives after its delay."""
    published, client = time.time(), Client(connection, shop)
    client.check_in(target.name, {"x-delay": 300})
    (arrival,) = client.take(target)
    assert arrival.at >= published + 0.3


def test_a_memory_alarm_ends_no_connection_and_a_worker_that_ends_in_it_leaves_all_to_the_next(
    private_rabbitmq: RabbitMQServer, serve: Any, connection: Connection, target: Queue
) -> None:
    """A connection that is given up would count as one delivery in vain each time."""
    # Celery itself waits without a bound when it closes a blocked connection, which is that of its
    # own events.
    silent = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    shop = serve(*silent, only="default", **OPEN, rabbitdelay_confirm_timeout=3)
    worker, client, came = shop.worker, Client(connection, shop), set[int]()

    def all_came() -> bool:
        arrivals = client.take(target, client.count(target))
        came.update(arrival.message.headers["id"] for arrival in arrivals)
        return came == set(range(MESSAGES))

    with ExitStack() as alarmed:
        with suspended(worker):
            for number in range(MESSAGES):
                client.put_in_envelope(target.name, Item(b"x", {"id": number}))
            assert client.count(target) == 0, "and the broker has read all before"
            alarmed.enter_context(alarm(private_rabbitmq))
        wait_for(lambda: is_any_blocked(private_rabbitmq), "a blocked connection")
        began = time.time()
        # Longer than the timeout, and than the time between two looks at the backlog.
        wait_for(lambda: time.time() > began + 4, "some time")
        assert ": reconnecting" not in worker.log
        os.kill(worker.pid, signal.SIGTERM)
        # Sooner than the modules' threads have to finish what they can finish.
        wait_for(lambda: not worker.running, "the worker's end", timeout=STOP_TIMEOUT)
        assert client.count(target) < MESSAGES
    worker.start()
    wait_for(all_came, "all messages")


def test_where_operators_declare_the_modules_serve_what_stands(
    standing: Topology, serve: Any, connection: Connection, target: Queue
) -> None:
    # As operators do, who know neither guard nor marker.
    own = (standing.identity.guard, standing.identity.marker)
    for each in own:
        each(connection.default_channel).delete()
    shop = serve(only="default", **NEVER)
    assert_delays(connection, shop, target)
    # They name what is deleted, and wait for it.
    distribution = standing.module_queues.distribution
    distribution(connection.default_channel).delete()
    said = "rabbitdelay distribution: reconnecting: TopologyIncomplete("
    wait_for(lambda: said in shop.worker.log, "a further attempt")
    assert distribution.name in shop.worker.log.partition(said)[2].splitlines()[0]
    assert set(missing(connection, standing)) == {distribution.name, *(each.name for each in own)}
    declare(connection, standing)
    assert_delays(connection, shop, target)


def test_where_operators_declare_a_worker_ends_that_misses_something_and_says_what(
    standing: Topology, serve: Any, connection: Connection
) -> None:
    distribution = standing.module_queues.distribution
    distribution(connection.default_channel).delete()
    with pytest.raises(ServerNotStarted, match=f"(?s)TopologyIncomplete.*{distribution.name}"):
        serve(only="default", **NEVER)
    assert missing(connection, standing) == (distribution.name,)


def test_a_topology_that_is_deleted_beside_its_worker_is_declared_again_as_a_whole(
    serve: Any, connection: Connection, target: Queue
) -> None:
    shop = serve(only="default", **OPEN)
    topology, look, worker = shop.rabbitdelay.topology, shop.tasks["look"], shop.worker
    # From here on, the shop takes levels and queue for given.
    look.apply_async(delay=0.2).get(timeout=PATIENCE)
    delete(connection, topology, force=True)
    wait_until_served(worker, times=2)
    assert missing(connection, topology) == ()
    assert_delays(connection, shop, target)
    look.apply_async(delay=0.3).get(timeout=PATIENCE)
    # No loop: each began anew once, or twice if it did so amid the deletion.
    assert worker.log.count(": reconnecting") <= 4
    assert "Traceback" not in worker.log
