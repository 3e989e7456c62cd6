"""The page in a real browser: what a person reads and clicks, and what it does on the servers."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
from kombu import Connection
from redis import Redis

from celery_rabbitdelay.levels.headers import EXCHANGE, QUEUE, REASON, ROUTING_KEY
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from celery_rabbitdelay.web import pages
from celery_rabbitdelay.web.search import MOST_READ_WHOLE
from tests.chromium import ELSEWHERE, PHONE, WIDE, Chromium, Tab
from tests.kernel.integration.worker import Worker
from tests.operations.integration.undeliverable_messages import message, put, straight
from tests.web.integration.page import (
    HOUR,
    OPERATOR,
    PASSWORD,
    ServedPage,
    standing_shop,
    with_users,
)

#: The pages that are neither actions nor files, and take no field.
NEED_A_FIELD = (
    *("waiting/completions", "waiting/task", "undeliverable/message", "jobs/one"),
    "schedules/one",
)
READ = [
    f"/{each.path}"
    for each in pages.PAGES
    if each.template and not (each.is_action or each.path in NEED_A_FIELD)
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """The browser of a module's tests."""
    with Chromium() as chromium:
        yield chromium


@pytest.fixture
def open_tab(chromium: Chromium) -> Iterator[Callable[..., Tab]]:
    """Opens tabs, each as another person's: at a page, under a name."""
    with ExitStack() as tabs:

        def open_tab(page: ServedPage, name: str = "localhost") -> Tab:
            return tabs.enter_context(chromium.tab(page.address(name)))

        yield open_tab


def signed_in(open_tab: Callable[..., Tab], page: ServedPage, name: str = "localhost") -> Tab:
    """Open the page in a tab of its own, as the operator."""
    tab = open_tab(page, name)
    tab.sign_in(OPERATOR, PASSWORD)
    tab.see("Waiting tasks")
    return tab


