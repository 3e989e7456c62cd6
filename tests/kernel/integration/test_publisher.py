"""A publish returns once the broker has confirmed; everything else is an error of its own."""

from collections import Counter
from functools import partial
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
from celery_rabbitdelay.publishing.message import PERSISTENT, Publication
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher, PublisherPool
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.publishing import GRACE, TIMEOUT, bodies, in_child, posting, publish


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
    make_full: Any,
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
        publisher.publish(
            Publication.of(amqp.Message("x", **properties), lambda: (exchange, key)),
            PublishPolicy(resends=3),
        )
    assert type(caught.value) is kind
    assert caught.value.routing_key == key
    assert not caught.value.may_have_arrived
    publish(publisher, target.name, timeout=TIMEOUT + GRACE)
    assert count(connection, target.name) == 2


def test_each_error_belongs_to_its_own_message_with_many_in_flight(
    connection: Connection, publisher: Publisher, target: Queue, make_full: Any, prefix: str
) -> None:
    full = make_full(1)
    publisher.publish_all([posting(full.name)])
    keys = [target.name, f"{prefix}-nowhere", full.name, "k" * 300, target.name]
    errors = [type(None), MessageReturned, MessageNacked, PublishError, type(None)]
    sent = [posting(keys[number % 5], str(number)) for number in range(1000)]
    finished: list[Publication] = []
    publisher.publish_all(sent, PublishPolicy(resends=0, window=50), done=finished.append)
    assert Counter(map(id, finished)) == Counter(map(id, sent))
    assert [type(each.error) for each in sent] == errors * 200
    named = {each.address()[1] for each in sent if each.error}
    assert {
        each.error.routing_key for each in sent if isinstance(each.error, PublishError)
    } == named
    confirmed = [str(number) for number in range(1000) if number % 5 in (0, 4)]
    assert bodies(connection, target, 400) == Counter(confirmed)


def test_a_broker_that_refuses_the_login_is_an_error_at_once(broker_url: str) -> None:
    for url in (broker_url.replace("guest:guest", "guest:wrong"), f"{broker_url}nowhere"):
        publisher = Publisher(Connection(url))
        with pytest.raises(ConnectionLost, match="attempt 1: ") as caught:
            publish(publisher, "queue")
        assert "wrong" not in str(caught.value)
        publisher.close()


def test_a_caller_s_connection_is_given_back_as_it_was(broker_url: str, target: Queue) -> None:
    """Even one that asks for confirms itself is no obstacle."""
    with Connection(broker_url, transport_options={"confirm_publish": True}) as own:
        transport: Any = own.connection
        on_blocked = transport.on_blocked = lambda reason: None
        own.connect_timeout = 25.0
        publisher = Publisher(own)
        publish(publisher, target.name, timeout=20.0)
        publisher.close_channel()
        assert transport.on_blocked is on_blocked
        assert own.connect_timeout == 25.0
        assert own.connected


# The pool, whose publishers threads share and no process inherits.


def test_a_forked_process_has_connections_of_its_own(connection: Connection, target: Queue) -> None:
    pool = PublisherPool(connection, limit=2)

    def publish_twenty(name: str, **options: Any) -> None:
        for _ in range(20):
            with pool.acquire() as own:
                publish(own, target.name, name, **options)

    publish_twenty("before")
    names = [f"child {number}" for number in range(3)]
    children = [in_child(partial(publish_twenty, name)) for name in names]
    publish_twenty("parent", resends=0)
    assert [ended() for ended in children] == [0, 0, 0]
    publish_twenty("after", resends=0)
    pool.close()
    expected = dict.fromkeys([*names, "before", "parent", "after"], 20)
    assert Counter(arrival.body for arrival in take(connection, [target], 120)) == expected


def test_a_pool_can_be_closed_and_forked_while_a_publisher_is_in_use(
    connection: Connection, target: Queue
) -> None:
    pool = PublisherPool(connection, limit=1)
    with pool.acquire() as publisher:
        publish(publisher, target.name)
        pool.close()
    assert not publisher.connection.connected
    with pool.acquire():

        def acquire_another() -> None:
            with pool.acquire(timeout=1) as own:
                publish(own, target.name)

        assert in_child(acquire_another)() == 0
    pool.close()
