"""Resends use the time that there is: what passes within it is not seen, and it is a limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import amqp
import pytest
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import ConnectionLost, DeclarationRefused, PublishError
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.publishing import GRACE, TIMEOUT, in_time, publish
from tests.integration.trouble import suspended

#: Attempts that only a limit of the time allows.
MANY = 6

#: Seconds of patience where a broker starts on a slow machine.
LONG = 120.0


class Addresses:
    """Counts how often a message's address is asked for: at each attempt to send it."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.asked = 0

    def __call__(self) -> tuple[str, str]:
        self.asked += 1
        return "", self.key


@pytest.fixture
def silent_hosts() -> Iterator[list[str]]:
    """URLs of three hosts that take connections and never say a word."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        yield [f"amqp://guest:guest@127.0.0.1:{each.getsockname()[1]}//" for each in hosts]


def test_a_queue_that_refuses_more_than_three_times_and_then_takes_it_has_it(
    connection: Connection, publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(1)
    publish(publisher, full.name, "before")
    address = Addresses(full.name)
    with ThreadPoolExecutor(1) as pool:
        message = amqp.Message("after", content_type="text/plain", content_encoding="utf-8")
        sending = pool.submit(publisher.publish, message, address, timeout=LONG)
        wait_for(lambda: address.asked >= MANY, "a message that is refused again and again")
        assert not sending.done()
        assert [each.body for each in take(connection, [full], 1)] == ["before"]
        sending.result(timeout=LONG)
    assert [each.body for each in take(connection, [full], 1)] == ["after"]


def test_a_broker_that_is_killed_and_starts_again_is_not_seen(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    # Up to 4.0, RabbitMQ writes down that a quorum queue exists half a second after it was made.
    enough = time.monotonic() + 2
    sent = 0
    while time.monotonic() < enough:
        publish(publisher, target.name)
        sent += 1
    with ThreadPoolExecutor(1) as pool:
        private_rabbitmq.kill()
        sending = pool.submit(publish, publisher, target.name, timeout=LONG)
        # In this thread, with which the node would end.
        private_rabbitmq.start()
        sending.result(timeout=LONG)
    with Connection(private_rabbitmq.url) as connection:
        # It may be there twice, if it was written to the new broker before its queue had a leader.
        wait_for(lambda: count(connection, target.name) >= sent + 1, "all messages")


def test_a_declaration_that_is_refused_for_a_reason_that_passes_is_repeated(
    publisher: Publisher, target: Queue
) -> None:
    """The text is RabbitMQ's for a classic queue whose node is down; test_cluster has one."""
    text = f"NOT_FOUND - home node 'b@c' of durable queue '{target.name}' in vhost '/' is down or"
    asked: list[Connection] = []

    def declare(connection: Connection) -> None:
        asked.append(connection)
        if len(asked) < MANY:
            raise NotFound(f"{text} inaccessible", (50, 10))

    publish(publisher, target.name, declare=declare)
    assert len(asked) == MANY
    asked.clear()
    with pytest.raises(DeclarationRefused, match="home node") as caught:
        # A function that has declared is not called again on the same connection.
        publish(publisher, target.name, declare=partial(declare), resends=2)
    assert len(asked) == 3
    assert isinstance(caught.value.__cause__, NotFound)


def test_hosts_that_say_nothing_leave_time_for_the_one_that_answers(
    broker_url: str, silent_hosts: list[str], target: Queue
) -> None:
    url = ";".join([*silent_hosts[:2], broker_url])
    # By themselves, they would take two minutes.
    publisher = Publisher(Connection(url, connect_timeout=60))
    with in_time(0):
        publish(publisher, target.name, timeout=GRACE)
    assert publisher.connection.connect_timeout == 60
    publisher.close()


def test_a_list_of_hosts_that_say_nothing_takes_no_longer_than_the_timeout(
    silent_hosts: list[str],
) -> None:
    publisher = Publisher(Connection(";".join(silent_hosts), connect_timeout=60))
    with in_time(), pytest.raises(ConnectionLost) as caught:
        publish(publisher, "any", timeout=TIMEOUT)
    assert not caught.value.may_have_arrived
    publisher.close()


def test_a_caller_s_connection_that_has_fallen_silent_is_an_error_in_time(
    private_rabbitmq: RabbitMQServer, target: Queue
) -> None:
    """Also where nothing but a new channel is asked for."""
    with Connection(private_rabbitmq.url) as connection:
        connection.ensure_connection()
        publisher = Publisher(connection)
        with suspended(private_rabbitmq), in_time(), pytest.raises(PublishError) as caught:
            publish(publisher, target.name, timeout=TIMEOUT)
        assert not caught.value.may_have_arrived


def test_a_declaration_of_many_steps_takes_no_longer_than_the_timeout(
    publisher: Publisher, target: Queue
) -> None:
    def declare(connection: Connection) -> None:
        while True:
            count(connection, target.name)

    publish(publisher, target.name)  # connects, which takes long on a busy machine
    # The limit is noticed before a step's answer is awaited, or while it is.
    over = r"no answer within|timed out"
    with in_time(), pytest.raises(ConnectionLost, match=over) as caught:
        publish(publisher, target.name, timeout=TIMEOUT, declare=declare)
    assert not caught.value.may_have_arrived
    publish(publisher, target.name)
