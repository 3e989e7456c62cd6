"""A publish returns once the broker has confirmed; everything else is an error of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    DeclarationRefused,
    MessageNacked,
    MessageReturned,
    NoPublisherFree,
    PublishError,
)
from celery_rabbitdelay.parcel import PERSISTENT
from celery_rabbitdelay.publisher import Publisher
from celery_rabbitdelay.publisher_pool import PublisherPool
from celery_rabbitdelay.testing.servers import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take

#: Seconds of patience where the broker is made to be silent.
TIMEOUT = 2.0

#: What a machine may add to a time limit before it has clearly not been kept.
GRACE = 8.0


def publish(
    publisher: Publisher, queue_name: str, body: str = "x", exchange: str = "", **options: Any
) -> None:
    message = amqp.Message(body, content_type="text/plain", content_encoding="utf-8")
    publisher.publish(message, lambda: (exchange, queue_name), **options)


@pytest.fixture
def publisher(connection: Connection) -> Iterator[Publisher]:
    publisher = Publisher(connection.clone())
    yield publisher
    publisher.close()


@pytest.fixture
def declared(connection: Connection, queue: Queue) -> Queue:
    queue(connection.default_channel).declare()
    return queue


@pytest.fixture
def private(private_rabbitmq: RabbitMQServer) -> Iterator[tuple[RabbitMQServer, Publisher]]:
    """A publisher that has published once to a broker that the test may maltreat."""
    with Connection(private_rabbitmq.url) as connection:
        queue = Queue("test-private", queue_arguments={"x-queue-type": "quorum"})
        queue(connection.default_channel).declare()
        publisher = Publisher(connection.clone())
        publish(publisher, queue.name)
        yield private_rabbitmq, publisher
    publisher.discard()
    with Connection(private_rabbitmq.url) as connection:
        queue(connection.default_channel).delete()


def test_a_published_message_is_persistent_and_there(
    connection: Connection, publisher: Publisher, declared: Queue
) -> None:
    publish(publisher, declared.name, "hello")
    (arrival,) = take(connection, [declared], 1)
    assert arrival.body == "hello"
    assert arrival.message.properties["delivery_mode"] == PERSISTENT


def test_a_message_that_a_full_queue_rejects_raises(
    connection: Connection, publisher: Publisher, make_queue: Callable[..., Queue]
) -> None:
    full = make_queue("full", max_length=1, queue_arguments={"x-overflow": "reject-publish"})
    full(connection.default_channel).declare()
    publish(publisher, full.name)
    with pytest.raises(MessageNacked) as caught:
        publish(publisher, full.name)
    assert caught.value.routing_key == full.name


def test_a_message_that_no_queue_takes_raises(publisher: Publisher, prefix: str) -> None:
    with pytest.raises(MessageReturned, match="NO_ROUTE") as caught:
        publish(publisher, f"{prefix}-nowhere")
    assert caught.value.routing_key == f"{prefix}-nowhere"


def test_a_message_to_an_exchange_that_does_not_exist_raises_and_the_next_one_goes_through(
    connection: Connection, publisher: Publisher, declared: Queue, prefix: str
) -> None:
    with pytest.raises(MessageReturned, match="no exchange"):
        publish(publisher, "key", exchange=f"{prefix}-nothing")
    publish(publisher, declared.name)
    assert count(connection, declared.name) == 1


def test_each_error_belongs_to_its_own_message(
    connection: Connection, publisher: Publisher, declared: Queue, prefix: str
) -> None:
    outcomes = []
    for number in range(20):
        try:
            publish(publisher, declared.name if number % 2 else f"{prefix}-nowhere")
            outcomes.append("confirmed")
        except MessageReturned:
            outcomes.append("returned")
    assert outcomes == ["returned", "confirmed"] * 10
    assert count(connection, declared.name) == 10


def test_a_connection_that_asks_for_confirms_itself_is_no_obstacle(
    broker_url: str, connection: Connection, declared: Queue
) -> None:
    own = Connection(broker_url, transport_options={"confirm_publish": True})
    publisher = Publisher(own)
    for _ in range(3):
        publish(publisher, declared.name)
    publisher.close()
    assert count(connection, declared.name) == 3


def test_a_broker_that_falls_silent_is_a_timeout_in_time(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private
    with _suspended(broker):
        began = time.monotonic()
        with pytest.raises(ConfirmTimeout):
            publish(publisher, "test-private", timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT + GRACE
    publish(publisher, "test-private", timeout=30)


def test_a_broker_that_is_silent_from_the_start_is_an_error_in_time(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, _ = private
    with _suspended(broker):
        began = time.monotonic()
        with pytest.raises(PublishError):
            publish(Publisher(Connection(broker.url)), "test-private", timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT + GRACE


def test_a_declaration_that_is_not_answered_is_an_error_in_time(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private

    def prepare(connection: Connection) -> None:
        Exchange("amq.topic", type="topic")(connection.default_channel).declare(passive=True)

    with _suspended(broker):
        began = time.monotonic()
        with pytest.raises(PublishError):
            publish(publisher, "test-private", timeout=TIMEOUT, prepare=prepare)
        assert time.monotonic() - began < TIMEOUT + GRACE


def test_a_blocked_connection_is_an_error_of_its_own(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private
    broker.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        with pytest.raises(ConnectionBlocked):
            publish(publisher, "test-private", timeout=TIMEOUT)
    finally:
        broker.ctl("set_vm_memory_high_watermark", "0.4")
    publish(publisher, "test-private", timeout=30)


def test_a_block_that_ends_in_time_only_delays_the_message(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private
    broker.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    unblock = threading.Thread(target=broker.ctl, args=("set_vm_memory_high_watermark", "0.4"))
    unblock.start()
    try:
        publish(publisher, "test-private", timeout=60)
    finally:
        unblock.join()


def test_a_message_is_sent_again_after_the_connection_was_closed_by_the_broker(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private
    with Connection(broker.url) as connection:
        before = count(connection, "test-private")
    broker.ctl("close_all_connections", "testing")
    asked: list[int] = []

    def address() -> tuple[str, str]:
        asked.append(len(asked))
        return "", "test-private"

    publisher.publish(amqp.Message("x"), address)
    # At each attempt: it depends on the time that is left.
    assert len(asked) == 2
    with Connection(broker.url) as connection:
        assert count(connection, "test-private") == before + 1


def test_a_killed_broker_is_a_lost_connection_and_when_it_is_back_nothing_is_missing(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    broker, publisher = private
    _publish_until_the_queue_is_on_disk(publisher)
    with Connection(broker.url) as connection:
        before = count(connection, "test-private")
    broker.kill()
    with pytest.raises(ConnectionLost, match="attempt 4"):
        publish(publisher, "test-private")
    with pytest.raises(ConnectionLost, match="attempt 1"):
        publish(publisher, "test-private", resends=0)
    broker.start()

    attempts = 0

    def takes_messages_again() -> bool:
        nonlocal attempts
        attempts += 1
        try:
            publish(publisher, "test-private", timeout=TIMEOUT)
        except PublishError:
            # The queue's leader is not back yet.
            return False
        return True

    wait_for(takes_messages_again, "the queue's leader", timeout=60)
    with Connection(broker.url) as connection:
        assert before < count(connection, "test-private") <= before + attempts


def _publish_until_the_queue_is_on_disk(publisher: Publisher) -> None:
    # Up to 4.0, RabbitMQ writes down that a quorum queue exists only half a second after it was
    # declared; a node that is killed before has lost the queue and what was confirmed in it.
    enough = time.monotonic() + 2
    while time.monotonic() < enough:
        publish(publisher, "test-private")


def test_a_broker_that_refuses_the_login_is_an_error_at_once(broker_url: str) -> None:
    for url in (broker_url.replace("guest:guest", "guest:wrong"), f"{broker_url}nowhere"):
        publisher = Publisher(Connection(url))
        with pytest.raises(ConnectionLost, match="attempt 1: ") as caught:
            publish(publisher, "queue")
        assert "wrong" not in str(caught.value)
        publisher.close()


def test_a_connection_that_is_refused_is_not_waited_for() -> None:
    publisher = Publisher(Connection("amqp://guest:guest@127.0.0.1:1//"))
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1//"):
        publish(publisher, "queue", resends=0)
    assert time.monotonic() - began < 1.5
    publisher.close()


def test_the_next_broker_of_a_list_is_tried(broker_url: str, declared: Queue) -> None:
    publisher = Publisher(Connection(f"amqp://guest:guest@127.0.0.1:1//;{broker_url}"))
    publish(publisher, declared.name)
    publisher.close()


@pytest.mark.parametrize("headers", [{"n": 2**70}, {"o": object()}])
def test_a_message_that_cannot_be_written_harms_no_other(
    connection: Connection, publisher: Publisher, declared: Queue, headers: dict[str, Any]
) -> None:
    publish(publisher, declared.name)
    with pytest.raises(PublishError, match="cannot be written"):
        publisher.publish(
            amqp.Message("x", application_headers=headers), lambda: ("", declared.name)
        )
    publish(publisher, declared.name, timeout=TIMEOUT + GRACE)
    assert count(connection, declared.name) == 2


def test_an_interrupted_publish_harms_no_other(
    connection: Connection, publisher: Publisher, declared: Queue
) -> None:
    class TimeIsUp(BaseException):
        """As Celery's soft time limit, or Ctrl-C."""

    def interrupted(connection: Connection) -> None:
        raise TimeIsUp

    publish(publisher, declared.name)
    with pytest.raises(TimeIsUp):
        publish(publisher, declared.name, prepare=interrupted)
    publish(publisher, declared.name, timeout=TIMEOUT + GRACE)
    assert count(connection, declared.name) == 2


