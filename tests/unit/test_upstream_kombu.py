"""The private parts of kombu that publishing/kombu_internals.py uses are where it looks for them.

A test that fails names the part that a new version of kombu has moved.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from random import randbytes
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue, compression
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils import json

from celery_rabbitdelay.publishing import kombu_internals as internals


def moved(name: str) -> str:
    return f"kombu {version('kombu')} has moved or changed {name}: mend kombu_internals.py"


def test_a_producer_serializes_and_compresses() -> None:
    assert hasattr(Producer, "_prepare"), moved("Producer._prepare")
    assert [*inspect.signature(Producer._prepare).parameters][1:] == [
        *("body", "serializer", "content_type", "content_encoding", "compression", "headers"),
    ], moved("the arguments of Producer._prepare")
    headers: dict[str, Any] = {}
    with Connection("memory://") as connection:
        producer = Producer(connection.default_channel, serializer="json")
        body, content_type, encoding = internals.serialized(
            producer, [1], headers, compression="zlib"
        )
    assert isinstance(body, bytes), moved("the result of Producer._prepare")
    assert (content_type, encoding) == ("application/json", "utf-8"), moved("Producer._prepare")
    assert headers == {"compression": "application/x-gzip"}, moved("Producer._prepare")


def test_a_serializer_is_known_by_its_encoder() -> None:
    assert hasattr(registry, "_encoders"), moved("serialization.registry._encoders")
    types = getattr(registry, "type_to_name", {})
    assert types.get("application/json") == "json", moved("serialization.registry.type_to_name")
    assert hasattr(registry._encoders["json"], "encoder"), moved("the codecs of _encoders")
    assert registry._encoders["json"].encoder is json.dumps, moved("kombu.utils.json.dumps")
    assert internals.is_kombus_json("json")
    assert not internals.is_kombus_json("pickle")
    assert not internals.is_kombus_json("unknown")


@pytest.mark.parametrize("name", compression.encoders())
def test_all_that_kombu_decompresses_is_decompressed_in_pieces(name: str) -> None:
    # Neither all of it nor nothing comes out at once.
    for body in (b"", b"x", randbytes(2**17) + bytes(2**24 + 2**20)):
        compressed, content_type = compression.compress(body, name)
        pieces = list(internals.decompressed(compressed, content_type))
        assert b"".join(pieces) == body, moved(f"the decompression {name}")
        assert max(map(len, pieces), default=0) <= 2**24


def test_a_compression_of_the_application_itself_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private: Any = compression
    monkeypatch.setitem(private._decoders, "application/x-gzip", bytes)
    assert list(internals.decompressed(b"own", "gzip")) == []


def test_a_message_with_an_error_is_not_decompressed() -> None:
    kombus: Any = Message

    class Erroneous(kombus):  # type: ignore[misc]
        def __init__(self) -> None:
            self.errors = [(ValueError, ValueError("seen"), None)]
            super().__init__(b"body", headers={"compression": "gzip"})

    message = Erroneous()
    assert message.body == b"body", moved("the use of Message.errors")
    with pytest.raises(ValueError, match="seen"):
        message._reraise_error()


def test_a_queue_is_declared_with_its_arguments_and_attributes() -> None:
    attributes: Any = {"max_length": 5, "message_ttl": 1.5}
    queue = Queue("q", queue_arguments={"x-overflow": "reject-publish"}, **attributes)
    expected = {"x-overflow": "reject-publish", "x-max-length": 5, "x-message-ttl": 1500}
    assert internals.declared_arguments(queue) == expected, moved("to_rabbitmq_queue_arguments")


def test_a_connection_knows_what_was_declared_on_it_and_forgets_it_on_a_new_one() -> None:
    with Connection("memory://") as connection:
        assert hasattr(connection, "declared_entities"), moved("Connection.declared_entities")
        connection.connect()
        internals.declared_entities(connection).add("noted")
        assert "noted" in internals.declared_entities(connection), moved(
            "Connection.declared_entities"
        )
        internals.drop_connection(connection)
        assert not connection.connected, moved("Connection.collect")
        connection.connect()
        assert not internals.declared_entities(connection), moved("Connection.declared_entities")


def test_a_consumer_knows_the_tags_of_its_queues() -> None:
    with Connection("memory://") as connection:
        queue = Queue("upstream", Exchange("upstream"), "upstream")
        consumer: Any = Consumer(connection.default_channel, [queue], tag_prefix="t-")
        assert hasattr(consumer, "_active_tags"), moved("Consumer._active_tags")
        consumer.consume()
        assert list(consumer._active_tags) == ["upstream"], moved("Consumer._active_tags")
        (tag,) = consumer._active_tags.values()
        assert internals.consumed_queue_name(consumer, tag) == "upstream"
        assert internals.consumed_queue_name(consumer, "other") is None
        consumer.cancel()
        queue(connection.default_channel).delete()
