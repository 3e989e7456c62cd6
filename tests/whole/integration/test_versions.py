"""Messages of a later version, at workers of this one: they wait for one that can read them."""

import json
import time
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection, Queue
from kombu.compression import compress

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.operations.undeliverable import undeliverable_messages
from celery_rabbitdelay.publishing.message import Content
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count, take, wait_until_waiting
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE, named

#: What a worker logs when it puts one back.
WARNING: Final = "needs a later version of celery_rabbitdelay"

#: The content type of an envelope of a later version.
LATER: Final = "application/vnd.rabbitdelay.envelope.2"

#: The properties of a task.
JSON: Final = {"content_type": "application/json", "content_encoding": "utf-8"}


def into_levels(
    connection: Connection, shop: Any, to: str, body: bytes, own: dict[str, Any], **properties: Any
) -> None:
    """Publish as a producer of any version does, due in a moment."""
    route = shop.rabbitdelay.topology.route(0.3, to)
    every = {header_names.DUE: int(time.time() * 1000) + 300, **own}
    message = amqp.Message(body, application_headers=every, delivery_mode=2, **properties)
    channel: Any = connection.default_channel
    channel.basic_publish(message, route.exchange, route.routing_key)


def later_note(shop: Any, notes: Notes) -> tuple[bytes, dict[str, Any]]:
    """Return body and headers of the task ``note`` of a later version, as it waits."""
    queue = named(shop, "default")
    made = shop.amqp.as_task_v2(str(uuid4()), "note", (1,), {"key": notes.key})
    own = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: queue, header_names.QUEUE: queue}
    later = {header_names.VERSION: 2, "rabbitdelay-new": [2], "x-mine": "kept"}
    return json.dumps(made.body).encode(), {**made.headers, **own, **later}


def waits_again(connection: Connection, shop: Any, number: int) -> None:
    """Wait until so many messages are in queues of the levels."""
    queues = [queue.name for queue in shop.rabbitdelay.topology.digit_queues]
    wait_for(
        lambda: sum(count(connection, name) for name in queues) == number,
        f"{number} messages in the levels",
        60,
    )


def test_distribution_keeps_them_going_until_a_later_version_takes_them(
    serve: Any, connection: Connection
) -> None:
    shop, body = serve(), b"\x00a format that nobody knows yet"
    own: dict[str, Any] = {"rabbitdelay-new": {"a": 1}, "x-mine": "kept"}
    into_levels(connection, shop, DISTRIBUTION, body, own, content_type=LATER, priority=3)
    into_levels(connection, shop, DISTRIBUTION, body, {**own, header_names.VERSION: 2})
    # This one goes on meanwhile, through the same queue.
    assert shop.tasks["look"].apply_async(delay=1, priority=9).get(timeout=PATIENCE)
    waits_again(connection, shop, 2)
    wait_for(lambda: shop.worker.log.count(WARNING) == 1, "the warning")
    shop.worker.stop()
    for arrival in take(connection, [shop.rabbitdelay.topology.module_queues.distribution], 2):
        message = arrival.message
        assert bytes(message.body) == body
        assert {name: message.headers[name] for name in own} == own
        assert message.headers[header_names.ATTEMPTS] >= 1
        is_envelope = header_names.VERSION not in message.headers
        assert message.content_type == (LATER if is_envelope else None)
        assert (message.properties.get("priority") == 3) == is_envelope


def test_a_task_that_comes_straight_from_the_levels_is_not_started_but_goes_back(
    serve: Any, connection: Connection, noted: Notes
) -> None:
    """Also a compressed one, which is beyond the bound of this version."""
    shop = serve(rabbitdelay_max_message_bytes=10)
    body, own = later_note(shop, noted)
    ways = {"plain": body, "gzip": compress(body, "gzip")[0]}
    for way, sent in ways.items():
        more = (
            {"x-way": way}
            if way == "plain"
            else {"x-way": way, "compression": "application/x-gzip"}
        )
        into_levels(connection, shop, named(shop, "default"), sent, {**own, **more}, **JSON)
    waits_again(connection, shop, 2)
    noted.send(2, delay=0.5)
    assert [note["given"] for note in noted.wait(1)] == [[2]]
    assert WARNING in shop.worker.log
    shop.worker.stop()
    arrivals = take(connection, [Queue(named(shop, "default"))], 2)
    assert {each.message.headers["x-way"] for each in arrivals} == ways.keys()
    for arrival in arrivals:
        # kombu has decompressed it.
        assert arrival.body == json.loads(body)
        found = arrival.message.headers
        assert {name: found[name] for name in own} == own
        assert found[header_names.ATTEMPTS] >= 1


def test_where_no_later_version_comes_they_lie_in_undeliverable_with_the_reason(
    serve: Any, connection: Connection, noted: Notes
) -> None:
    shop = serve(rabbitdelay_retry_for=1.0)
    body, own = later_note(shop, noted)
    into_levels(connection, shop, named(shop, "default"), body, own, **JSON)
    into_levels(connection, shop, DISTRIBUTION, b"later", {}, content_type=LATER)
    # It arrives, and with what counts its attempts it would exceed a frame.
    longer = {**own, "x-long": "x" * 130_000}
    every = {header_names.DUE: int(time.time() * 1000), **longer}
    size = len(Content.of(amqp.Message(b"", application_headers=every, **JSON)).properties)
    longer["x-long"] += "x" * (131_040 - size)
    into_levels(connection, shop, named(shop, "default"), b"[]", longer, **JSON)
    topology = shop.rabbitdelay.topology
    wait_until_waiting(connection, topology.module_queues.undeliverable.name, 3)
    found = {message.body: message for message in undeliverable_messages(connection, topology)}
    assert noted() == []
    assert found.keys() == {body, b"later", b"[]"}
    assert all(WARNING in message.found.reason for message in found.values())
    assert found[body].found.task == "note"
    assert {name: found[body].headers[name] for name in own} == own
    assert "cannot be written in AMQP" in found[b"[]"].found.reason
    shop.worker.stop()
    # All were acknowledged.
    assert count(connection, named(shop, "default")) == 0
