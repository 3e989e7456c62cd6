"""Messages of a later version, at workers of this one: they wait for one that can read them."""

from __future__ import annotations

import json
import time
from typing import Any, Final
from uuid import uuid4

import amqp
import pytest
from kombu import Connection, Queue
from kombu.compression import compress

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.operations.undeliverable.messages import (
    UndeliverableMessage,
    undeliverable_messages,
)
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, named

#: What a worker logs when it puts one back.
WARNING: Final = "needs a later version of celery_rabbitdelay"

#: What the redelivery of this version adds to a message.
COUNTED: Final = {
    header_names.ATTEMPTS,
    header_names.FAILED_SINCE,
    header_names.FIRST_REASON,
    header_names.REASON,
}

#: The content type of an envelope of a later version.
LATER: Final = "application/vnd.rabbitdelay.envelope.2"


def into_levels(
    connection: Connection,
    shop: Any,
    destination: str,
    body: bytes,
    headers: dict[str, Any],
    **properties: Any,
) -> None:
    """Publish as a producer of any version does, due in a moment."""
    route = shop.rabbitdelay.topology.route(0.3, destination)
    due = {header_names.DUE: int(time.time() * 1000) + 300}
    message = amqp.Message(
        body, application_headers={**due, **headers}, delivery_mode=2, **properties
    )
    channel: Any = connection.default_channel
    channel.basic_publish(message, route.exchange, route.routing_key)


def note_of(shop: Any, notes: Notes, number: int) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
    """Return body, headers and properties of the task ``note``, as it waits for its own queue."""
    task_id, queue = str(uuid4()), named(shop, "default")
    made = shop.amqp.as_task_v2(task_id, "note", (number,), {"key": notes.key})
    own = {header_names.EXCHANGE: "", header_names.ROUTING_KEY: queue, header_names.QUEUE: queue}
    properties = {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "correlation_id": task_id,
    }
    return json.dumps(made.body).encode(), {**made.headers, **own}, properties


def waits_again(connection: Connection, shop: Any, number: int) -> None:
    """Wait until so many messages are in queues of the levels."""
    queues = [queue.name for queue in shop.rabbitdelay.topology.digit_queues]
    wait_for(
        lambda: sum(count(connection, name) for name in queues) == number,
        f"{number} messages in the levels",
        60,
    )


def undeliverable(connection: Connection, shop: Any, number: int) -> list[UndeliverableMessage]:
    """Wait until so many messages are undeliverable and return copies of them."""
    topology = shop.rabbitdelay.topology
    name = topology.module_queues.undeliverable.name
    wait_for(lambda: count(connection, name) == number, f"{number} undeliverable messages")
    return list(undeliverable_messages(connection, topology))


def test_distribution_keeps_them_going_until_a_later_version_takes_them(
    serve: Any, connection: Connection
) -> None:
    shop, body = serve(), b"\x00a format that nobody knows yet"
    own: dict[str, Any] = {"rabbitdelay-new": {"a": 1}, "x-mine": "kept"}
    into_levels(connection, shop, DISTRIBUTION, body, own, content_type=LATER, priority=3)
    versioned = {**own, header_names.VERSION: 2}
    into_levels(connection, shop, DISTRIBUTION, body, versioned, message_id="2")
    # This one goes on meanwhile, through the same queue.
    assert shop.tasks["look"].apply_async(delay=1, priority=9).get(timeout=PATIENCE)
    wait_for(lambda: "goes back into the delay levels" in shop.worker.log, "the warning")
    # After the second attempt, each of them waits for seconds.
    waits_again(connection, shop, 2)
    assert shop.worker.log.count(WARNING) == 1
    assert "Upgrade celery_rabbitdelay on all workers" in shop.worker.log
    shop.worker.stop()
    modules = shop.rabbitdelay.topology.module_queues
    arrivals = take(connection, [modules.distribution], 2)
    assert count(connection, modules.undeliverable.name) == 0
    for arrival in arrivals:
        message = arrival.message
        assert bytes(message.body) == body
        headers = message.headers
        assert headers.keys() >= COUNTED
        assert headers["rabbitdelay-new"] == {"a": 1}
        assert headers["x-mine"] == "kept"
        is_envelope = header_names.VERSION not in headers
        assert message.content_type == (LATER if is_envelope else None)
        assert (message.properties.get("priority") == 3) == is_envelope