def test_a_declaration_that_is_refused_is_an_error_with_the_broker_s_reason(
    publisher: Publisher, declared: Queue
) -> None:
    def prepare(connection: Connection) -> None:
        Queue(declared.name, durable=False)(connection.default_channel).queue_declare()

    with pytest.raises(DeclarationRefused, match="inequivalent arg") as caught:
        publish(publisher, declared.name, prepare=prepare)
    assert caught.value.routing_key == declared.name
    publish(publisher, declared.name)


def test_a_caller_s_connection_is_given_back_as_it_was(
    broker_url: str, connection: Connection, declared: Queue
) -> None:
    transport: Any = connection.connection
    on_blocked = transport.on_blocked = lambda reason: None
    connection.connect_timeout = 5.0
    publisher = Publisher(connection)
    publish(publisher, declared.name, timeout=1.0)
    publisher.close_channel()
    assert transport.on_blocked is on_blocked
    assert connection.connect_timeout == 5.0
    assert connection.connected


def test_a_pool_can_be_closed_and_forked_while_a_publisher_is_in_use(
    connection: Connection, declared: Queue
) -> None:
    pool = PublisherPool(connection, limit=1)
    with pool.acquire() as publisher:
        publish(publisher, declared.name)
        pool.close()
    assert not publisher.connection.connected
    with pool.acquire() as publisher:
        publish(publisher, declared.name)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pool.acquire() as own:
                    status = int(own is publisher)
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


