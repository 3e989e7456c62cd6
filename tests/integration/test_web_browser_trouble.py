"""An open page in a real browser while the broker, Redis and the page's own server go and come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kombu import Connection
from redis import Redis

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
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
from tests.integration.shop import PATIENCE
from tests.integration.trouble import suspended

__all__ = ["chromium", "open_tab"]

#: What the browser, and htmx, say if nobody listens where the page was.
NOBODY_LISTENS = ("Failed to load resource: net::ERR_", "htmx:error: Failed to fetch")


@pytest.fixture
def serve_page(
    configuration: dict[str, Any], make_shop: Callable[..., Any], redis: RedisServer
) -> Iterator[Callable[..., Any]]:
    """Serves the page of an application, which is its attribute ``page``; no worker serves it."""
    with ExitStack() as pages:

        def serve_page(**options: Any) -> Any:
            settings = {
                **with_users(redis.url, **options),
            }
            shop = make_shop(**settings)
            with Connection(shop.conf.broker_url) as connection:
                shop.rabbitdelay.declare(connection)
            shop.page = pages.enter_context(ServedPage({**configuration, **settings}))
            return shop

        yield serve_page


def send(shop: Any, number: int) -> list[str]:
    """Send tasks that wait; return their ids."""
    return [str(shop.tasks["look"].apply_async(delay=2 * HOUR).id) for _ in range(number)]


def stay(tab: Tab) -> None:
    """Mark the page that is open; see :func:`stayed`."""
    tab.run("window.isTheSamePage = true")


def stayed(tab: Tab) -> bool:
    """Return whether the page is open that was marked, so that nobody has opened it again."""
    return bool(tab.run("return window.isTheSamePage"))


def test_a_broker_that_is_killed_and_comes_back_under_an_open_page(
    serve_page: Callable[..., Any], private_rabbitmq: RabbitMQServer, open_tab: Callable[..., Tab]
) -> None:
    shop = serve_page()
    (task_id, *_) = send(shop, 2)
    tab, story = (signed_in(open_tab, shop.page, name) for name in ("ada", "grace"))
    tab.see("2 messages wait in the levels")
    story.go(f"/waiting/task?id={task_id}")
    story.see("may be in hours.")
    for each in (tab, story):
        stay(each)
    private_rabbitmq.kill()
    try:
        tab.see(
            "The broker cannot be asked", "2 messages wait in the levels", "What is shown is of"
        )
        story.see("The broker cannot be asked", "State waiting")
        assert "guest:" not in tab.text
        reading = open_tab(shop.page, "reading")
        reading.go("/now")
        sign_in(reading)
        reading.see("The broker cannot be asked")
        for path, known in (
            ("/waiting", "2 tracked tasks wait"),
            ("/undeliverable", "The broker cannot be asked"),
            ("/health", "cannot be asked"),
            ("/jobs", "Name of the job"),
            ("/schedules", "There are no schedules"),
        ):
            reading.go(path)
            reading.see(known)
    finally:
        private_rabbitmq.start()
    for each in (tab, story):
        each.see_no("The broker cannot be asked")
        assert stayed(each)
    tab.see("2 messages wait in the levels")
    send(shop, 1)
    tab.see("3 messages wait in the levels")
    assert tab.complaints(UNKNOWN) == []


def test_a_redis_that_is_killed_and_comes_back_under_an_open_page(
    serve_page: Callable[..., Any], redis: RedisServer, open_tab: Callable[..., Tab]
) -> None:
    shop = serve_page()
    task_id, cancelled = send(shop, 2)
    tab, story = (signed_in(open_tab, shop.page, name) for name in ("ada", "grace"))
    tab.see("2 messages wait in the levels", "the next tracked task is due")
    story.go(f"/waiting/task?id={task_id}")
    story.see("State waiting")
    acting = open_tab(shop.page, "acting")
    acting.go(f"/waiting/task?id={cancelled}")
    sign_in(acting)
    acting.see("State waiting")
    acting.follow("Stop refreshing")  # with the next refresh, the button would be gone
    for each in (tab, story):
        stay(each)
    with Redis.from_url(redis.url) as client:
        client.save()
    redis.kill()
    try:
        tab.see("Redis cannot be asked", "2 messages wait in the levels")
        story.see("Redis cannot be asked")
        acting.press("Cancel")
        acting.see("0 of 1 cancelled", "Then it failed", cancelled)
        for path in ("/waiting", "/waiting/all", "/jobs?name=x", "/schedules"):
            acting.go(path)
            acting.see("Redis cannot be asked")
    finally:
        redis.start()
    for each in (tab, story):
        each.see_no("Redis cannot be asked")
        assert stayed(each)
    story.see("State waiting")
    acting.go(f"/waiting/task?id={cancelled}")
    acting.press("Cancel")
    acting.see("1 of 1 cancelled")
    assert shop.rabbitdelay.show(cancelled).state == "cancelled"
    assert tab.complaints(UNKNOWN, AWAY) == []


def test_a_server_of_the_page_that_is_killed_and_comes_back_under_an_open_page(
    serve_page: Callable[..., Any], open_tab: Callable[..., Tab]
) -> None:
    shop = serve_page(secret="a secret of more than 32 bytes, which signs the cookies")
    send(shop, 1)
    tab = signed_in(open_tab, shop.page)
    tab.see("1 messages wait in the levels")
    stay(tab)
    shop.page.kill()
    wait_for(lambda: NOBODY_LISTENS[0] in str(tab.complaints()), "a refresh that fails", PATIENCE)
    assert "1 messages wait in the levels" in tab.text, "the last counts stay"
    send(shop, 1)
    shop.page.start()
    tab.see("2 messages wait in the levels")
    assert stayed(tab)
    assert tab.complaints(*NOBODY_LISTENS) == []


def test_a_server_of_the_page_that_forgets_who_signed_in_lets_one_sign_in_again(
    serve_page: Callable[..., Any], open_tab: Callable[..., Tab]
) -> None:
    shop = serve_page()  # its secret is a random one
    send(shop, 1)
    tab = signed_in(open_tab, shop.page)
    tab.go("/now?horizon=week")
    tab.see("1 messages wait in the levels")
    shop.page.kill()
    shop.page.start()
    tab.see("Password")
    # The form refreshes with the page around it, as anything else does.
    tab.fill("Name", "ada")
    tab.fill("Password", "correct horse")
    tab.press("Sign in")
    tab.see("1 messages wait in the levels")
    assert tab.path == "/now?horizon=week"
    assert tab.complaints(UNKNOWN, *NOBODY_LISTENS) == []


def test_what_takes_long_shows_its_progress_and_is_stopped(
    serve_page: Callable[..., Any], private_rabbitmq: RabbitMQServer, open_tab: Callable[..., Tab]
) -> None:
    shop = serve_page()
    send(shop, 120)
    tab = signed_in(open_tab, shop.page)
    tab.go("/waiting/all")
    with suspended(private_rabbitmq):
        tab.press("Run 120 now")
        tab.see("0 of 120", "running")
        tab.press("Stop")
        tab.see("0 of 120", "running")  # until the batch ends, which goes on
    tab.see("run now all", "stopped")
    assert "120 of 120" not in tab.text
    assert not tab.offers("Stop")
    tab.follow("What goes on")
    tab.see("run now all", "ada", "stopped")
    assert tab.complaints() == []
