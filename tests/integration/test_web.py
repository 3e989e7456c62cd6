"""The page against real servers: what it shows, what its actions do, and servers that go away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.operations import waiting as operations
from celery_rabbitdelay.registry.index import Filter, shard_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.web import application, site
from tests.browser import Browser
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.shop import PATIENCE, make_app
from tests.integration.trouble import suspended
from tests.unit.clock import Clock

#: Few queues, whose highest digits last for hours, so that nothing is due unless a test says so.
HOURS = [("hours", 8, 3600), ("parts", 8, 450), ("steps", 10, 45), ("ticks", 9, 5)]

HOUR = 3600


@pytest.fixture(scope="module")
def shop(module_broker_url: str, redis_url: str) -> Iterator[Any]:
    """An application with a registry; no worker serves it."""
    settings = {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_layout": HOURS,
        "rabbitdelay_track": "all",
    }
    app: Any = make_app(settings)
    with Connection(app.conf.broker_url) as connection:
        app.rabbitdelay.declare(connection)
    yield app
    delete_what_it_declared(app)
    app.close()


@pytest.fixture
def tracked(shop: Any) -> Iterator[Any]:
    """The same application, in which nothing waits before and after the test."""
    yield shop
    sum(shop.rabbitdelay.cancel_batches(Filter()))
    with Connection(shop.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        for queue in shop.rabbitdelay.topology.digit_queues:
            channel.queue_purge(queue.name)


@pytest.fixture
def browser(tracked: Any) -> Browser:
    """An operator on this machine."""
    return Browser(application(tracked, loopback_role="operator", shows_arguments=True))


def send(shop: Any, number: int = 1, hours: float = 2, **options: Any) -> list[str]:
    """Send tasks that wait; return their ids."""
    look = shop.tasks["look"]
    return [str(look.apply_async(delay=hours * HOUR, **options).id) for _ in range(number)]


def ids_of(told: dict[str, Any]) -> list[str]:
    return [each["task_id"] for each in told["tasks"]]


def test_now_counts_each_digit_and_what_falls_due_and_takes_nothing_from_the_queues(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(tracked, 3, hours=2)
    send(tracked, 1, hours=0.625)
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
    monkeypatch.setattr(wall_clock, "source", lambda: an_hour_later)
    told = Browser(application(tracked)).json("/now")["due"]
    totals = {each["name"]: each["tracked"] for each in told["horizons"]}
    assert (told["overdue"], totals["hour"], totals["day"]) == (1, 3, 3)


def test_a_refresh_shows_what_others_have_seen_and_who_opens_a_page_looks_anew(
    tracked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_rabbitdelay.web.reading.time", Clock())
    (task_id,) = send(tracked)
    web = application(tracked)

    def state(**headers: str) -> str:
        answer = Browser(web).get(f"/api/waiting/task?id={task_id}", headers=headers)
        return str(answer.json()["task"]["state"])

    refresh = {"HX-Request": "true"}
    assert state(**refresh) == "waiting"
    tracked.rabbitdelay.cancel(task_id)
    assert [state(**refresh), state()] == ["waiting", "cancelled"]


def test_waiting_finds_tasks_by_what_they_were_sent_with(tracked: Any, browser: Browser) -> None:
    job, order = f"import-{uuid4()}", f"order:{uuid4()}"
    (plain,) = send(tracked, hours=1)
    keyed, other = (send(tracked, key=f"{order}{each}:pay")[0] for each in ("", "1"))
    with tracked.rabbitdelay.job(job, expires=HOUR):
        of_job = send(tracked, 2, hours=3, job=job)
    note = str(tracked.tasks["note"].apply_async(kwargs={"key": "x"}, delay=4 * HOUR).id)
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
        ("MOST_RECORDS", {"key": "{job}:*"}),
    ],
    ids=["some at a time", "without an index", "start of a key"],
)
def test_page_by_page_a_list_has_each_task_once_and_reads_only_some(
    tracked: Any,
    browser: Browser,
    small_pages: list[int],
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    query: dict[str, str],
) -> None:
    if bound:
        monkeypatch.setattr(operations, bound, 10)
    job, same = f"job-{uuid4()}", datetime.now(UTC) + timedelta(hours=2)
    look, at = tracked.tasks["look"], tracked.tasks["at"]
    with tracked.rabbitdelay.job(job, expires=HOUR):
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


def test_the_story_of_a_task_says_where_it_is_and_why_it_has_not_run(
    tracked: Any, browser: Browser
) -> None:
    delays, key, job = tracked.rabbitdelay, f"order:{uuid4()}", f"import-{uuid4()}"
    (task_id,) = send(tracked, hours=2.5, key=key, args=("Köln", 4711))
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    told = browser.json("/waiting/task", id=task_id)
    known = told["task"]
    assert (known["state"], known["key"], known["args"]) == ("waiting", key, "('Köln', 4711)")
    assert told["levels"][0]["may_be_in"] == {"hours.2": 1}
    assert why_not(browser, task_id)[0].startswith("It is not due yet, but in ")
    delays.postpone(task_id, delay=5 * HOUR)
    assert "because it was postponed" in why_not(browser, task_id)[0]
    delays.pause(task="look")
    assert "are paused" in why_not(browser, task_id)[1]
    delays.resume(task="look")
    send(tracked, key=key)
    assert "newer task was sent under its key" in why_not(browser, task_id)[0]
    delays.open_job(job, expires=HOUR)
    (of_job,) = send(tracked, job=job)
    assert "Its job is open" in why_not(browser, of_job)[1]
    delays.abort_job(job)
    assert "Its job was aborted" in why_not(browser, of_job)[1]
    delays.cancel(of_job)
    assert why_not(browser, of_job) == ["It was cancelled, and will not run."]
    assert browser.json("/waiting/task", id="nobody's")["task"] is None


def test_the_story_of_an_overdue_task_says_what_its_queue_has(
    tracked: Any, browser: Browser, connection: Connection
) -> None:
    queue = f"{tracked.conf.task_default_queue}.overdue"
    (overdue,) = send(tracked, hours=0.0001, queue=queue)

    def is_said(words: str) -> bool:
        return words in why_not(browser, overdue)[0]

    for words, then in (
        ("no worker takes from its queue. Messages in it: 1;", "queue_purge"),
        ("no worker takes from its queue. Messages in it: 0;", "queue_delete"),
        ("does not exist", "queue_delete"),
    ):
        wait_for(partial(is_said, words), words, PATIENCE)
        getattr(connection.default_channel, then)(queue)


def test_arguments_are_hidden_unless_they_are_allowed_and_masked_by_a_function(
    tracked: Any,
) -> None:
    (task_id,) = send(tracked, args=("card 4711 0815",))

    def shown(**options: Any) -> str:
        browser = Browser(application(tracked, **options))
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
    tracked: Any, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, soon, later = send(tracked, 3)
    due = tracked.rabbitdelay.show(later).due
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
    assert tracked.rabbitdelay.show(cancelled).state == "cancelled"
    assert tracked.rabbitdelay.show(later).due == due + timedelta(hours=1)
    assert tracked.rabbitdelay.show(soon).due <= datetime.now(UTC)
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


def decided(browser: Browser, action: str, sent_before: str, **fields: str) -> dict[str, Any]:
    """Decide about all tasks that match; return the work, which has ended."""
    sent = {"action": action, "sent_before": sent_before, **fields}
    begun = browser.post("/waiting/decide-all", **sent)
    assert begun.status_code == 303, begun.text
    where = begun.headers["Location"]

    def work() -> dict[str, Any]:
        told: dict[str, Any] = browser.get(f"/api{where}").json()["works"][0]
        return told

    wait_for(lambda: work()["state"] != "running", "the work")
    assert browser.get(where).status_code == 200
    return work()


@pytest.mark.parametrize(
    ("action", "fields"),
    [("cancel", {}), ("postpone", {"by": "45m"}), ("run-now", {})],
    ids=["cancel", "by", "run now"],
)
def test_all_that_were_counted_are_decided_once_although_they_move_and_others_stay(
    tracked: Any,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    small_pages: list[int],
    action: str,
    fields: dict[str, str],
) -> None:
    monkeypatch.setattr(operations, "BATCH", 3)
    # All in one shard, so that they are read in many pages, while those before are moved.
    ids = [each for each in (uuid4().hex for _ in range(5_000)) if shard_of(each) == 0][:20]
    job, (kept,) = f"tuesday-{uuid4()}", send(tracked, hours=1)
    with tracked.rabbitdelay.job(job, expires=HOUR):
        for number, each in enumerate(ids):
            send(tracked, hours=0.25 if number < 10 else 1, task_id=each, job=job)
    before = {each.task_id: each.due for each in tracked.rabbitdelay.pending(job=job)}
    counted = browser.json("/waiting/all", job=job)
    assert counted["count"] == len(before) == 20
    told = decided(browser, action, counted["sent_before"], **fields, job=job)
    assert (told["state"], told["error"], told["done"], told["total"]) == ("done", None, 20, 20)
    after = {each.task_id: each.due for each in tracked.rabbitdelay.pending()}
    assert after.pop(kept) > datetime.now(UTC) + timedelta(minutes=50)
    if action == "cancel":
        assert after == {}
    elif action == "postpone":
        assert after == {task_id: due + timedelta(minutes=45) for task_id, due in before.items()}
    else:
        assert len(small_pages) > 5
        assert after.keys() == before.keys()
        assert max(after.values()) < datetime.now(UTC) + timedelta(minutes=5)


def test_tasks_that_are_sent_after_the_count_stay(tracked: Any, browser: Browser) -> None:
    counted = send(tracked, 2)
    sent_before = browser.json("/waiting/all")["sent_before"]
    wait_for(lambda: browser.json("/waiting/all")["sent_before"] > sent_before, "the clock")
    (sooner,) = send(tracked, hours=1)
    assert decided(browser, "cancel", sent_before)["done"] == len(counted)
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
    tracked: Any, session_rabbitmq: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ENTERING_PERIOD", 0.0)
    browser = Browser(application(tracked, management=session_rabbitmq.management_url))

    def rate() -> float:
        told = browser.json("/now")["entering"]
        assert told["error"] is None
        return told["rate"] or 0.0

    wait_for(lambda: send(tracked, 10) and rate() > 1, "the rate", PATIENCE)
    # The levels keep what has entered: only what a client publishes counts.
    wait_for(lambda: rate() == 0, "the end", PATIENCE)


def test_no_page_has_a_password(tracked: Any) -> None:
    secret = "planted-secret"
    options = {
        "secret": f"{secret}-{'x' * 32}",
        "management": f"http://guest:{secret}@127.0.0.1:1",
        "loopback_role": "operator",
    }
    browser = Browser(application(tracked, **options))
    for path in ("/now", "/waiting", "/health", "/work", "/session"):
        for whole in (path, f"/api{path}"):
            answer = browser.get(whole)
            assert secret not in answer.text + str(answer.headers)
