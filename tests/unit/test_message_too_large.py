"""Messages that a module would refuse for their size, after they have waited."""

from __future__ import annotations

from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.compression import encoders
from kombu.exceptions import OperationalError

from celery_rabbitdelay.exceptions import MessageTooLarge
from celery_rabbitdelay.kombu import DelayedProducer, Destination, Due, Publisher, Topology

TOPOLOGY = Topology()
MODULES = ("check-in", "distribution")
BEYOND = TOPOLOGY.layout.capacity_ms / 1000 + 60

STRAIGHT = Destination(Queue("q"), "", "q")
FAN_OUT = Destination(None, "news", "")


def make(
    size: int, destination: Destination, delay: float = 5, bound: Any = 1000, **options: Any
) -> int:
    """Make a message; return the bytes of its body."""
    bounds = {} if bound == "default" else {"max_message_bytes": bound}
    publisher = Publisher(Connection("amqp://"))
    producer = DelayedProducer(publisher, TOPOLOGY, modules=MODULES, **bounds)
    given = {"content_type": "application/octet-stream", "content_encoding": "binary", **options}
    made = producer.delayed_message(b"x" * size, destination, Due.after(delay), **given)
    return len(made.message.body)


@pytest.mark.parametrize(
    ("destination", "options"),
    [
        (FAN_OUT, {}),
        (STRAIGHT, {"priority": 9}),
        # Check-in reads it after each round of meditation.
        (STRAIGHT, {"delay": BEYOND}),
    ],
)
def test_the_sender_refuses_what_no_module_takes(destination: Destination, options: Any) -> None:
    assert make(1000, destination, **options) == 1000
    with pytest.raises(MessageTooLarge) as caught:
        make(1001, destination, **options)
    assert (caught.value.size, caught.value.bound) == (1001, 1000)
    assert isinstance(caught.value, OperationalError)
    assert "1,001 bytes is larger than rabbitdelay_max_message_bytes, 1,000" in str(caught.value)
    assert make(1001, destination, bound=None, **options) == 1001
    with pytest.raises(MessageTooLarge):
        make(16 * 2**20 + 1, destination, bound="default", **options)


def test_what_goes_straight_to_a_queue_may_be_as_large_as_the_broker_allows() -> None:
    assert make(100_000, STRAIGHT) == 100_000


@pytest.mark.parametrize("compression", encoders())
def test_a_compressed_body_counts_as_what_it_is_decompressed_to(compression: str) -> None:
    assert 0 < make(1000, STRAIGHT, compression=compression) < 1000
    with pytest.raises(MessageTooLarge) as caught:
        make(1001, STRAIGHT, compression=compression)
    assert (caught.value.size, caught.value.bound) == (1001, 1000)
    assert make(1001, STRAIGHT, bound=None, compression=compression) < 1001
