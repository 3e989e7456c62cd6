"""A module's consumer on one connection, and what it receives made by the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from socket import SHUT_RDWR
from threading import Event, Thread
from typing import Any

import amqp
from kombu import Connection, Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.consumer import ModuleConsumer
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.modules.module import Module, ModuleStatistics
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.incoming import reading_unreadable_properties
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration.arrivals import wait_until_waiting
from tests.unit.waiting import waiting

#: Messages before the poison, and as many from it on.
AROUND = 10


def test_of_the_messages_that_a_dead_worker_had_only_the_poison_counts_again(
    connection: Connection, topology: Topology, target: Queue, make_queue: Any
) -> None:
    channel: Any = connection.default_channel
    source = make_queue("source", queue_arguments={"x-queue-type": "quorum"})
    declare(connection, topology)
    source(channel).declare()
    for number in range(2 * AROUND):
        channel.basic_publish(amqp.Message(str(number)), "", source.name)
    dying: Any
    with connection.clone() as dying:
        had: list[Any] = []
        dying.default_channel.basic_consume(source.name, callback=had.append)
        while len(had) < 2 * AROUND:
            dying.drain_events(timeout=30)
    wait_until_waiting(connection, source.name, 2 * AROUND)

    stopping, stands_still, go_on = Event(), Event(), Event()

    def receive(message: amqp.Message) -> Iterator[Outgoing]:
        if int(message.body) == AROUND:
            stands_still.set()
            go_on.wait()
        yield Outgoing("", target.name, waiting(amqp.Message(b"x", delivery_mode=2)))

    module = Module("test", topology, source, receive, 100, 1000, timeout=30, retry_for=0)
    serving: Any = connection.clone()
    reading_unreadable_properties(serving)
    consumer = ModuleConsumer(module, serving, ModuleStatistics(), stopping)

    def serve() -> None:
        with suppress(OSError):
            consumer.serve()

    thread = Thread(target=serve, daemon=True)
    thread.start()
    try:
        assert stands_still.wait(PATIENCE)
        wait_until_waiting(connection, target.name, AROUND)
        wait_until_waiting(connection, source.name, AROUND - 1)
        serving.connection.sock.shutdown(SHUT_RDWR)
        wait_until_waiting(connection, source.name, AROUND)
        left = [channel.basic_get(source.name, no_ack=True) for _ in range(AROUND)]
    finally:
        stopping.set()
        go_on.set()
        thread.join(PATIENCE)
        serving.collect(socket_timeout=0.1)
    counts = {int(message.body): message.headers["x-delivery-count"] for message in left}
    assert counts == {n: 2 if n == AROUND else 1 for n in range(AROUND, 2 * AROUND)}
