"""The page against real servers: what it shows, what its actions do, and servers that go away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection
from markupsafe import escape

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.app.known_task import known_task
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.operations import status
from celery_rabbitdelay.operations import waiting as operations
from celery_rabbitdelay.registry.index import shard_of
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.web import application, site, work
from celery_rabbitdelay.web.pages import PAGES
from tests.browser import Browser, assert_harmless, read
from tests.integration.arrivals import count
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app
from tests.integration.trouble import suspended
from tests.node_control import evaluate
from tests.unit.clock import Clock

#: Two levels whose digits last for hours, so that nothing is due during a test.
HOURS = [("hours", 24, 3600), ("minutes", 60, 60)]

HOUR = 3600

#: Later than anything is sent.
NEVER = "2999-01-01T00:00Z"

#: What anybody may have written, and must not do anything.
HOSTILE = {
    "markup": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "attribute": '" onmouseover="alert(1)" x=\'',
    "template": "{{ 7 * 7 }}{% raw %}${7*7}",
    "control": "a\x00\x1b[2J\r\nX-Injected: yes\x85\u2028b",
    "bidi": "abc\u202egpj.exe\u2066\u200f\u061c",
    "combining": "Z" + "\u0351\u0363" * 500,
    "address": "../../../etc/passwd?id=1&x=y#z%2e%2f",
    "scheme": "javascript:alert(1)",
    "long": "m" * 20_000,
}


@pytest.fixture
def tracked(make_shop: Callable[..., Any], redis_url: str) -> Any:
    """An application with a registry, whose tasks wait for hours; no worker serves it."""
    shop = make_shop(
        rabbitdelay_registry_url=redis_url, rabbitdelay_layout=HOURS, rabbitdelay_track="all"
    )
    with Connection(shop.conf.broker_url) as connection:
        shop.rabbitdelay.declare(connection)
    return shop


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


def test_now_counts_each_digit_and_what_is_due(tracked: Any, browser: Browser) -> None:
    send(tracked, 3, hours=2)
    send(tracked, 1, hours=0.5)

    def has_arrived() -> bool:
        told = browser.json("/now")
        return bool(told["total"] == 4)

    wait_for(has_arrived, "the counts")
    told = browser.json("/now", horizon="day")
    hours, minutes = told["levels"]
    assert {each["queue"]: each["messages"] for each in hours["digits"] if each["messages"]} == {
        "hours.2": 3
    }
    assert {each["queue"]: each["messages"] for each in minutes["digits"] if each["messages"]} == {
        "minutes.30": 1
    }
    due = {each["name"]: each for each in told["due"]["horizons"]}
    assert [due[each]["tracked"] for each in ("minute", "hour", "day", "year")] == [0, 1, 4, 4]
    # A message in hours.2 is due within 2 h 59 min, one in minutes.30 within 30 min.
    assert [due[each]["all_at_least"] for each in ("minute", "hour", "day")] == [0, 1, 4]
    steps = [each["tracked"] for each in told["due"]["steps"]]
    assert (len(steps), steps[0], sum(steps)) == (24, 1, 4)

    page = browser.get("/now?horizon=day").text
    assert_harmless(page)
    assert "4 messages wait in the levels" in " ".join(read(page).text.split())


def test_the_servers_are_asked_as_often_for_twenty_viewers_as_for_one(
    tracked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[None] = []
    clock = Clock()
    monkeypatch.setattr("celery_rabbitdelay.web.reading.time", clock)

    def status_of(*arguments: Any, **options: Any) -> Any:
        looks.append(None)
        return status.status_of(*arguments, **options)

    monkeypatch.setattr(site, "status_of", status_of)
    web = application(tracked)
    assert not looks, "nobody has looked yet"

    def watch(_: int) -> None:
        browser = Browser(web)
        for _ in range(3):
            assert browser.get("/now").status_code == 200

    for period in (1, 2):
        with ThreadPoolExecutor(20) as viewers:
            list(viewers.map(watch, range(20)))
        assert len(looks) == period
        clock.now += site.STATUS_PERIOD


def test_twenty_who_have_the_same_page_open_share_its_look_and_who_opens_it_has_a_look_of_his_own(
    tracked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task_id,) = send(tracked)
    looks: list[str] = []

    def known(registry: Any, task_id: str, *arguments: Any) -> Any:
        looks.append(task_id)
        return known_task(registry, task_id, *arguments)

    monkeypatch.setattr("celery_rabbitdelay.web.waiting.known_task", known)
    clock = Clock()
    monkeypatch.setattr("celery_rabbitdelay.web.reading.time", clock)
    web = application(tracked)

    def state(headers: dict[str, str] | None = None, task: str = task_id) -> str:
        answer = Browser(web).get(f"/api/waiting/task?id={task}", headers=headers or {})
        assert answer.status_code == 200
        told = answer.json()["task"]
        return "unknown" if told is None else str(told["state"])

    refresh = {"HX-Request": "true"}
    assert {state(refresh) for _ in range(20)} == {"waiting"}
    assert looks == [task_id]
    tracked.rabbitdelay.cancel(task_id)
    assert state() == "cancelled"
    assert state(refresh) == "waiting", "the look of the others"
    assert state(refresh, "nobody's") == "unknown"
    looks.clear()
    clock.now += 5
    assert {state(refresh) for _ in range(20)} == {"cancelled"}
    assert looks == [task_id]


def test_waiting_finds_tasks_by_what_they_were_sent_with(tracked: Any, browser: Browser) -> None:
    (plain,) = send(tracked, hours=1)
    (keyed,) = send(tracked, hours=2, key="order:7")
    with tracked.rabbitdelay.job("import-7", expires=HOUR):
        of_job = send(tracked, 2, hours=3, job="import-7")
    (other,) = [str(tracked.tasks["note"].apply_async(kwargs={"key": "x"}, delay=4 * HOUR).id)]
    everything = [plain, keyed, *of_job, other]
    now = datetime.now(UTC)
    later = (now + timedelta(hours=2.5)).isoformat()

    def found(**filters: Any) -> list[str]:
        return sorted(ids_of(browser.json("/waiting", **filters)))

    assert found() == sorted(everything)
    assert found(id=keyed) == [keyed]
    assert found(key="order:7") == [keyed]
    assert found(job="import-7") == sorted(of_job)
    assert found(task="note") == [other]
    assert found(task="look", job="import-7") == sorted(of_job)
    assert found(task="note", job="import-7") == []
    assert found(due_before=later) == sorted([plain, keyed])
    assert found(due_after=later) == sorted([*of_job, other])
    assert found(key="order:7", task="note") == []
    assert browser.json("/waiting", job="import-7")["count"] == 2
    for wrong in ("due_after=soon", "limit=0", "limit=x", "after=x", "due_before=9999-99-99"):
        assert browser.get(f"/waiting?{wrong}").status_code == 400


def test_the_start_of_keys_finds_all_tasks_of_an_order_part_by_part(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(tracked, 30, hours=1)
    wanted = [send(tracked, key=f"order:7:{each}")[0] for each in ("pay", "ship", "review")]
    others = [send(tracked, key=each)[0] for each in ("order:71:pay", "pay:order:7:", "order:8")]
    told = browser.json("/waiting", key="order:7:*")
    assert (sorted(ids_of(told)), told["count"], told["next"]) == (sorted(wanted), 3, None)
    assert len(ids_of(browser.json("/waiting", key="order:7*"))) == 4
    assert len(ids_of(browser.json("/waiting", key="*"))) == len(wanted + others)
    assert ids_of(browser.json("/waiting", key="order:7:*", task="at")) == []
    assert "Decide about all 3" in browser.get("/waiting?key=order:7:*").text
    assert "Decide about all" in browser.get("/waiting?key=order:8").text
    monkeypatch.setattr(operations, "MOST_RECORDS", 10)
    told = browser.json("/waiting", key="order:7:*")
    seen, parts = ids_of(told), 1
    while told["next"] is not None:
        told = browser.json("/waiting", key="order:7:*", after=told["next"])
        seen, parts = seen + ids_of(told), parts + 1
    assert sorted(seen) == sorted(wanted)
    assert parts > 2
    assert browser.json("/waiting/all", key="order:7:*")["may_be_more"]
    assert "Cancel all" in browser.get("/waiting/all?key=order:7:*").text
    told = decided(browser, "cancel", key="order:7:*")
    assert (told["state"], told["done"]) == ("done", 3)
    left = {each.task_id for each in tracked.rabbitdelay.pending() if each.key}
    assert left == {*others}


def test_a_page_of_many_tasks_reads_only_some_of_them(
    tracked: Any, browser: Browser, small_pages: list[int]
) -> None:
    same = datetime.now(UTC) + timedelta(hours=2)
    sent = [
        *send(tracked, 100, hours=1),
        *(str(tracked.tasks["look"].apply_async(eta=same).id) for _ in range(60)),
    ]
    first = browser.json("/waiting", limit=10)
    assert first["count"] == 160
    # Of each of the 32 shards, no more than two pages of four.
    assert sum(small_pages) < 32 * 2 * 4
    seen, told = ids_of(first), first
    while told["next"] is not None:
        told = browser.json("/waiting", limit=10, after=told["next"])
        assert len(told["tasks"]) <= 10
        seen += ids_of(told)
    assert len(seen) == len(set(seen)) == 160
    assert set(seen) == set(sent)
    page = browser.get("/waiting?limit=10&task=look").text
    (more,) = [
        values["href"]
        for tag, values in read(page).tags
        if tag == "a" and values.get("rel") == "next"
    ]
    assert more is not None
    assert "task=look" in more
    assert browser.get(more).status_code == 200


def test_a_search_that_no_index_answers_ends_early_and_can_be_continued(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracked.rabbitdelay.job("last", expires=HOUR):
        send(tracked, 40, hours=1)
        for _ in range(40):
            tracked.tasks["at"].apply_async(delay=HOUR, job="last")
        (wanted,) = send(tracked, hours=2, job="last")
    monkeypatch.setattr(operations, "MOST_READ", 10)
    told, pages = browser.json("/waiting", task="look", job="last"), 1
    assert told["may_be_more"]
    while not told["tasks"]:
        assert told["next"] is not None
        told = browser.json("/waiting", task="look", job="last", after=told["next"])
        pages += 1
    assert ids_of(told) == [wanted]
    assert pages > 2


def test_more_tasks_due_at_once_than_a_page_reads_are_all_listed(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = datetime.now(UTC) + timedelta(hours=2)
    sent = [str(tracked.tasks["look"].apply_async(eta=same).id) for _ in range(30)]
    monkeypatch.setattr(operations, "MOST_READ", 10)
    told = browser.json("/waiting", limit=4)
    seen, pages = ids_of(told), 1
    while told["next"] is not None:
        assert pages <= len(sent), "the search does not come to an end"
        told, pages = browser.json("/waiting", limit=4, after=told["next"]), pages + 1
        seen += ids_of(told)
    assert seen == sorted(sent)


def test_the_story_of_a_task_says_where_it_is_and_what_was_decided(
    tracked: Any, browser: Browser
) -> None:
    before = datetime.now(UTC)
    (task_id,) = send(tracked, hours=2.5, key="order:7", args=("Köln", 4711))
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    told = browser.json("/waiting/task", id=task_id)
    assert told["task"]["state"] == "waiting"
    assert told["task"]["key"] == "order:7"
    assert told["task"]["args"] == "('Köln', 4711)"
    sent = datetime.fromisoformat(told["task"]["sent"])
    assert before - timedelta(minutes=1) < sent < datetime.now(UTC) + timedelta(minutes=1)
    hours, minutes = told["levels"]
    assert (hours["count"], minutes["count"]) in ((2, 30), (2, 29))
    assert hours["may_be_in"] == {"hours.2": 1}
    page = browser.get(f"/waiting/task?id={task_id}").text
    assert "may be in hours.2" in " ".join(read(page).text.split())
    tracked.rabbitdelay.cancel(task_id)
    assert browser.json("/waiting/task", id=task_id)["task"]["state"] == "cancelled"
    assert browser.json("/waiting/task", id="nobody's")["task"] is None


def why_not(browser: Browser, task_id: str) -> list[str]:
    told = browser.json("/waiting/task", id=task_id)["why_not_run"]
    return [str(each["words"]) for each in told]


def test_the_story_of_a_task_says_why_it_has_not_run(tracked: Any, browser: Browser) -> None:
    delays = tracked.rabbitdelay
    (later,) = send(tracked)
    (only,) = why_not(browser, later)
    assert only.startswith("It is not due yet, but in ")
    delays.postpone(later, delay=5 * HOUR)
    assert "because it was postponed" in why_not(browser, later)[0]
    delays.pause(task="look")
    assert "are paused" in why_not(browser, later)[1]
    delays.resume(task="look")
    delays.cancel(later)
    assert why_not(browser, later) == ["It was cancelled, and will not run."]

    old, _ = send(tracked, key="order:7"), send(tracked, key="order:7")
    assert "newer task was sent under its key" in why_not(browser, old[0])[0]

    delays.open_job("import", expires=HOUR)
    (of_job,) = send(tracked, hours=0.00001, job="import")
    wait_for(lambda: "Its job is open" in why_not(browser, of_job)[0], "the due time")
    delays.abort_job("import")
    words = "Its job was aborted: it will not run."
    assert why_not(browser, of_job) == [words]
    page = browser.get(f"/waiting/task?id={of_job}").text
    assert_harmless(page)
    assert words in read(page).text
    assert any(values.get("href") == "/jobs?name=import" for _, values in read(page).tags)


def test_the_story_of_an_overdue_task_says_what_its_queue_has(
    tracked: Any, browser: Browser
) -> None:
    (overdue,) = send(tracked, hours=0.00001)
    wait_for(
        lambda: (
            "no worker takes from its queue. Messages in it: 1;" in why_not(browser, overdue)[0]
        ),
        "the message in its queue",
    )
    queue = tracked.conf.task_default_queue
    with Connection(tracked.conf.broker_url) as connection:
        channel: Any = connection.channel()
        channel.basic_qos(0, 1, False)
        tag = channel.basic_consume(queue, callback=lambda _: None)
        assert browser.json("/waiting/task", id=overdue)["levels"] == []
        wait_for(lambda: "its queue is empty" in why_not(browser, overdue)[0], "the consumer")
        tracked.tasks["look"].apply_async()
        wait_for(
            lambda: "workers of its queue are busy" in why_not(browser, overdue)[0], "the next"
        )
        channel.basic_cancel(tag)
    (lost,) = send(tracked, hours=0.00001, queue=f"{queue}.lost")
    with Connection(tracked.conf.broker_url) as connection:
        doomed: Any = connection.default_channel
        doomed.queue_delete(f"{queue}.lost")
    wait_for(lambda: "does not exist" in why_not(browser, lost)[0], "the due time")


def test_a_part_of_a_name_finds_nothing_but_proposes_names(tracked: Any, browser: Browser) -> None:
    send(tracked)
    assert browser.json("/waiting", task="loo")["similar"] == ["look"]
    page = browser.get("/waiting?task=loo").text
    assert_harmless(page)
    assert "Do you mean look?" in " ".join(read(page).text.split())
    found = browser.get("/waiting?task=look").text
    assert "1 tracked task matches." in read(found).text
    assert any(
        tag == "option" and values.get("value") == "look" for tag, values in read(found).tags
    )
    assert browser.json("/waiting", task="nothing like it")["similar"] == []


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


def test_what_is_cancelled_on_the_page_does_not_run_and_run_now_does(
    serve: Callable[..., Any], redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop = serve(rabbitdelay_registry_url=redis_url, rabbitdelay_track="all")
    notes, browser = Notes(shop), Browser(application(shop, loopback_role="operator"))
    cancelled, soon, later = (notes.send(each, delay=20) for each in ("cancelled", "soon", "later"))
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        answer = browser.post("/waiting/cancel", id=[cancelled.id])
        assert "1 of 1 cancelled" in " ".join(read(answer.text).text.split())
        postponed = browser.post("/waiting/postpone", id=[later.id], by="1h")
        assert postponed.status_code == 200
        assert browser.post("/waiting/run-now", id=[soon.id]).status_code == 200
    wait_for(lambda: notes() == ["soon"], "the task that runs now", PATIENCE)
    assert notes.until(20.0) == ["soon"]
    assert ids_of(browser.json("/waiting")) == [later.id]
    lines = [each.getMessage() for each in caplog.records]
    assert lines == [
        f"'local' has cancelled: 1 ['{cancelled.id}']",
        f"'local' has postponed: 1 ['{later.id}']",
        f"'local' has run now: 1 ['{soon.id}']",
    ]
    browser.post("/waiting/cancel", id=[later.id])
    notes.forget()


def test_an_action_says_what_it_has_found_for_each_task(tracked: Any, browser: Browser) -> None:
    first, second = send(tracked, 2)
    tracked.rabbitdelay.cancel(first)
    headers = {"X-Rabbitdelay-Token": browser.token}
    told = browser.ask(
        "POST", "/api/waiting/cancel", data={"id": [first, second, "nobody's"]}, headers=headers
    ).json()
    assert told["done"] == 1
    outcomes = {each["id"]: each["outcome"] for each in told["outcomes"]}
    assert outcomes == {first: "cancelled", second: "done", "nobody's": "unknown"}
    for path, fields in (
        ("/waiting/cancel", {}),
        ("/waiting/postpone", {"id": second}),
        ("/waiting/postpone", {"id": second, "by": "soon"}),
        ("/waiting/postpone", {"id": second, "by": "1h", "until": "2999-01-01"}),
        ("/waiting/postpone", {"id": second, "by": "9" * 30}),
        ("/waiting/postpone", {"id": second, "by": "-1h"}),
        ("/waiting/postpone", {"id": second, "until": "then"}),
        ("/waiting/postpone", {"id": second, "until": "2999-01-01"}),
        ("/waiting/decide-all", {"action": "burn", "sent_before": "2999-01-01"}),
        ("/waiting/decide-all", {"action": "cancel"}),
    ):
        assert browser.post(path, **fields).status_code == 400, (path, fields)


def test_all_that_match_are_cancelled_after_they_were_counted(
    tracked: Any, browser: Browser
) -> None:
    with tracked.rabbitdelay.job("tuesday", expires=HOUR):
        send(tracked, 20, hours=1, job="tuesday")
    kept = send(tracked, 3)
    confirm = browser.get("/waiting/all?job=tuesday&action=cancel").text
    assert "20 tracked tasks match" in read(confirm).text
    assert_harmless(confirm)
    told = decided(browser, "cancel", job="tuesday")
    assert told["state"] == "done"
    assert (told["done"], told["total"], told["user"]) == (20, 20, "local")
    assert "cancelled all with job='tuesday'" in told["what"]
    assert sorted(ids_of(browser.json("/waiting"))) == sorted(kept)


@pytest.mark.parametrize(
    ("action", "more"), [("cancel", {}), ("postpone", {"by": "5h"}), ("run-now", {})]
)
def test_of_a_batch_that_fails_partway_is_told_how_many_were_decided(
    tracked: Any, browser: Browser, action: str, more: Any
) -> None:
    sent = [send(tracked, hours=1 + number)[0] for number in range(4)]
    record = tracked.rabbitdelay.registry.names.of("task", sent[2])
    store = tracked.rabbitdelay.registry.store
    # As if another program had written there: Redis reads no number in it.
    store.commands(lambda pipe: pipe.hset(record, "cancelled", "x"))
    told = decided(browser, action, more)
    assert told["state"] == "failed"
    assert told["error"]
    found = [each for each in sent if is_decided(tracked, each, action)]
    assert told["done"] == len(found) == (3 if action == "cancel" else 2)
    store.commands(lambda pipe: pipe.hdel(record, "cancelled"))


def is_decided(tracked: Any, task_id: str, action: str) -> bool:
    if task_id not in {each.task_id for each in tracked.rabbitdelay.pending()}:
        return True
    try:
        return tracked.rabbitdelay.show(task_id).postponed is not None
    except RegistryUnavailable:
        return False


@pytest.mark.parametrize("action", ["cancel", "postpone", "run-now"])
def test_the_task_of_a_key_is_decided_about_without_reading_all_others(
    tracked: Any, browser: Browser, small_pages: list[int], action: str
) -> None:
    others = send(tracked, 20)
    (keyed,) = send(tracked, key="order:7")
    more = {"until": soon()} if action == "postpone" else {}
    told = decided(browser, action, more, key="order:7", task="look")
    assert (told["state"], told["done"]) == ("done", 1)
    assert small_pages == []
    due = {each["task_id"]: each["due"] for each in browser.json("/waiting")["tasks"]}
    if action == "cancel":
        assert sorted(due) == sorted(others)
    else:
        assert min(due, key=lambda each: str(due[each])) == keyed


def soon() -> str:
    """Return an instant in half an hour, as a form takes it."""
    return (datetime.now(UTC) + timedelta(minutes=30)).isoformat()


def decided(
    browser: Browser, action: str, more: dict[str, str] | None = None, **wanted: str
) -> dict[str, Any]:
    """Decide about all tasks that match, as they were counted; return the work, which has ended."""
    sent_before = browser.json("/waiting/all", **wanted)["sent_before"]
    fields = {"action": action, "sent_before": sent_before, **(more or {}), **wanted}
    begun = browser.post("/waiting/decide-all", **fields)
    assert begun.status_code == 303, begun.text
    where = begun.headers["Location"]
    wait_for(lambda: works(browser, where)["state"] != "running", "the work")
    return works(browser, where)


def works(browser: Browser, where: str) -> dict[str, Any]:
    told: dict[str, Any] = browser.get(f"/api{where}").json()["works"][0]
    assert browser.get(where).status_code == 200
    return told


@pytest.mark.parametrize("way", ["until", "by", "run-now"])
def test_all_that_match_move_once_although_they_move_in_the_list(
    tracked: Any,
    browser: Browser,
    monkeypatch: pytest.MonkeyPatch,
    small_pages: list[int],
    way: str,
) -> None:
    monkeypatch.setattr(operations, "BATCH", 3)
    # All in one shard, so that they are read in many pages, while those before are moved.
    ids = [each for each in (uuid4().hex for _ in range(5_000)) if shard_of(each) == 0][:40]
    sent = [
        *(send(tracked, hours=0.25, task_id=each)[0] for each in ids[:20]),
        *(send(tracked, hours=1, task_id=each)[0] for each in ids[20:]),
    ]
    before = {each.task_id: each.due for each in tracked.rabbitdelay.pending()}
    ways = {"until": {"until": soon()}, "by": {"by": "45m"}, "run-now": {}}
    told = decided(browser, "run-now" if way == "run-now" else "postpone", ways[way])
    assert (told["state"], told["error"], told["done"]) == ("done", None, 40)
    assert len(small_pages) > 10
    after = {each.task_id: each.due for each in tracked.rabbitdelay.pending()}
    assert sorted(after) == sorted(sent)
    if way == "by":
        later = timedelta(minutes=45)
        assert after == {task_id: due + later for task_id, due in before.items()}
    else:
        wanted = datetime.now(UTC) + timedelta(minutes=30 if way == "until" else 0)
        assert all(abs(each - wanted) < timedelta(minutes=5) for each in after.values())
        assert len({*after.values()}) == 1 or way == "run-now"


def test_tasks_that_are_sent_after_the_count_stay(tracked: Any, browser: Browser) -> None:
    counted = send(tracked, 2)
    sent_before = browser.json("/waiting/all")["sent_before"]
    wait_for(lambda: browser.json("/waiting/all")["sent_before"] > sent_before, "the clock")
    (sooner,) = send(tracked, hours=1)
    begun = browser.post("/waiting/decide-all", action="cancel", sent_before=sent_before)
    where = begun.headers["Location"]
    wait_for(lambda: works(browser, where)["state"] == "done", "the work")
    assert works(browser, where)["done"] == len(counted)
    assert ids_of(browser.json("/waiting")) == [sooner]


def test_what_takes_long_can_be_stopped(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "BATCH", 1)
    send(tracked, 30)
    real, browsing = RabbitDelay.postpone, {"where": ""}

    def postpone(*arguments: Any, **options: Any) -> Any:
        outcome = real(*arguments, **options)
        if browsing["where"] == "":
            wait_for(lambda: browsing["where"], "the page of the work")
        return outcome

    monkeypatch.setattr(RabbitDelay, "postpone", postpone)
    begun = browser.post("/waiting/decide-all", action="postpone", by="3h", sent_before=NEVER)
    where = begun.headers["Location"]
    key = where.partition("=")[2]
    assert works(browser, where)["state"] == "running"
    assert browser.post("/work/stop", key=key).status_code == 303
    browsing["where"] = where
    wait_for(lambda: works(browser, where)["state"] == "stopped", "the end")
    assert works(browser, where)["done"] < 30


def test_no_more_than_some_things_go_on_at_a_time(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MOST_AT_ONCE", 0)
    answer = browser.post("/waiting/decide-all", action="cancel", sent_before=NEVER)
    assert answer.status_code == 503


@pytest.fixture
def hostile(tracked: Any) -> Iterator[dict[str, str]]:
    """A task, and a schedule, with each of the hostile texts wherever it takes one."""
    look, ids = tracked.tasks["look"], {}
    for kind, text in HOSTILE.items():
        # An id is a header that RabbitMQ takes up to 255 bytes of, as correlation_id.
        task_id = text if len(text.encode()) < 200 else f"{text[:50]}{kind}"
        with tracked.rabbitdelay.job(f"{text}", expires=HOUR):
            options = {"task_id": f"{task_id}-{uuid4().hex[:4]}", "key": text, "job": text}
            # Celery itself cuts the text that it makes of arguments.
            options["argsrepr"] = f"({text!r},)"
            options |= {"exchange": text[:50], "routing_key": text[:50]}
            ids[kind] = str(look.apply_async((text,), delay=2 * HOUR, **options).id)
        tracked.rabbitdelay.schedules.put(text[:60], text, timedelta(hours=1), (text,))
    yield ids
    for text in HOSTILE.values():
        tracked.rabbitdelay.schedules.delete(text[:60])
    for each in ids.values():
        tracked.rabbitdelay.cancel(each)


def test_hostile_texts_do_nothing_wherever_they_are_shown(
    tracked: Any, browser: Browser, hostile: dict[str, str]
) -> None:
    page = browser.get("/waiting")
    assert page.status_code == 200
    assert_harmless(without_ids(page.text, hostile))
    assert len(page.content) < 100_000
    told = browser.json("/waiting")
    assert set(ids_of(told)) > set(hostile.values())
    for kind, text in HOSTILE.items():
        found = browser.get("/waiting", params={"id": hostile[kind]})
        assert found.status_code == 200
        story = browser.get("/waiting/task", params={"id": hostile[kind]})
        assert story.status_code == 200, kind
        assert len(story.content) < 100_000
        assert_harmless(without_ids(story.text, hostile))
        told = browser.json("/waiting/task", id=hostile[kind])["task"]
        assert (told["state"], told["exchange"]) == ("waiting", text[:50])
        schedule = browser.get("/schedules/one", params={"name": text[:60]})
        assert schedule.status_code == 200, kind
        assert_harmless(schedule.text)
        if len(text) < 5_000:
            assert ids_of(browser.json("/waiting", key=text)) == [hostile[kind]]
            by_job = browser.get("/waiting", params={"job": text})
            assert_harmless(without_ids(by_job.text, hostile))
        texts = ("id", "key", "job", "task", "name", "queue", "reason", "to")
        for asked in (texts, (*texts, "action", "horizon")):
            for one in PAGES:
                if one.is_action or one.file:
                    continue
                answer = browser.get(f"/{one.path}", params=dict.fromkeys(asked, text[:5000]))
                assert answer.status_code in (200, 400, 404, 503), (one, kind)
                assert_harmless(without_ids(answer.text, {"": text[:5000], **hostile}))
                assert "x-injected" not in answer.headers
    assert browser.get("/waiting", params={"key": "m" * 60_000}).status_code == 200
    megabyte = browser.post("/waiting/cancel", id="m" * 1_000_000)
    assert megabyte.status_code == 200
    assert len(megabyte.content) < 10_000
    answer = browser.post("/waiting/cancel", id=list(hostile.values()))
    assert_harmless(without_ids(answer.text, hostile))
    assert not set(ids_of(browser.json("/waiting"))) & set(hostile.values())


def without_ids(page: str, hostile: dict[str, str]) -> str:
    """Return a page without the values of its fields, which the browser needs as they are."""
    for text in (*hostile.values(), *HOSTILE.values()):
        page = page.replace(f'value="{escape(text)}"', 'value=""')
    return page


def test_a_frozen_broker_holds_up_no_other_page(
    tracked: Any,
    browser: Browser,
    private_rabbitmq: RabbitMQServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(tracked, 1)
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    monkeypatch.setattr("celery_rabbitdelay.web.reading.ANSWER_TIMEOUT", 0.5)
    with suspended(private_rabbitmq):
        wait_for(lambda: browser.json("/now")["broker_error"], "the page to notice")
        seconds: list[float] = []
        # A busy machine may need longer, but hardly each time.
        while min(seconds, default=2) >= 2 and len(seconds) < 10:
            began = time.monotonic()
            assert len(browser.json("/waiting")["tasks"]) == 1
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 2
    wait_for(lambda: browser.json("/now")["broker_error"] is None, "the page to recover", PATIENCE)


def test_redis_goes_away_and_comes_back_under_an_open_page(
    tracked: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    (task_id,) = send(tracked)
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    store = tracked.rabbitdelay.registry.store

    def away(*arguments: Any, **options: Any) -> Any:
        raise RegistryUnavailable("ConnectionError: redis://:secret@127.0.0.1:6379 refuses")

    with monkeypatch.context() as broken:
        for name in ("commands", "call_each", "call_durably"):
            broken.setattr(type(store), name, away)
        for path in ("/waiting", f"/waiting/task?id={task_id}", "/waiting/all"):
            answer = browser.get(path)
            assert answer.status_code == 503
            assert "Redis cannot be asked" in answer.text
            assert "secret" not in answer.text
            assert browser.get(f"/api{path}").json()["error"]
        wait_for(lambda: browser.json("/now")["due"]["error"], "the histogram to notice")
        told = browser.json("/now")
        assert told["total"] == 1
        failed = browser.post("/waiting/cancel", id=task_id)
        assert failed.status_code == 200
        assert "Then it failed" in failed.text
    assert ids_of(browser.json("/waiting")) == [task_id]
    wait_for(lambda: browser.json("/now")["due"]["error"] is None, "the histogram to recover")


def test_without_a_registry_the_pages_say_what_they_need(make_shop: Callable[..., Any]) -> None:
    shop = make_shop(rabbitdelay_layout=HOURS)
    shop.tasks["look"].apply_async(delay=HOUR)
    browser = Browser(application(shop))
    answer = browser.get("/waiting")
    assert answer.status_code == 503
    assert "pip install &#39;celery-rabbitdelay[registry]&#39;" in answer.text
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    told = browser.json("/now")
    assert told["due"]["has_registry"] is False
    assert {each["name"]: each["all_at_least"] for each in told["due"]["horizons"]}["day"] == 1
    assert "rabbitdelay_registry_url" in browser.get("/now").text


def test_health_without_the_management_api_says_how_to_get_it(
    tracked: Any, browser: Browser
) -> None:
    told = browser.json("/health")
    assert "rabbitmq-plugins enable rabbitmq_management" in told["needs"]
    assert told["error"]
    assert "rabbitmq_management" in browser.get("/health").text


@pytest.fixture(scope="module")
def managed(broker_root: Path | None) -> Iterator[RabbitMQServer]:
    """A node with the management API."""
    with RabbitMQServer(broker_root, management=True) as node:
        yield node


def test_now_says_how_many_messages_enter_the_levels(
    managed: RabbitMQServer, make_shop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ENTERING_PERIOD", 0.0)
    shop = make_shop(broker_url=managed.url, rabbitdelay_layout=HOURS)
    browser = Browser(application(shop, management=managed.management_url))

    def rate() -> float:
        for _ in range(10):
            shop.tasks["look"].apply_async(delay=HOUR)
        told = browser.json("/now")["entering"]
        assert told["error"] is None
        return told["rate"] or 0.0

    wait_for(lambda: rate() > 1, "the rate", PATIENCE)
    assert "messages a second enter the levels" in read(browser.get("/now").text).text
    # The levels keep what has entered: only what a client publishes counts.
    wait_for(lambda: browser.json("/now")["entering"]["rate"] == 0, "the end", PATIENCE)


def test_a_broker_that_keeps_no_statistics_has_no_rate(
    managed: RabbitMQServer, make_shop: Callable[..., Any]
) -> None:
    shop = make_shop(broker_url=managed.url, rabbitdelay_layout=HOURS)
    browser = Browser(application(shop, management=managed.management_url))
    evaluate(managed, "application:set_env(rabbitmq_management_agent, rates_mode, none)")
    try:
        wait_for(lambda: browser.json("/now")["entering"]["error"], "the look", PATIENCE)
    finally:
        evaluate(managed, "application:set_env(rabbitmq_management_agent, rates_mode, basic)")
    told = browser.json("/now")["entering"]
    assert told["rate"] is None
    assert "keeps no statistics" in told["error"]


def test_without_the_management_api_now_says_what_it_does_not_know(shop: Any) -> None:
    browser = Browser(application(shop, management="http://127.0.0.1:1"))
    wait_for(lambda: browser.json("/now")["entering"]["error"], "the look", PATIENCE)
    assert browser.json("/now")["entering"]["rate"] is None
    assert "management API, which cannot be reached" in read(browser.get("/now").text).text


def test_health_shows_each_finding_with_its_way_out(
    managed: RabbitMQServer, configuration: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "FINDINGS_PERIOD", 0.5)
    shop = make_app({**configuration, "broker_url": managed.url})
    browser = Browser(application(shop, management=managed.management_url))
    wait_for(lambda: browser.json("/health")["error"] is None, "the management API")
    told, page = browser.json("/health"), browser.get("/health").text
    shop.close()
    assert "not-declared" in {each["code"] for each in told["findings"]}
    assert told["version"]
    assert "run `celery -A proj rabbitdelay declare`" in read(page).text
    assert "guest:" not in page
    assert_harmless(page)


def test_no_page_has_a_password(tracked: Any, redis_url: str) -> None:
    shop, secret = tracked, "planted-secret"
    options = {
        "secret": f"{secret}-{'x' * 32}",
        "management": f"http://guest:{secret}@127.0.0.1:1",
        "loopback_role": "operator",
    }
    browser = Browser(application(shop, **options))
    for path in (
        "/now",
        "/waiting",
        "/health",
        "/work",
        "/waiting/all",
        "/openapi.json",
        "/session",
    ):
        for whole in (path, f"/api{path}"):
            answer = browser.get(whole)
            assert secret not in answer.text + str(answer.headers)


def test_nothing_is_taken_from_the_queues_by_looking(
    tracked: Any, browser: Browser, connection: Connection
) -> None:
    send(tracked, 3)
    queue = tracked.rabbitdelay.topology.level_queues["hours.x1"][1].name
    wait_for(lambda: count(connection, queue) == 3, "the tasks")
    for path in ("/now", "/waiting", "/health", "/work", "/waiting/all"):
        browser.get(path)
    assert count(connection, queue) == 3
