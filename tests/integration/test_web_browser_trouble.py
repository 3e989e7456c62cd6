"""An open page in a real browser while the broker and Redis go and come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from tests.chromium import Tab
from tests.integration.page import (
    AWAY,
    HOUR,
    UNKNOWN,
    ServedPage,
    chromium,
    open_tab,
    sign_in,
    signed_in,
    with_users,
)

__all__ = ["chromium", "open_tab"]


@pytest.fixture
def shop(
    configuration: dict[str, Any], make_shop: Callable[..., Any], redis: RedisServer
) -> Iterator[Any]:
    """An application, whose page is its attribute ``page``; no worker serves it."""
    settings = with_users(redis.url)
    shop = make_shop(**settings)
    with Connection(shop.conf.broker_url) as connection:
        shop.rabbitdelay.declare(connection)
    with ServedPage({**configuration, **settings}) as shop.page:
        yield shop


def send(shop: Any, number: int) -> list[str]:
    """Send tasks that wait; return their ids."""
    return [str(shop.tasks["look"].apply_async(delay=2 * HOUR).id) for _ in range(number)]


@pytest.fixture
def tab(shop: Any, open_tab: Callable[..., Tab]) -> Iterator[Tab]:
    """A tab with counts, which nobody opens again."""
    send(shop, 2)
    tab = signed_in(open_tab, shop.page)
    tab.see("2 messages wait in the levels")
    tab.run("window.isTheSamePage = true")
    yield tab
    assert tab.run("return window.isTheSamePage")


def test_a_broker_that_is_killed_and_comes_back_under_an_open_page(
    shop: Any, tab: Tab, private_rabbitmq: RabbitMQServer
) -> None:
    private_rabbitmq.kill()
    try:
        tab.see("The broker cannot be asked", "2 messages wait in the levels")
        assert "guest:" not in tab.text
    finally:
        private_rabbitmq.start()
    tab.see_no("The broker cannot be asked")
    send(shop, 1)
    tab.see("3 messages wait in the levels")
    assert tab.complaints(UNKNOWN) == []


def test_a_redis_that_is_killed_and_comes_back_under_an_open_page(
    shop: Any, tab: Tab, redis: RedisServer, open_tab: Callable[..., Tab]
) -> None:
    (task_id,) = send(shop, 1)
    acting = open_tab(shop.page, "acting")
    acting.go(f"/waiting/task?id={task_id}&refresh=off")
    sign_in(acting)
    acting.see("State waiting")
    with Redis.from_url(redis.url) as client:
        client.save()
    redis.kill()
    try:
        tab.see("Redis cannot be asked", "messages wait in the levels")
        acting.press("Cancel")
        acting.see("0 of 1 cancelled", task_id)
        for path in ("/waiting", "/waiting/all", "/jobs?name=x", "/schedules"):
            acting.go(path)
            acting.see("Redis cannot be asked")
    finally:
        redis.start()
    tab.see_no("Redis cannot be asked")
    acting.go(f"/waiting/task?id={task_id}")
    acting.press("Cancel")
    acting.see("1 of 1 cancelled")
    assert tab.complaints(UNKNOWN, AWAY) == []
