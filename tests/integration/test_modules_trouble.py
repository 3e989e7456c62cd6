"""The modules beside a broker in trouble, and a topology that is incomplete or taken away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.modules.service import STOP_TIMEOUT
from celery_rabbitdelay.publishing.declaration import declare, delete, missing
from celery_rabbitdelay.testing import RabbitMQServer, ServerNotStarted, wait_for
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.integration.modules import OPEN, check_in, wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import Worker

#: Where only operators declare.
NEVER = {**OPEN, "rabbitdelay_declare": "never"}

#: Messages that are on their way when the broker is in trouble.
MESSAGES = 200

#: Seconds in which the messages come due, so that some are whenever the trouble begins. If the
#: machine is so slow that all are due before, the next number is tried.
SPANS = (10, 30, 90)

HUNDRED_SECONDS: dict[str, Any] = {"rabbitdelay_layout": [("seconds", 100, 1), ("ms", 10, 0.1)]}


@contextmanager
def alarm(broker: RabbitMQServer) -> Iterator[None]:
    """A memory alarm: the broker takes no messages, and blocks who publishes."""
    broker.ctl("set_vm_memory_high_watermark", "0.0001")
    try:
        yield
    finally:
        broker.ctl("set_vm_memory_high_watermark", "0.6")


@pytest.fixture
def standing(make_shop: Callable[..., Any], connection: Connection) -> Any:
    """An application for which operators have declared the levels and a queue."""
    shop = make_shop(**NEVER)
    declare(connection, shop.rabbitdelay.topology)
    shop.amqp.queues[named(shop, "default")](connection.default_channel).declare()
    return shop


@contextmanager
def blocked(
    broker: RabbitMQServer, connection: Connection, shop: Any, target: Queue
) -> Iterator[list[float]]:
    """A memory alarm that has blocked a module while messages come due, whose times it yields."""

    def is_blocked() -> bool:
        return "blocked" in broker.ctl("list_connections", "state")

    def have_all_come() -> bool:
        return count(connection, target.name) == MESSAGES

    checkin = shop.rabbitdelay.topology.module_queues.checkin
    for span in SPANS:
        delays = [1_000 + (span * 1000 - 1_100) * number // MESSAGES for number in range(MESSAGES)]
        published = time.time()
        for number, delay in enumerate(delays):
            check_in(connection, shop, target.name, headers={"x-delay": delay, "id": number})
        wait_until_waiting(connection, checkin.name, 0)
        with alarm(broker):
            wait_for(lambda: is_blocked() or have_all_come(), "a blocked connection")
            if not have_all_come():
                yield [published + delay / 1000 for delay in delays]
                return
        target(connection.default_channel).purge()
    pytest.fail("the machine is too slow for an alarm before all messages are due")


def assert_delays(connection: Connection, shop: Any, target: Queue) -> None:
    """Assert that a message that is checked in arrives after its delay."""
    published = time.time()
    check_in(connection, shop, target.name, headers={"x-delay": 300})
    (arrival,) = take(connection, [target], 1)
    assert arrival.at >= published + 0.3


def test_what_is_due_during_a_memory_alarm_arrives_when_it_ends(
    private_rabbitmq: RabbitMQServer,
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    target: Queue,
) -> None:
    """And no connection is given up, which would count as one delivery in vain each time."""
    settings = {**OPEN, **HUNDRED_SECONDS, "rabbitdelay_confirm_timeout": 1}
    shop = make_shop(**settings)
    with Worker({**configuration, **settings}, [named(shop, "default")]) as worker:
        wait_until_served(worker)
        with blocked(private_rabbitmq, connection, shop, target) as due:
            began = time.time()
            # Longer than the timeout, and than the time between two looks at the backlog.
            wait_for(lambda: time.time() > began + 4, "some time")
            assert count(connection, target.name) < MESSAGES
        arrivals = take(connection, [target], MESSAGES)
        assert "connects again" not in worker.log
    assert {arrival.message.headers["id"] for arrival in arrivals} == set(range(MESSAGES))
    for arrival in arrivals:
        assert arrival.at >= due[arrival.message.headers["id"]]


def test_a_worker_ends_during_a_memory_alarm_and_leaves_all_to_the_next(
    private_rabbitmq: RabbitMQServer,
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    target: Queue,
) -> None:
    settings = {**OPEN, **HUNDRED_SECONDS}
    shop = make_shop(**settings)
    # Celery itself waits without a bound when it closes a blocked connection, which is that of its
    # own events.
    silent = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    with Worker({**configuration, **settings}, [named(shop, "default")], *silent) as worker:
        wait_until_served(worker)
        with blocked(private_rabbitmq, connection, shop, target):
            os.kill(worker.pid, signal.SIGTERM)
            # Sooner than the modules' threads have to finish what they can finish.
            wait_for(lambda: not worker.running, "the worker's end", timeout=STOP_TIMEOUT)
            assert count(connection, target.name) < MESSAGES
        came: set[int] = set()

        def all_came() -> bool:
            for arrival in take(connection, [target], count(connection, target.name)):
                came.add(arrival.message.headers["id"])
            return came == set(range(MESSAGES))

        worker.start()
        wait_for(all_came, "all messages")


def test_where_operators_declare_the_modules_serve_what_stands(
    standing: Any, configuration: dict[str, Any], connection: Connection, target: Queue
) -> None:
    topology = standing.rabbitdelay.topology
    # As operators do, who know neither guard nor marker.
    for own in (topology.identity.guard, topology.identity.marker):
        own(connection.default_channel).delete()
    with Worker({**configuration, **NEVER}, [named(standing, "default")]):
        assert_delays(connection, standing, target)
    assert set(missing(connection, topology)) == {
        topology.identity.guard.name,
        topology.identity.marker.name,
    }


def test_where_operators_declare_a_worker_ends_that_misses_something_and_says_what(
    standing: Any, configuration: dict[str, Any], connection: Connection
) -> None:
    topology = standing.rabbitdelay.topology
    distribution = topology.module_queues.distribution
    distribution(connection.default_channel).delete()
    worker = Worker({**configuration, **NEVER}, [named(standing, "default")])
    try:
        with pytest.raises(ServerNotStarted):
            worker.start()
        assert "TopologyIncomplete" in worker.log
        assert distribution.name in worker.log
    finally:
        worker.stop()
    assert missing(connection, topology) == (distribution.name,)


def test_where_operators_declare_the_modules_name_what_was_deleted_and_wait_for_it(
    standing: Any, configuration: dict[str, Any], connection: Connection, target: Queue
) -> None:
    topology = standing.rabbitdelay.topology
    distribution = topology.module_queues.distribution
    with Worker({**configuration, **NEVER}, [named(standing, "default")]) as worker:
        wait_until_served(worker)
        distribution(connection.default_channel).delete()
        said = "distribution: connects again in 1.0 s: TopologyIncomplete("
        wait_for(lambda: said in worker.log, "the second attempt")
        assert distribution.name in worker.log[worker.log.index(said) :].splitlines()[0]
        assert missing(connection, topology) == (distribution.name,)
        declare(connection, topology)
        assert_delays(connection, standing, target)


def test_a_topology_that_is_deleted_beside_its_worker_is_declared_again_as_a_whole(
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    target: Queue,
) -> None:
    shop = make_shop(**OPEN)
    topology = shop.rabbitdelay.topology
    look = shop.tasks["look"]
    with Worker({**configuration, **OPEN}, [named(shop, "default")]) as worker:
        wait_until_served(worker)
        # From here on, the shop takes levels and queue for given.
        look.apply_async(delay=0.2).get(timeout=PATIENCE)
        delete(connection, topology, force=True)
        wait_until_served(worker, times=2)
        assert missing(connection, topology) == ()
        assert_delays(connection, shop, target)
        look.apply_async(delay=0.3).get(timeout=PATIENCE)
        # No loop: each began anew once, or twice if it did so amid the deletion.
        assert worker.log.count("connects again") <= 4
        assert "Traceback" not in worker.log
