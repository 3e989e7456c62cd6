"""A module's consumer on one connection, and what it receives made by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from socket import SHUT_RDWR
from threading import Event, Thread
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.consumer import ModuleConsumer
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.modules.module import Module, ModuleStatistics
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration.arrivals import count, take, wait_until_waiting
from tests.unit.waiting import waiting

Receive = Callable[[amqp.Message], Iterator[Outgoing]]


def outgoing(exchange: str, key: str, body: bytes = b"x") -> Outgoing:
    return Outgoing(exchange, key, waiting(amqp.Message(body, delivery_mode=2)))


class Serving:
    """Serves a module in a thread until the block ends; ``errors`` says what ended it before."""

    def __init__(self, url: str, module: Module) -> None:
        self.stopping = Event()
        self.statistics = ModuleStatistics()
        self.errors: list[BaseException] = []
        self.connection = Connection(url)
        reading_unreadable_properties(self.connection)
        self.consumer = ModuleConsumer(module, self.connection, self.statistics, self.stopping)
        self._thread = Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with self.connection:
            try:
                self.consumer.serve()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.errors.append(error)
                self.connection.collect(socket_timeout=0.1)

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


class Bench:
    """Levels, a queue, and a module that makes of each message what a function returns."""

    def __init__(self, connection: Connection, topology: Topology, source: Queue) -> None:
        self.channel: Any = connection.default_channel
        self.source = source
        self.undeliverable = topology.module_queues.undeliverable.name
        self._connection = connection
        self._topology = topology
        declare(connection, topology)
        source(self.channel).declare()

    def serve(self, receive: Receive) -> Serving:
        """Serve the module as long as the block runs."""
        options: Any = {"prefetch": 100, "max_unconfirmed": 1000, "timeout": 30, "retry_for": 0}
        module = Module("test", self._topology, self.source, receive, **options)
        return Serving(self._connection.as_uri(include_password=True), module)

    def put(self, *bodies: str) -> None:
        """Put messages into the module's queue."""
        for body in bodies:
            self.channel.basic_publish(amqp.Message(body), "", self.source.name)

    def wait_until_waiting(self, number: int) -> None:
        """Wait until so many messages are ready in the module's queue."""
        wait_until_waiting(self._connection, self.source.name, number)

    def reasons(self, number: int) -> list[str]:
        """Take so many undeliverable messages; return their reasons."""
        queue = Queue(self.undeliverable)
        return [
            examine(arrival.message.headers, self._topology).reason
            for arrival in take(self._connection, [queue], number)
        ]


@pytest.fixture
def bench(connection: Connection, topology: Topology, make_queue: Callable[..., Queue]) -> Bench:
    """What a test serves, fills and looks at."""
    source = make_queue("source", queue_arguments={"x-queue-type": "quorum"})
    return Bench(connection, topology, source)


def test_of_the_messages_that_a_dead_worker_had_only_the_poison_counts_again(
    bench: Bench, connection: Connection, target: Queue
) -> None:
    around, stands_still, go_on = 10, Event(), Event()
    bench.put(*map(str, range(2 * around)))
    with Connection(connection.as_uri(include_password=True)) as dying:
        had: list[Any] = []
        channel_of_dying: Any = dying.default_channel
        channel_of_dying.basic_consume(bench.source.name, callback=had.append)
        while len(had) < 2 * around:
            dying.drain_events(timeout=30)
    bench.wait_until_waiting(2 * around)

    def receive(message: amqp.Message) -> Iterator[Outgoing]:
        if int(message.body) == around:
            stands_still.set()
            go_on.wait()
        yield outgoing("", target.name)

    try:
        with bench.serve(receive) as served:
            assert stands_still.wait(PATIENCE)
            wait_until_waiting(connection, target.name, around)
            bench.wait_until_waiting(around - 1)
            transport: Any = served.connection.connection
            transport.sock.shutdown(SHUT_RDWR)
            bench.wait_until_waiting(around)
            source = bench.source.name
            left = [bench.channel.basic_get(source, no_ack=True) for _ in range(around)]
            go_on.set()
    finally:
        go_on.set()
    counts = {int(message.body): message.headers["x-delivery-count"] for message in left}
    assert counts == {n: 2 if n == around else 1 for n in range(around, 2 * around)}


def test_many_messages_that_close_the_channel_are_found_without_sending_the_others_again(
    bench: Bench, connection: Connection, target: Queue
) -> None:
    bad = Outgoing(
        "", target.name, waiting(amqp.Message(b"never", expiration="soon", delivery_mode=2))
    )
    good = [outgoing("", target.name, str(number).encode()) for number in range(10)]
    copies: list[int] = []
    with bench.serve(lambda _: iter([*[bad] * 40, *good, *[bad] * 30])) as served:
        # On a slow machine the broker may answer before all of them are in flight.
        while len(copies) < 5 and 10 not in copies:
            bench.put("x")
            assert len(bench.reasons(70)) == 70
            bench.wait_until_waiting(0)
            wait_for(lambda: served.statistics.finished == len(copies) + 1, "the message")
            held = count(connection, target.name)
            arrived = {str(each.body).encode() for each in take(connection, [target], held)}
            assert arrived == {each.message.body for each in good}
            copies.append(held)
    assert not served.errors
    assert min(copies) == 10