@pytest.mark.parametrize(
    ("compression", "settings"),
    # The last one is beyond the bound of this version.
    [(None, {}), ("gzip", {}), ("gzip", {"rabbitdelay_max_message_bytes": 10})],
)
def test_a_task_that_comes_straight_from_the_levels_is_not_started_but_goes_back(
    serve: Any,
    connection: Connection,
    noted: Notes,
    compression: str | None,
    settings: dict[str, Any],
) -> None:
    shop = serve(**settings)
    body, headers, properties = note_of(shop, noted, 1)
    sent, own = body, {**headers, header_names.VERSION: 2, "rabbitdelay-new": [2]}
    if compression:
        sent, own["compression"] = compress(body, compression)
    queue = named(shop, "default")
    into_levels(connection, shop, queue, sent, own, **properties)
    wait_for(lambda: WARNING in shop.worker.log, "the warning")
    waits_again(connection, shop, 1)
    noted.send(2, delay=0.5)
    assert [note["given"] for note in noted.wait(1)] == [[2]]
    shop.worker.stop()
    (arrival,) = take(connection, [Queue(queue)], 1)
    # kombu has decompressed it.
    assert arrival.body == json.loads(body)
    found = arrival.message.headers
    assert {name: found[name] for name in own} == own
    assert found[header_names.ATTEMPTS] >= 1
    assert arrival.message.properties["correlation_id"] == properties["correlation_id"]


def test_where_no_later_version_comes_they_lie_in_undeliverable_with_the_reason(
    serve: Any, connection: Connection, noted: Notes
) -> None:
    shop = serve(rabbitdelay_retry_for=4.0)
    body, headers, properties = note_of(shop, noted, 1)
    versioned = {**headers, header_names.VERSION: 9}
    into_levels(connection, shop, named(shop, "default"), body, versioned, **properties)
    into_levels(connection, shop, DISTRIBUTION, b"later", {}, content_type=LATER)
    found = undeliverable(connection, shop, 2)
    assert noted() == []
    by_body = {message.body: message for message in found}
    assert by_body.keys() == {body, b"later"}
    for message in found:
        assert WARNING in message.found.reason
        assert "attempts since" in message.found.reason
    task = by_body[body]
    assert task.found.task == "note"
    assert {name: task.headers[name] for name in versioned} == versioned


def test_a_task_whose_headers_leave_no_room_for_the_count_is_undeliverable(
    serve: Any, connection: Connection, noted: Notes
) -> None:
    shop = serve()
    body, headers, properties = note_of(shop, noted, 1)
    long = {**headers, header_names.VERSION: 2, "x-long": "x" * 130_000}
    # It arrives, and with what counts its attempts it would exceed a frame.
    long["x-long"] += "x" * (131_040 - encoded_bytes(long, properties))
    into_levels(connection, shop, named(shop, "default"), body, long, **properties)
    (found,) = undeliverable(connection, shop, 1)
    assert shop.worker.log.count("A task is undeliverable, without its headers") == 1
    assert found.body == body
    assert WARNING in found.found.reason
    assert "cannot be written in AMQP" in found.found.reason
    shop.worker.stop()
    # It was acknowledged.
    assert count(connection, named(shop, "default")) == 0


def encoded_bytes(headers: dict[str, Any], properties: dict[str, Any]) -> int:
    """Return how many bytes headers and properties take, as :func:`into_levels` sends them."""
    every = {header_names.DUE: int(time.time() * 1000), **headers}
    message = amqp.Message(b"", application_headers=every, delivery_mode=2, **properties)
    return len(Content.of(message).properties)
