"""Retries, by the task, by Celery and after a lost worker: they wait, and return to their queue."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import celery
import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from tests.integration.arrivals import find_waiting
from tests.integration.shop import FAR_BACKOFFS, PATIENCE, QUEUES, named
from tests.integration.waited import assert_not_delayed, assert_waited
from tests.integration.worker import Worker

#: Tasks that kill the process that runs them, by what Celery then does with them; to send them
#: anew is new in Celery 5.7.
LOST = ["lost", *(["lost-retry"] if hasattr(celery.Task, "retry_on_worker_lost") else [])]


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.parametrize("first", [{}, {"delay": 0.2}], ids=["undelayed", "delayed"])
def test_a_retry_returns_to_the_queue_it_came_from(
    served_shop: Any, name: str, first: dict[str, Any]
) -> None:
    queue = named(served_shop, name)
    result = served_shop.tasks["retry"].apply_async(
        ([], 2, {"countdown": 0.3}), queue=queue, headers={"x-tenant": "shop"}, **first
    )
    attempts = result.get(timeout=PATIENCE)

    assert [attempt["retries"] for attempt in attempts] == [0, 1, 2]
    # The same exchange and key each time, which do not grow with the retries.
    assert len({(a["exchange"], a["routing_key"]) for a in attempts}) == 1
    # What the caller gave and when it is due, and nothing of the broker's.
    assert all(a["headers"].keys() - {headers.DUE, headers.QUEUE} == {"x-tenant"} for a in attempts)
    assert all(attempt["headers"]["x-tenant"] == "shop" for attempt in attempts)
    assert all(a["headers"][headers.QUEUE] == queue for a in attempts[1:])
    for earlier, later in pairwise(attempts):
        assert_waited(later, earlier["at"], 0.3)


@pytest.mark.parametrize("first", [{}, {"delay": 0.2}], ids=["undelayed", "delayed"])
def test_where_only_the_second_queue_is_served_both_retries_come_back(
    shop: Any, configuration: dict[str, Any], first: dict[str, Any]
) -> None:
    second = named(shop, "second")
    with Worker(configuration, [second]):
        retry = shop.tasks["retry"]
        result = retry.apply_async(([], 2, {"countdown": 0.3}), queue=second, **first)
        attempts = result.get(timeout=PATIENCE)
    assert [attempt["retries"] for attempt in attempts] == [0, 1, 2]


@pytest.mark.parametrize("option", ["delay", "countdown", "eta"])
def test_a_retry_takes_every_kind_of_delay(served_shop: Any, option: str) -> None:
    before = datetime.now(UTC)
    value = before + timedelta(seconds=1.5) if option == "eta" else 0.4
    options = {option: value}
    attempts = served_shop.tasks["retry"].apply_async(([], 1, options)).get(timeout=PATIENCE)
    first, second = attempts
    assert_not_delayed(first)
    if option == "eta":
        assert_waited(second, before.timestamp(), 1.5)
    else:
        assert_waited(second, first["at"], 0.4)


@pytest.mark.parametrize("option", ["delay", "countdown"])
def test_a_delayed_task_s_retry_without_a_delay_comes_back_at_once(
    served_shop: Any, option: str
) -> None:
    second = named(served_shop, "second")
    retry = served_shop.tasks["retry"]
    result = retry.apply_async(([], 1, {option: 0}), delay=0.3, queue=second)
    _, again = result.get(timeout=PATIENCE)
    assert_not_delayed(again)
    assert again["routing_key"] == second
    assert again["headers"] == {}


def test_autoretry_with_backoff_waits_in_the_levels_and_returns(served_shop: Any) -> None:
    queue = named(served_shop, "second")
    before = time.time()
    seen = served_shop.tasks["autoretry"].apply_async(queue=queue).get(timeout=PATIENCE)
    assert seen["retries"] == 1
    assert seen["routing_key"] == queue
    assert seen["headers"][headers.QUEUE] == queue
    assert_waited(seen, before, 1)


def test_a_backoff_above_ten_minutes_waits_in_full_below_its_maximum(
    make_shop: Callable[..., Any], configuration: dict[str, Any], connection: Connection
) -> None:
    clock = {"rabbitdelay_layout": "clock"}
    shop = make_shop(**clock)
    topology = shop.rabbitdelay.topology
    # What Celery makes of the options: exactly these, and with jitter anything up to the maximum.
    exactly = {"backoff": 1000, "backoff-max": 4000}
    with Worker({**configuration, **clock}):
        for name, options in FAR_BACKOFFS.items():
            before = time.time()
            result = shop.tasks[name].apply_async(queue=named(shop, "second"))
            waiting = find_waiting(connection, topology.digit_queues)
            message = waiting.message
            assert message.headers["id"] == result.id
            assert message.headers["retries"] == 1
            assert message.headers["eta"] is None
            ahead = message.headers[headers.DUE] / 1000 - before
            if name in exactly:
                assert exactly[name] <= ahead < exactly[name] + 20
                route = topology.route(exactly[name], named(shop, "second"))
                assert waiting.queue == route.stops[0]
                assert message.delivery_info["routing_key"] == route.routing_key
            else:
                assert 600 < ahead < options["retry_backoff_max"] + 20


@pytest.mark.parametrize("name", LOST)
def test_a_task_whose_worker_was_lost_runs_again(served_shop: Any, name: str) -> None:
    key = f"lost-{uuid4().hex}"
    second = named(served_shop, "second")
    redis = served_shop.backend.client
    before = time.time()
    own = {"x-tenant": "shop"}
    result = served_shop.tasks[name].apply_async((key,), delay=0.5, queue=second, headers=own)
    again = result.get(timeout=PATIENCE)
    first, noted = (json.loads(text) for text in redis.lrange(key, 0, -1))

    assert_waited(first, before, 0.5)
    for name_of in ("exchange", "routing_key"):
        assert first[name_of] == noted[name_of] == again[name_of]
    assert again["headers"].keys() == first["headers"].keys() == {*own, headers.DUE, headers.QUEUE}
    if name == "lost":
        # The broker has kept the message, which is due since the first time.
        assert again["headers"] == first["headers"]
        assert again["retries"] == 0
    else:
        assert_waited(again, first["at"], 1)
        assert again["retries"] == 1
    redis.delete(key)
