"""``may_have_arrived``: after which errors the broker may have the message, and after which not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    DeclarationRefused,
    MessageNacked,
    MessageRefused,
    MessageReturned,
    PublishError,
    TopologyIncomplete,
)
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.publishing import TIMEOUT, posting, postings, publish, work

#: One attempt more than the first.
ONCE_MORE = PublishPolicy(resends=1)


def then_lost(
    broker: RabbitMQServer, publisher: Publisher, sent: Publication
) -> Iterator[Publication]:
    """A message that is written, and whose connection is lost before any answer."""
    broker.suspend()
    try:
        # A slow iterator's messages are written at once.
        work(0.01)
        yield sent
        transport: Any = publisher.connection.connection
        transport.transport.sock.shutdown(socket.SHUT_RDWR)
    finally:
        broker.resume()


@contextmanager
def alarm(broker: RabbitMQServer) -> Iterator[None]:
    """A memory alarm: the broker takes no more messages."""
    broker.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    try:
        yield
    finally:
        broker.ctl("set_vm_memory_high_watermark", "0.4")


def test_what_the_broker_refuses_it_does_not_have(
    publisher: Publisher, target: Queue, make_full: Callable[[int], Queue], prefix: str
) -> None:
    full = make_full(1)
    publish(publisher, full.name)

    def refused(connection: Connection) -> None:
        Queue(target.name, durable=False)(connection.default_channel).queue_declare()

    for kind, key, options in (
        (MessageNacked, full.name, {"resends": 3}),
        (MessageReturned, f"{prefix}-nowhere", {}),
        (MessageReturned, "key", {"exchange": f"{prefix}-nothing"}),
        (DeclarationRefused, target.name, {"declare": refused}),
    ):
        with pytest.raises(PublishError) as caught:
            publish(publisher, key, **options)
        assert type(caught.value) is kind
        assert not caught.value.may_have_arrived
    with pytest.raises(MessageRefused) as caught:
        publisher.publish(amqp.Message("x", expiration="soon"), lambda: ("", target.name))
    assert not caught.value.may_have_arrived
    with pytest.raises(PublishError, match="cannot be written") as caught:
        publish(publisher, "k" * 300)
    assert not caught.value.may_have_arrived


def test_what_was_never_written_the_broker_does_not_have(prefix: str) -> None:
    publisher = Publisher(Connection("amqp://guest:guest@127.0.0.1:1//"))
    with pytest.raises(ConnectionLost) as caught:
        publish(publisher, f"{prefix}-any", resends=2)
    assert not caught.value.may_have_arrived


def test_a_refusal_after_a_lost_connection_tells_nothing_about_the_first_attempt(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(1)
    publish(publisher, full.name)
    sent = posting(full.name)
    publisher.publish_all(then_lost(private_rabbitmq, publisher, sent), ONCE_MORE)
    assert isinstance(sent.error, MessageNacked)
    assert sent.error.may_have_arrived


def test_after_a_lost_connection_the_broker_may_have_what_was_written(
    private_rabbitmq: RabbitMQServer, connection: Connection, publisher: Publisher, target: Queue
) -> None:
    publish(publisher, target.name)
    sent = posting(target.name)

    def no_more(again: Connection) -> None:
        if sent.resent:
            raise ConnectionResetError("a network that is gone")

    source = then_lost(private_rabbitmq, publisher, sent)
    with pytest.raises(ConnectionLost) as caught:
        publisher.publish_all(source, ONCE_MORE, declare=no_more)
    assert sent.error is caught.value
    assert caught.value.may_have_arrived
    wait_for(lambda: count(connection, target.name) == 2, "the message, which has arrived")


def test_what_is_missing_on_the_next_connection_tells_nothing_about_the_first_attempt(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    publish(publisher, target.name)
    sent = posting(target.name)

    def missing(connection: Connection) -> None:
        if sent.resent:
            raise TopologyIncomplete("prefix", ("queue",))

    with pytest.raises(TopologyIncomplete) as caught:
        publisher.publish_all(then_lost(private_rabbitmq, publisher, sent), declare=missing)
    assert caught.value.may_have_arrived
    with pytest.raises(TopologyIncomplete) as caught:
        publisher.publish_all(postings(target.name, 1), declare=missing)
    assert not caught.value.may_have_arrived


def test_a_broker_that_does_not_answer_may_have_the_message_only_if_it_was_written(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    publish(publisher, target.name)
    private_rabbitmq.suspend()
    try:
        with pytest.raises(ConfirmTimeout) as caught:
            publish(publisher, target.name, timeout=TIMEOUT)
        assert caught.value.may_have_arrived
        with pytest.raises(ConnectionLost) as lost:
            publish(publisher, target.name, timeout=TIMEOUT)
        assert not lost.value.may_have_arrived
    finally:
        private_rabbitmq.resume()


def test_what_a_blocked_broker_got_arrives_when_the_alarm_is_over(
    private_rabbitmq: RabbitMQServer, connection: Connection, target: Queue
) -> None:
    arrived = []
    with ExitStack() as sockets:
        with alarm(private_rabbitmq):
            for number in range(3):
                publisher = Publisher(Connection(private_rabbitmq.url))
                publisher.connection.ensure_connection()
                # A socket that stays open for the kernel: RabbitMQ reads what was written before it
                # learns that the connection is gone.
                transport: Any = publisher.connection.connection
                sockets.enter_context(transport.transport.sock.dup())
                with pytest.raises(ConnectionBlocked) as caught:
                    publish(publisher, target.name, str(number), timeout=TIMEOUT)
                assert caught.value.may_have_arrived
                publisher.close()
                arrived.append(str(number))
        wait_for(lambda: count(connection, target.name) == len(arrived), "the end of the alarm")
    assert sorted(each.body for each in take(connection, [target], len(arrived))) == arrived


def test_a_message_that_closed_the_channel_is_not_there_and_those_beside_it_may_be(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    """Where the connection is lost for good before the others are sent again."""
    message = amqp.Message(b"never", expiration="soon", delivery_mode=2)
    sent = postings(target.name, 5)
    sent[2] = Publication(Content.of(message), sent[2].address, "2")
    publisher.publish_all(sent)
    assert isinstance(sent[2].error, MessageRefused)
    assert not sent[2].error.may_have_arrived

    sent = postings(target.name, 5)
    sent[2] = Publication(Content.of(message), sent[2].address, "2")

    def lost(connection: Connection) -> None:
        if sent[2].resent:
            raise ConnectionResetError("a network that is gone")

    with pytest.raises(ConnectionLost) as caught:
        publisher.publish_all(sent, PublishPolicy(resends=0), declare=lost)
    assert caught.value.may_have_arrived
    assert all(each.error is caught.value for each in sent if each.error)
