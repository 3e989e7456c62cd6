"""A real browser on the page: what a person clicks, two viewers, a broker that goes and comes."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import uvicorn
from kombu import Connection
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from celery_rabbitdelay.web import application
from celery_rabbitdelay.web.passwords import hash_password
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE

HOUR = 3600


@contextmanager
def served(web: Any) -> Iterator[str]:
    """Serve the page in a thread; yield its address."""
    server = uvicorn.Server(
        uvicorn.Config(web, port=free_port(), log_config=None, proxy_headers=False)
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), "the web server")
        yield f"http://127.0.0.1:{server.config.port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture
def make_browser() -> Iterator[Callable[..., Any]]:
    """Starts browsers without a window; without JavaScript if it is said."""
    made: list[Any] = []

    def make(javascript: bool = True) -> Any:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or "chromium"
        for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(each)
        if not javascript:
            setting = {"profile.managed_default_content_settings.javascript": 2}
            options.add_experimental_option("prefs", setting)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = shutil.which("chromedriver") or "chromedriver"
        made.append(webdriver.Chrome(options=options, service=Service(driver)))
        return made[-1]

    yield make
    for browser in made:
        browser.quit()


@pytest.fixture
def shop(make_shop: Callable[..., Any], redis_url: str) -> Any:
    """An application with a registry; no worker serves it."""
    shop = make_shop(
        rabbitdelay_registry_url=redis_url,
        rabbitdelay_layout=[("hours", 24, 3600), ("minutes", 60, 60), ("seconds", 60, 1)],
        rabbitdelay_track="all",
    )
    with Connection(shop.conf.broker_url) as connection:
        shop.rabbitdelay.declare(connection)
    return shop


def text_of(browser: Any) -> str:
    """Return what is to be seen of a page."""
    return str(browser.execute_script("return document.getElementById('main')?.innerText ?? ''"))


def shows(browser: Any, text: str) -> bool:
    """Return whether a text is to be seen on a page."""
    return text in text_of(browser)


def click(browser: Any, label: str) -> None:
    """Click the first button or link with a label."""
    path = f"//button[normalize-space()='{label}'] | //a[normalize-space()='{label}']"
    browser.find_element(By.XPATH, path).click()


def assert_no_complaints(browser: Any) -> None:
    """Assert that the browser has nothing to say of scripts, styles or the policy."""
    assert [each["message"] for each in browser.get_log("browser")] == []


def test_the_clock_fills_as_one_looks_for_two_viewers(
    shop: Any, make_browser: Callable[..., Any]
) -> None:
    with served(application(shop)) as address:
        viewers = [make_browser(), make_browser()]
        for each in viewers:
            each.get(f"{address}/now")
            assert "0 messages wait" in text_of(each)
        for _ in range(3):
            shop.tasks["look"].apply_async(delay=2 * HOUR)
        for each in viewers:
            wait_for(partial(shows, each, "3 messages wait"), "the page", PATIENCE)
            assert_no_complaints(each)


def test_a_person_signs_in_searches_and_cancels_a_task(
    shop: Any, make_browser: Callable[..., Any]
) -> None:
    hostile = "<img src=x onerror=\"document.title='broken'\">"
    wanted = shop.tasks["look"].apply_async((hostile,), delay=2 * HOUR, key=hostile)
    kept = shop.tasks["look"].apply_async(delay=3 * HOUR)
    users = {"ada": {"password": hash_password("a word"), "role": "operator"}}
    with served(application(shop, users=users, shows_arguments=True)) as address:
        browser = make_browser()
        browser.get(f"{address}/waiting")
        browser.find_element(By.NAME, "name").send_keys("ada")
        browser.find_element(By.NAME, "password").send_keys("a word")
        click(browser, "Sign in")
        wait_for(partial(shows, browser, "2 tracked tasks wait"), "the list", PATIENCE)
        browser.find_element(By.NAME, "key").send_keys(hostile)
        click(browser, "Search")
        wait_for(partial(shows, browser, "1 tracked task matches"), "the search", PATIENCE)
        assert hostile in text_of(browser)
        click(browser, wanted.id)
        wait_for(partial(shows, browser, "Why it has not run"), "the story", PATIENCE)
        assert hostile in text_of(browser)
        click(browser, "Cancel")
        wait_for(partial(shows, browser, "1 of 1 cancelled"), "the outcome", PATIENCE)
        assert shop.rabbitdelay.show(wanted.id).state == "cancelled"
        assert shop.rabbitdelay.show(kept.id).state == "waiting"
        assert browser.title != "broken"
        # Of the favicon and the page of a 401, Chromium itself says so.
        said = [each["message"] for each in browser.get_log("browser")]
        assert not [each for each in said if "401" not in each], said
        click(browser, "Sign out")
        wait_for(partial(shows, browser, "Sign in"), "the form", PATIENCE)


def test_enter_in_the_field_of_a_delay_postpones_and_does_not_cancel(
    shop: Any, make_browser: Callable[..., Any]
) -> None:
    task = shop.tasks["look"].apply_async(delay=2 * HOUR)
    with served(application(shop, loopback_role="operator")) as address:
        browser = make_browser()
        browser.get(f"{address}/waiting")
        browser.find_element(By.CSS_SELECTOR, "input[type=checkbox]").click()
        browser.find_element(By.ID, "delay").send_keys("5h\n")
        wait_for(lambda: "1 of 1 postponed" in text_of(browser), "the page")
    assert shop.rabbitdelay.show(task.id).postponed is not None


def test_all_that_match_are_run_now_and_a_worker_runs_them(
    serve: Callable[..., Any], redis_url: str, make_browser: Callable[..., Any]
) -> None:
    shop = serve(rabbitdelay_registry_url=redis_url, rabbitdelay_track="all")
    notes = Notes(shop)
    for number in range(5):
        notes.send(number, delay=HOUR)
    with served(application(shop, loopback_role="operator")) as address:
        browser = make_browser()
        browser.get(f"{address}/waiting?task=note")
        click(browser, "Decide about all 5 that match")
        assert "5 tracked tasks match" in text_of(browser)
        click(browser, "Run 5 now")
        wait_for(lambda: "5 of 5" in text_of(browser), "the work", PATIENCE)
        wait_for(lambda: sorted(notes()) == list(range(5)), "the tasks", PATIENCE)
    notes.forget()


def test_the_broker_goes_away_and_comes_back_under_an_open_page(
    shop: Any, make_browser: Callable[..., Any], private_rabbitmq: RabbitMQServer
) -> None:
    shop.tasks["look"].apply_async(delay=2 * HOUR)
    away = "The broker cannot be asked"
    with served(application(shop)) as address:
        browser = make_browser()
        browser.get(f"{address}/now")
        wait_for(lambda: "1 messages wait" in text_of(browser), "the counts", PATIENCE)
        private_rabbitmq.kill()
        try:
            wait_for(lambda: away in text_of(browser), "the page to notice", PATIENCE)
            assert "1 messages wait" in text_of(browser)
        finally:
            private_rabbitmq.start()
        wait_for(lambda: away not in text_of(browser), "the page to recover", PATIENCE)


def test_without_javascript_everything_can_be_read(
    shop: Any, make_browser: Callable[..., Any]
) -> None:
    task = shop.tasks["look"].apply_async(delay=2 * HOUR)
    with served(application(shop)) as address:
        browser = make_browser(javascript=False)
        for path, says in (
            ("/now", "The clock of what waits"),
            ("/waiting", task.id),
            (f"/waiting/task?id={task.id}", "waiting"),
            ("/health", "Health"),
        ):
            browser.get(f"{address}{path}")
            assert says in browser.find_element(By.ID, "main").text
        browser.get(f"{address}/now")
        click(browser, "week")
        assert "horizon=week" in browser.current_url


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(
    shop: Any, make_browser: Callable[..., Any], width: int
) -> None:
    long = "m" * 3000
    task = shop.tasks["look"].apply_async((long,), delay=2 * HOUR, key=long, argsrepr=long)
    with served(application(shop, shows_arguments=True)) as address:
        browser = make_browser()
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        for path in (
            "/now",
            "/waiting",
            f"/waiting/task?id={task.id}",
            "/health",
            "/undeliverable",
        ):
            browser.get(f"{address}{path}")
            wide = browser.execute_script("return document.documentElement.scrollWidth")
            assert wide <= width, path
