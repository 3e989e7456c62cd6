"""The undeliverable messages are read, and stay in their queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing

import amqp
import pytest
from kombu import Connection

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.undeliverable import reader as undeliverable_reader
from celery_rabbitdelay.operations.undeliverable.messages import (
    headers_as_json,
    undeliverable_messages,
)
from celery_rabbitdelay.publishing.declaration import declare
from tests.integration.arrivals import count, wait_until_waiting
from tests.integration.undeliverable_messages import message, put
from tests.integration.unreadable import FAR_TIMESTAMP, LATIN_ID, LATIN_KEY, Raw, publish_with_key

#: More looks than the 20 after which RabbitMQ 4.0 and later drop a message by default.
LOOKS = 21


@pytest.fixture
def declared(connection: Connection, topology: Topology) -> Topology:
    declare(connection, topology)
    return topology


def numbered(number: int) -> list[amqp.Message]:
    return [message(each, {}) for each in range(number)]


def read(connection: Connection, topology: Topology, **options: int) -> list[int]:
    return [int(each.body) for each in undeliverable_messages(connection, topology, **options)]


def test_messages_stay_where_they_are_however_often_they_are_read(
    connection: Connection, declared: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undeliverable_reader, "SILENCE", 0.01)
    assert read(connection, declared) == []
    name = put(connection, declared, *numbered(40))
    assert read(connection, declared, limit=15) == [*range(15)]
    for _ in range(LOOKS):
        assert read(connection, declared) == [*range(40)]
    wait_until_waiting(connection, name, 40)


@pytest.mark.parametrize(("queue_type", "of_a_tag"), [("quorum", 20), ("classic", 1000)])
def test_a_read_goes_on_behind_what_it_has_taken_and_takes_few_ahead(
    connection: Connection,
    make_topology: Callable[..., Topology],
    monkeypatch: pytest.MonkeyPatch,
    queue_type: str,
    of_a_tag: int,
) -> None:
    monkeypatch.setattr(undeliverable_reader, "AHEAD", 10)
    monkeypatch.setattr(undeliverable_reader, "MOST_OF_A_TAG", of_a_tag)
    topology = make_topology(queue_type=queue_type)
    declare(connection, topology)
    name = put(connection, topology, *numbered(75))
    with closing(undeliverable_messages(connection, topology)) as messages:
        for number in range(75):
            assert int(next(messages).body) == number
            assert 75 - count(connection, name) <= (number // 10 + 1) * 10
    wait_until_waiting(connection, name, 75)


def test_a_read_that_takes_too_long_fails_and_loses_nothing(
    connection: Connection, declared: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put(connection, declared, *numbered(5))
    messages = undeliverable_messages(connection, declared)
    assert int(next(messages).body) == 0
    monkeypatch.setattr(undeliverable_reader, "MOST_SECONDS", 0.0)
    with pytest.raises(ReadTooLong, match=r"1 undeliverable messages.*with a limit"):
        next(messages)
    wait_until_waiting(connection, name, 5)


def test_messages_that_python_cannot_read_are_read_with_the_reason(
    connection: Connection, declared: Topology
) -> None:
    good = amqp.Message("good", application_headers={"own": "kept"})
    name = put(connection, declared, good, Raw("far", FAR_TIMESTAMP), Raw("", LATIN_ID))
    exchange = declared.module_queues.undeliverable.exchange.name
    publish_with_key(connection, exchange, LATIN_KEY, good)
    publish_with_key(connection, exchange, LATIN_KEY, Raw("both", LATIN_ID))
    wait_until_waiting(connection, name, 5)
    found = list(undeliverable_messages(connection, declared))
    assert [each.body for each in found] == [b"good", b"far", b"", b"good", b"both"]
    _, far, latin, key, both = found
    assert "properties cannot be read" in far.found.reason
    assert b"sent-at" in far.headers[header_names.UNREADABLE_PROPERTIES]
    assert "UnicodeDecodeError" in latin.found.reason
    assert r"its routing key is b'caf\xe9', which is not UTF-8" in key.found.reason
    assert (key.routing_key, key.headers["own"]) == ("caf?", "kept")
    assert "UnicodeDecodeError" in both.found.reason
    for each in found:
        json.loads(headers_as_json(each.headers))
