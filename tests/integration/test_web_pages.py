"""The pages for undeliverable messages, jobs and schedules; the command that serves the page."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from threading import Event
from typing import Any
from uuid import uuid4

import httpx
import pytest
from jsonschema import Draft202012Validator
from kombu import Connection

from celery_rabbitdelay.operations.undeliverable.messages import UndeliverableFilter
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.web import application, site
from celery_rabbitdelay.web.passwords import hash_password, is_password
from celery_rabbitdelay.web.sessions import COOKIE
from tests.browser import Browser, assert_harmless, quick_hash
from tests.integration.arrivals import count
from tests.integration.page import ServedPage
from tests.integration.shop import PATIENCE, named
from tests.integration.undeliverable_messages import message, put, straight
from tests.integration.worker import run_command

HOUR = 3600


@pytest.fixture
def shop(make_shop: Callable[..., Any], redis_url: str) -> Any:
    """An application with a registry; no worker serves it."""
    shop = make_shop(rabbitdelay_registry_url=redis_url, rabbitdelay_track="all")
    with Connection(shop.conf.broker_url) as connection:
        shop.rabbitdelay.declare(connection)
    return shop


@pytest.fixture
def browser(shop: Any, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """An operator on this machine; each page looks anew."""
    monkeypatch.setattr(site, "UNDELIVERABLE_PERIOD", 0.0)
    return Browser(application(shop, loopback_role="operator"))


def ended(browser: Browser, begun: httpx.Response) -> dict[str, Any]:
    """Wait until the work that an action has begun has ended; return it."""

    def works() -> dict[str, Any]:
        told: dict[str, Any] = browser.get(f"/api{begun.headers['Location']}").json()["works"][0]
        return told

    wait_for(lambda: works()["state"] != "running", "the work", PATIENCE)
    return works()


def lose(shop: Any, connection: Connection, number: int, **headers: Any) -> str:
    """Put tasks into undeliverable; return the queue that they were for."""
    queue = named(shop, "default")
    with connection.clone() as other:
        shop.amqp.queues[queue](other.default_channel).declare()
    own = {"task": "look", "lang": "py", "argsrepr": "('card 4711',)", **headers}
    body = json.dumps([["card 4711 0815"], {}, {}])
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    tasks = [message(body, straight(queue, id=uuid4().hex, **own), **kind) for _ in range(number)]
    put(connection, shop.rabbitdelay.topology, *tasks)
    return queue


def test_undeliverable_messages_are_counted_redriven_and_deleted_as_many_as_were_counted(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    queue = lose(shop, connection, 3)
    lose(shop, connection, 2, task="<script>alert(1)</script>")
    told = browser.json("/undeliverable")
    assert (told["read"], told["count"]) == (5, 5)
    assert sum(each["count"] for each in told["reasons"]) == 5
    assert browser.json("/undeliverable", task="look")["count"] == 3
    assert browser.json("/undeliverable", older_than="1d")["count"] == 0
    assert_harmless(browser.get("/undeliverable").text)
    counted = browser.json("/undeliverable/all", action="redrive", task="look")["report"]
    assert (counted["matched"], counted["removed"]) == (3, 3)
    assert count(connection, f"{shop.rabbitdelay.topology.prefix}.undeliverable") == 5

    nowhere = {"action": "redrive", "to": f"nowhere-{uuid4().hex}", "task": "look"}
    work = ended(browser, browser.post("/undeliverable/decide-all", count="3", **nowhere))
    assert (work["state"], work["done"]) == ("failed", 0)
    redrive = {"action": "redrive", "task": "look", "count": "3"}
    assert ended(browser, browser.post("/undeliverable/decide-all", **redrive))["done"] == 3
    wait_for(lambda: count(connection, queue) == 3, "the tasks in their queue", PATIENCE)
    purge = {"action": "purge", "count": "1"}
    assert ended(browser, browser.post("/undeliverable/decide-all", **purge))["done"] == 1
    assert browser.json("/undeliverable")["read"] == 1


def test_bodies_of_undeliverable_messages_are_hidden_masked_or_exported_as_the_command_lists_them(
    shop: Any, browser: Browser, connection: Connection, configuration: dict[str, Any]
) -> None:
    lose(shop, connection, 2)
    (first, _) = browser.json("/undeliverable")["messages"]
    address = f"/undeliverable/message?id={first['task_id']}"
    assert "card 4711" not in browser.get(address).text + browser.get(f"/api{address}").text
    assert browser.get("/undeliverable/export").status_code == 403

    shows = Browser(application(shop, shows_arguments=True))
    assert "card 4711 0815" in shows.get(address).text
    masking = Browser(application(shop, shows_arguments=True, mask=lambda task, text: "masked"))
    assert "card 4711" not in masking.get(address).text + masking.get("/undeliverable/export").text

    file = shows.get("/undeliverable/export?task=look")
    assert "attachment" in file.headers["Content-Disposition"]
    told = run_command(configuration, "undeliverable list --full --task look --json")
    # A later read finds the order and the broker's count of deliveries changed.
    same = ("task_id", "task", "queue", "reason", "envelope", "body")
    exported, listed = (
        sorted(json.dumps([each[name] for name in same], sort_keys=True) for each in found)
        for found in (map(json.loads, file.text.splitlines()), json.loads(told.stdout)["messages"])
    )
    assert exported == listed


def test_a_purge_shows_its_progress_and_can_be_stopped(
    shop: Any, browser: Browser, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(shop, connection, 6)
    queue = f"{shop.rabbitdelay.topology.prefix}.undeliverable"
    real, read_so_far, may_go_on = UndeliverableFilter.matches, [0], Event()

    def matches(*arguments: Any) -> bool:
        read_so_far[0] += 1
        if read_so_far[0] == 4:
            assert may_go_on.wait(PATIENCE)
        return real(*arguments)

    monkeypatch.setattr(UndeliverableFilter, "matches", matches)
    begun = browser.post("/undeliverable/decide-all", action="purge", count="6")
    where = begun.headers["Location"]
    wait_for(lambda: read_so_far[0] == 4, "the fourth message", PATIENCE)
    (told,) = browser.get(f"/api{where}").json()["works"]
    assert (told["state"], told["total"]) == ("running", 6)
    browser.post("/work/stop", key=where.partition("=")[2])
    may_go_on.set()
    told = ended(browser, begun)
    assert (told["state"], told["error"]) == ("stopped", None)
    assert 3 <= told["done"] < 6
    wait_for(lambda: count(connection, queue) == 6 - told["done"], "those that stay", PATIENCE)


def test_a_job_is_opened_and_its_tasks_wait_for_its_commit_or_its_end(
    shop: Any, browser: Browser
) -> None:
    for path, state in (("commit", "committed"), ("abort", "aborted")):
        name = f"import & <b>{uuid4().hex}"
        for wrong in ({}, {"expires": "0"}, {"expires": "9" * 400 + "d"}):
            assert browser.post("/jobs/open", name=name, **wrong).status_code == 400, wrong
        assert browser.json("/jobs", name=name)["state"] is None
        opened = browser.post("/jobs/open", name=name, expires="1h")
        assert browser.get(opened.headers["Location"]).status_code == 200
        shop.tasks["look"].apply_async(delay=5, job=name)
        told = browser.json("/jobs", name=name)
        assert (told["name"], told["state"], told["tasks"]) == (name, "open", 1)
        assert [(each["name"], each["tasks"]) for each in told["open"]] == [(name, 1)]
        assert browser.post("/jobs/open", name=name, expires="1h").status_code == 409
        assert browser.post(f"/jobs/{path}", name=name).status_code == 303
        assert browser.json("/jobs", name=name)["state"] == state
        assert_harmless(browser.get("/jobs", params={"name": name}).text)
    assert browser.post("/jobs/commit", name=name).status_code == 409


def test_a_schedule_is_paused_resumed_triggered_and_ended(shop: Any, browser: Browser) -> None:
    name = "each <b>hour</b>"
    shop.rabbitdelay.schedules.put(name, "look", timedelta(hours=1), ("card 4711",))
    (told,) = browser.json("/schedules")["schedules"]
    assert (told["name"], told["task"], told["args"]) == (name, "look", None)
    for path, is_paused in (("pause", True), ("resume", False)):
        assert browser.post(f"/schedules/{path}", name=name).status_code == 303
        assert shop.rabbitdelay.schedules.get(name).is_paused is is_paused
    page = browser.get("/schedules/one", params={"name": name})
    assert "card 4711" not in page.text
    assert_harmless(page.text)
    assert_harmless(browser.get("/schedules").text)
    assert browser.post("/schedules/trigger", name=name).status_code == 303
    assert browser.post("/schedules/end", name=name).headers["Location"] == "/schedules"
    assert browser.json("/schedules")["schedules"] == []
    for path in ("pause", "trigger", "end", "edit"):
        assert browser.post(f"/schedules/{path}", name=name).status_code == 404


def test_a_schedule_is_edited_and_keeps_its_task_and_its_arguments(
    shop: Any, browser: Browser
) -> None:
    own, name = shop.rabbitdelay.schedules, "each <b>day</b>"
    options = {"jitter": 5, "overlap": "skip", "priority": 3, "catch_up": 60}
    own.put(name, "look", "0 9 * * *", ("card 4711",), **options)
    before = own.get(name)
    written = "30 7 * * 1-5\r\nevery 1h30m"
    edited = browser.post("/schedules/edit", name=name, when=written, timezone="Asia/Tokyo")
    after = own.get(name)
    assert after.recurrence.rules == ("30 7 * * 1-5", "every 5400000")
    assert after.recurrence.zone == "Asia/Tokyo"
    assert after == before._replace(
        recurrence=after.recurrence, next_at=after.next_at, next_id=after.next_id
    )
    assert_harmless(browser.get(edited.headers["Location"]).text)
    assert browser.post("/schedules/edit", name=name, paused="yes").status_code == 303
    for wrong in (
        {"when": "now and then"},
        {"when": "every 9999999999999999d"},
        {"timezone": "../../etc/passwd"},
        {"paused": "perhaps"},
    ):
        assert browser.post("/schedules/edit", name=name, **wrong).status_code == 400, wrong
    assert own.get(name) == after._replace(is_paused=True)
    own.delete(name)


def test_a_schedule_whose_arguments_cannot_be_read_is_shown_and_paused_but_not_edited(
    shop: Any, make_shop: Callable[..., Any], redis_url: str
) -> None:
    settings = {"rabbitdelay_registry_url": redis_url, "rabbitdelay_track": "all"}
    own = make_shop(**settings, accept_content=["json", "pickle"]).rabbitdelay.schedules
    own.put("pickled", "look", "0 9 * * *", ({"card 4711"},), serializer="pickle")
    browser = Browser(application(shop, loopback_role="operator", shows_arguments=True))
    (told,) = browser.json("/schedules")["schedules"]
    assert (told["task"], told["args"], told["is_readable"]) == ("look", None, False)
    edit = {"name": "pickled", "when": "0 10 * * *"}
    assert "accept_content" in browser.post("/schedules/edit", **edit).text
    assert browser.post("/schedules/pause", name="pickled").status_code == 303
    found = own.get("pickled")
    assert (found.is_paused, found.args) == (True, ({"card 4711"},))
    own.delete("pickled")


def test_the_description_of_the_json_names_each_path_and_is_true(shop: Any) -> None:
    browser = Browser(application(shop, loopback_role="operator", shows_arguments=True))
    for path, operations in browser.json("/openapi.json")["paths"].items():
        for method, operation in operations.items():
            is_needed = any(each["required"] for each in operation.get("parameters", ()))
            answer = browser.ask(method.upper(), f"/api{path}")
            # Without what it needs, it refuses; an action lacks its form.
            expected = 415 if method == "post" else 400 if is_needed else 200
            assert answer.status_code in (expected, 404), (path, answer.text)
            for each in operation.get("requestBody", {"content": {}})["content"].values():
                Draft202012Validator.check_schema(each["schema"])


def test_the_command_serves_the_page_and_ends_under_wrong_passwords_that_hold_up_nothing(
    configuration: dict[str, Any],
) -> None:
    """All come from one address, as through a proxy, and a comparison costs what it costs users."""
    users = {"ada": {"password": hash_password("right")}}
    with (
        ServedPage({**configuration, "rabbitdelay_web": {"users": users}}) as page,
        ThreadPoolExecutor(20) as strangers,
    ):
        assert f"http://127.0.0.1:{page.port}" in page.log
        reader = Browser(None, page.address())
        assert reader.sign_in("ada", "right").status_code == 303

        def attack(_: int) -> int:
            return Browser(None, page.address()).sign_in("ada", "wrong").status_code

        attacks = [strangers.submit(attack, each) for each in range(40)]
        while not all(each.done() for each in attacks):
            assert reader.get("/api/session").status_code == 200
        assert {each.result() for each in attacks} == {401, 429}
        # In the browser that has signed in before.
        reader.post("/sign-out")
        assert reader.sign_in("ada", "right").status_code == 303
        attacks = [strangers.submit(attack, each) for each in range(20)]
        os.kill(page.pid, signal.SIGTERM)
        wait_for(lambda: not page.running, "its end, without force", PATIENCE / 2)
        wait(attacks, PATIENCE)
        assert "guest:guest" not in page.log


def test_signing_out_ends_the_session_in_all_processes_that_serve_the_page(shop: Any) -> None:
    users = {"ada": {"password": quick_hash("right")}}
    options: dict[str, Any] = {"users": users, "secret": "s" * 32}
    here, there = (Browser(application(shop, **options)) for _ in range(2))
    here.sign_in("ada", "right")
    there.cookies = httpx.Cookies(here.cookies)
    copy = there.cookies[COOKIE]
    assert (here.get("/work").status_code, there.get("/work").status_code) == (200, 200)
    assert here.post("/sign-out").status_code == 303
    browsers = here, there, Browser(application(shop, **options))
    for each in browsers:
        each.cookies.set(COOKIE, copy)
    # Processes ask each other once a second.
    wait_for(lambda: all(each.get("/work").status_code == 401 for each in browsers), "the end", 30)


def test_the_command_refuses_to_serve_the_page_to_strangers(configuration: dict[str, Any]) -> None:
    told = run_command(configuration, "web --host :: --port 0")
    assert told.returncode == 2, told.stderr
    assert "without users, the page is served on this machine alone" in told.stderr


def test_the_command_hashes_a_password(configuration: dict[str, Any]) -> None:
    told = run_command(configuration, "web --hash-password", "a word\n")
    assert told.returncode == 0, told.stderr
    (line,) = told.stdout.splitlines()
    assert is_password("a word", line)
    assert not is_password("another", line)
