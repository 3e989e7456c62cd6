"""One message never costs more than itself: what is too large, too many, too long or forged."""

from collections.abc import Callable
from functools import partial
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.modules.deliveries import MAX_HELD_BYTES
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.modules import OPEN, Client

MEBIBYTE = 2**20

#: What a worker may grow by beyond the bytes that a module holds: copies of single messages on
#: their way, and memory that Python does not give back.
MARGIN = 96 * MEBIBYTE


@pytest.fixture
def publish(connection: Connection) -> Callable[..., None]:
    """Publishes a message to an exchange, with a confirm."""
    channel: Any = connection.channel()
    channel.confirm_select()

    def publish(exchange: str, key: str, body: bytes, **properties: Any) -> None:
        channel.basic_publish_confirm(amqp.Message(body, **properties), exchange, key)

    return publish


def test_what_the_broker_refuses_in_undeliverable_too_is_put_there_by_the_broker(
    serve: Any, connection: Connection, target: Queue
) -> None:
    """A message in an envelope has a header that closes the channel, wherever it is published."""
    client = Client(connection, serve(**OPEN, rabbitdelay_retry_for=0))
    client.put_in_envelope(target.name, Item(b"bad", {"CC": "no list"}))
    client.put_in_envelope(target.name, Item(b"good"))
    (arrival,) = client.take(target)
    assert arrival.message.body == b"good"
    ((reason, _),) = client.undeliverable()
    assert "CC" in reason
    assert ": reconnecting" not in client.shop.worker.log


def test_a_flood_of_large_messages_is_held_within_bounds(
    serve: Any, connection: Connection, target: Queue, publish: Any
) -> None:
    """They wait at the broker, for a consumer that has a prefetch count of 1,000 by then."""
    client = Client(connection, serve(**OPEN))
    worker = client.shop.worker
    checkin = client.topology.module_queues.checkin
    large = 3 * MAX_HELD_BYTES // MEBIBYTE
    publish(checkin.exchange.name, target.name, b"small")
    client.take(target)
    before = worker.peak_bytes

    def have_arrived(number: int) -> bool:
        return client.count(target) >= number

    # A slow broker may deliver no faster than the module publishes: then flood it again.
    for flood in range(1, 6):
        worker.suspend()
        try:
            for number in range(large):
                body = b"%09d" % number + b"\0" * MEBIBYTE
                publish(checkin.exchange.name, target.name, body)
        finally:
            worker.resume()
        sent = flood * large
        wait_for(partial(have_arrived, sent), "the flood")
        assert worker.peak_bytes - before < MAX_HELD_BYTES + MARGIN
        if "consuming is paused" in worker.log:
            break
    assert "consuming is paused" in worker.log
    assert ": reconnecting" not in worker.log
    # Messages as small as most raise the prefetch again: none is late for the large ones.
    for _ in range(500):
        client.check_in(target.name)
    wait_for(lambda: have_arrived(sent + 500), "the small ones")
    arrivals = client.take(target, sent + 500)
    came = {each.message.body[:9] for each in arrivals if len(each.message.body) > MEBIBYTE}
    assert came == {b"%09d" % number for number in range(large)}
    assert client.count(client.topology.module_queues.undeliverable) == 0
