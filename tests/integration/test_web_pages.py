"""The pages for undeliverable messages, jobs and schedules; the command that serves the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from threading import Barrier, Event
from typing import Any
from uuid import uuid4

import httpx
import pytest
from jsonschema import Draft202012Validator
from kombu import Connection

from celery_rabbitdelay.operations.undeliverable.messages import UndeliverableFilter
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import free_port
from celery_rabbitdelay.web import application, schedules, site
from celery_rabbitdelay.web.access import MOST_WRONG, PAUSE
from celery_rabbitdelay.web.passwords import hash_password, is_password
from celery_rabbitdelay.web.sessions import COOKIE
from tests.browser import Browser, Form, assert_harmless, quick_hash, read
from tests.integration.arrivals import count
from tests.integration.page import ServedPage
from tests.integration.shop import PATIENCE, named
from tests.integration.undeliverable_messages import message, put, straight
from tests.integration.worker import run_command, start_celery

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


def said(page: str) -> str:
    """Return the text of a page in one line."""
    return " ".join(read(page).text.split())


def ended(browser: Browser, where: str) -> dict[str, Any]:
    """Wait until the work of an address has ended; return it."""

    def works() -> dict[str, Any]:
        told: dict[str, Any] = browser.get(f"/api{where}").json()["works"][0]
        return told

    wait_for(lambda: works()["state"] != "running", "the work")
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


def test_undeliverable_messages_are_shown_by_reason_and_redriven(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    queue = lose(shop, connection, 3)
    lose(shop, connection, 1, task="<script>alert(1)</script>")
    told = browser.json("/undeliverable")
    assert (told["read"], told["count"]) == (4, 4)
    assert sum(each["count"] for each in told["reasons"]) == 4
    assert browser.json("/undeliverable", task="look")["count"] == 3
    assert browser.json("/undeliverable", older_than="1d")["count"] == 0
    page = browser.get("/undeliverable")
    assert_harmless(page.text)

    first = browser.json("/undeliverable", task="look")["messages"][0]
    story = browser.get("/undeliverable/message", params={"id": first["task_id"]})
    assert_harmless(story.text)
    whole = story.text + browser.get(f"/api/undeliverable/message?id={first['task_id']}").text
    assert "card 4711" not in whole
    shown = Browser(application(shop, shows_arguments=True))
    address = f"/undeliverable/message?id={first['task_id']}"
    assert "card 4711 0815" in shown.get(address).text
    masking = Browser(application(shop, shows_arguments=True, mask=lambda task, text: "masked"))
    assert "card 4711" not in masking.get(address).text

    confirm = browser.get("/undeliverable/all?action=redrive&task=look").text
    assert "3 undeliverable messages match" in said(confirm)
    assert count(connection, f"{shop.rabbitdelay.topology.prefix}.undeliverable") == 4
    begun = browser.post("/undeliverable/decide-all", action="redrive", count="3", task="look")
    assert ended(browser, begun.headers["Location"])["done"] == 3
    wait_for(lambda: count(connection, queue) == 3, "the tasks in their queue", PATIENCE)
    assert browser.json("/undeliverable")["count"] == 1

    begun = browser.post("/undeliverable/decide-all", action="purge", count="1")
    assert ended(browser, begun.headers["Location"])["done"] == 1
    assert browser.json("/undeliverable")["read"] == 0


def test_undeliverable_messages_are_exported_as_the_command_lists_them(
    shop: Any, browser: Browser, connection: Connection, configuration: dict[str, Any]
) -> None:
    lose(shop, connection, 2)
    lose(shop, connection, 1, task="<script>")
    assert browser.get("/undeliverable/export").status_code == 403
    assert "Export" not in browser.get("/undeliverable").text

    shows = Browser(application(shop, shows_arguments=True))
    file = shows.get("/undeliverable/export?task=look")
    assert file.headers["Content-Type"].startswith("application/x-ndjson")
    assert "attachment" in file.headers["Content-Disposition"]
    exported = [json.loads(line) for line in file.text.splitlines()]
    told = run_command(configuration, "undeliverable list --full --task look --json")
    listed = json.loads(told.stdout)["messages"]
    # A later read finds the order and the broker's count of deliveries changed.
    same = ("task_id", "task", "queue", "reason", "envelope", "body")
    for one, other in zip(*(sorted(each, key=by_id) for each in (exported, listed)), strict=True):
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
        assert one.keys() == other.keys() - {"amqp_properties"}
    assert len(exported) == 2
    assert len(shows.json("/undeliverable/export", task="look")["messages"]) == 2
    assert "Export 3" in shows.get("/undeliverable").text
    masking = Browser(application(shop, shows_arguments=True, mask=lambda task, text: "masked"))
    assert "card 4711" not in masking.get("/undeliverable/export").text


def by_id(told: dict[str, Any]) -> str:
    return str(told["task_id"])


@pytest.mark.parametrize("action", ["redrive", "purge"])
def test_a_redrive_or_a_purge_shows_its_progress_and_can_be_stopped(
    shop: Any,
    browser: Browser,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    action: str,
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
    begun = browser.post("/undeliverable/decide-all", action=action, count="6")
    where = begun.headers["Location"]
    wait_for(lambda: read_so_far[0] == 4, "the fourth message", PATIENCE)
    told = browser.get(f"/api{where}").json()["works"][0]
    assert (told["state"], told["total"]) == ("running", 6)
    if action == "purge":
        assert told["done"] == 3
    browser.post("/work/stop", key=where.partition("=")[2])
    may_go_on.set()
    told = ended(browser, where)
    assert (told["state"], told["error"]) == ("stopped", None)
    assert 3 <= told["done"] < 6
    wait_for(lambda: count(connection, queue) == 6 - told["done"], "those that stay", PATIENCE)


def test_a_queue_that_does_not_exist_is_refused_before_anything_is_redriven(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    lose(shop, connection, 1)
    nowhere = {"action": "redrive", "to": f"nowhere-{uuid4().hex}"}
    assert browser.get("/undeliverable/all", params=nowhere).status_code in (400, 503)
    begun = browser.post("/undeliverable/decide-all", count="1", **nowhere)
    work = ended(browser, begun.headers["Location"])
    assert (work["state"], work["done"]) == ("failed", 0)
    assert browser.json("/undeliverable")["count"] == 1


def test_a_job_is_shown_committed_and_aborted(shop: Any, browser: Browser) -> None:
    for name, path, state in (("a", "/jobs/commit", "committed"), ("b", "/jobs/abort", "aborted")):
        name = f"{name}-{uuid4().hex}"
        shop.rabbitdelay.open_job(name, expires=HOUR)
        shop.tasks["look"].apply_async(delay=5, job=name)
        told = browser.json("/jobs", name=name)
        assert (told["name"], told["state"], told["tasks"]) == (name, "open", 1)
        assert "Commit" in browser.get(f"/jobs?name={name}").text
        assert browser.post(path, name=name).headers["Location"] == f"/jobs?name={name}"
        assert browser.json("/jobs", name=name)["state"] == state
    assert browser.post("/jobs/commit", name=name).status_code == 409
    assert browser.json("/jobs", name="nobody's")["state"] is None
    for address in ("/jobs", "/jobs?name=%3Cscript%3E", f"/jobs?name={name}"):
        assert_harmless(browser.get(address).text.replace('value="&lt;script&gt;"', 'value=""'))


def test_a_job_is_opened_and_its_tasks_wait_for_its_commit(shop: Any, browser: Browser) -> None:
    name = f"import & <b>{uuid4().hex}"
    page = browser.get("/jobs", params={"name": name}).text
    assert "Open a job of this name" in page
    assert_harmless(page)
    for wrong in ({}, {"expires": "soon"}, {"expires": "0"}, {"expires": "9" * 400 + "d"}):
        assert browser.post("/jobs/open", name=name, **wrong).status_code == 400, wrong
    assert browser.json("/jobs", name=name)["state"] is None
    opened = browser.post("/jobs/open", name=name, expires="1h")
    assert opened.status_code == 303
    assert browser.get(opened.headers["Location"]).status_code == 200
    told = browser.json("/jobs", name=name)
    assert (told["name"], told["state"], told["tasks"]) == (name, "open", 0)
    shop.tasks["look"].apply_async(delay=5, job=name)
    told = browser.json("/jobs", name=name)
    assert told["tasks"] == 1
    ((listed, tasks),) = [(each["name"], each["tasks"]) for each in told["open"]]
    assert (listed, tasks, told["may_be_more"]) == (name, 1, False)
    assert_harmless(browser.get("/jobs").text)
    assert name in said(browser.get("/jobs").text)
    assert browser.post("/jobs/open", name=name, expires="1h").status_code == 409
    assert browser.post("/jobs/commit", name=name).status_code == 303
    assert browser.json("/jobs")["open"] == []
    assert "No job is open" in said(browser.get("/jobs").text)
    viewer = Browser(application(shop))
    assert viewer.post("/jobs/open", name="another", expires="1h").status_code == 403
    assert "Open a job" not in viewer.get("/jobs?name=another").text


def test_a_schedule_is_paused_resumed_triggered_and_ended(shop: Any, browser: Browser) -> None:
    name = "each <b>hour</b>"
    shop.rabbitdelay.schedules.put(name, "look", timedelta(hours=1), ("card 4711",))
    (told,) = browser.json("/schedules")["schedules"]
    assert (told["name"], told["task"], told["args"]) == (name, "look", None)
    for path, is_paused in (("pause", True), ("resume", False)):
        assert browser.post(f"/schedules/{path}", name=name).status_code == 303
        assert browser.json("/schedules/one", name=name)["schedule"]["paused"] is is_paused
    page = browser.get("/schedules/one", params={"name": name})
    assert "card 4711" not in page.text
    assert_harmless(page.text)
    assert_harmless(browser.get("/schedules").text)
    assert len(browser.json("/schedules/one", name=name)["next"]) == 10
    assert browser.post("/schedules/trigger", name=name).status_code == 303
    assert browser.post("/schedules/end", name=name).headers["Location"] == "/schedules"
    assert browser.json("/schedules")["schedules"] == []
    assert browser.post("/schedules/pause", name=name).status_code == 404
    assert browser.get("/schedules/one", params={"name": name}).status_code == 404


def test_a_schedule_is_edited_and_keeps_its_task_and_its_arguments(
    shop: Any, browser: Browser
) -> None:
    own, name = shop.rabbitdelay.schedules, "each <b>day</b>"
    options = {"jitter": 5, "overlap": "skip", "priority": 3, "catch_up": 60}
    own.put(name, "look", "0 9 * * *", ("card 4711",), **options)
    before = own.get(name)
    written = "30 7 * * 1-5\r\nevery 1h30m"
    edited = browser.post("/schedules/edit", name=name, when=written, timezone="Asia/Tokyo")
    assert edited.status_code == 303
    after = own.get(name)
    assert after.recurrence.rules == ("30 7 * * 1-5", "every 5400000")
    assert after.recurrence.zone == "Asia/Tokyo"
    assert not after.is_paused
    assert after == before._replace(
        recurrence=after.recurrence, next_at=after.next_at, next_id=after.next_id
    )
    page = browser.get(edited.headers["Location"]).text
    assert_harmless(page)
    assert "every 1h30m" in page
    assert browser.post("/schedules/edit", name=name, paused="yes").status_code == 303
    assert own.get(name) == after._replace(is_paused=True)
    for wrong in (
        {"when": "now and then"},
        {"when": "every 90"},
        {"when": "every soon"},
        {"when": "every 10ms"},
        {"when": "every 9999999999999999d"},
        {"timezone": "../../etc/passwd"},
        {"timezone": "Europe"},
        {"paused": "perhaps"},
    ):
        refused = browser.post("/schedules/edit", name=name, **wrong)
        assert refused.status_code == 400, (wrong, refused.text)
    assert own.get(name) == after._replace(is_paused=True)
    assert browser.post("/schedules/edit", name="nobody's", paused="no").status_code == 404
    own.delete(name)


def test_a_schedule_whose_arguments_cannot_be_read_is_shown_and_paused(
    shop: Any, make_shop: Callable[..., Any], redis_url: str
) -> None:
    settings = {"rabbitdelay_registry_url": redis_url, "rabbitdelay_track": "all"}
    own = make_shop(**settings, accept_content=["json", "pickle"]).rabbitdelay.schedules
    own.put("pickled", "look", "0 9 * * *", ({"card 4711"},), serializer="pickle")
    browser = Browser(application(shop, loopback_role="operator", shows_arguments=True))
    (listed,) = browser.json("/schedules")["schedules"]
    told = browser.json("/schedules/one", name="pickled")["schedule"]
    for each in (listed, told):
        assert (each["task"], each["args"], each["kwargs"]) == ("look", None, None)
        assert each["is_readable"] is False
    page = browser.get("/schedules/one?name=pickled").text
    assert "cannot be read here (accept_content)" in said(page)
    assert "/schedules/edit" not in page
    refused = browser.post("/schedules/edit", name="pickled", when="0 10 * * *")
    assert (refused.status_code, "accept_content" in refused.text) == (409, True)
    assert browser.post("/schedules/pause", name="pickled").status_code == 303
    found = own.get("pickled")
    assert (found.is_paused, found.args) == (True, ({"card 4711"},))
    # Redis has lost what it sends, until it comes.
    Records(shop.rabbitdelay.registry).note("pickled", message="")
    page = said(browser.get("/schedules/one?name=pickled").text)
    assert ("Redis has lost it" in page, "Redis has lost them" in page) == (True, True)
    refused = browser.post("/schedules/edit", name="pickled", when="0 10 * * *")
    assert (refused.status_code, "Redis has lost" in refused.text) == (409, True)
    own.delete("pickled")


def test_the_time_line_shows_when_each_schedule_is_due(shop: Any, browser: Browser) -> None:
    own, now = shop.rabbitdelay.schedules, datetime.now(UTC)
    own.put("hourly", "look", timedelta(hours=1), start=now + timedelta(minutes=30))
    own.put("often <i>", "look", timedelta(seconds=30), paused=True)
    own.put("seldom", "look", timedelta(days=40), start=now + timedelta(days=2))

    def runs(horizon: str) -> dict[str, int]:
        told = browser.json("/schedules", horizon=horizon)["schedules"]
        return {each["name"]: len(each["runs"]) for each in told}

    most = schedules.MOST_RUNS
    assert runs("day") == {"hourly": most, "often <i>": most, "seldom": 0}
    assert runs("hour") == {"hourly": 1, "often <i>": most, "seldom": 0}
    assert runs("year")["seldom"] == 10
    told = browser.json("/schedules", horizon="hour")
    (hourly,) = [each for each in told["schedules"] if each["name"] == "hourly"]
    assert hourly["runs"] == [hourly["next_at"]]
    page = browser.get("/schedules?horizon=year").text
    assert_harmless(page)
    tags = [tag for tag, _ in read(page).tags]
    assert tags.count("circle") == 2 * most + 10
    assert browser.get("/schedules?horizon=eon").status_code == 400
    for name in ("hourly", "often <i>", "seldom"):
        own.delete(name)


def test_workers_are_shown_with_what_differs_between_them_and_no_secret(
    serve: Callable[..., Any],
) -> None:
    key = {"rabbitdelay_signing_key": "planted-secret" * 4}
    shop = serve(rabbitdelay_max_unconfirmed=70, **key)
    other = serve(rabbitdelay_max_unconfirmed=71, **key)
    browser = Browser(application(shop))
    wait_for(lambda: len(browser.json("/workers")["workers"]) == 2, "both workers", PATIENCE)
    told, page = browser.json("/workers"), browser.get("/workers")
    first, second = (each.worker.name for each in (shop, other))
    versions = {"celery_rabbitdelay", "celery", "python"}
    for each in told["workers"]:
        assert each["modules"] == sorted(shop.rabbitdelay.settings.modules)
        assert set(each["versions"]) == versions
        assert each["settings"]["prefix"] == shop.rabbitdelay.settings.prefix
    (different,) = told["differences"]
    assert (different["kind"], different["name"]) == ("setting", "max_unconfirmed")
    assert {each["value"]: each["workers"] for each in different["values"]} == {
        "70": [first],
        "71": [second],
    }
    assert_harmless(page.text)
    assert "rabbitdelay_max_unconfirmed 70" in said(page.text)
    assert "planted-secret" not in page.text + str(told)


def test_the_description_of_the_json_names_each_path_and_is_true(shop: Any) -> None:
    browser = Browser(application(shop, loopback_role="operator", shows_arguments=True))
    told = browser.json("/openapi.json")
    assert told["openapi"].startswith("3.1")
    for path, operations in told["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"].endswith("."), path
            needed = [each["name"] for each in operation.get("parameters", ()) if each["required"]]
            answer = browser.ask(method.upper(), f"/api{path}")
            # Without what it needs, it refuses; an action lacks its form.
            expected = 415 if method == "post" else 400 if needed else 200
            assert answer.status_code in (expected, 404), (path, answer.text)
            body = operation.get("requestBody", {"content": {}})["content"]
            for each in body.values():
                Draft202012Validator.check_schema(each["schema"])


def test_the_command_serves_the_page_until_it_is_stopped(
    shop: Any, configuration: dict[str, Any], redis_url: str
) -> None:
    own = {**configuration, "rabbitdelay_registry_url": redis_url}
    port = free_port()
    command = f"rabbitdelay web --port {port}"
    with start_celery(own, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as serving:
        address = f"http://127.0.0.1:{port}/api/now"

        def answers() -> Any:
            assert serving.poll() is None
            try:
                with urllib.request.urlopen(address) as answer:
                    return json.load(answer)
            except OSError:
                return None

        try:
            wait_for(answers, "the page", PATIENCE)
            assert answers()["prefix"] == configuration["prefix"]
        finally:
            serving.send_signal(signal.SIGTERM)
            _, errors = serving.communicate(timeout=PATIENCE)
    assert f"http://127.0.0.1:{port}" in errors
    assert "guest:guest" not in errors


def signs_in_in_the_end(browser: Browser, password: str) -> bool:
    """Try again as often as the answers say so; return whether it is signed in."""
    deadline = time.monotonic() + PATIENCE
    answer = browser.sign_in("ada", password)
    while answer.status_code == 429 and time.monotonic() < deadline:
        time.sleep(int(answer.headers["Retry-After"]))
        answer = browser.sign_in("ada", password)
    return answer.status_code == 303


def test_wrong_passwords_lock_out_nobody_and_hold_up_nothing(
    configuration: dict[str, Any],
) -> None:
    """All come from one address, as through a proxy, and a comparison costs what it costs users."""
    users = {"ada": {"password": hash_password("right")}}
    with ServedPage({**configuration, "rabbitdelay_web": {"users": users}}) as page:
        reader, other = (Browser(None, page.address()) for _ in range(2))
        assert reader.sign_in("ada", "right").status_code == 303
        with ThreadPoolExecutor(60) as strangers:

            def attack() -> list[Future[int]]:
                ready = Barrier(60)

                def signs_in() -> int:
                    stranger = Browser(None, page.address())
                    form = Form.of(stranger.get("/now").text, "/sign-in")
                    ready.wait(PATIENCE)
                    sent = {**form, "name": "ada", "password": "wrong"}
                    return stranger.ask("POST", "/sign-in", data=sent).status_code

                return [strangers.submit(signs_in) for _ in range(60)]

            began, attacks = time.monotonic(), attack()
            while not all(each.done() for each in attacks):
                assert reader.get("/api/session").status_code == 200
            # In the browser that has signed in before, and in another one.
            reader.post("/sign-out")
            assert reader.sign_in("ada", "right").status_code == 303
            assert signs_in_in_the_end(other, "right")
            statuses = Counter(each.result() for each in attacks)
            assert statuses.keys() == {401, 429}
            assert statuses[401] <= MOST_WRONG + (time.monotonic() - began) / PAUSE
            assert page.log.count("A wrong password for 'ada'") == statuses[401]

            attacks = attack()
            wait_for(lambda: any(each.done() for each in attacks), "an answer", PATIENCE)
            os.kill(page.pid, signal.SIGTERM)
            wait_for(lambda: not page.running, "its end, without force", PATIENCE / 2)
            wait(attacks, PATIENCE)


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
    wait_for(lambda: all(each.get("/work").status_code == 401 for each in browsers), "the end")


@pytest.mark.parametrize("host", ["::", "10.0.0.1", "tasks.example"])
def test_without_users_the_command_listens_on_this_machine_alone(
    configuration: dict[str, Any], host: str
) -> None:
    told = run_command(configuration, f"web --host {host} --port 0")
    assert told.returncode == 2, told.stderr
    assert "without users, the page is served on this machine alone" in told.stderr


def test_the_command_says_what_is_wrong_with_an_option(configuration: dict[str, Any]) -> None:
    own = {**configuration, "rabbitdelay_web": {"users": {"ada": {"password": "planted"}}}}
    told = run_command(own, "web --port 0")
    assert told.returncode == 2
    assert "the password of user 'ada' is not hashed" in told.stderr
    assert "planted" not in told.stderr


def test_the_command_hashes_a_password(configuration: dict[str, Any]) -> None:
    pipe = subprocess.PIPE
    command = "rabbitdelay web --hash-password"
    with start_celery(configuration, command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        printed, errors = process.communicate("a word\n", timeout=PATIENCE)
    assert process.returncode == 0, errors
    (line,) = printed.splitlines()
    assert re.fullmatch(r"scrypt:[\w:=-]+", line)
    assert is_password("a word", line)
    assert not is_password("another", line)