def test_a_pool_whose_publishers_are_all_in_use_says_so_in_time(connection: Connection) -> None:
    pool = PublisherPool(connection, limit=1)
    with (
        pool.acquire(),
        pytest.raises(NoPublisherFree, match="broker_pool_limit"),
        pool.acquire(timeout=0.1),
    ):
        pass
    pool.close()


def test_threads_publish_side_by_side(connection: Connection, declared: Queue) -> None:
    pool = PublisherPool(connection, limit=3)

    def publish_fifty(thread: int) -> None:
        for number in range(50):
            with pool.acquire() as publisher:
                publish(publisher, declared.name, f"{thread}-{number}")

    threads = [threading.Thread(target=publish_fifty, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()

    bodies = Counter(arrival.body for arrival in take(connection, [declared], 400))
    assert len(bodies) == 400


def test_a_forked_process_has_connections_of_its_own(
    connection: Connection, declared: Queue
) -> None:
    pool = PublisherPool(connection, limit=2)
    with pool.acquire() as publisher:
        publish(publisher, declared.name, "before the fork")

    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for _ in range(20):
                    with pool.acquire() as publisher:
                        publish(publisher, declared.name, f"child {number}")
                pool.close()
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for _ in range(20):
        with pool.acquire() as publisher:
            publish(publisher, declared.name, "parent", resends=0)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    with pool.acquire() as publisher:
        publish(publisher, declared.name, "after the children", resends=0)
    pool.close()

    bodies = Counter(arrival.body for arrival in take(connection, [declared], 82))
    assert bodies == {
        **{f"child {number}": 20 for number in range(3)},
        "parent": 20,
        "before the fork": 1,
        "after the children": 1,
    }


@contextmanager
def _suspended(broker: RabbitMQServer) -> Iterator[None]:
    broker.suspend()
    try:
        yield
    finally:
        broker.resume()
