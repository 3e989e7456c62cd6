"""Check-in, meditation and distribution: modules that a worker serves, and any AMQP client uses."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import product
from socket import SHUT_RDWR
from threading import Event, Thread
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue, binding

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.deliveries import Module
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.modules.service import ModuleConsumer, ModuleService
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.kombu_internals import connect
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import read_unreadable_properties
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import Arrival, count, take, wait_until_waiting
from tests.kernel.integration.modules import (
    MODULES,
    OPEN,
    Client,
    check_in,
    client,
    wait_until_served,
)
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.trouble import Relay
from tests.kernel.integration.worker import Worker
from tests.kernel.unit.waiting import waiting

__all__ = ["client"]


def test_a_client_that_knows_nothing_of_python_delays_a_message(
    client: Client, connection: Connection, make_queue: Any, prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-news", type="topic")
    queue = make_queue("news", exchange, "paper.#")
    queue(client.channel).declare()
    published = time.time()
    topology = client.topology
    url = connection.as_uri(include_password=True)
    if url.endswith("//"):  # rabbitmq-c writes the default virtual host otherwise
        url = url.removesuffix("/") + "%2F"
    command = [
        *("amqp-publish", "-u", url),
        *("-e", topology.module_queues.checkin.exchange.name, "-r", "paper.daily", "-b", "hello"),
        *("-H", "x-delay: 500", "-H", f"{headers.EXCHANGE}: {exchange.name}"),
    ]
    subprocess.run(command, check=True)
    (arrival,) = client.take(queue)
    assert arrival.at >= published + 0.5
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert arrival.message.delivery_info["routing_key"] == "paper.daily"
    assert set(arrival.message.headers) == {headers.DUE}


@pytest.mark.parametrize("kind", ["fanout", "headers", "topic", "direct"])
def test_every_queue_gets_it_once_that_would_get_it_without_a_delay(
    client: Client, connection: Connection, make_queue: Any, prefix: str, kind: str
) -> None:
    exchange = Exchange(f"{prefix}-{kind}", type=kind)
    keys = {"topic": ["paper.#", "*.daily"], "direct": ["paper.daily"] * 2}.get(kind, ["", ""])
    matching = {"x-match": "all", "colour": "red"} if kind == "headers" else None
    queues = [
        make_queue(f"{kind}-{number}", bindings=[binding(exchange, key, matching)])
        for number, key in enumerate(keys)
    ]
    for queue in queues:
        queue(client.channel).declare()
    published = time.time()
    told = {"x-delay": 300, headers.EXCHANGE: exchange.name, "colour": "red"}
    client.check_in("paper.daily", told, priority=7, expiration=60)
    arrivals = take(connection, queues, len(queues))
    assert {arrival.queue for arrival in arrivals} == {queue.name for queue in queues}
    for arrival in arrivals:
        assert arrival.at >= published + 0.3
        info, properties = arrival.message.delivery_info, arrival.message.properties
        assert (info["exchange"], info["routing_key"]) == (exchange.name, "paper.daily")
        assert (properties["priority"], properties["expiration"]) == (7, "60000")
        assert arrival.message.headers.keys() == {"colour", headers.DUE}


@pytest.mark.parametrize(
    ("key", "given", "reason"),
    [
        ("test-q", {"x-delay": "soon"}, "'soon', not a number"),
        ("celery", {"x-delay": 5}, "may not reach the queue 'celery'"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "amq.topic"}, "may not reach the exchange"),
        ("test-nobody", {"x-delay": 5}, "there is no queue 'test-nobody'"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "test-none"}, "there is no exchange"),
    ],
)
def test_what_cannot_be_read_or_delivered_is_undeliverable_with_its_reason(
    client: Client, key: str, given: dict[str, Any], reason: str
) -> None:
    client.check_in(key, {**given, "mine": 1})
    ((told, message),) = client.undeliverable()
    assert reason in told
    assert message.headers["mine"] == 1
    assert message.payload == "hello"


def test_a_delay_above_the_capacity_is_kept(client: Client, target: Queue, prefix: str) -> None:
    """In the levels of 5.9 s, a message and a task, which meditate first."""
    assert client.topology.layout.capacity_ms == 5900
    published = time.time()
    client.check_in(target.name, {"x-delay": 6500})
    result = client.shop.tasks["look"].apply_async(delay=6.5)
    (arrival,) = client.take(target, timeout=PATIENCE)
    assert arrival.message.delivery_info["routing_key"] == target.name
    for at in (arrival.at, result.get(timeout=PATIENCE)["at"]):
        assert at >= published + 6.5


@pytest.mark.parametrize("priority", [0, 9])
def test_a_task_for_a_fanout_exchange_reaches_all_its_queues(
    client: Client, make_queue: Any, priority: int
) -> None:
    mirror = client.shop.amqp.queues[named(client.shop, "mirror")]
    unknown = make_queue("unknown", bindings=[binding(mirror.exchange)])
    unknown(client.channel).declare()
    before, look = time.time(), client.shop.tasks["look"]
    result = look.apply_async(delay=0.5, queue=mirror.name, priority=priority)
    (arrival,) = client.take(unknown)
    # The application's own queue is served by the worker.
    seen = result.get(timeout=PATIENCE)
    assert min(arrival.at, seen["at"]) >= before + 0.5
    assert arrival.message.headers["id"] == result.id
    assert arrival.message.delivery_info["exchange"] == mirror.exchange.name == seen["exchange"]
    assert arrival.message.properties["priority"] == priority


def test_the_command_line_says_which_modules_a_worker_serves(configuration: Any, shop: Any) -> None:
    with Worker(configuration, None, "--rabbitdelay-modules=distribution") as worker:
        wait_until_served(worker, "distribution")
        assert "check-in: serving" not in worker.log


def test_all_messages_of_an_envelope_reach_their_queue_or_are_undeliverable(
    client: Client, target: Queue
) -> None:
    items = [Item(b"x", {"id": number}) for number in range(1000)]
    client.put_in_envelope(target.name, *items)
    client.put_in_envelope("test-nobody", *items)
    came = [arrival.message.headers["id"] for arrival in client.take(target, 1000)]
    found = [message.headers["id"] for _, message in client.undeliverable(1000)]
    assert sorted(came) == sorted(found) == list(range(1000))
    assert client.count(target) == 0


# Messages that no worker can finish go to `undeliverable`, and take no others with them.


#: Good messages before the bad one, and behind it.
AROUND = 10


def test_a_message_for_an_exchange_that_clients_may_not_publish_to_is_undeliverable(
    client: Client, target: Queue, internal: str
) -> None:
    """The broker closes the channel on which it is published, with all that is in flight."""
    for number in range(2 * AROUND):
        if number == AROUND:
            bad = {"x-delay": 100, headers.EXCHANGE: internal, "mine": 1}
            client.check_in(target.name, bad)
        client.check_in(target.name, {"x-delay": 100, "id": number})
    came: set[int] = set()
    while came != set(range(2 * AROUND)):
        arrivals = client.take(target, max(client.count(target), 1))
        came.update(arrival.message.headers["id"] for arrival in arrivals)
    ((reason, message),) = client.undeliverable()
    assert message.headers["mine"] == 1
    assert "internal exchange" in reason


@pytest.fixture
def source(connection: Connection, topology: Topology, make_queue: Any) -> Queue:
    """A quorum queue that a module takes messages from, beside declared levels."""
    declare(connection, topology)
    queue: Queue = make_queue("source", queue_arguments={"x-queue-type": "quorum"})
    queue(connection.default_channel).declare()
    return queue


def test_of_the_messages_that_a_dead_worker_had_only_the_poison_counts_again(
    connection: Connection, topology: Topology, target: Queue, source: Queue
) -> None:
    channel: Any = connection.default_channel
    for number in range(2 * AROUND):
        channel.basic_publish(amqp.Message(str(number)), "", source.name)
    dying: Any
    with connection.clone() as dying:
        had: list[Any] = []
        dying.default_channel.basic_consume(source.name, callback=had.append)
        while len(had) < 2 * AROUND:
            dying.drain_events(timeout=30)
    wait_until_waiting(connection, source.name, 2 * AROUND)

    stands_still, go_on = Event(), Event()

    def receive(message: amqp.Message) -> Iterator[Outgoing]:
        if int(message.body) == AROUND:
            stands_still.set()
            go_on.wait()
        yield Outgoing("", target.name, waiting(amqp.Message(b"x", delivery_mode=2)))

    module = Module("test", topology, source, receive, 100, 1000, timeout=30, retry_for=0)
    serving: Any = connection.clone()
    connect(serving)
    read_unreadable_properties(serving)
    service = ModuleService(serving, lambda _: None, lambda: None, module)
    consumer = ModuleConsumer(service, serving)

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
        service.stopping.set()
        go_on.set()
        thread.join(PATIENCE)
        serving.collect(socket_timeout=0.1)
    counts = {int(message.body): message.headers["x-delivery-count"] for message in left}
    assert counts == {n: 2 if n == AROUND else 1 for n in range(AROUND, 2 * AROUND)}


def test_a_module_notices_that_its_connection_was_dropped_silently(
    connection: Connection, topology: Topology, target: Queue, source: Queue
) -> None:
    """Both sides notice after two heartbeats; here, one is a second."""
    channel: Any = connection.default_channel

    def receive(_: amqp.Message) -> Iterator[Outgoing]:
        yield Outgoing("", target.name, waiting(amqp.Message(b"x", delivery_mode=2)))

    module = Module("test", topology, source, receive, 100, 1000, timeout=30, retry_for=0)
    broker: Any = connection
    with closing(Relay(broker.port or 5672)) as relay:
        own = connection.clone(hostname="127.0.0.1", port=relay.port, heartbeat=1)
        service = ModuleService(own, lambda _: None, lambda: None, module)
        service.start()
        try:
            channel.basic_publish(amqp.Message("before"), "", source.name)
            wait_until_waiting(connection, target.name, 1)
            relay.drop()
            channel.basic_publish(amqp.Message("after"), "", source.name)
            began = time.monotonic()
            wait_until_waiting(connection, target.name, 2)
            assert time.monotonic() - began < module.timeout / 2
        finally:
            service.stop()


# A destination in trouble: its tasks are tried again, and no other task waits for them.


#: Tasks for the queue in trouble: more than a level's dead-letter worker has places.
MANY = 40

#: Tasks for a queue that takes them.
FEW = 10

#: How many messages the full queue takes.
ROOM = 15


@pytest.fixture
def served(serve: Any) -> Any:
    """An application whose levels stand, and whose modules are served by one worker."""
    return serve(only="default", **OPEN)


@pytest.fixture
def full(make_queue: Callable[..., Queue]) -> Queue:
    """A queue that refuses messages once it holds a few; not declared."""
    bounded = {"x-max-length": ROOM, "x-overflow": "reject-publish"}
    return make_queue("full", queue_arguments={"x-queue-type": "quorum", **bounded})


def test_tasks_for_a_full_queue_come_when_there_is_room_and_hold_up_no_others(
    served: Any, connection: Connection, publisher: Publisher, full: Queue, target: Queue
) -> None:
    asked = time.time()
    producer = DelayedProducer(publisher, served.rabbitdelay.topology, modules=MODULES)
    for queue, number in (*product([full], range(MANY)), *product([target], range(FEW))):
        producer.publish_delayed(number, Destination(queue, "", queue.name), 1.5)
    # They come although the other queue takes no message any more.
    sound = take(connection, [target], FEW)
    # A quorum queue takes a few more than its bound.
    wait_for(lambda: count(connection, full.name) >= ROOM, "a full queue")
    assert count(connection, full.name) < MANY
    # A bounded queue never holds all of them.
    arrivals: list[Arrival] = []
    while len(arrivals) < MANY:
        arrivals += take(connection, [full], max(count(connection, full.name), 1))

    assert sorted(arrival.body for arrival in sound) == list(range(FEW))
    assert Counter(arrival.body for arrival in arrivals) == Counter(range(MANY))
    for arrival in (*sound, *arrivals):
        assert arrival.at >= asked + 1.5
        assert arrival.message.headers[headers.QUEUE] == arrival.queue
    for arrival in arrivals:
        told = arrival.message.headers.keys()
        assert not {headers.ATTEMPTS, headers.REASON, "x-death"} & told
    queues = served.rabbitdelay.topology.queues
    wait_for(lambda: not sum(count(connection, each.name) for each in queues), "empty levels")


def test_a_task_for_an_exchange_that_is_missing_comes_when_it_is_there(
    served: Any, connection: Connection, make_queue: Any, prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-later", type="fanout")
    check_in(connection, served, "any", headers={"x-delay": 100, headers.EXCHANGE: exchange.name})
    wait_for(lambda: "there is no exchange" in served.worker.log, "the first attempt")
    queue = make_queue("later", exchange)
    queue(connection.default_channel).declare()
    (arrival,) = take(connection, [queue], 1)
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert set(arrival.message.headers) == {headers.DUE}
