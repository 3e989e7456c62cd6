"""What a delayed task does about a lost broker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from kombu import Connection

from celery_rabbitdelay.exceptions import ConnectionLost
from celery_rabbitdelay.publishing import publisher as publisher_module
from celery_rabbitdelay.publishing.kombu_internals import open_connection
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import take
from tests.integration.publishing import in_time
from tests.integration.shop import PATIENCE, make_app
from tests.node_control import closes, evaluate

#: More attempts than Celery's options give a task that nobody's worker runs.
MANY = 6


def test_connecting_takes_no_longer_than_celery_s_setting_says() -> None:
    """All attempts together, to a host that takes the connection and says no word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}//"
        given = {"broker_url": url, "prefix": "test", "broker_connection_timeout": 0.5}
        shop: Any = make_app(given)
        with in_time(0.5), pytest.raises(ConnectionLost, match="attempt 1:") as caught:
            shop.tasks["look"].apply_async(delay=5)
        assert not caught.value.may_have_arrived


def test_a_task_that_sends_survives_a_broker_that_comes_back_in_time(
    private_rabbitmq: RabbitMQServer, make_shop: Callable[..., Any], prefix: str
) -> None:
    """It has no limit but the time."""
    shop = make_shop(broker_url=private_rabbitmq.url, rabbitdelay_confirm_timeout=120)
    first = shop.tasks["look"].apply_async(delay=0.1)
    connects = mock.Mock(side_effect=open_connection)
    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(publisher_module, "open_connection", connects),
    ):
        with _out_of_reach(private_rabbitmq):
            sending = pool.submit(shop.tasks["send"].apply, ("look", {"delay": 0.5}))
            wait_for(lambda: connects.call_count >= MANY, "many attempts")
            assert not sending.done()
        second = sending.result(timeout=PATIENCE).get()
    with Connection(private_rabbitmq.url) as connection:
        arrivals = take(connection, [shop.amqp.queues[f"{prefix}.default"]], 2)
    assert [arrival.message.headers["id"] for arrival in arrivals] == [first.id, second]


@contextmanager
def _out_of_reach(broker: RabbitMQServer) -> Iterator[None]:
    """Close all connections and refuse new ones; unlike a killed node, it is back in a blink."""
    suspends = "rabbit_maintenance:suspend_all_client_listeners()"
    try:
        evaluate(broker, suspends, closes("the broker is lost"))
        yield
    finally:
        evaluate(broker, "rabbit_maintenance:resume_all_client_listeners()")
