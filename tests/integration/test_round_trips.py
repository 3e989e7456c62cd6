"""How often declaring and checking wait for the broker's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from select import select
from typing import Any

import amqp
import pytest
from amqp import spec
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import TopologyNotEmpty
from celery_rabbitdelay.levels.layout import clock
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.backlog import backlog_of
from celery_rabbitdelay.publishing.declaration import (
    check_complete,
    declare,
    delete,
    is_complete,
    missing,
)
from celery_rabbitdelay.publishing.kombu_internals import PASSIVE_BATCH, find_exchanges, find_queues
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.worker.bootsteps import MAX_JITTER, WorkerDeclaration
from tests.integration.arrivals import wait_until_waiting
from tests.integration.publishing import publish

#: What "a few dozen" is.
FEW = 30


@dataclass
class RoundTrips:
    """Counts how often a connection reads after it has written."""

    count: int = 0
    has_written: bool = False


@contextmanager
def counted(connection: Connection) -> Iterator[RoundTrips]:
    """Count the round trips of an open connection."""
    trips = RoundTrips()
    amqp: Any = connection.connection
    write, read = amqp.frame_writer, amqp.transport.read_frame

    def write_frame(*args: Any) -> Any:
        trips.has_written = True
        return write(*args)

    def read_frame(*args: Any, **options: Any) -> Any:
        trips.count += trips.has_written
        trips.has_written = False
        return read(*args, **options)

    amqp.frame_writer, amqp.transport.read_frame = write_frame, read_frame
    yield trips
    amqp.frame_writer, amqp.transport.read_frame = write, read


@contextmanager
def declared_queues(connection: Connection) -> Iterator[set[str]]:
    """Note the queues that an open connection declares, and not those that it only looks for."""
    declared: set[str] = set()
    amqp: Any = connection.connection
    write = amqp.frame_writer

    def write_frame(kind: int, channel: int, method: Any, arguments: Any, *rest: Any) -> Any:
        if method == spec.Queue.Declare:
            # After two reserved bytes the name, behind its length; then the flags, passive lowest.
            flags_at = 3 + arguments[2]
            if not arguments[flags_at] & 1:
                declared.add(bytes(arguments[3:flags_at]).decode())
        return write(kind, channel, method, arguments, *rest)

    amqp.frame_writer = write_frame
    yield declared
    amqp.frame_writer = write


def test_the_clock_is_declared_checked_and_deleted_in_a_few_round_trips(
    connection: Connection, publisher: Publisher, make_topology: Callable[..., Topology]
) -> None:
    topology = make_topology(clock())
    connection.connect()

    def round_trips(ask: Callable[..., Any]) -> int:
        with counted(connection) as trips:
            ask(connection, topology)
        return trips.count

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


def test_a_worker_s_connections_declare_once_and_again_after_one_of_them_is_lost(
    shop: Any, connection: Connection, broker_url: str
) -> None:
    topology: Topology = shop.rabbitdelay.topology
    declaration = WorkerDeclaration(shop)
    with Connection(broker_url) as other:
        connection.connect()
        other.connect()
        declaration.declare(connection)
        with counted(other) as trips:
            declaration.declare(other)
        assert trips.count == 0

        delete(connection, topology)
        declaration.connection_lost()
        declaration.declare(other)
        with counted(connection) as trips:
            declaration.declare(connection)
        assert trips.count == 0
    assert missing(connection, topology) == ()


@pytest.mark.parametrize("somebody_else", [False, True])
def test_what_is_missing_after_a_loss_is_declared_after_a_random_wait(
    shop: Any, connection: Connection, broker_url: str, somebody_else: bool
) -> None:
    topology: Topology = shop.rabbitdelay.topology
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if somebody_else:
            with Connection(broker_url) as other:
                declare(other, topology)

    declaration = WorkerDeclaration(shop, wait)
    declaration.declare(connection)
    declaration.connection_lost()
    with Connection(broker_url) as new:
        declaration.declare(new)
    # No wait at the first start, and none for what is in place.
    assert waits == []
    for lost in range(1, 4):
        delete(connection, topology)
        declaration.connection_lost()
        with declared_queues(connection) as declared:
            declaration.declare(connection)
        assert len(waits) == lost
        assert missing(connection, topology) == ()
        assert (topology.digit_queues[0].name in declared) is not somebody_else
    assert len(set(waits)) == len(waits)
    assert all(0 <= seconds <= MAX_JITTER for seconds in waits)


@pytest.mark.parametrize(
    "gone",
    [
        set(),
        {0},
        {PASSIVE_BATCH - 1, PASSIVE_BATCH},
        set(range(PASSIVE_BATCH * 2 + 10)),
        set(range(0, PASSIVE_BATCH * 2 + 10, 7)),
    ],
    ids=["none", "first", "at the border of two batches", "all", "every seventh"],
)
def test_each_answer_is_taken_for_the_queue_or_exchange_that_was_asked_for(
    connection: Connection, publisher: Publisher, make_queue: Callable[..., Queue], gone: set[int]
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
