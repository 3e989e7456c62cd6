"""Messages that no worker can finish go to ``undeliverable``, and take no others with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.entities import POISON_LIMIT
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.testing import wait_for
from tests.integration.modules import OPEN, Client, client

__all__ = ["client"]

#: Good messages before the bad one, and behind it.
AROUND = 10


def check_in_around(client: Client, target: Queue, bad: Callable[[], Any]) -> None:
    """Check in good messages, a bad one amid them."""
    for number in range(2 * AROUND):
        if number == AROUND:
            bad()
        client.check_in(target.name, {"x-delay": 100, "id": number})


def assert_all_good_ones_arrive(client: Client, target: Queue) -> None:
    """Assert that each good message arrived; a connection that was lost may have doubled some."""
    came: set[int] = set()

    def all_came() -> bool:
        ready = min(client.count(target), 1)
        came.update(arrival.message.headers["id"] for arrival in client.take(target, ready))
        return came == set(range(2 * AROUND))

    wait_for(all_came, "the good messages")


def test_a_message_for_an_exchange_that_clients_may_not_publish_to_is_undeliverable(
    client: Client, target: Queue, internal: str
) -> None:
    """The broker closes the channel on which it is published, with all that is in flight."""
    told = {"x-delay": 100, headers.EXCHANGE: internal, "mine": 1}
    check_in_around(client, target, lambda: client.check_in(target.name, told))
    assert_all_good_ones_arrive(client, target)
    ((reason, message),) = client.undeliverable()
    assert message.headers["mine"] == 1
    assert "internal exchange" in reason


def test_a_message_that_every_client_dies_of_is_undeliverable_after_the_limit(
    shop: Any, serve: Any, connection: Connection, target: Queue
) -> None:
    """Delivered and never acknowledged, as by a worker whose process dies of it each time."""
    client = Client(connection, shop)
    declare(connection, client.topology)
    check_in_around(
        client, target, lambda: client.check_in(target.name, {"x-delay": 100, "mine": 1})
    )
    queues = client.topology.module_queues
    checkin = queues.checkin.name
    for number in range(AROUND):
        good = client.channel.basic_get(checkin)
        assert good.headers["id"] == number
        client.channel.basic_ack(good.delivery_tag)
        client.check_in(target.name, {"x-delay": 100, "id": number})
    for _ in range(POISON_LIMIT + 1):
        dying: Any
        with connection.channel() as dying:
            while (taken := dying.basic_get(checkin)) is None:
                pass
            assert taken.headers["mine"] == 1
    wait_for(lambda: client.count(queues.undeliverable) == 1, "the message")
    serve(only="default", **OPEN)
    assert_all_good_ones_arrive(client, target)
    ((reason, message),) = client.undeliverable()
    assert message.headers["mine"] == 1
    (death,) = message.headers["x-death"]
    assert (death["queue"], death["reason"]) == (checkin, "delivery_limit")
    assert f"delivery limit of {checkin} exceeded" in reason
