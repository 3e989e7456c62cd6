"""What becomes of a message when it arrives, by what its frames said; the channel is a fake."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import amqp
import pytest
from kombu import Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.deliveries import (
    HEADER_EXPANSION,
    Deliveries,
    Module,
)
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.publishing.wire import ACK, REJECT, REQUEUE, Seen


def receive(message: amqp.Message) -> Iterator[Outgoing]:
    yield cast(Any, message)


def admit(message: amqp.Message) -> None:
    message.properties["application_headers"] = {}


@pytest.fixture
def deliveries() -> Deliveries:
    channel = SimpleNamespace(basic_cancel=lambda tag, nowait: None)
    transport = SimpleNamespace(_quick_recv=None)
    connection: Any = SimpleNamespace(
        channel=lambda: channel, connection=SimpleNamespace(frame_max=4096, transport=transport)
    )
    module = Module("m", Topology(), Queue("q"), receive, 9, 9, 9.0, 9.0, admit=admit)
    return Deliveries(connection, module)


def arrive(deliveries: Deliveries, seen: Seen, tag: int = 1, redelivered: bool = False) -> None:
    message = amqp.Message(b"12345", application_headers={"mine": 1, **seen.marks})
    message.delivery_info = {"delivery_tag": tag, "redelivered": redelivered}
    cast(Any, message).rabbitdelay_seen = seen
    deliveries._received(message)


def settled(deliveries: Deliveries) -> dict[Any, list[int]]:
    return {how: tags for how, tags in deliveries._settled.items() if tags}


def test_a_message_is_settled_once_nothing_is_pending_for_it(deliveries: Deliveries) -> None:
    arrive(deliveries, Seen(properties_bytes=7))
    (received,) = deliveries.waiting
    # Headers take more memory than their bytes. They are admitted before anybody reads them.
    assert received.cost == 5 + HEADER_EXPANSION * 7
    assert received.message.headers == {}
    received.pending += 1
    for left in (1, 0):
        assert (deliveries.unfinished, settled(deliveries)) == (1, {})
        received.pending = left
        deliveries.settle(received)
    assert (deliveries.unfinished, settled(deliveries)) == (0, {ACK: [1]})
    assert (deliveries._statistics.received, deliveries._statistics.finished) == (1, 1)


def test_a_message_that_was_not_kept_is_rejected_and_counted(deliveries: Deliveries) -> None:
    arrive(deliveries, Seen(skipped_bytes=6))
    assert (deliveries.unfinished, settled(deliveries)) == (0, {REJECT: [1]})
    counted = deliveries._statistics
    assert (counted.received, counted.undeliverable, counted.finished) == (1, 1, 1)


def test_at_the_end_it_gives_back_what_nobody_has_begun(deliveries: Deliveries) -> None:
    for tag in (1, 2):
        arrive(deliveries, Seen(), tag, redelivered=tag == 1)
        assert deliveries.are_redelivered is (tag == 1)
    begun = deliveries.waiting.popleft()
    deliveries.stop()
    assert (deliveries.unfinished, settled(deliveries)) == (1, {REQUEUE: [2]})
    begun.pending = 0
    deliveries.settle(begun)
    assert (deliveries.unfinished, deliveries._statistics.finished) == (0, 1)
