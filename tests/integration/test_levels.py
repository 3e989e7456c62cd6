"""Messages that really wait: every layout, every way past a zero, both types of queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import (
    DeclarationRefused,
    DelayTooLong,
    NeedsDistribution,
)
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.layout import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare, delete
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from tests.integration.arrivals import count, take
from tests.integration.conftest import SHORT
from tests.integration.publishing import work
from tests.unit.clock import frozen

#: How late a message may be on a slow machine; one that is held up is late by rounds of 180 s.
GENEROUS = 60.0

BITS = [("s8", 2, 0.8), ("s4", 2, 0.4), ("s2", 2, 0.2), ("s1", 2, 0.1)]

QUEUE_TYPES = ("quorum", "classic")

LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "clock": lambda zeros: clock(zeros=zeros),
    "binary": lambda zeros: binary(levels=5, zeros=zeros),
    "geometric": lambda zeros: geometric(factor=3, levels=3, zeros=zeros),
    "custom": lambda zeros: custom(BITS, zeros=zeros),
}


def destination(queue: Queue) -> Destination:
    return Destination(queue, "", queue.name)


@pytest.fixture
def send(connection: Connection) -> Iterator[Callable[..., float]]:
    """Sends a message with a delay and returns the instant before which it must not come."""
    publisher = Publisher(connection.clone())

    def send(topology: Topology, queue: Queue, delay: float, body: Any = "x", **more: Any) -> float:
        not_before = time.time() + delay
        producer = DelayedProducer(publisher, topology)
        producer.publish_delayed(body, destination(queue), delay, **more)
        return not_before

    yield send
    publisher.close()


#: Every layout with every way past a zero, and each of both with either type of queue.
PAIRS = [
    pytest.param(make, zeros, QUEUE_TYPES[(row + column) % 2], id=f"{name}-{zeros}")
    for row, (name, make) in enumerate(LAYOUTS.items())
    for column, zeros in enumerate(["bind", "skip", "queue"])
]


@pytest.mark.parametrize(("make", "zeros", "queue_type"), PAIRS)
def test_no_message_is_early_and_each_comes_once(
    connection: Connection,
    make_topology: Callable[..., Topology],
    queue: Queue,
    send: Callable[..., float],
    make: Callable[[Any], Layout],
    zeros: str,
    queue_type: str,
) -> None:
    topology = make_topology(make(zeros), queue_type=queue_type)
    delays = [0.1, 0.2, 0.35, 0.5, 1.0, 1.1, 1.5]
    not_before = {delay: send(topology, queue, delay, body=delay) for delay in delays}

    arrivals = take(connection, [queue], len(delays))

    assert sorted(arrival.body for arrival in arrivals) == delays
    for arrival in arrivals:
        assert 0 <= arrival.at - not_before[arrival.body] < GENEROUS
    assert count(connection, topology.module_queues.undeliverable.name) == 0


@pytest.mark.parametrize("zeros", ["bind", "skip", "queue"])
def test_each_shard_delivers_its_own_messages_once(
    connection: Connection,
    make_topology: Callable[..., Topology],
    queue: Queue,
    send: Callable[..., float],
    zeros: Any,
) -> None:
    topology = make_topology(custom(BITS, zeros=zeros), shards=3)
    # A delay would be over if the first message had to wait for the declaration.
    declare(connection, topology)
    numbers = range(12)
    with frozen():  # or what is left of a delay may be nothing
        not_before = [
            send(topology, queue, 1.1, body=n, correlation_id=f"task-{n}") for n in numbers
        ]

    arrivals = take(connection, [queue], len(numbers))

    assert sorted(arrival.body for arrival in arrivals) == list(numbers)
    assert all(0 <= arrival.at - not_before[arrival.body] < GENEROUS for arrival in arrivals)
    deaths = [death for arrival in arrivals for death in arrival.message.headers["x-death"]]
    stops = {death["queue"] for death in deaths}
    shards = {stop.rsplit(".", 1)[1] for stop in stops}
    assert shards == {"s0", "s1", "s2"}
    assert count(connection, topology.module_queues.undeliverable.name) == 0


def test_a_message_keeps_its_properties_and_loses_its_expiration(
    connection: Connection, topology: Topology, queue: Queue, send: Callable[..., float]
) -> None:
    own = {"x-tenant": "shop", "x-death": [{"queue": f"{topology.prefix}.ms.300"}], headers.DUE: 5}
    send(
        topology,
        queue,
        0.3,
        body={"order": 7},
        headers=own,
        priority=3,
        expiration=0.05,
        correlation_id="id-7",
        reply_to=Queue("answers"),
        compression="zlib",
    )

    (arrival,) = take(connection, [queue], 1)

    message = arrival.message
    assert arrival.body == {"order": 7}
    assert message.headers["x-tenant"] == "shop"
    assert message.headers[headers.DUE] > time.time() * 1000 - 60_000
    assert message.properties["priority"] == 3
    assert message.properties["delivery_mode"] == PERSISTENT
    assert message.properties["correlation_id"] == "id-7"
    assert message.properties["reply_to"] == "answers"
    assert "expiration" not in message.properties
    assert message.headers["compression"] == "application/x-gzip"


def test_no_delay_is_delivered_at_once(
    connection: Connection, topology: Topology, queue: Queue, send: Callable[..., float]
) -> None:
    send(topology, queue, -3)
    assert len(take(connection, [queue], 1)) == 1


def test_what_does_not_fit_is_refused(
    topology: Topology, queue: Queue, send: Callable[..., float]
) -> None:
    with pytest.raises(DelayTooLong, match=r"5\.900 s"):
        send(topology, queue, 6)
    with pytest.raises(NeedsDistribution, match="priority 5"):
        send(topology, queue, 1, priority=5)


def test_an_exchange_deleted_by_hand_is_put_back_by_the_next_message(
    connection: Connection, topology: Topology, queue: Queue, send: Callable[..., float]
) -> None:
    send(topology, queue, 0.1)
    channel: Any = connection.default_channel
    for exchange in topology.exchanges:
        exchange(channel).delete()

    send(topology, queue, 0.2)

    assert len(take(connection, [queue], 2)) == 2


def test_an_instant_is_met_although_the_levels_have_to_be_declared_first(
    connection: Connection, topology: Topology, make_queue: Callable[..., Queue]
) -> None:
    declared: list[float] = []

    def hold_back(name: str, *counts: int) -> None:
        work(0.5)
        declared.append(time.time())

    queue = make_queue(on_declared=hold_back)
    publisher = Publisher(connection.clone())
    due = datetime.now(UTC) + timedelta(seconds=5)
    DelayedProducer(publisher, topology).publish_delayed("x", destination(queue), Due.at(due))
    publisher.close()
    (arrival,) = take(connection, [queue], 1)
    assert due.timestamp() <= arrival.at < due.timestamp() + GENEROUS
    # It was published after its queue was declared, for what was left by then: at most 4.5 s.
    (published_after,) = declared
    waited_ms = 0
    for death in arrival.message.headers.get("x-death", []):
        unit, digit = death["queue"].removeprefix(f"{topology.prefix}.").split(".")
        waited_ms += int(digit) * {"seconds": 1000, "ms": 1}[unit]
    assert waited_ms <= max(due.timestamp() - published_after, 0) * 1000 + 100


def test_a_destination_that_could_not_be_bound_is_bound_by_the_next_message(
    connection: Connection, topology: Topology, queue: Queue, send: Callable[..., float]
) -> None:
    not_ours = Queue(queue.name, no_declare=True)
    with pytest.raises(DeclarationRefused, match="no queue"):
        send(topology, not_ours, 0.1)
    queue(connection.default_channel).declare()
    send(topology, not_ours, 0.2)
    assert len(take(connection, [queue], 1)) == 1


def test_what_else_is_to_be_declared_is_declared(
    connection: Connection,
    topology: Topology,
    make_queue: Callable[..., Queue],
    send: Callable[..., float],
) -> None:
    further = make_queue("further")
    send(topology, make_queue("queue"), 0.1, declare=[further])
    assert count(connection, further.name) == 0


def test_prefixes_never_meet(
    connection: Connection, prefix: str, queue: Queue, send: Callable[..., float]
) -> None:
    one, two = Topology(f"{prefix}-a", SHORT), Topology(f"{prefix}-b", binary(levels=4))
    try:
        send(one, queue, 0.2, body="one")
        send(two, queue, 0.2, body="two")
        assert sorted(a.body for a in take(connection, [queue], 2)) == ["one", "two"]
    finally:
        delete(connection, one, force=True)
        delete(connection, two, force=True)
