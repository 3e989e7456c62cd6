"""Publishers that threads share, and that no process inherits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import NoPublisherFree
from celery_rabbitdelay.publishing import wire
from celery_rabbitdelay.publishing.publisher_pool import PublisherPool
from tests.integration.arrivals import take
from tests.integration.publishing import in_child, publish


def test_a_pool_whose_publishers_are_all_in_use_says_so_in_time(connection: Connection) -> None:
    pool = PublisherPool(connection, limit=1)
    with (
        pool.acquire(),
        pytest.raises(NoPublisherFree, match="broker_pool_limit"),
        pool.acquire(timeout=0.1),
    ):
        pass
    pool.close()


def test_an_answer_is_received_at_once(
    connection: Connection, target: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def receive(function: Callable[[int], bytes], at_once: int, size: int) -> bytes:
        received = function(max(size, at_once))
        sizes.append(len(received))
        return received

    monkeypatch.setattr(wire, "_receive", receive)
    pool = PublisherPool(connection, limit=1)
    with pool.acquire() as publisher:
        publish(publisher, target.name)
        sizes.clear()
        publish(publisher, target.name)
        # py-amqp alone asks for three parts.
        assert sizes == [len(wire.settle_frames(1, wire.ACK, [1]))]
    pool.close()


def test_a_forked_process_has_connections_of_its_own(connection: Connection, target: Queue) -> None:
    pool = PublisherPool(connection, limit=2)
    with pool.acquire() as publisher:
        publish(publisher, target.name, "before the fork")

    def publish_twenty(name: str) -> None:
        for _ in range(20):
            with pool.acquire() as own:
                publish(own, target.name, name)
        pool.close()

    children = [in_child(partial(publish_twenty, f"child {number}")) for number in range(3)]
    for _ in range(20):
        with pool.acquire() as publisher:
            publish(publisher, target.name, "parent", resends=0)
    assert [ended() for ended in children] == [0, 0, 0]
    with pool.acquire() as publisher:
        publish(publisher, target.name, "after the children", resends=0)
    pool.close()

    bodies = Counter(arrival.body for arrival in take(connection, [target], 82))
    assert bodies == {
        **{f"child {number}": 20 for number in range(3)},
        "parent": 20,
        "before the fork": 1,
        "after the children": 1,
    }


def test_a_pool_can_be_closed_and_forked_while_a_publisher_is_in_use(
    connection: Connection, target: Queue
) -> None:
    pool = PublisherPool(connection, limit=1)
    with pool.acquire() as publisher:
        publish(publisher, target.name)
        pool.close()
    assert not publisher.connection.connected
    with pool.acquire():

        def acquire_another() -> None:
            with pool.acquire(timeout=1) as own:
                publish(own, target.name)

        assert in_child(acquire_another)() == 0
    pool.close()
