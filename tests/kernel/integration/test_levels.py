"""Messages that really wait: every layout, every way past a zero, both types of queue."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.layout import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from tests.kernel.integration.arrivals import count, take

#: How late a message may be on a slow machine; one that is held up is late by rounds of 180 s.
GENEROUS = 60.0

BITS = [("s8", 2, 0.8), ("s4", 2, 0.4), ("s2", 2, 0.2), ("s1", 2, 0.1)]


@pytest.fixture
def send(connection: Connection) -> Iterator[Callable[..., float]]:
    """Sends a message with a delay and returns the instant before which it must not come."""
    publisher = Publisher(connection.clone())

    def send(topology: Topology, queue: Queue, delay: float, body: Any = "x", **more: Any) -> float:
        not_before = time.time() + delay
        producer = DelayedProducer(publisher, topology)
        producer.publish_delayed(body, Destination(queue, "", queue.name), delay, **more)
        return not_before

    yield send
    publisher.close()


@pytest.mark.parametrize(
    ("layout", "queue_type"),
    [
        (clock(), "classic"),
        (binary(levels=5, zeros="skip"), "quorum"),
        (geometric(factor=3, levels=3, zeros="queue"), "quorum"),
        (custom(BITS, zeros="bind"), "quorum"),
        (custom(BITS, zeros="queue"), "classic"),
    ],
    ids=lambda each: f"{each.name}-{each.zeros}" if isinstance(each, Layout) else each,
)
def test_no_message_is_early_and_each_comes_once(
    connection: Connection,
    make_topology: Any,
    queue: Queue,
    send: Any,
    layout: Layout,
    queue_type: str,
) -> None:
    topology = make_topology(layout, queue_type=queue_type)
    delays = [-3, 0.1, 0.35, 1.0, 1.5]
    not_before = {delay: send(topology, queue, delay, body=delay) for delay in delays}

    arrivals = take(connection, [queue], len(delays))

    assert sorted(arrival.body for arrival in arrivals) == delays
    for arrival in arrivals:
        assert 0 <= arrival.at - not_before[arrival.body] < GENEROUS
    assert count(connection, topology.module_queues.undeliverable.name) == 0


def test_a_message_keeps_its_properties_and_loses_its_expiration(
    connection: Connection, topology: Topology, queue: Queue, send: Any
) -> None:
    own = {"x-tenant": "shop", "x-death": [{"queue": f"{topology.prefix}.ms.300"}], headers.DUE: 5}
    kept = {"priority": 3, "correlation_id": "id-7"}
    more = {"expiration": 0.05, "reply_to": Queue("answers"), "compression": "zlib"}
    send(topology, queue, 0.3, body={"order": 7}, headers=own, **kept, **more)
    (arrival,) = take(connection, [queue], 1)
    message = arrival.message
    assert arrival.body == {"order": 7}
    assert message.headers["x-tenant"] == "shop"
    assert message.headers["compression"] == "application/x-gzip"
    assert message.headers[headers.DUE] > time.time() * 1000 - 60_000
    expected = {**kept, "delivery_mode": PERSISTENT, "reply_to": "answers"}
    assert message.properties.items() >= expected.items()
    assert "expiration" not in message.properties
