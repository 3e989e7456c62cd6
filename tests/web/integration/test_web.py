"""The page against real servers: what it shows, what its actions do, and the command."""

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any
from uuid import uuid4

import httpx
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.operations.undeliverable import UndeliverableFilter
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.registry.index import Filter, shard_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.web import application, now, undeliverable, waiting
from celery_rabbitdelay.web import search as operations
from celery_rabbitdelay.web.access import COOKIE
from celery_rabbitdelay.web.options import hash_password, is_password
from tests.browser import Browser, assert_harmless, quick_hash
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.trouble import suspended
from tests.kernel.integration.worker import run_command
from tests.kernel.unit.clock import Clock
from tests.operations.integration.undeliverable_messages import message, put, straight
from tests.web.integration.page import HOUR, ServedPage, standing_shop

#: Few queues, whose highest digits last for hours, so that nothing is due unless a test says so.
HOURS = [("hours", 8, 3600), ("parts", 8, 450), ("steps", 10, 45), ("ticks", 9, 5)]


@pytest.fixture(scope="module")
def module_shop(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application with a registry; no worker serves it."""
    own: dict[str, Any] = {"rabbitdelay_registry_url": redis_url, "rabbitdelay_layout": HOURS}
    with standing_shop(module_broker_url, redis_url, **own, rabbitdelay_track="all") as app:
        yield app


@pytest.fixture
def shop(module_shop: Any) -> Iterator[Any]:
    """The same application, in which nothing waits before and after the test."""
    yield module_shop
    sum(module_shop.rabbitdelay.cancel_batches(Filter()))
    topology = module_shop.rabbitdelay.topology
    left = [*topology.digit_queues, topology.module_queues.undeliverable]
    with Connection(module_shop.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        for name in (*(queue.name for queue in left), named(module_shop, "default")):
            channel.queue_purge(name)


@pytest.fixture
def browser(shop: Any, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """An operator on this machine; each page looks anew."""
    monkeypatch.setattr(undeliverable, "PERIOD", 0.0)
    return Browser(application(shop, loopback_role="operator"))


def ended(browser: Browser, begun: httpx.Response) -> dict[str, Any]:
    """Wait until the work that an action has begun has ended; return it."""
    assert begun.status_code == 303, begun.text
    where = begun.headers["Location"]

    def work() -> dict[str, Any]:
        told: dict[str, Any] = browser.get(f"/api{where}").json()["works"][0]
        return told

    wait_for(lambda: work()["state"] != "running", "the work", PATIENCE)
    assert browser.get(where).status_code == 200
    return work()


def send(shop: Any, number: int = 1, hours: float = 2, **options: Any) -> list[str]:
    """Send tasks that wait; return their ids."""
    look = shop.tasks["look"]
    return [str(look.apply_async(delay=hours * HOUR, **options).id) for _ in range(number)]


def ids_of(told: dict[str, Any]) -> list[str]:
    return [each["task_id"] for each in told["tasks"]]


def test_now_counts_each_digit_and_what_falls_due_and_takes_nothing_from_the_queues(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(shop, 3, hours=2)
    send(shop, 1, hours=0.625)
    wait_for(lambda: browser.json("/now")["total"] == 4, "the counts")
    for path in ("/waiting", "/health", "/work", "/waiting/all"):
        browser.get(path)
    told = browser.json("/now", horizon="day")
    digits = [each for level in told["levels"] for each in level["digits"]]
    held = {each["queue"]: each["messages"] for each in digits if each["messages"]}
    assert held == {"hours.2": 3, "parts.5": 1}
    due = {each["name"]: each for each in told["due"]["horizons"]}
    assert [due[each]["tracked"] for each in ("minute", "hour", "day", "year")] == [0, 1, 4, 4]
    assert [due[each]["all_at_least"] for each in ("minute", "hour", "day")] == [0, 1, 4]
    steps = [each["tracked"] for each in told["due"]["steps"]]
    assert (len(steps), steps[0], sum(steps)) == (24, 1, 4)

    an_hour_later = time.time_ns() + HOUR * 10**9
    monkeypatch.setattr(wall_clock, "ns", lambda: an_hour_later)
    told = Browser(application(shop)).json("/now")["due"]
    totals = {each["name"]: each["tracked"] for each in told["horizons"]}
    assert (told["overdue"], totals["hour"], totals["day"]) == (1, 3, 3)


def test_the_queue_of_an_overdue_task_is_asked_for_once_however_many_look(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(connection: Connection, queues: Iterable[Queue]) -> Any:
        asked.append(connection)
        return queue_counts(connection, queues)

    monkeypatch.setattr(waiting, "queue_counts", counted)
    monkeypatch.setattr("celery_rabbitdelay.metrics.reading.time", Clock())
    (task_id,) = send(shop)
    three_hours_later = time.time_ns() + 3 * HOUR * 10**9
    monkeypatch.setattr(wall_clock, "ns", lambda: three_hours_later)
    web = application(shop)
    for _ in range(3):
        (reason,) = why_not(Browser(web), task_id)
        assert "no worker takes from its queue" in reason
    assert len(asked) == 1


def test_waiting_finds_tasks_by_what_they_were_sent_with(shop: Any, browser: Browser) -> None:
    job, order = f"import-{uuid4()}", f"order:{uuid4()}"
    (plain,) = send(shop, hours=1)
    keyed, other = (send(shop, key=f"{order}{each}:pay")[0] for each in ("", "1"))
    with shop.rabbitdelay.job(job, expires=HOUR):
        of_job = send(shop, 2, hours=3, job=job)
    note = str(shop.tasks["note"].apply_async(kwargs={"key": "x"}, delay=4 * HOUR).id)
    everything = {plain, keyed, other, *of_job, note}
    later = (datetime.now(UTC) + timedelta(hours=2.5)).isoformat()
    for wanted, filters in (
        (everything, {}),
        ({keyed}, {"id": keyed}),
        ({keyed}, {"key": f"{order}:pay"}),
        ({keyed}, {"key": f"{order}:*"}),
        ({keyed, other}, {"key": f"{order}*"}),
        (set(of_job), {"job": job, "task": "look"}),
        ({note}, {"task": "note"}),
        ({plain, keyed, other}, {"due_before": later}),
        ({note, *of_job}, {"due_after": later}),
    ):
        told = browser.json("/waiting", **filters)
        assert (set(ids_of(told)), told["count"]) == (wanted, len(wanted)), filters
    assert "note" in browser.json("/waiting", task="not")["similar"]
    for wrong in ("due_after=soon", "limit=0", "after=x", "due_before=9999-99-99"):
        assert browser.get(f"/waiting?{wrong}").status_code == 400


@pytest.mark.parametrize(
    ("bound", "query"),
    [
        ("", {"limit": "10"}),
        ("MOST_READ", {"task": "look", "job": "{job}"}),
        ("MOST_READ", {"key": "{job}:*"}),
    ],
    ids=["some at a time", "without an index", "start of a key"],
)
def test_page_by_page_a_list_has_each_task_once_and_reads_only_some(
    shop: Any,
    browser: Browser,
    small_pages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    query: dict[str, str],
) -> None:
    if bound:
        monkeypatch.setattr(operations, bound, 10)
    job, same = f"job-{uuid4()}", datetime.now(UTC) + timedelta(hours=2)
    look, at = shop.tasks["look"], shop.tasks["at"]
    with shop.rabbitdelay.job(job, expires=HOUR):
        wanted = {
            str(look.apply_async(eta=same, job=job, key=f"{job}:{number}").id)
            for number in range(20)
        }
        if bound:  # a search has to pass over these
            for _ in range(20):
                at.apply_async(delay=HOUR, job=job)
    asked = {name: value.format(job=job) for name, value in query.items()}
    told = browser.json("/waiting", **asked)
    if not bound:
        # Of each of the 32 shards, no more than a page of four.
        assert sum(small_pages) <= 20
    seen, pages = ids_of(told), 1
    while told["next"] is not None:
        assert pages < 60, "the search does not come to an end"
        told, pages = browser.json("/waiting", **asked, after=told["next"]), pages + 1
        seen += ids_of(told)
    assert (len(seen), set(seen)) == (20, wanted)
    assert pages > 1


def why_not(browser: Browser, task_id: str) -> list[str]:
    told = browser.json("/waiting/task", id=task_id)["why_not_run"]
    return [str(each["words"]) for each in told]


def test_the_story_of_a_task_says_where_it_is_and_why_it_has_not_run(shop: Any) -> None:
    browser = Browser(application(shop, shows_arguments=True))
    delays, key, job = shop.rabbitdelay, f"order:{uuid4()}", f"import-{uuid4()}"
    (task_id,) = send(shop, hours=2.5, key=key, args=("Köln", 4711))
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    told = browser.json("/waiting/task", id=task_id)
    known = told["task"]
    assert (known["state"], known["key"], known["args"]) == ("waiting", key, "('Köln', 4711)")
    assert told["levels"][0]["may_be_in"] == {"hours.2": 1}
    assert why_not(browser, task_id)[0].startswith("Due in ")
    delays.postpone(task_id, delay=5 * HOUR)
    assert "because it was postponed" in why_not(browser, task_id)[0]
    delays.pause(task="look")
    assert "are paused" in why_not(browser, task_id)[1]
    delays.resume(task="look")
    send(shop, key=key)
    assert "newer task was sent under its key" in why_not(browser, task_id)[0]
    delays.open_job(job, expires=HOUR)
    (of_job,) = send(shop, job=job)
    assert "Its job is open" in why_not(browser, of_job)[1]
    delays.abort_job(job)
    assert "Its job was aborted" in why_not(browser, of_job)[1]
    delays.cancel(of_job)
    assert why_not(browser, of_job) == ["It was cancelled, and will not run."]
    assert browser.json("/waiting/task", id="nobody's")["task"] is None


def test_arguments_are_hidden_unless_they_are_allowed_and_masked_by_a_function(
    shop: Any,
) -> None:
    (task_id,) = send(shop, args=("card 4711 0815",))

    def shown(**options: Any) -> str:
        browser = Browser(application(shop, **options))
        page = browser.get(f"/waiting/task?id={task_id}").text
        return page + browser.get(f"/api/waiting/task?id={task_id}").text

    def fails(task: str, text: str) -> str:
        raise ValueError(text)

    assert "card 4711" not in shown()
    assert "card 4711" in shown(shows_arguments=True)
    masked = shown(shows_arguments=True, mask=lambda task, text: f"{task}: {text[:6]}…")
    assert "card 4711" not in masked
    assert "look: (&#39;card…" in masked
    assert "card 4711" not in shown(shows_arguments=True, mask=fails)


def test_an_action_does_what_it_says_for_each_task_and_is_logged(
    shop: Any, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, soon, later = send(shop, 3)
    due = shop.rabbitdelay.show(later).due
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        for action, fields in (
            ("cancel", {"id": [cancelled]}),
            ("postpone", {"id": [later], "by": "1h"}),
            ("run-now", {"id": [soon]}),
        ):
            assert browser.post(f"/waiting/{action}", **fields).status_code == 200
    assert [each.getMessage() for each in caplog.records] == [
        f"'local' has cancelled: 1 ['{cancelled}']",
        f"'local' has postponed: 1 ['{later}']",
        f"'local' has run now: 1 ['{soon}']",
    ]
    assert shop.rabbitdelay.show(cancelled).state == "cancelled"
    assert shop.rabbitdelay.show(later).due == due + timedelta(hours=1)
    assert shop.rabbitdelay.show(soon).due <= datetime.now(UTC)
    headers, ids = {"X-Rabbitdelay-Token": browser.token}, [cancelled, later, "nobody's"]
    told = browser.ask("POST", "/api/waiting/cancel", data={"id": ids}, headers=headers).json()
    outcomes = {each["id"]: each["outcome"] for each in told["outcomes"]}
    assert outcomes == {cancelled: "cancelled", later: "done", "nobody's": "unknown"}
    assert told["done"] == 1
    for path, wrong in (
        ("cancel", {}),
        ("postpone", {"id": soon}),
        ("postpone", {"id": soon, "by": "1h", "until": "2999-01-01"}),
        ("postpone", {"id": soon, "by": "9" * 30}),
        ("decide-all", {"action": "burn", "sent_before": "2999-01-01"}),
        ("decide-all", {"action": "cancel"}),
    ):
        assert browser.post(f"/waiting/{path}", **wrong).status_code == 400, (path, wrong)


@pytest.mark.parametrize(
    ("action", "fields"),
    [("cancel", {}), ("postpone", {"by": "45m"}), ("run-now", {})],
    ids=["cancel", "by", "run now"],
)
def test_all_that_were_counted_are_decided_once_although_they_move_and_others_stay(
    shop: Any,
    browser: Browser,
    small_pages: list[int],
    action: str,
    fields: dict[str, str],
) -> None:
    # All in one shard, so that they are read in many pages, while those before are moved.
    ids = [each for each in (uuid4().hex for _ in range(5_000)) if shard_of(each) == 0][:20]
    job, (kept,) = f"tuesday-{uuid4()}", send(shop, hours=1)
    with shop.rabbitdelay.job(job, expires=HOUR):
        for number, each in enumerate(ids):
            send(shop, hours=0.25 if number < 10 else 1, task_id=each, job=job)
    before = {each.task_id: each.due for each in shop.rabbitdelay.pending(job=job)}
    counted = browser.json("/waiting/all", job=job)
    assert counted["count"] == len(before) == 20
    sent = {"action": action, "sent_before": counted["sent_before"], "job": job, **fields}
    told = ended(browser, browser.post("/waiting/decide-all", **sent))
    assert (told["state"], told["error"], told["done"], told["total"]) == ("done", None, 20, 20)
    after = {each.task_id: each.due for each in shop.rabbitdelay.pending()}
    assert after.pop(kept) > datetime.now(UTC) + timedelta(minutes=50)
    if action == "cancel":
        assert after == {}
    elif action == "postpone":
        assert after == {task_id: due + timedelta(minutes=45) for task_id, due in before.items()}
    else:
        assert len(small_pages) > 5
        assert after.keys() == before.keys()
        assert max(after.values()) < datetime.now(UTC) + timedelta(minutes=5)


def test_tasks_that_are_sent_after_the_count_stay(shop: Any, browser: Browser) -> None:
    counted = send(shop, 2)
    sent_before = browser.json("/waiting/all")["sent_before"]
    wait_for(lambda: browser.json("/waiting/all")["sent_before"] > sent_before, "the clock")
    (sooner,) = send(shop, hours=1)
    begun = browser.post("/waiting/decide-all", action="cancel", sent_before=sent_before)
    assert ended(browser, begun)["done"] == len(counted)
    assert ids_of(browser.json("/waiting")) == [sooner]


def test_a_frozen_broker_holds_up_no_other_page(
    make_shop: Callable[..., Any], redis_url: str, private_rabbitmq: RabbitMQServer
) -> None:
    shop = make_shop(
        rabbitdelay_registry_url=redis_url,
        rabbitdelay_layout=HOURS,
        rabbitdelay_track="all",
    )
    browser = Browser(application(shop))
    (task_id,) = send(shop)
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    with ThreadPoolExecutor(1) as pool, suspended(private_rabbitmq):
        looking = pool.submit(Browser(application(shop)).json, "/now")
        while not looking.done():
            assert ids_of(browser.json("/waiting")) == [task_id]
    assert looking.result()["broker_error"]


def test_without_a_registry_the_page_counts_and_says_what_else_it_needs(
    configuration: dict[str, Any],
) -> None:
    plain: Any = make_app({**configuration, "rabbitdelay_registry_url": None})
    browser = Browser(application(plain))
    answer = browser.get("/waiting")
    assert (answer.status_code, "rabbitdelay_registry_url" in answer.text) == (503, True)
    assert browser.json("/now")["due"]["has_registry"] is False
    plain.close()


def test_now_says_how_many_messages_enter_the_levels_as_the_management_api_counts_them(
    shop: Any, session_rabbitmq: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "ENTERING_PERIOD", 0.0)
    browser = Browser(application(shop, management=session_rabbitmq.management_url))

    def rate() -> float:
        told = browser.json("/now")["entering"]
        assert told["error"] is None
        return told["rate"] or 0.0

    wait_for(lambda: send(shop, 10) and rate() > 1, "the rate", PATIENCE)
    # The levels keep what has entered: only what a client publishes counts.
    wait_for(lambda: rate() == 0, "the end", PATIENCE)


def test_no_page_has_a_password(shop: Any) -> None:
    secret = "planted-secret"
    options = {
        "secret": f"{secret}-{'x' * 32}",
        "management": f"http://guest:{secret}@127.0.0.1:1",
        "loopback_role": "operator",
    }
    browser = Browser(application(shop, **options))
    for path in ("/now", "/waiting", "/health", "/work", "/session"):
        for whole in (path, f"/api{path}"):
            answer = browser.get(whole)
            assert secret not in answer.text + str(answer.headers)


def lose(shop: Any, connection: Connection, number: int, **headers: Any) -> str:
    """Put tasks into undeliverable; return the queue that they were for."""
    queue = named(shop, "default")
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
    assert (counted["matched"], counted["moved"]) == (3, 3)
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
    shop: Any, browser: Browser, connection: Connection
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
    told = run_command(shop.configuration, "undeliverable export --task look")
    # A later read finds the order and the broker's count of deliveries changed.
    same = ("task_id", "task", "queue", "reason")
    exported, listed = (
        sorted([*(each[name] for name in same), each["body"]["text"]] for each in found)
        for found in (map(json.loads, text.splitlines()) for text in (file.text, told.stdout))
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
    shop: Any,
) -> None:
    other: Any = make_app({**shop.configuration, "accept_content": ["json", "pickle"]})
    own = other.rabbitdelay.schedules
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
    other.close()


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
