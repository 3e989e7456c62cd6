"""How often declaring and checking wait for the broker's answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from select import select
from types import SimpleNamespace
from typing import Any
from unittest import mock

import amqp
import pytest
from amqp import spec
from amqp.exceptions import NotFound
from kombu import Connection

from celery_rabbitdelay.exceptions import TopologyNotEmpty
from celery_rabbitdelay.levels.layout import clock
from celery_rabbitdelay.publishing.declaration import (
    backlog_of,
    check_complete,
    declare,
    delete,
    is_complete,
    missing,
)
from celery_rabbitdelay.publishing.kombu_internals import PASSIVE_BATCH, find_exchanges, find_queues
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.worker.bootsteps import WorkerDeclaration
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.publishing import publish

#: What "a few dozen" is.
FEW = 30


@contextmanager
def counted(connection: Connection) -> Iterator[SimpleNamespace]:
    """Count how often an open connection reads after it has written."""
    trips, has_written = SimpleNamespace(count=0), False
    amqp: Any = connection.connection
    write, read = amqp.frame_writer, amqp.transport.read_frame

    def write_frame(*args: Any) -> Any:
        nonlocal has_written
        has_written = True
        return write(*args)

    def read_frame(*args: Any, **options: Any) -> Any:
        nonlocal has_written
        trips.count += has_written
        has_written = False
        return read(*args, **options)

    amqp.frame_writer, amqp.transport.read_frame = write_frame, read_frame
    yield trips
    amqp.frame_writer, amqp.transport.read_frame = write, read


def test_the_clock_is_declared_checked_and_deleted_in_a_few_round_trips(
    connection: Connection, publisher: Publisher, make_topology: Any
) -> None:
    topology = make_topology(clock())
    connection.connect()

    def round_trips(ask: Callable[..., Any]) -> int:
        with counted(connection) as trips:
            ask(connection, topology)
        return int(trips.count)

    assert [round_trips(declare) <= FEW for _ in range(2)] == [True, True]
    for check in (missing, check_complete, backlog_of):
        assert round_trips(check) <= 10
    assert round_trips(is_complete) <= FEW
    full = topology.digit_queues[0]
    publish(publisher, full.name)
    with counted(connection) as trips, pytest.raises(TopologyNotEmpty) as caught:
        delete(connection, topology)
    assert (caught.value.waiting, trips.count <= 10) == ({full.name: 1}, True)
    full(connection.default_channel).purge()
    assert missing(connection, topology) == ()
    for part in (topology.queues[-1], topology.exchanges[0], topology.identity.marker):
        assert is_complete(connection, topology)
        part(connection.default_channel).delete()
        assert not is_complete(connection, topology)
        declare(connection, topology)
    assert round_trips(delete) <= FEW


def test_a_worker_declares_once_and_after_a_loss_only_if_something_is_missing(
    shop: Any, connection: Connection, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = shop.rabbitdelay.topology
    declared = mock.Mock(side_effect=shop.rabbitdelay.declare)
    monkeypatch.setattr(shop.rabbitdelay, "declare", declared)
    declaration = WorkerDeclaration(shop)
    connection.connect()
    with Connection(broker_url) as other:
        declaration.declare(connection)
        other.connect()
        with counted(other) as trips:
            declaration.declare(other)
        assert trips.count == 0
        declaration.connection_lost()
        declaration.declare(other)
        assert declared.mock_calls == [mock.call(connection)]
        delete(connection, topology)
        declaration.connection_lost()
        declaration.declare(connection)
        assert declared.mock_calls == [mock.call(connection)] * 2
        assert missing(connection, topology) == ()
        with counted(other) as trips:
            declaration.declare(other)
        assert trips.count == 0


@pytest.mark.parametrize(
    "gone",
    [set(), {PASSIVE_BATCH - 1, PASSIVE_BATCH}, set(range(0, PASSIVE_BATCH * 2 + 10, 7))],
    ids=["none", "at the border of two batches", "every seventh"],
)
def test_each_answer_is_taken_for_the_queue_or_exchange_that_was_asked_for(
    connection: Connection, publisher: Publisher, make_queue: Any, gone: set[int]
) -> None:
    channel: Any = connection.default_channel
    here, elsewhere = make_queue("here"), make_queue("elsewhere")
    here(channel).declare()
    publish(publisher, here.name)
    wait_until_waiting(connection, here.name, 1)
    total = PASSIVE_BATCH * 2 + 10

    names = [elsewhere.name if number in gone else here.name for number in range(total)]
    found = find_queues(channel, names)
    assert {number for number, counts in enumerate(found) if counts is None} == gone
    assert {counts for counts in found if counts is not None} <= {(1, 0)}

    exchanges = [elsewhere.name if number in gone else "amq.fanout" for number in range(total)]
    exist = find_exchanges(channel, exchanges)
    assert {number for number, exists in enumerate(exist) if not exists} == gone


def test_the_close_of_another_channel_is_not_taken_for_an_answer(connection: Connection) -> None:
    transport: Any = connection.connection
    publishing: Any = connection.channel()
    own: Any = connection.channel()
    publishing.basic_publish(amqp.Message("x"), "test-nowhere", "key")
    # The broker has closed the channel that publishes before the question is asked.
    assert select([transport.sock], [], [], 30)[0]
    with pytest.raises(NotFound) as caught:
        find_exchanges(own, ["amq.topic"])
    assert caught.value.method_sig == spec.Basic.Publish
