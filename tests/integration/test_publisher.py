"""A publish returns once the broker has confirmed; everything else is an error of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amqp
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import (
    ConnectionLost,
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


UNWRITABLE = (PublishError, "cannot be written")

#: For each kind of message that is not taken: its error, the error's words, the exchange and the
#: key (a name under the test's prefix, if it begins with ``-``), and properties.
NOT_TAKEN: dict[str, tuple[type[PublishError], str, str, str, dict[str, Any]]] = {
    "full queue": (MessageNacked, "-full", "", "-full", {}),
    "no queue": (MessageReturned, "NO_ROUTE", "", "-nowhere", {}),
    "no exchange": (MessageReturned, "no exchange", "-nothing", "key", {}),
    "internal exchange, 403": (MessageRefused, "internal exchange", "-internal", "key", {}),
    "wrong property, 406": (MessageRefused, "expiration", "", "-queue", {"expiration": "soon"}),
    "long key": (*UNWRITABLE, "", "k" * 300, {}),
    "long exchange": (*UNWRITABLE, "e" * 300, "key", {}),
    "large number": (*UNWRITABLE, "", "-queue", {"application_headers": {"n": 2**70}}),
    "object": (*UNWRITABLE, "", "-queue", {"application_headers": {"o": object()}}),
}


@pytest.mark.usefixtures("internal")
@pytest.mark.parametrize(
    ("kind", "says", "exchange", "key", "properties"), NOT_TAKEN.values(), ids=NOT_TAKEN
)
def test_what_is_not_taken_is_an_error_of_its_own_and_harms_no_other(
    connection: Connection,
    publisher: Publisher,
    target: Queue,
    make_full: Callable[[int], Queue],
    prefix: str,
    kind: type[PublishError],
    says: str,
    exchange: str,
    key: str,
    properties: dict[str, Any],
) -> None:
    publish(publisher, make_full(1).name)
    publish(publisher, target.name)
    exchange, key = (prefix + name if name.startswith("-") else name for name in (exchange, key))
    with pytest.raises(PublishError, match=says) as caught:
        publisher.publish(amqp.Message("x", **properties), lambda: (exchange, key), resends=3)
    assert type(caught.value) is kind
    assert caught.value.routing_key == key
    assert not caught.value.may_have_arrived
    publish(publisher, target.name, timeout=TIMEOUT + GRACE)
    assert count(connection, target.name) == 2


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
