"""Publishing to a broker that goes away, falls silent or takes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import amqp
import pytest
from kombu import Connection, Exchange, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    PublishError,
)
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count
from tests.integration.publishing import GRACE, TIMEOUT, publish


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
            publish(publisher, "test-private", timeout=TIMEOUT, declare=prepare)
        assert time.monotonic() - began < TIMEOUT + GRACE


def test_a_broker_that_never_confirms_says_so_and_its_connection_is_not_used_again(
    private: tuple[RabbitMQServer, Publisher],
) -> None:
    """Also where connecting took a part of the time: no other message was confirmed meanwhile."""
    broker, _ = private
    publisher = Publisher(Connection(broker.url))

    def suspend(connection: Connection) -> None:
        broker.suspend()

    try:
        with pytest.raises(ConfirmTimeout, match=r"did not confirm in time$"):
            publish(publisher, "test-private", timeout=TIMEOUT, declare=suspend)
    finally:
        broker.resume()
    assert not publisher.connection.connected
    publish(publisher, "test-private", timeout=30)
    publisher.close()


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
        publish(publisher, "test-private", resends=3)
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


@contextmanager
def _suspended(broker: RabbitMQServer) -> Iterator[None]:
    broker.suspend()
    try:
        yield
    finally:
        broker.resume()