@pytest.fixture(scope="module")
def served(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application and its page, for the tests of this module."""
    settings = with_users(redis_url, shows_arguments=True)
    with (
        standing_shop(module_broker_url, redis_url, **settings) as app,
        ServedPage(app.configuration) as app.page,
    ):
        yield app


def send(served: Any, number: int = 1, **options: Any) -> list[str]:
    """Send tasks that wait; return their ids."""
    look = served.tasks["look"]
    return [str(look.apply_async(delay=2 * HOUR, **options).id) for _ in range(number)]


def state(served: Any, task_id: str) -> str:
    return str(served.rabbitdelay.show(task_id).state)


def test_a_browser_asks_for_a_password_once(served: Any, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(served.page, "nobody")
    tab.go("/waiting")
    assert tab.text == "", "the browser asks"
    tab.sign_in(OPERATOR, "wrong")
    assert tab.text == ""
    tab.sign_in(OPERATOR, PASSWORD)
    tab.see("Waiting tasks", f"{OPERATOR}, operator")
    tab.go("/waiting")
    tab.see("Waiting", f"{OPERATOR}, operator")
    assert tab.complaints("status of 401") == []


@pytest.mark.parametrize("name", ["localhost", ELSEWHERE])
def test_a_form_of_the_page_acts_and_one_of_another_site_does_not(
    served: Any, open_tab: Callable[..., Tab], name: str
) -> None:
    """Over plain HTTP, a browser says whether it is the same site only to ``localhost``."""
    tab, (task_id,) = signed_in(open_tab, served.page, name), send(served)
    action = f"{tab.base}/waiting/decide?action=cancel"
    form = f"<form method=post action={action}><input name=id value={task_id}><button>Win"
    tab.driver.get(f"data:text/html,{quote(form)}")
    tab.press("Win")
    tab.see("The request comes from another site's page.")
    assert state(served, task_id) == "waiting"
    tab.go(f"/waiting/task?id={task_id}")
    tab.press("Cancel…")
    tab.press("Cancel 1 task")
    tab.see("Cancelled 1 of 1")
    assert tab.complaints("status of 403", "/favicon.ico") == []


def test_a_selection_brings_up_its_actions_which_ask_once_and_lead_back_to_the_search(
    served: Any, open_tab: Callable[..., Tab]
) -> None:
    tab, job = signed_in(open_tab, served.page), f"import-{uuid4().hex[:8]}"
    with served.rabbitdelay.job(job, expires=HOUR):
        first, second = send(served, 2, job=job)
    tab.go("/waiting")
    tab.fill("Search", f"job:{job}\n")
    tab.see("2 tasks match")
    assert "Postpone…" not in tab.text
    tab.tick(f"Select {first}")
    tab.see("selected", "Postpone…", "Cancel…")
    tab.press("Postpone…")
    tab.see("Postpone 1 task?", first)
    tab.fill("By", "3h\n")
    tab.see("Postponed 1 of 1")
    tab.driver.back()
    tab.see("Postpone 1 task?", first)
    tab.driver.forward()
    tab.see("Postponed 1 of 1")
    late = datetime.now(UTC) + timedelta(hours=4.5)
    assert [served.rabbitdelay.show(each).due > late for each in (first, second)] == [True, False]
    tab.follow("Back to the list")
    assert tab.value("Search") == f"job:{job}"
    tab.tick(f"Select {second}")
    tab.press("Cancel…")
    tab.see("Cancel 1 task?")
    assert state(served, second) == "waiting"
    tab.press("Cancel 1 task")
    tab.see("Cancelled 1 of 1")
    assert [state(served, each) for each in (first, second)] == ["waiting", "cancelled"]
    tab.follow("Back to the list")
    tab.follow("Cancel 1…")
    tab.see("Cancel 1 task?", f"job:{job}")
    tab.press("Cancel 1 task")
    tab.see("Cancelled 1 of 1")
    assert state(served, first) == "cancelled"
    tab.follow("Back to the list")
    tab.see("0 tasks match")
    assert tab.complaints() == []


def test_a_search_is_completed_as_one_types_and_finds_what_was_pasted(
    served: Any, open_tab: Callable[..., Tab]
) -> None:
    tab, key = signed_in(open_tab, served.page), uuid4().hex
    send(served, 3)
    (task_id,) = send(served, key=key)
    tab.go("/waiting")
    names = "return fetch('/api/waiting/completions?q=loo').then(answer => answer.json())"
    wait_for(lambda: tab.run(names)["completions"], "a reading with the tasks", PATIENCE)
    tab.fill("Search", "due:<1d loo")
    first = "return document.querySelector('#completions option')?.value"
    wait_for(lambda: tab.run(first) == "due:<1d task:look", "the completion", PATIENCE)
    tab.fill("Search", f"{key[:20]}\n")
    tab.see("1 task matches", task_id)
    assert tab.complaints() == []


def test_a_search_goes_on_by_itself_and_counts_in_its_heading_what_it_has_found(
    served: Any, open_tab: Callable[..., Tab]
) -> None:
    tab, word = signed_in(open_tab, served.page), uuid4().hex
    others = send(served, MOST_READ_WHOLE)
    (task_id,) = [str(served.tasks["look"].apply_async((word,), delay=3 * HOUR).id)]
    tab.go(f"/waiting?q={word}")
    tab.see("1 task matches", task_id, "End of the list: 1 task found.")
    tab.follow("Cancel 1…")
    tab.see(f"Cancel all tasks that match {word}?")
    served.rabbitdelay.registry.cancel([*others, task_id])
    assert tab.complaints() == []


def test_without_scripts_one_reads_and_acts(served: Any, open_tab: Callable[..., Tab]) -> None:
    tab, (task_id,) = signed_in(open_tab, served.page), send(served)
    with tab.without_scripts():
        tab.go(f"/waiting/task?id={task_id}")
        tab.see("on time", "Details")
        tab.press("Cancel…")
        tab.press("Cancel 1 task")
        tab.see("Cancelled 1 of 1")
        for path in READ:
            tab.go(path)
            assert tab.texts("h1"), path
    assert state(served, task_id) == "cancelled"
    assert tab.complaints() == []


def test_an_open_page_shows_that_the_broker_and_redis_are_away_and_comes_back(
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    redis: RedisServer,
    private_rabbitmq: RabbitMQServer,
    open_tab: Callable[..., Tab],
) -> None:
    settings = with_users(redis.url)
    shop = make_shop(**settings)
    task_id = send(shop)[0]
    with ServedPage({**configuration, **settings}) as page:
        acting = signed_in(open_tab, page)
        acting.go("/workers?refresh=off")
        acting.see("No worker has answered within a second")  # which no page waits for
        tab = signed_in(open_tab, page)
        tab.see("1 task waits", "1 message in the levels")
        tab.run("window.isTheSamePage = true")
        private_rabbitmq.kill()
        try:
            tab.see("The broker cannot be reached", "1 message in the levels")
            assert "guest:" not in tab.text
        finally:
            private_rabbitmq.start()
        tab.see_no("The broker cannot be reached")

        acting.go(f"/waiting/task?id={task_id}&refresh=off")
        acting.see("Why it has not run")
        with Redis.from_url(redis.url) as client:
            client.save()
        redis.kill()
        try:
            tab.see("Redis cannot be reached", "1 message in the levels")
            acting.press("Cancel…")
            acting.see("Redis cannot be reached")
        finally:
            redis.start()
        tab.see_no("Redis cannot be reached")
        acting.go(f"/waiting/task?id={task_id}")
        acting.press("Cancel…")
        acting.press("Cancel 1 task")
        acting.see("Cancelled 1 of 1")
        assert tab.run("return window.isTheSamePage")
        assert tab.complaints("status of 503") == []


#: What anybody may have written. What runs of it changes ``window.hacked``.
HOSTILE = {
    "markup": "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "\" autofocus onfocus='window.hacked = 3' x=\"</td></tr></table></main></bdi><style>*{}",
    "control": "a\x00\x1b[2J\r\nX-Injected: yes\x85\u2028b\u202egpj.exe\u2066\u2067\u200f\u061c",
    "combining": "مرحبا بالعالم" + "Z" + "\u0351\u0363\u0489" * 500,
    "address": "javascript:window.hacked = 4//../../etc/passwd?id=1&x=y#z" + "m" * 20_000,
}

#: A worker's name; no argument of a program has NUL, and no name of Celery's more than one ``@``.
HOSTILE_WORKER = (
    "<img src=x onerror='window.hacked = 5'>\"></td>@\u202e\x1b<script>window.hacked = 6</script>"
)


@pytest.fixture
def hostile(served: Any) -> Iterator[None]:
    """A task, a schedule and an undeliverable message with each of the hostile texts."""
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    lost = []
    for name, text in HOSTILE.items():
        where: dict[str, Any] = {"exchange": text[:50], "routing_key": f"{name} {text}"[:100]}
        with served.rabbitdelay.job(text, expires=HOUR):
            send(served, job=text, key=text, args=(text,), task_id=text[:50], **where)
        served.rabbitdelay.schedules.put(text[:50], text, timedelta(hours=1), (text,))
        told: dict[str, Any] = {"id": f"lost: {text[:50]}", "task": text, "argsrepr": text}
        told |= {REASON: text, text[:50]: 1, **dict.fromkeys((EXCHANGE, ROUTING_KEY, QUEUE), text)}
        lost.append(message(json.dumps([[text], {}, {}]), straight(text, **told), **kind))
        served.rabbitdelay.pause(task=text)
    with Connection(served.conf.broker_url) as connection:
        queue = put(connection, served.rabbitdelay.topology, *lost)
        yield
        channel: Any = connection.default_channel
        channel.queue_purge(queue)
    for text in HOSTILE.values():
        served.rabbitdelay.schedules.delete(text[:50])
        served.rabbitdelay.resume(task=text)


def test_hostile_texts_run_nowhere_and_every_page_is_accessible(
    served: Any, open_tab: Callable[..., Tab], hostile: None
) -> None:
    tab, found, seen = signed_in(open_tab, served.page), list[str](), set[str]()

    def look(path: str = "") -> None:
        """Look at a page; without a path, at that which the tab shows."""
        if path:
            tab.go(path)
            seen.add(path.partition("?")[0].strip("/"))
        assert tab.texts("footer"), path
        found.extend(tab.barriers())
        assert tab.run("return window.hacked") is None, path

    with Worker(served.configuration, [], "-n", HOSTILE_WORKER):
        tab.go("/workers")
        tab.see("onerror='window.hacked = 5'")
        look("/workers")

    def has_read() -> bool:
        """Return whether the page, which reads undeliverable messages rarely, has read ours."""
        tab.go("/undeliverable")
        return bool(tab.run("return document.querySelector(\"a[href*='/undeliverable/message']\")"))

    wait_for(has_read, "the undeliverable messages", PATIENCE)
    for text in HOSTILE.values():
        asked, name = quote(text[:5000], safe=""), quote(text[:50], safe="")
        look(f"/waiting/task?id={name}")
        look(f"/waiting?q={quote(str(Term.of('job', text[:5000])))}")
        look(f"/undeliverable?id=lost%3A%20{name}")
        first = "a[href*='/undeliverable/message']"
        look(tab.run(f"return document.querySelector(\"{first}\").getAttribute('href')"))
        look(f"/jobs?name={asked}")
        look(f"/jobs/one?name={asked}")
        look(f"/jobs/one?name={asked}&action=abort")
        look(f"/schedules/one?name={name}")
        tab.press("Pause")
        tab.see("paused")
        look(f"/undeliverable/all?action=purge&id=lost%3A%20{name}")
        tab.press("Delete 1 for good")
        tab.see("1 of 1", "done")
        tab.go(f"/waiting/task?id={name}")
        tab.press("Cancel…")
        tab.see("Cancel 1 task?")
        look()
        tab.press("Cancel 1 task")
        tab.see("Cancelled 1 of 1")
        look()
        assert state(served, text[:50]) == "cancelled"
    for size, scheme in product((WIDE, PHONE), ("light", "dark")):
        tab.resize(size)
        tab.prefer(scheme)
        for path in (*READ, "/nowhere", "/waiting?limit=none"):
            look(path)
    assert "\n".join(found) == ""
    pages_to_see = {each.path for each in pages.PAGES if each.template and not each.is_action}
    assert pages_to_see - {"waiting/completions"} <= seen
    assert tab.complaints("status of 404", "status of 400") == []
