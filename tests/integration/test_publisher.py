"""A publish returns once the broker has confirmed; everything else is an error of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.app.task import TEMPORARY_ERRORS
from celery_rabbitdelay.exceptions import (
    ConnectionLost,
    DeclarationRefused,
    MessageNacked,
    MessageRefused,
    MessageReturned,
    PublishError,
)
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.publisher import Publisher
from tests.integration.arrivals import count, take
from tests.integration.publishing import GRACE, TIMEOUT, publish


def test_a_published_message_is_persistent_and_there(
    connection: Connection, publisher: Publisher, target: Queue
) -> None:
    publish(publisher, target.name, "hello")
    (arrival,) = take(connection, [target], 1)
    assert arrival.body == "hello"
    assert arrival.message.properties["delivery_mode"] == PERSISTENT


def test_a_message_that_a_full_queue_rejects_raises(
    publisher: Publisher, make_full: Callable[[int], Queue]
) -> None:
    full = make_full(1)
    publish(publisher, full.name)
    with pytest.raises(MessageNacked) as caught:
        publish(publisher, full.name, timeout=TIMEOUT)
    assert caught.value.routing_key == full.name


def test_a_message_that_no_queue_takes_raises(publisher: Publisher, prefix: str) -> None:
    with pytest.raises(MessageReturned, match="NO_ROUTE") as caught:
        publish(publisher, f"{prefix}-nowhere")
    assert caught.value.routing_key == f"{prefix}-nowhere"


def test_a_message_to_an_exchange_that_does_not_exist_raises_and_the_next_one_goes_through(
    connection: Connection, publisher: Publisher, target: Queue, prefix: str
) -> None:
    with pytest.raises(MessageReturned, match="no exchange"):
        publish(publisher, "key", exchange=f"{prefix}-nothing")
    publish(publisher, target.name)
    assert count(connection, target.name) == 1


@pytest.mark.parametrize("internal", [True, False], ids=["403", "406"])
def test_a_message_that_the_broker_will_never_take_is_an_error_of_its_own(
    connection: Connection, publisher: Publisher, target: Queue, prefix: str, internal: bool
) -> None:
    """It is no nack, after which a task with ``acks_late`` would be retried for ever."""
    channel: Any = connection.default_channel
    exchange, properties = "", {} if internal else {"expiration": "soon"}
    if internal:
        exchange = f"{prefix}-internal"
        # An exchange that clients may not publish to; kombu has no option for it.
        arguments: Any = (0, exchange, "fanout", False, True, False, True, False, {})
        channel.send_method((40, 10), "BssbbbbbF", arguments, wait=(40, 11))
    message = amqp.Message("x", **properties)
    with pytest.raises(MessageRefused, match="internal exchange" if internal else "expiration"):
        publisher.publish(message, lambda: (exchange, target.name))
    assert not issubclass(MessageRefused, TEMPORARY_ERRORS)
    publish(publisher, target.name)
    assert count(connection, target.name) == 1
    if internal:
        channel.exchange_delete(exchange)


def test_each_error_belongs_to_its_own_message(
    connection: Connection, publisher: Publisher, target: Queue, prefix: str
) -> None:
    outcomes = []
    for number in range(20):
        try:
            publish(publisher, target.name if number % 2 else f"{prefix}-nowhere")
            outcomes.append("confirmed")
        except MessageReturned:
            outcomes.append("returned")
    assert outcomes == ["returned", "confirmed"] * 10
    assert count(connection, target.name) == 10


def test_a_connection_that_asks_for_confirms_itself_is_no_obstacle(
    broker_url: str, connection: Connection, target: Queue
) -> None:
    own = Connection(broker_url, transport_options={"confirm_publish": True})
    publisher = Publisher(own)
    for _ in range(3):
        publish(publisher, target.name)
    publisher.close()
    assert count(connection, target.name) == 3


def test_a_broker_that_refuses_the_login_is_an_error_at_once(broker_url: str) -> None:
    for url in (broker_url.replace("guest:guest", "guest:wrong"), f"{broker_url}nowhere"):
        publisher = Publisher(Connection(url))
        with pytest.raises(ConnectionLost, match="attempt 1: ") as caught:
            publish(publisher, "queue")
        assert "wrong" not in str(caught.value)
        publisher.close()


def test_a_connection_that_is_refused_is_not_waited_for() -> None:
    publisher = Publisher(Connection("amqp://guest:guest@127.0.0.1:1//"))
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1//"):
            publish(publisher, "queue", resends=0)
        seconds.append(time.monotonic() - began)
    # Left to itself, kombu waits two seconds each time; a busy machine does not do so thrice.
    assert min(seconds) < 1.5
    publisher.close()


def test_the_next_broker_of_a_list_is_tried(broker_url: str, target: Queue) -> None:
    publisher = Publisher(Connection(f"amqp://guest:guest@127.0.0.1:1//;{broker_url}"))
    publish(publisher, target.name)
    publisher.close()


@pytest.mark.parametrize("headers", [{"n": 2**70}, {"o": object()}])
def test_a_message_that_cannot_be_written_harms_no_other(
    connection: Connection, publisher: Publisher, target: Queue, headers: dict[str, Any]
) -> None:
    publish(publisher, target.name)
    with pytest.raises(PublishError, match="cannot be written"):
        publisher.publish(amqp.Message("x", application_headers=headers), lambda: ("", target.name))
    publish(publisher, target.name, timeout=TIMEOUT + GRACE)
    assert count(connection, target.name) == 2


def test_an_interrupted_publish_harms_no_other(
    connection: Connection, publisher: Publisher, target: Queue
) -> None:
    class TimeIsUp(BaseException):
        """As Celery's soft time limit, or Ctrl-C."""

    def interrupted(connection: Connection) -> None:
        raise TimeIsUp

    publish(publisher, target.name)
    with pytest.raises(TimeIsUp):
        publish(publisher, target.name, declare=interrupted)
    publish(publisher, target.name, timeout=TIMEOUT + GRACE)
    assert count(connection, target.name) == 2


def test_a_declaration_that_is_refused_is_an_error_with_the_broker_s_reason(
    publisher: Publisher, target: Queue
) -> None:
    def prepare(connection: Connection) -> None:
        Queue(target.name, durable=False)(connection.default_channel).queue_declare()

    with pytest.raises(DeclarationRefused, match="inequivalent arg") as caught:
        publish(publisher, target.name, declare=prepare)
    assert caught.value.routing_key == target.name
    publish(publisher, target.name)


def test_a_caller_s_connection_is_given_back_as_it_was(
    broker_url: str, connection: Connection, target: Queue
) -> None:
    transport: Any = connection.connection
    on_blocked = transport.on_blocked = lambda reason: None
    connection.connect_timeout = 25.0
    publisher = Publisher(connection)
    publish(publisher, target.name, timeout=20.0)
    publisher.close_channel()
    assert transport.on_blocked is on_blocked
    assert connection.connect_timeout == 25.0
    assert connection.connected
