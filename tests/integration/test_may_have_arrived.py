"""``may_have_arrived``: after which errors the broker may have the message, and after which not."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    MessageNacked,
    MessageRefused,
    TopologyIncomplete,
)
from celery_rabbitdelay.publishing.publication import Publication, PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.publishing import TIMEOUT, posting, postings, publish, work
from tests.integration.trouble import alarm, suspended

#: One attempt more than the first.
ONCE_MORE = PublishPolicy(resends=1)


def then_lost(
    broker: RabbitMQServer, publisher: Publisher, sent: Publication
) -> Iterator[Publication]:
    """A message that is written, and whose connection is lost before any answer."""
    with suspended(broker):
        # A slow iterator's messages are written at once.
        work(0.01)
        yield sent
        transport: Any = publisher.connection.connection
        transport.transport.sock.shutdown(socket.SHUT_RDWR)


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
    with suspended(private_rabbitmq):
        with pytest.raises(ConfirmTimeout) as caught:
            publish(publisher, target.name, timeout=TIMEOUT)
        assert caught.value.may_have_arrived
        with pytest.raises(ConnectionLost) as lost:
            publish(publisher, target.name, timeout=TIMEOUT)
        assert not lost.value.may_have_arrived


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
                    publish(publisher, target.name, str(number), timeout=5)
                assert caught.value.may_have_arrived
                publisher.close()
                arrived.append(str(number))
        wait_for(lambda: count(connection, target.name) == len(arrived), "the end of the alarm")
    assert sorted(each.body for each in take(connection, [target], len(arrived))) == arrived


def test_a_message_that_closed_the_channel_is_not_there_and_those_beside_it_may_be(
    private_rabbitmq: RabbitMQServer, publisher: Publisher, target: Queue
) -> None:
    """Where the connection is lost for good before the others are sent again."""

    def with_a_bad_one() -> list[Publication]:
        good = postings(target.name, 4)
        return [*good[:2], posting(target.name, expiration="soon"), *good[2:]]

    sent = with_a_bad_one()
    publisher.publish_all(sent)
    assert isinstance(sent[2].error, MessageRefused)
    assert not sent[2].error.may_have_arrived
    sent = with_a_bad_one()

    def lost(connection: Connection) -> None:
        if sent[2].resent:
            raise ConnectionResetError("a network that is gone")

    with pytest.raises(ConnectionLost) as caught:
        publisher.publish_all(sent, PublishPolicy(resends=0), declare=lost)
    assert caught.value.may_have_arrived
    assert all(each.error is caught.value for each in sent if each.error)
