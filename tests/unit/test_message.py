"""Parts of a message."""

from __future__ import annotations

from typing import Any

import amqp
import pytest
from kombu import Connection, Queue
from kombu.serialization import register, unregister

from celery_rabbitdelay.kombu import DelayedProducer, Destination, Due, Publisher, Topology
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.publishing.message import WaitingMessage, body_of, kept_properties
from celery_rabbitdelay.publishing.wire import Content


@pytest.mark.parametrize(
    ("received", "kept"),
    [
        ({}, {"priority": None}),
        ({"priority": 0}, {"priority": 0}),
        ({"priority": 9, "reply_to": None}, {"priority": 9}),
        (
            {"message_id": "4d5e", "type": "order", "timestamp": 1_900_000_000},
            {"priority": None, "message_id": "4d5e", "type": "order", "timestamp": 1_900_000_000},
        ),
        (
            {"user_id": "shop", "expiration": "1000", "delivery_mode": 1, "cluster_id": "eu"},
            {"priority": None},
        ),
    ],
    ids=["none", "lowest priority", "empty property", "kept", "never kept"],
)
def test_a_message_published_again_keeps_its_properties(received: Any, kept: Any) -> None:
    assert kept_properties(received) == kept


@pytest.mark.parametrize(
    ("properties", "task_id"),
    [
        ({"correlation_id": "4d5e", "message_id": "other"}, "4d5e"),
        ({"correlation_id": "", "message_id": "4d5e"}, "4d5e"),
        ({"message_id": 7}, "7"),
        ({}, "3421780262"),  # CRC-32's check value, https://reveng.sourceforge.io/crc-catalogue
    ],
)
def test_a_message_without_an_id_has_one_of_its_body(properties: Any, task_id: str) -> None:
    assert WaitingMessage(b"123456789", properties, DelayHeaders()).task_id == task_id


@pytest.mark.parametrize(
    ("text", "encoding", "body"),
    [
        ("Größe", None, "Größe".encode()),
        ("Größe", "latin-1", b"Gr\xf6\xdfe"),
        # A body that was empty is a text, whatever a stranger calls its encoding.
        ("", "unknown", b""),
        ("", "a\0b", b""),
        # This encoding decodes some bytes to a text that it cannot encode.
        ("-" * 64, "idna", b"-" * 64),
    ],
)
def test_a_body_that_py_amqp_has_decoded_is_encoded_as_it_was(
    text: str, encoding: str | None, body: bytes
) -> None:
    message = amqp.Message(text, content_encoding=encoding)
    assert body_of(message) == body
    assert Content.of(message).body == body


def test_a_serializer_may_return_text_of_any_encoding() -> None:
    register("latin", str, str, "text/x-latin", content_encoding="latin-1")
    try:
        producer = DelayedProducer(Publisher(Connection("amqp://")), Topology(), serializer="latin")
        made = producer.delayed_message("Größe", Destination(Queue("q"), "", "q"), Due.after(5))
    finally:
        unregister("latin")
    body, properties, _ = made.message
    assert (body, properties["content_encoding"]) == (b"Gr\xf6\xdfe", "latin-1")
