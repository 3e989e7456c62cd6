"""What a delayed task does about a lost broker, by Celery's ``task_publish_retry``."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from celery.signals import before_task_publish
from kombu import Connection

from celery_rabbitdelay.exceptions import ConnectionLost
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import take
from tests.integration.publishing import GRACE, in_time
from tests.integration.shop import PATIENCE, make_app
from tests.node_control import closes, evaluate

#: Seconds between two attempts.
INTERVAL = 0.1

POLICY = {"interval_start": INTERVAL, "interval_step": 0, "interval_max": INTERVAL}


@pytest.mark.parametrize(
    ("settings", "options", "attempts"),
    [
        ({"task_publish_retry": False}, {}, 1),
        ({}, {"retry": False}, 1),
        ({"task_publish_retry": False}, {"retry": True, "retry_policy": {"max_retries": 2}}, 3),
        ({"task_publish_retry_policy": {**POLICY, "max_retries": 4}}, {}, 5),
        ({}, {"retry_policy": {"max_retries": 3}}, 4),
        # Once on the connection that is lost, and four times to connect.
        ({}, {}, 5),
        ({}, {"retry_policy": POLICY}, 5),
    ],
    ids=[
        "setting off",
        "option off",
        "option on",
        "policy of the setting",
        "policy of the call",
        "default",
        "pauses",
    ],
)
def test_a_lost_broker_raises_after_as_many_attempts_as_celery_s_options_say(
    private_rabbitmq: RabbitMQServer,
    make_shop: Callable[..., Any],
    settings: dict[str, Any],
    options: dict[str, Any],
    attempts: int,
) -> None:
    shop = make_shop(broker_url=private_rabbitmq.url, **settings)
    shop.tasks["look"].apply_async(delay=5)
    with _out_of_reach(private_rabbitmq):
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match=f"attempt {attempts}:"):
            shop.tasks["look"].apply_async(delay=5, **options)
        assert time.monotonic() - began < GRACE


def test_connecting_takes_no_longer_than_celery_s_setting_says() -> None:
    """All attempts together, to a host that takes the connection and says no word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}//"
        given = {"broker_url": url, "prefix": "test", "broker_connection_timeout": 0.5}
        shop: Any = make_app(given)
        with in_time(0.5), pytest.raises(ConnectionLost, match="attempt 1:") as caught:
            shop.tasks["look"].apply_async(delay=5)
        assert not caught.value.may_have_arrived


@pytest.mark.parametrize("in_task", [False, True], ids=["no limit", "in a task"])
def test_a_task_survives_a_broker_that_comes_back_in_time(
    private_rabbitmq: RabbitMQServer,
    make_shop: Callable[..., Any],
    prefix: str,
    in_task: bool,
) -> None:
    """A task that sends has no limit but the time; others have if their policy says so."""
    shop = make_shop(broker_url=private_rabbitmq.url, rabbitdelay_confirm_timeout=120)
    look = shop.tasks["look"]

    def send() -> str:
        if in_task:
            task_id: str = shop.tasks["send"].apply(("look", {"delay": 0.5})).get()
            return task_id
        result = look.apply_async(delay=0.5, retry_policy={**POLICY, "max_retries": None})
        return str(result.id)

    publishing = []

    def note(**signal: Any) -> None:
        publishing.append(time.time())

    # Before the first task: an application of Celery 5.5 may not see who is connected later.
    before_task_publish.connect(note)
    try:
        first = look.apply_async(delay=0.1)
        with ThreadPoolExecutor(1) as pool:
            with _out_of_reach(private_rabbitmq):
                before = time.time()
                sending = pool.submit(send)
                wait_for(lambda: len(publishing) == 2, "the first attempt")
                # With three resends it would be over after 0.6 s.
                wait_for(lambda: time.time() > publishing[1] + 20 * INTERVAL, "further attempts")
                assert not sending.done()
            second = sending.result(timeout=PATIENCE)
    finally:
        before_task_publish.disconnect(note)

    with Connection(private_rabbitmq.url) as connection:
        arrivals = take(connection, [shop.amqp.queues[f"{prefix}.default"]], 2)
    ids = [arrival.message.headers["id"] for arrival in arrivals]
    assert ids == [first.id, second]
    assert arrivals[1].at >= before + 0.5


@contextmanager
def _out_of_reach(broker: RabbitMQServer) -> Iterator[None]:
    """Close all connections and refuse new ones; unlike a killed node, it is back in a blink."""
    suspends = "rabbit_maintenance:suspend_all_client_listeners()"
    try:
        evaluate(broker, suspends, closes("the broker is lost"))
        yield
    finally:
        evaluate(broker, "rabbit_maintenance:resume_all_client_listeners()")
