"""How often declaring and checking wait for the broker's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from select import select
from typing import Any
from uuid import uuid4

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
    declare_destination,
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


@pytest.fixture(scope="module")
def module_clock(module_broker_url: str) -> Iterator[Topology]:
    """The default levels, of this module."""
    topology = Topology(f"test-{uuid4().hex[:8]}", clock())
    yield topology
    with Connection(module_broker_url) as connection:
        delete(connection, topology, force=True)


@pytest.fixture
def whole_clock(connection: Connection, module_clock: Topology) -> Topology:
    """The default levels, declared; what a test deletes is put back for the next."""
    declare(connection, module_clock)
    return module_clock


def test_the_clock_is_declared_and_deleted_in_a_few_round_trips(
    connection: Connection, make_topology: Callable[..., Topology]
) -> None:
    topology = make_topology(clock())
    connection.connect()
    with counted(connection) as first:
        declare(connection, topology)
    with counted(connection) as again:
        declare(connection, topology)
    assert missing(connection, topology) == ()
    with counted(connection) as gone:
        delete(connection, topology)
    assert max(first.count, again.count, gone.count) <= FEW


@pytest.mark.parametrize("check", [missing, check_complete, backlog_of])
def test_a_declared_clock_is_checked_in_a_few_round_trips(
    connection: Connection, whole_clock: Topology, check: Callable[..., Any]
) -> None:
    with counted(connection) as trips:
        check(connection, whole_clock)
    assert trips.count <= 10


def test_a_clock_in_which_messages_wait_is_not_deleted_after_a_few_round_trips(
    connection: Connection, whole_clock: Topology, publisher: Publisher
) -> None:
    full = whole_clock.digit_queues[:2]
    for queue in full:
        publish(publisher, queue.name)
    with counted(connection) as trips, pytest.raises(TopologyNotEmpty) as caught:
        delete(connection, whole_clock)
    assert set(caught.value.waiting.values()) == {1}
    assert missing(connection, whole_clock) == ()
    for queue in full:
        queue(connection.default_channel).purge()
    assert trips.count <= 10


def test_a_queue_is_declared_and_bound_once_on_a_connection(
    connection: Connection, whole_clock: Topology, queue: Queue
) -> None:
    with counted(connection) as first:
        declare_destination(connection, whole_clock, queue)
    assert 0 < first.count <= FEW
    with counted(connection) as second:
        declare_destination(connection, whole_clock, queue)
    assert second.count == 0


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


def test_what_is_in_place_after_a_loss_is_neither_declared_nor_waited_for(
    shop: Any, connection: Connection, broker_url: str
) -> None:
    waits: list[float] = []
    declaration = WorkerDeclaration(shop, waits.append)
    declaration.declare(connection)
    declaration.connection_lost()
    with Connection(broker_url) as new:
        new.connect()
        with declared_queues(new) as declared:
            declaration.declare(new)
    assert waits == []
    # Its own queues alone: AMQP cannot tell whether they are bound.
    assert declared == {queue.name for queue in shop.amqp.queues.values()}


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
    # No wait at the first start.
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


@pytest.mark.parametrize("what", ["nothing", "queue", "exchange", "marker"])
def test_whether_a_clock_is_complete_takes_a_few_round_trips(
    connection: Connection, whole_clock: Topology, what: str
) -> None:
    missing_part: dict[str, Any] = {
        "queue": whole_clock.queues[-1],
        "exchange": whole_clock.exchanges[0],
        "marker": whole_clock.identity.marker,
    }
    if what in missing_part:
        missing_part[what](connection.default_channel).delete()
    with counted(connection) as trips:
        assert is_complete(connection, whole_clock) is (what == "nothing")
    assert trips.count <= FEW


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
