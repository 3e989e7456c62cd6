"""The page against real servers: what it shows, what its actions do, and the command."""

import html
import json
import logging
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

import httpx
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import ATTEMPTS, FAILED_SINCE, FIRST_REASON
from celery_rabbitdelay.operations.undeliverable import UndeliverableFilter
from celery_rabbitdelay.operations.verify import Verification
from celery_rabbitdelay.publishing.declaration import declare_destination, queue_counts
from celery_rabbitdelay.registry.decision import Arrival
from celery_rabbitdelay.registry.index import SHARDS, Filter, Index, Kind, shard_of
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.web import (
    application,
    now,
    site,
    task,
    undeliverable,
    workers,
)
from celery_rabbitdelay.web import search as operations
from celery_rabbitdelay.web.problems import Problem
from celery_rabbitdelay.web.shown import quoted
from tests.browser import Browser, Form, assert_harmless, read
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.trouble import suspended
from tests.kernel.integration.worker import Worker, run_command
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
    # What is cancelled is counted until it is due.
    registry = module_shop.rabbitdelay.registry
    counted = [f"{registry.names.prefix}:{{{shard}}}:cancelled:*" for shard in range(SHARDS)]
    found = registry.store.commands(lambda pipe: [pipe.keys(each) for each in counted])
    registry.store.commands(lambda pipe: [pipe.delete(key) for keys in found for key in keys])
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


def test_levels_count_each_digit_and_looking_takes_nothing_from_the_queues(
    shop: Any, browser: Browser
) -> None:
    send(shop, 3, hours=2)
    send(shop, 1, hours=0.625)
    wait_for(lambda: browser.json("/levels")["total"] == 4, "the counts")
    for path in ("/now", "/waiting", "/health", "/work", "/waiting/all"):
        browser.get(path)
    told = browser.json("/levels")
    digits = [each for level in told["levels"] for each in level["digits"]]
    held = {each["queue"]: each["messages"] for each in digits if each["messages"]}
    assert held == {"hours.2": 3, "parts.5": 1}
    assert 0 < told["due_within"] <= 0.75 * HOUR


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the page believe that it is so many seconds later."""
    then = time.time_ns() + int(seconds * 10**9)
    monkeypatch.setattr(wall_clock, "ns", lambda: then)


def test_now_says_what_waits_by_task_and_queue_and_when_it_is_due(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = named(shop, "default")
    send(shop, 2, hours=2)
    send(shop, 1, hours=0.625)
    (cancelled, _) = send(shop, 2, hours=2)
    shop.rabbitdelay.cancel(cancelled)
    wait_for(lambda: browser.json("/now")["total"] == 5, "the counts")
    told = browser.json("/now", horizon="day")
    assert (told["waiting"], told["in_an_hour"], told["due_at_least"]) == (4, 1, 5)
    for row in (*told["tasks"], *told["queues"]):
        counts = {name: row[name] for name in ("waiting", "in_an_hour", "cancelled")}
        assert counts == {"waiting": 4, "in_an_hour": 1, "cancelled": 1}
        assert row["next_due"] == told["next_due"]
    assert [each["name"] for each in told["queues"]] == [queue]
    (series,) = told["due"]["series"]
    assert (series["name"], sum(series["counts"])) == ("look", 4)
    assert len(series["counts"]) == len(told["due"]["edges"]) - 1
    by_queue = browser.json("/now", horizon="minute", by="queue")["due"]
    assert by_queue["series"] == []

    later(monkeypatch, HOUR)
    other = Browser(application(shop))
    told = other.json("/now")
    assert [told["tasks"][0][each] for each in ("waiting", "overdue", "held")] == [4, 1, 0]
    cause = f"look; no worker consumes queue {queue}"
    (overdue,) = [each for each in told["problems"] if each["page"] == "waiting"]
    assert (overdue["words"], overdue["about"]) == ("1 task overdue:", cause)
    shown = read(other.get("/now").text).text
    assert f"1 task overdue: {cause}" in " ".join(shown.split())


def test_each_figure_of_now_is_that_of_the_registry_and_the_broker_after_a_thousand_operations(
    shop: Any, browser: Browser
) -> None:
    delays, draw = shop.rabbitdelay, random.Random(51)
    queues = [named(shop, "default"), named(shop, "second")]
    waiting, first_hours = dict[str, Kind](), dict[str, float]()
    cancelled = Counter[Kind]()
    messages = 0
    for _ in range(1_000):
        choice, hours = draw.random(), draw.randrange(7) + 0.5
        if choice < 0.6 or not waiting:
            kind = Kind(draw.choice(("look", "at")), draw.choice(queues))
            where = {"queue": kind.queue, "delay": hours * HOUR}
            task_id = str(shop.tasks[kind.task].apply_async(**where).id)
            waiting[task_id], first_hours[task_id] = kind, hours
            messages += 1
            continue
        task_id = draw.choice([*waiting])
        if choice < 0.8:
            assert delays.cancel(task_id) is Outcome.DONE
            cancelled[waiting.pop(task_id)] += 1
        else:
            assert delays.postpone(task_id, delay=hours * HOUR) is Outcome.DONE
            messages += hours < first_hours[task_id]  # a second message of it
            first_hours[task_id] = min(hours, first_hours[task_id])
    with Connection(shop.conf.broker_url) as connection:
        counts = queue_counts(connection, delays.topology.digit_queues)
        in_the_levels = sum(each.messages for each in counts.values() if each is not None)
    wait_for(lambda: browser.json("/now")["total"] == messages, "the counts")
    assert in_the_levels <= messages

    told, listed, now = browser.json("/now", horizon="day"), [*delays.pending()], wall_clock.now()
    assert {each.task_id: Kind(each.task, each.queue) for each in listed} == waiting
    assert (told["waiting"], told["total"]) == (len(waiting), messages)
    for by, rows in (("task", told["tasks"]), ("queue", told["queues"])):
        names = {getattr(kind, by) for kind in (*waiting.values(), *cancelled)}
        assert {row["name"] for row in rows} == names
        for row in rows:
            dues = [each.due for each in listed if getattr(each, by) == row["name"]]
            of_it = sum(n for kind, n in cancelled.items() if getattr(kind, by) == row["name"])
            in_an_hour = sum(due < now + timedelta(hours=1) for due in dues)
            first = min(dues, default=None)
            figures = {name: row[name] for name in ("waiting", "in_an_hour", "cancelled", "held")}
            assert figures == {
                "waiting": len(dues),
                "in_an_hour": in_an_hour,
                "cancelled": of_it,
                "held": 0,
            }
            assert (row["next_due"], row["overdue"]) == (first and first.isoformat(), 0)
    series = {each["name"]: sum(each["counts"]) for each in told["due"]["series"]}
    assert series == Counter(kind.task for kind in waiting.values())


def test_twenty_viewers_of_now_cost_what_one_does(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(shop)
    asked, summary = [], Index.summary

    def counted(index: Index, *given: Any) -> Any:
        asked.append(index)
        return summary(index, *given)

    monkeypatch.setattr(Index, "summary", counted)
    monkeypatch.setattr("celery_rabbitdelay.metrics.reading.time", Clock())
    web = application(shop)
    assert Browser(web).json("/now")["waiting"] == 1
    of_one = len(asked)
    for _ in range(19):
        assert Browser(web).json("/now")["waiting"] == 1
    assert len(asked) == of_one


def test_what_a_pause_or_an_open_job_holds_is_not_called_overdue(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays, job, queue = shop.rabbitdelay, f"import-{uuid4().hex}", named(shop, "default")
    delays.open_job(job, expires=9 * HOUR)
    send(shop, 2, job=job)
    send(shop, 1)
    later(monkeypatch, 3 * HOUR)

    def counts() -> tuple[int, int, list[str]]:
        told = Browser(application(shop)).json("/now")
        (row,) = told["tasks"]
        of_tasks = [
            each for each in told["problems"] if each["page"] in ("waiting", "pauses", "jobs/one")
        ]
        return (
            row["overdue"],
            row["held"],
            [f"{each['words']} {each['about']}" for each in of_tasks],
        )

    waits = f"2 tasks held until commit of job {job}"
    overdue = f"1 task overdue: look; no worker consumes queue {queue}"
    assert counts() == (1, 2, [overdue, waits])
    for name, value in (("queue", queue), ("task", "look")):
        delays.pause(**{name: value})
        assert counts() == (0, 3, [f"Paused, 3 tasks held: {name} {value}"])
        delays.resume(**{name: value})
    delays.abort_job(job)
    assert counts()[:2] == (3, 0)


def test_now_shows_a_pause_or_the_end_of_a_job_at_once(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_rabbitdelay.metrics.reading.time", Clock())  # no reading expires
    job = f"import-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=9 * HOUR)
    send(shop, 2, job=job)
    send(shop, 1)
    later(monkeypatch, 3 * HOUR)

    def wait_until_counted(overdue: int, held: int) -> None:
        def counted() -> list[tuple[int, int]]:
            found = [browser.json("/now", horizon=each)["tasks"] for each in ("hour", "day")]
            return [(each["overdue"], each["held"]) for (each,) in found]

        wait_for(lambda: counted() == [(overdue, held)] * 2, "the new counts", PATIENCE)

    wait_until_counted(1, 2)
    try:
        assert browser.post("/pauses/pause", what="task", name="look").status_code == 303
        wait_until_counted(0, 3)
        assert browser.post("/pauses/resume", what="task", name="look").status_code == 303
        wait_until_counted(1, 2)
        assert browser.post("/jobs/abort", name=job, action="x").status_code == 303
        wait_until_counted(3, 0)
    finally:
        shop.rabbitdelay.resume(task="look")


def test_now_says_what_it_leaves_out_and_what_its_icons_mean(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(waits: now.Waits, by: str, late: object) -> list[now.Row]:
        row = now.Row("", 0, None, 0, overdue=1, held=3, job_open=2, cancelled=0, late="")
        return [row._replace(name=f"{by}-{each}", waiting=each) for each in range(1, 11)]

    monkeypatch.setattr(now, "_rows", rows)
    for number, listed in ((6, 6), (7, 5)):
        found = [Problem("note", f"fault {each}") for each in range(number)]
        monkeypatch.setattr(now, "problems", lambda *_, found=found: found)
        monkeypatch.setattr(now, "awaited", lambda *_: ())
        page = browser.get("/now").text
        assert [f"fault {each}" in page for each in range(number)].count(True) == listed
        assert ("2 more problems" in page) is (number == 7)
    assert page.count('title="held by a pause"') == page.count(">held by a pause:<") > 0
    assert page.count('title="held until the commit of a job"') > 0
    chips = page.partition('class="chips"')[2].partition("</ul>")[0]
    names = [f"queue-{each}" for each in range(10, 2, -1)]
    assert sorted(names, key=chips.index) == names
    assert "and 2 more" in chips


def test_the_queue_of_an_overdue_task_is_asked_for_once_however_many_look(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(connection: Connection, queues: Iterable[Queue]) -> Any:
        asked.append(connection)
        return queue_counts(connection, queues)

    monkeypatch.setattr(task, "queue_counts", counted)
    monkeypatch.setattr("celery_rabbitdelay.metrics.reading.time", Clock())
    (task_id,) = send(shop)
    three_hours_later = time.time_ns() + 3 * HOUR * 10**9
    monkeypatch.setattr(wall_clock, "ns", lambda: three_hours_later)
    web = application(shop)
    for _ in range(3):
        (reason,) = why_not(Browser(web), task_id)
        assert "its queue is empty: its message was lost" in reason
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
    for wanted, text in (
        (everything, ""),
        ({keyed}, f"id:{keyed}"),
        ({keyed}, f"key:{order}:pay"),
        ({keyed}, f"key:{order}:*"),
        ({keyed, other}, f"key:{order}*"),
        ({keyed}, f'"{order[-8:]}:PAY"'),
        ({plain}, plain),
        ({keyed}, f"{order}:pay"),
        ({keyed}, f'"{order}:P"'),
        (set(of_job), f"job:{job} task:look"),
        (set(of_job), f"job:{job}"),
        ({note}, "task:no*"),
        ({plain, keyed, other}, f"due:<{later} state:waiting"),
        ({note, *of_job}, f"due:>{later}"),
        ({keyed, other}, f"due:1h..2h queue:{named(shop, 'default')} sent:<1h key:*"),
        (set(), "state:held"),
    ):
        told = browser.json("/waiting", q=text)
        assert (set(ids_of(told)), told["count"]) == (wanted, len(wanted)), text
    (row,) = browser.json("/waiting", q=f"key:{order}:pay")["tasks"]
    assert (row["state"], row["queue"], row["arguments"]) == (
        "waiting",
        named(shop, "default"),
        None,
    )
    assert browser.json("/waiting", q=f"{order}:pay")["q"] == f"key:{order}:pay"
    for wrong in (
        "q=args:1",
        f"q={order}",
        "q=due:soon",
        "q=state:cancelled",
        "q=task:",
        "limit=0",
        "after=x",
    ):
        assert browser.get(f"/waiting?{wrong}").status_code == 400
    # The line stays, to be mended.
    assert 'value="due:soon"' in browser.get("/waiting?q=due:soon").text


def counts_of(told: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return how many tasks that wait have which value."""
    return {
        name: {each["value"]: each["count"] for each in values}
        for name, values in told["facets"].items()
    }


def test_beside_the_list_what_matches_is_counted_by_the_terms_that_narrow_it(
    shop: Any, browser: Browser
) -> None:
    job, queue = f"import-{uuid4()}", named(shop, "default")
    with shop.rabbitdelay.job(job, expires=HOUR):
        send(shop, 3, job=job, hours=0.5)
    send(shop, 2)
    shop.tasks["note"].apply_async(kwargs={"key": "x"}, delay=30 * HOUR)
    key = f"order:{uuid4()}"
    (cancelled,), before = send(shop, key=key), browser.json("/waiting")["cancelled"]
    shop.rabbitdelay.cancel(cancelled)
    everything = {
        "state": {"waiting": 6},
        "task": {"look": 5, "note": 1},
        "queue": {queue: 6},
        "due": {"<1h": 3, "<1d": 5, "<7d": 6},
        "job": {job: 3},
    }
    told = browser.json("/waiting")
    assert counts_of(told) == everything
    # Counted in the records.
    by_record = browser.json("/waiting", q="sent:<1h")
    assert counts_of(by_record) == everything
    (look, _) = told["facets"]["task"]
    looked = browser.get(f"/api/waiting?{look['address']}").json()
    assert (looked["q"], looked["count"]) == ("task:look", 5)
    (chosen,) = looked["facets"]["task"]
    assert (chosen["is_on"], chosen["count"]) == (True, 5)
    assert browser.get(f"/api/waiting?{chosen['address']}").json()["q"] == ""
    of_job = browser.json("/waiting", q=f"job:{job} due:<1h")
    assert counts_of(of_job)["task"] == {"look": 3}
    # Cancelled tasks are counted; one is shown by its id.
    assert browser.json("/waiting")["cancelled"] == before + 1
    for exact in (cancelled, key, f"key:{key}"):
        told = browser.json("/waiting", q=exact)
        words = "The task was cancelled and will not run."
        assert told["unlisted"] == [{"task_id": cancelled, "words": words}]
        assert told["cancelled"] == 0


def test_due_tasks_are_held_or_overdue_and_none_is_both(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = f"import-{uuid4()}"
    shop.rabbitdelay.open_job(job, expires=10 * HOUR)
    (of_job,), (late,), (waits,) = send(shop, job=job), send(shop), send(shop, hours=9)
    note = str(shop.tasks["note"].apply_async(kwargs={"key": "x"}, delay=2 * HOUR).id)
    shop.rabbitdelay.pause(task="note")
    three_hours_later = time.time_ns() + 3 * HOUR * 10**9
    monkeypatch.setattr(wall_clock, "ns", lambda: three_hours_later)
    try:
        told = browser.json("/waiting")
        states = {each["task_id"]: each["state"] for each in told["tasks"]}
        assert states == {of_job: "job-open", late: "overdue", waits: "waiting", note: "held"}
        counts = {"waiting": 1, "held": 2, "overdue": 1, "job-open": 1}  # held by the job too
        assert counts_of(told)["state"] == counts
        assert counts_of(browser.json("/waiting", q="sent:<1d"))["state"] == counts
        for state, ids in (
            ("held", {of_job, note}),
            ("job-open", {of_job}),
            ("overdue", {late}),
            ("waiting", {waits}),
        ):
            assert set(ids_of(browser.json("/waiting", q=f"state:{state}"))) == ids
        for task_id, state in states.items():
            assert browser.json("/waiting/task", id=task_id)["state"] == state
    finally:
        shop.rabbitdelay.resume(task="note")
        shop.rabbitdelay.abort_job(job)


def test_a_word_is_found_in_arguments_as_far_as_they_are_shown(shop: Any) -> None:
    (order,), _ = send(shop, args=("Order 4711", 0)), send(shop, args=("Order 4712",))

    def found(word: str, **options: Any) -> list[str]:
        browser = Browser(application(shop, loopback_role="operator", **options))
        told = browser.json("/waiting", q=word)
        assert told["count"] == len(told["tasks"])
        if told["tasks"] and options:
            assert word in told["tasks"][0]["arguments"]
            counted = browser.json("/waiting/all", q=word)
            assert counted["count"] == told["count"]
        return ids_of(told)

    assert found("4711") == []
    assert found("4711", shows_arguments=True) == [order]
    assert found("471", shows_arguments=True) == []
    masks = {"shows_arguments": True, "mask": lambda task, text: text.replace("4711", "…")}
    assert found("4711", **masks) == []
    browser = Browser(application(shop, loopback_role="operator", shows_arguments=True))
    sent_before = browser.json("/waiting/all", q="4711")["sent_before"]
    begun = browser.post("/waiting/decide?q=4711", action="cancel", sent_before=sent_before)
    assert ended(browser, begun)["done"] == 1
    assert shop.rabbitdelay.show(order).state == "cancelled"


def test_a_search_is_completed_by_the_names_that_wait(shop: Any, browser: Browser) -> None:
    send(shop)
    told = browser.json("/waiting/completions", q="due:<1h lo")["completions"]
    assert told == ["due:<1h task:look"]
    page = browser.get("/waiting/completions", params={"q": '"><script> sta'}).text
    assert_harmless(page)
    assert "state:" in page


@pytest.mark.parametrize(
    ("bound", "query"),
    [
        ("", {"limit": "10"}),
        ("MOST_READ", {"q": "task:look job:{job}"}),
        ("MOST_READ", {"q": "key:{job}:*"}),
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
    # By itself, the page goes on until it is full.
    told = browser.json("/waiting", **asked)
    rows = len(told["tasks"])
    while told["is_short"]:
        told = browser.get(f"/api/waiting?{told['next_address']}").json()
        rows += len(told["tasks"])
    assert (rows, told["next"] is None) == ((20, True) if bound else (10, False))
    assert told["so_far"] == rows


def test_a_page_says_which_tasks_it_has_and_actions_on_all_come_with_a_search(
    shop: Any, browser: Browser
) -> None:
    send(shop, 3)
    told, shown = browser.json("/waiting", limit="2"), browser.get("/waiting?limit=2").text
    assert "1\N{EN DASH}2 of 3 Next 2" in read(shown).text
    assert "/waiting/all?" not in shown
    address = told["next_address"]
    assert "3\N{EN DASH}3 of 3" in read(browser.get(f"/waiting?{address}").text).text
    told = browser.get(f"/api/waiting?{address}").json()
    assert (told["so_far"], len(told["tasks"]), told["next"]) == (3, 1, None)
    assert "Cancel 3…" in read(browser.get("/waiting?q=task:look").text).text


def test_a_search_that_goes_on_counts_what_it_has_found_and_names_itself_in_its_actions(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MOST_READ", 10)
    send(shop, 12, hours=1)
    for number in range(3):
        send(shop, hours=2, key=f"order:{number}")
    first = browser.get("/waiting?q=key:order:*").text
    assert "Searching…" in read(first).text
    assert "first 0 matches" not in first
    assert "/waiting/all?" not in first
    told = browser.json("/waiting", q="key:order:*")
    last = browser.get(f"/waiting?{told['next_address']}").text
    assert "3 tasks match" in read(last).text
    assert "Cancel 3…" in read(last).text

    counted = browser.json("/waiting/all", q="key:order:*")
    assert (counted["count"], counted["may_be_more"]) == (0, True)
    asked = read(browser.get("/waiting/all?q=key:order:*&action=cancel").text)
    text = " ".join(asked.text.split())
    assert text.count("Cancel all tasks that match key:order:*") == 2, "the heading and the button"
    assert "Of the first 10 tasks, none matches; all others are searched" in text
    asked = read(browser.get("/waiting/all?q=key:order:*&action=cancel&so_far=3").text)
    assert "At least 3 tasks match; all others are searched" in " ".join(asked.text.split())
    begun = browser.post(
        "/waiting/decide?q=key:order:*", action="cancel", sent_before=counted["sent_before"]
    )
    work = ended(browser, begun)
    assert (work["done"], work["about"]) == (3, "tasks that match key:order:*")
    assert "<h1>Cancelled</h1>" in browser.get(begun.headers["Location"]).text
    assert "<h1>Actions</h1>" in browser.get("/work").text


def why_not(browser: Browser, task_id: str) -> list[str]:
    told = browser.json("/waiting/task", id=task_id)["task"]["why"]
    return [str(each["words"]) for each in told]


def test_the_story_of_a_task_says_where_it_is_and_why_it_has_not_run(shop: Any) -> None:
    browser = Browser(application(shop, shows_arguments=True))
    delays, key, job = shop.rabbitdelay, f"order:{uuid4()}", f"import-{uuid4()}"
    (task_id,) = send(shop, hours=2.5, key=key, args=("Köln", 4711))
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    told = browser.json("/waiting/task", id=task_id)
    known = told["task"]
    assert (known["state"], known["key"], known["args"]) == ("waiting", key, "('Köln', 4711)")
    assert [each["place"] for each in told["history"]] == ["past", "here", "ahead", "ahead"]
    assert told["history"][1]["queues"] == {"hours.2": 1}
    assert why_not(browser, task_id)[0].startswith("Due in ")
    delays.postpone(task_id, delay=5 * HOUR)
    assert "because it was postponed" in why_not(browser, task_id)[0]
    assert "Postponed" in read(browser.get(f"/waiting/task?id={task_id}").text).text
    (_, _, _, first_due, due, _) = browser.json("/waiting/task", id=task_id)["history"]
    assert first_due["at"] < due["at"]
    assert "No worker consumes its queue" in why_not(browser, task_id)[1]
    delays.pause(task="look")
    assert "have been paused for" in why_not(browser, task_id)[1]
    assert (
        "when the pause ends" in browser.json("/waiting/task", id=task_id)["history"][-1]["words"]
    )
    delays.resume(task="look")
    send(shop, key=key)
    assert "newer task was sent under the same key" in why_not(browser, task_id)[0]
    delays.open_job(job, expires=HOUR)
    of_job, arrived = send(shop, 2, job=job)
    assert "Its job is open" in why_not(browser, of_job)[1]
    delays.abort_job(job)
    assert "Its job was aborted" in why_not(browser, of_job)[1]
    delays.cancel(of_job)
    assert why_not(browser, of_job) == ["The task was cancelled and will not run."]
    [(copy, due)] = delays.registry.index.fields([arrived], "copy", "due")
    delays.registry.decide([Arrival(arrived, int(due), copy=copy, job=job)])
    [told] = browser.json("/waiting/task", id=arrived)["task"]["why"]
    assert (told["words"][:19], told["page"]) == ("Its job was aborted", "jobs/one")
    page = browser.get(f"/waiting/task?id={arrived}").text
    assert f"{job}, aborted" in read(page).text
    assert page.count(f'href="/jobs/one?name={job}"') == 2, "in the reason and in the details"
    assert browser.json("/waiting/task", id="nobody's")["task"] is None


def test_the_story_of_an_overdue_task_says_what_has_to_happen_before_it_runs(
    shop: Any, connection: Connection
) -> None:
    (task_id,), queue = send(shop, hours=0.002), named(shop, "default")
    topic = {"exchange": named(shop, "topic"), "routing_key": "elsewhere"}
    routed = str(shop.tasks["look"].apply_async(delay=1, **topic).id)

    def story(task_id: str = task_id) -> tuple[str, str]:
        told = Browser(application(shop)).json("/waiting/task", id=task_id)
        return told["task"]["why"][0]["words"], told["history"][-1]["words"]

    unserved = "The task is due, but no worker consumes its queue."
    wait_for(lambda: story()[0].startswith(unserved), "the task to be overdue", PATIENCE)
    assert story()[1] == "A worker that consumes its queue runs it"
    words, ahead = story(routed)
    assert "no worker serves distribution, which publishes it to its exchange" in words
    assert ahead == "A worker that serves distribution publishes it to its exchange"
    channel: Any = connection.default_channel
    channel.queue_delete(queue)
    words, ahead = story()
    assert "its queue does not exist: no worker serves distribution" in words
    assert ahead == "Distribution publishes it to the queue once the queue exists"
    declare_destination(connection, shop.rabbitdelay.topology, shop.amqp.queues[queue])


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


def test_another_process_shows_an_action_but_does_not_stop_it(shop: Any, browser: Browser) -> None:
    begun = browser.post("/waiting/decide", action="cancel", id=["nobody's"])
    own, other = ended(browser, begun), Browser(application(shop))
    assert other.json("/work", key=own["key"])["works"] == [own]
    page = other.get("/work", params={"key": own["key"]})
    assert (page.status_code, "nobody&#39;s" in page.text) == (200, True)
    assert other.get("/work", params={"key": "unknown"}).status_code == 404
    operator = Browser(application(shop, loopback_role="operator"))
    assert operator.post("/work/stop", key=own["key"]).status_code == 404


def test_an_action_does_what_it_says_for_each_task_and_is_logged(
    shop: Any, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, soon, later = send(shop, 3)
    due = shop.rabbitdelay.show(later).due
    with caplog.at_level(logging.INFO, "celery_rabbitdelay.web"):
        for action, task_id, fields in (
            ("cancel", cancelled, {}),
            ("postpone", later, {"by": "1h"}),
            ("run-now", soon, {}),
        ):
            begun = browser.post("/waiting/decide", action=action, id=[task_id], **fields)
            work = ended(browser, begun)
            assert (work["done"], work["outcomes"]) == (1, {task_id: "done"})
    logged = [each for each in caplog.records if each.name.startswith("celery_rabbitdelay.web")]
    assert [each.getMessage() for each in logged] == [
        f"rabbitdelay web: user 'local' acted on selected tasks ['{task_id}']: done; "
        f"{done}: 1, expected: 1"
        for done, task_id in (("cancelled", cancelled), ("postponed", later), ("run now", soon))
    ]
    assert shop.rabbitdelay.show(cancelled).state == "cancelled"
    assert shop.rabbitdelay.show(later).due == due + timedelta(hours=1)
    assert shop.rabbitdelay.show(soon).due <= datetime.now(UTC)
    ids = [cancelled, later, "nobody's"]
    told = browser.post("/api/waiting/decide", action="cancel", id=ids).json()["work"]
    outcomes = {cancelled: "cancelled", later: "done", "nobody's": "unknown"}
    assert (told["state"], told["done"], told["total"], told["outcomes"]) == (
        "done",
        1,
        3,
        outcomes,
    )
    shown = read(browser.get(f"/work?key={told['key']}").text).text
    assert "Cancelled 1 of 3selected tasks" in shown
    assert f"was cancelled or superseded before{cancelled}" in shown
    assert f"done{later}" in shown
    for path, wrong in (
        ("confirm", {"action": "cancel"}),
        ("decide", {"action": "postpone", "id": soon}),
        ("decide", {"action": "postpone", "id": soon, "by": "1h", "until": "2999-01-01"}),
        ("decide", {"action": "postpone", "id": soon, "by": "9" * 30}),
        ("decide", {"action": "burn", "sent_before": "2999-01-01"}),
        ("decide", {"action": "cancel"}),
    ):
        assert browser.post(f"/waiting/{path}", **wrong).status_code == 400, (path, wrong)


def test_an_action_that_fails_midway_names_the_tasks_that_are_left(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, real = send(shop, 3), Registry.cancel

    def cancel(registry: Registry, task_ids: Sequence[str], *given: Any) -> list[Outcome]:
        if ids[1] in task_ids:
            raise RegistryUnavailable("redis://:secret@host is away")
        return real(registry, task_ids, *given)

    monkeypatch.setattr(Registry, "cancel", cancel)
    begun = browser.post("/waiting/decide", action="cancel", id=ids, back="waiting?q=task:look")
    work = ended(browser, begun)
    assert (work["state"], work["done"], work["total"]) == ("failed", 1, 3)
    assert work["outcomes"] == {ids[0]: "done", ids[1]: "unconfirmed", ids[2]: None}
    page = browser.get(begun.headers["Location"]).text
    shown = read(page).text
    assert "redis://:**@host is away" in shown
    for words, task_id in zip(
        ("done", "not confirmed: see the task", "not tried"), ids, strict=True
    ):
        assert f"{words}{task_id}" in shown
    assert 'href="/waiting?q=task:look"' in page


def test_a_browser_can_go_back_to_a_confirmation_and_to_an_outcome(
    shop: Any, browser: Browser
) -> None:
    (task_id,) = send(shop)
    back = f"waiting/task?id={task_id}"
    asked = browser.post("/waiting/confirm", action="postpone", back=back, id=task_id)
    assert asked.status_code == 303
    page = asked.headers["Location"]
    assert "Postpone 1 task?" in read(browser.get(page).text).text
    for referer, leads_back in ((page, True), ("/waiting/decide", False), ("/evil", False)):
        wrong = browser.ask(
            "POST",
            "/waiting/decide",
            data={"action": "postpone", "id": task_id, "by": "soon"},
            headers={"Referer": f"{browser.base}{referer}"},
        )
        assert wrong.status_code == 400
        links = [values["href"] for tag, values in read(wrong.text).tags if tag == "a"]
        assert (page in links) is leads_back
        assert_harmless(wrong.text)
    fields = {"action": "postpone", "by": "1h", "id": task_id}
    for given, leads_to in ((back, back), ("https://evil.example", "waiting")):
        begun = browser.post("/waiting/decide", back=given, **fields)
        assert ended(browser, begun)["back"] == leads_to
        outcome = read(browser.get(begun.headers["Location"]).text)
        assert "Postponed 1 of 1" in outcome.text
        assert f"/{leads_to}" in [values.get("href") for _, values in outcome.tags]
    # No browser opens an address with all of these.
    many = [f"{number:060}" for number in range(100)]
    assert browser.post("/waiting/confirm", id=many).status_code == 200
    assert ended(browser, browser.post("/waiting/decide", action="cancel", id=many))["done"] == 0


def test_a_search_for_states_is_confirmed_again_after_a_resume(shop: Any, browser: Browser) -> None:
    (held,) = send(shop)
    shop.rabbitdelay.pause(task="look")
    counted = browser.json("/waiting/all", q=f"state:waiting id:{held}")
    confirmed = {"action": "cancel", **{each: counted[each] for each in ("sent_before", "held_by")}}
    shop.rabbitdelay.resume(task="look")
    refused = browser.post(f"/waiting/decide?q=state:waiting id:{held}", **confirmed)
    assert (refused.status_code, shop.rabbitdelay.show(held).state) == (409, "waiting")
    assert "A pause or a job has begun or ended since the count" in refused.text
    counted = browser.json("/waiting/all", q=f"state:waiting id:{held}")
    confirmed["held_by"] = counted["held_by"]
    begun = browser.post(f"/waiting/decide?q=state:waiting id:{held}", **confirmed)
    assert ended(browser, begun)["done"] == 1


def test_a_task_whose_message_was_lost_is_sent_again_by_run_now(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    queue, (lost, listed) = named(shop, "default"), send(shop, 2, hours=0.002)
    wait_for(lambda: count(connection, queue) == 2, "the messages", PATIENCE)
    channel: Any = connection.default_channel
    channel.queue_purge(queue)
    hint = "Running it now (postpone --delay 0) sends a new message"
    wait_for(lambda: hint in why_not(browser, lost)[0], "the reason", PATIENCE)
    ahead = browser.json("/waiting/task", id=lost)["history"][-1]["words"]
    assert ahead == "'Run now' sends it again"
    begun = browser.post("/waiting/decide", action="run-now", id=[lost])
    assert ended(browser, begun)["outcomes"] == {lost: "done"}
    wait_for(lambda: count(connection, queue) == 1, "the message", PATIENCE)
    assert "Postponed" not in read(browser.get(f"/waiting/task?id={lost}").text).text
    sent_before = browser.json("/waiting/all", q=listed)["sent_before"]
    asked = {"action": "run-now", "sent_before": sent_before}
    begun = browser.post(f"/waiting/decide?q=id:{listed}+task:look", **asked)
    assert ended(browser, begun)["done"] == 1
    wait_for(lambda: count(connection, queue) == 2, "the other message", PATIENCE)


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
    counted = browser.json("/waiting/all", q=f"job:{job}")
    assert counted["count"] == len(before) == 20
    sent = {"action": action, **{each: counted[each] for each in ("sent_before", "back")}}
    told = ended(browser, browser.post(f"/waiting/decide?q=job:{job}", **sent, **fields))
    assert told["back"] == f"waiting?q=job%3A{job}"
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


def test_tasks_are_postponed_until_an_instant_unless_they_are_due_later(
    shop: Any, browser: Browser
) -> None:
    (early,), (late,) = send(shop, hours=1), send(shop, hours=5)
    noon = (datetime.now(UTC) + timedelta(hours=2)).replace(microsecond=0)
    due = shop.rabbitdelay.show(late).due
    ids = {"id": [early, late, "nobody's"], "until": noon.isoformat()}
    work = ended(browser, browser.post("/waiting/decide", action="postpone", **ids))
    outcomes = {early: "done", late: "kept", "nobody's": "unknown"}
    assert (work["done"], work["outcomes"]) == (1, outcomes)
    later = (noon + timedelta(hours=1)).isoformat()
    sent_before = browser.json("/waiting/all")["sent_before"]
    asked = {"action": "postpone", "until": later, "sent_before": sent_before}
    work = ended(browser, browser.post("/waiting/decide", **asked))
    assert (work["done"], work["total"]) == (1, 2)
    dues = [shop.rabbitdelay.show(each).due for each in (early, late)]
    assert dues == [noon + timedelta(hours=1), due]
    # The due time of a single task may be set to an earlier one.
    form = browser.post("/waiting/confirm", action="postpone", id=late)
    form = browser.get(form.headers["Location"])
    assert "Set the due time" in read(form.text).text
    at = {"action": "postpone", "id": late, "at": noon.isoformat()}
    assert ended(browser, browser.post("/waiting/decide", **at))["done"] == 1
    assert shop.rabbitdelay.show(late).due == noon


def test_tasks_that_are_sent_after_the_count_stay(shop: Any, browser: Browser) -> None:
    counted = send(shop, 2)
    sent_before = browser.json("/waiting/all")["sent_before"]
    wait_for(lambda: browser.json("/waiting/all")["sent_before"] > sent_before, "the clock")
    (sooner,) = send(shop, hours=1)
    begun = browser.post("/waiting/decide", action="cancel", sent_before=sent_before)
    assert ended(browser, begun)["done"] == len(counted)
    assert ids_of(browser.json("/waiting")) == [sooner]


def test_a_confirmed_action_on_a_task_by_its_key_reaches_no_other_task(
    shop: Any, browser: Browser
) -> None:
    """A single word is tried as a key first; once that task has ended, it is part of other keys."""
    word = uuid4().hex
    ((mine,), (other,)) = send(shop, key=word), send(shop, key=f"x-{word}")
    asked = browser.get(f"/waiting/all?q={word}&action=cancel").text
    assert "Cancel 1 task?" in read(asked).text
    (target,) = re.findall(r'action="(/waiting/decide[^"]*)"', asked)
    (sent_before,) = re.findall(r'name="sent_before" value="([^"]*)"', asked)
    shop.rabbitdelay.cancel(mine)
    begun = browser.post(html.unescape(target), sent_before=html.unescape(sent_before))
    assert ended(browser, begun)["done"] == 0
    assert shop.rabbitdelay.show(other).state == "waiting"


def test_one_due_time_is_set_for_a_single_task_only(shop: Any, browser: Browser) -> None:
    tasks, soon = send(shop, 2), datetime.now(UTC) + timedelta(hours=1)
    sent_before = browser.json("/waiting/all")["sent_before"]
    for fields in ({"sent_before": sent_before}, {"id": tasks}):
        at = {"action": "postpone", "at": soon.isoformat(), **fields}
        assert browser.post("/waiting/decide", **at).status_code == 400
    assert all(shop.rabbitdelay.show(each).due > soon for each in tasks)


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


def test_no_page_waits_for_workers_and_each_says_how_old_their_answers_are(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, clock = Event(), [time.time_ns()]
    monkeypatch.setattr(wall_clock, "ns", lambda: clock[0])

    def ask(*_: Any, **__: Any) -> dict[str, Any]:
        assert may_answer.wait(PATIENCE), "a page has waited"
        return {"one@here": {}}

    def check(*_: Any) -> Verification:
        ask()
        return Verification("4.0", ())

    monkeypatch.setattr(site, "status_of_workers", ask)
    monkeypatch.setattr(now, "verify_application", check)

    def notes() -> list[str]:
        told = browser.json("/now")["problems"]
        return [each["words"] for each in told if each["severity"] == "note"]

    asked, checked = "The workers are being asked", "The broker is being checked"
    assert notes() == [asked, checked]
    assert browser.json("/now")["workers"] is None
    polls = 'hx-trigger="every 1s"'
    assert polls in browser.get("/now").text
    for page, words, figure in (("/workers", asked, "workers"), ("/health", checked, "version")):
        told = browser.json(page)
        assert (told["is_awaited"], told["taken"], told[figure] or None) == (True, None, None)
        shown = browser.get(page).text
        assert f"{words}." in shown
        assert polls in shown

    may_answer.set()
    wait_for(lambda: notes() == [], "the answers", PATIENCE)
    may_answer.clear()
    assert browser.json("/now")["workers"] == 1
    assert polls not in browser.get("/now").text
    assert not any(browser.json(page)["is_awaited"] for page in ("/workers", "/health"))
    clock[0] += HOUR * 10**9
    assert notes() == [f"{each}; the last answer came 1 h ago" for each in (asked, checked)]
    may_answer.set()


def test_now_shows_old_figures_while_the_broker_and_redis_do_not_answer(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, period in ((site, "STATUS"), (now, "DUE"), (site, "COUNTED")):
        monkeypatch.setattr(module, f"{period}_PERIOD", 0.0)
    monkeypatch.setattr(workers, "UNSERVED_PERIOD", 0.0)
    send(shop)
    wait_for(lambda: browser.json("/now")["total"] == 1, "the counts")
    may_answer = Event()

    def ask(*_: Any, **__: Any) -> None:
        assert may_answer.wait(PATIENCE), "the page has waited"
        raise OSError("away")

    for owner, name in ((site, "status_of"), (Index, "summary"), (workers, "queue_counts")):
        monkeypatch.setattr(owner, name, ask)
    told = [browser.json("/now") for _ in range(2)]
    assert [(each["total"], each["waiting"], each["broker_error"]) for each in told] == [
        (1, 1, None)
    ] * 2
    assert told[0]["taken"] == told[1]["taken"]
    may_answer.set()
    wait_for(lambda: browser.json("/now")["broker_error"], "the error", PATIENCE)


def test_without_a_registry_the_page_counts_and_says_what_else_it_needs(
    configuration: dict[str, Any],
) -> None:
    plain: Any = make_app({**configuration, "rabbitdelay_registry_url": None})
    browser = Browser(application(plain))
    answer = browser.get("/waiting")
    assert (answer.status_code, "rabbitdelay_registry_url" in answer.text) == (503, True)
    told = browser.json("/now")
    assert (told["has_registry"], told["tasks"]) == (False, [])
    assert "rabbitdelay_registry_url" in browser.get("/now").text
    plain.close()


def test_now_says_how_many_messages_were_sent_a_minute_as_the_management_api_counts_them(
    shop: Any, session_rabbitmq: RabbitMQServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "SENT_PERIOD", 0.0)
    monkeypatch.setattr(now, "SENT", (60, 5))
    browser = Browser(application(shop, management=session_rabbitmq.management_url))
    send(shop, 10)

    def sent() -> float:
        told = browser.json("/now")["last_hour"]
        assert told["sent_error"] is None
        return float(sum(number for _, number in told["sent"])) / 12

    wait_for(lambda: sent() >= 10, "what was sent", PATIENCE)


def test_without_the_management_api_now_says_so_in_one_hint(shop: Any) -> None:
    browser = Browser(application(shop, management="http://guest:guest@127.0.0.1:1"))
    wait_for(lambda: browser.json("/now")["last_hour"]["sent_error"], "the error", PATIENCE)
    page = read(browser.get("/now").text).text
    assert "The number of sent tasks is unknown" in page
    assert "refused" not in page


def test_no_page_has_a_password(shop: Any) -> None:
    secret = "planted-secret"
    options = {
        "management": f"http://guest:{secret}@127.0.0.1:1",
        "loopback_role": "operator",
    }
    browser = Browser(application(shop, **options))
    for path in ("/now", "/waiting", "/health", "/work"):
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
    work = ended(browser, browser.post("/undeliverable/decide", count="3", **nowhere))
    assert (work["state"], work["done"]) == ("failed", 0)
    redrive = {"action": "redrive", "task": "look", "count": "3"}
    assert ended(browser, browser.post("/undeliverable/decide", **redrive))["done"] == 3
    wait_for(lambda: count(connection, queue) == 3, "the tasks in their queue", PATIENCE)
    purge = {"action": "purge", "count": "1"}
    assert ended(browser, browser.post("/undeliverable/decide", **purge))["done"] == 1
    assert browser.json("/undeliverable")["read"] == 1


def test_messages_of_a_misspelt_queue_are_sent_again_to_another_queue(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    misspelt, queue = f"mails-{uuid4().hex}", named(shop, "default")
    task = {"task": "look", "lang": "py", "id": uuid4().hex}
    kind = {"content_type": "application/json", "content_encoding": "utf-8"}
    lost = message(json.dumps([[], {}, {}]), straight(misspelt, **task), **kind)
    put(connection, shop.rabbitdelay.topology, lost)
    chosen = {"action": "redrive", "queue": misspelt}
    page = browser.get("/undeliverable/all", params=chosen).text
    assert "is not a destination that the application allows" in page
    assert ("--" in read(page).text, "Send 0 again" in page) == (False, False)
    form = Form.of(page, "/undeliverable/decide")
    counted = browser.get("/undeliverable/all", params={**form, **chosen, "to": queue}).text
    (field,) = [each for tag, each in read(counted).tags if each.get("id") == "to"]
    assert (field["value"], "Send 1 again" in counted) == (queue, True)
    form = Form.of(counted, "/undeliverable/decide") | {"action": "redrive", "to": queue}
    assert ended(browser, browser.post("/undeliverable/decide", **form))["done"] == 1
    wait_for(lambda: count(connection, queue) == 1, "the task in the other queue", PATIENCE)


def test_undeliverable_messages_are_named_and_found_by_queue_day_and_reason_and_opened(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    failed = {FAILED_SINCE: wall_clock.ms() - 1000, ATTEMPTS: 2, FIRST_REASON: "full"}
    queue = lose(shop, connection, 2, **failed)
    stray = message("<b>no task", {"x-delay": 4711})
    put(connection, shop.rabbitdelay.topology, stray, routing_key="orders.<i>new")
    told = browser.json("/undeliverable")
    (stranger,) = [each for each in told["messages"] if each["task_id"] is None]
    assert (stranger["x_delay"], stranger["size"]) == ("4711", len("<b>no task"))
    assert stranger["routing_key"] == "orders.<i>new"
    assert_harmless(browser.get("/undeliverable").text)
    opened = browser.get(f"/undeliverable/message?name={stranger['name']}")
    assert (opened.status_code, "4711" in opened.text) == (200, True)
    assert_harmless(opened.text)
    assert told["tasks"]["look"] == told["queues"][queue] == 2
    name = next(each["name"] for each in told["messages"] if each["task_id"])
    record = browser.json("/undeliverable/message", name=name)["message"]
    page = browser.get("/undeliverable/message", params={"name": name}).text
    for what in ("due", "since"):
        assert f'<time datetime="{record[what]}">' in page
        assert f">{record[what]}<" not in page
    assert sum(told["days"].values()) == 2, "one says no day"
    facets = [*((name, told[f"{name}s"]) for name in ("task", "queue", "day"))]
    facets.append(("reason", {each["reason"]: each["count"] for each in told["reasons"]}))
    page = browser.get("/undeliverable").text
    for name, counts in facets:
        for value, number in counts.items():
            address = urlencode({name: value})
            assert f'href="/undeliverable?{address}"' in page
            assert browser.get(f"/api/undeliverable?{address}").json()["count"] == number, address


def test_bodies_of_undeliverable_messages_are_hidden_unless_they_are_allowed_and_masked(
    shop: Any, browser: Browser, connection: Connection
) -> None:
    lose(shop, connection, 2)
    (first, _) = browser.json("/undeliverable")["messages"]
    address = f"/undeliverable/message?name={first['name']}"
    assert "card 4711" not in browser.get(address).text + browser.get(f"/api{address}").text

    shows = Browser(application(shop, shows_arguments=True))
    assert "card 4711 0815" in shows.get(address).text
    masking = Browser(application(shop, shows_arguments=True, mask=lambda task, text: "masked"))
    assert "card 4711" not in masking.get(address).text


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
    begun = browser.post("/undeliverable/decide", action="purge", count="6")
    where = begun.headers["Location"]
    wait_for(lambda: read_so_far[0] == 4, "the fourth message", PATIENCE)
    (told,) = browser.get(f"/api{where}").json()["works"]
    assert (told["state"], told["total"]) == ("running", 6)
    polls = 'hx-trigger="every 1s"'
    assert polls in browser.get(where).text
    browser.post("/work/stop", key=where.partition("=")[2])
    may_go_on.set()
    told = ended(browser, begun)
    assert (told["state"], told["error"]) == ("stopped", None)
    assert polls not in browser.get(where).text
    assert 3 <= told["done"] < 6
    wait_for(lambda: count(connection, queue) == 6 - told["done"], "those that stay", PATIENCE)


def test_a_count_of_undeliverable_messages_says_whether_there_may_be_more(
    shop: Any, browser: Browser, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(shop, connection, 2)
    lose(shop, connection, 1, task="ship")

    def counted(**fields: str) -> str:
        text = read(browser.get("/undeliverable", params=fields).text).text
        return text.partition(", read")[0].splitlines()[-1].strip()

    assert [counted(), counted(task="ship")] == ["3 messages", "1 message of the 3"]
    monkeypatch.setattr(undeliverable, "MOST_READ", 3)
    of_oldest = ["3 messages of the 3 oldest", "1 message of the 3 oldest"]
    assert [counted(), counted(task="ship")] == of_oldest


def test_a_viewer_is_told_so_wherever_an_operator_may_act(
    shop: Any, connection: Connection
) -> None:
    browser, job = Browser(application(shop)), f"import-{uuid4().hex}"
    lose(shop, connection, 1)
    shop.rabbitdelay.open_job(job, expires=HOUR)
    for path in ("/undeliverable", "/undeliverable/all", "/pauses", f"/jobs/one?name={job}"):
        page = browser.get(path).text
        assert ("only operators may act" in page, 'method="post"' in page) == (True, False), path
    shop.rabbitdelay.abort_job(job)


def test_the_tasks_of_an_open_job_wait_for_its_commit_or_its_end(
    shop: Any, browser: Browser
) -> None:
    for path, state in (("commit", "committed"), ("abort", "aborted")):
        name = f"import & <b>{uuid4().hex}"
        assert browser.json("/jobs/one", name=name)["state"] is None
        shop.rabbitdelay.open_job(name, expires=HOUR)
        send(shop, job=name)
        told = browser.json("/jobs/one", name=name)
        assert (told["name"], told["state"], told["tasks"]) == (name, "open", 1)
        (listed,) = browser.json("/jobs", state="open", name="import & <b>*")["jobs"]
        opened = shared.local(datetime.fromisoformat(listed["opened"]), shop.timezone)
        assert opened in read(browser.get("/jobs", params={"name": name}).text).text
        assert (listed["name"], listed["tasks"]) == (name, 1)
        times = "opened", "expires"
        assert [told[each] for each in times] == [listed[each] for each in times]
        page = browser.get("/jobs/one", params={"name": name}).text
        assert ("<form" in page, f"action={path}" in page) == (False, True), "it asks first"
        assert ("Opened" in page, "unless committed" in page) == (True, True)
        asked = browser.get("/jobs/one", params={"name": name, "action": path}).text
        assert "1 waiting task " in asked.partition("</button>")[0]
        form = Form.of(asked, f"/jobs/{path}")
        assert browser.post(f"/jobs/{path}", **form).status_code == 303
        assert browser.json("/jobs/one", name=name)["state"] == state
        assert browser.json("/jobs", state="open", name="import & <b>*")["count"] == 0
        for page in ("/jobs", "/jobs/one"):
            assert_harmless(browser.get(page, params={"name": name}).text)
        assert "<form" not in browser.get("/jobs/one", params={"name": name, "action": path}).text
    assert browser.post("/jobs/commit", name=name).status_code == 409
    told = browser.json("/jobs", age="a day", name="import & <b>*")
    assert told["states"] == {"committed": 1, "aborted": 1}
    assert browser.json("/jobs", name="export*")["jobs"] == []


def test_a_task_and_a_queue_are_paused_and_resumed_and_what_is_held_is_counted(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, noon = named(shop, "default"), wall_clock.now() + timedelta(days=1)
    send(shop, 2, hours=1)
    send(shop, 1, hours=3)
    for what, name in (("task", "look"), ("queue", queue)):
        listed = browser.get("/waiting", params={"q": str(Term.of(what, name))}).text
        assert f"/pauses?{what}={quoted(name)}" in listed
        assert "/pauses?" not in browser.get("/waiting", params={"q": f"{what}:*"}).text
    try:
        for what, name, until in (("task", "look", noon), ("queue", queue, None)):
            wanted = {} if until is None else {"until": until.isoformat()}
            assert browser.post("/pauses/pause", what=what, name=name, **wanted).status_code == 303
        early = browser.post("/pauses/pause", what="task", name="look", until="2020-01-01T00:00")
        assert early.status_code == 400
        two_hours_later = time.time_ns() + 2 * HOUR * 10**9
        monkeypatch.setattr(wall_clock, "ns", lambda: two_hours_later)
        told = browser.json("/pauses")["paused"]
        assert [(each["what"], each["name"], each["held"], each["ahead"]) for each in told] == [
            ("task", "look", 2, 1),
            ("queue", queue, 2, 1),
        ]
        ends = [each["until"] and datetime.fromisoformat(each["until"]) for each in told]
        assert ends[1] is None
        assert abs(ends[0] - noon) < timedelta(milliseconds=1)
        page = browser.get("/pauses").text
        assert_harmless(page)
        assert (f"{noon:%Y-%m-%d %H:%M}" in read(page).text, "no end" in page) == (True, True)
        for what, name in (("task", "look"), ("queue", queue)):
            assert browser.post("/pauses/resume", what=what, name=name).status_code == 303
        assert browser.json("/pauses")["paused"] == []
    finally:
        shop.rabbitdelay.resume(task="look")
        shop.rabbitdelay.resume(queue=queue)


def test_a_pause_says_if_no_waiting_task_has_the_name_and_the_names_of_each_kind_are_proposed(
    shop: Any, browser: Browser
) -> None:
    queue, unknown = named(shop, "default"), f"lok-{uuid4().hex}"
    send(shop)
    wrong = [
        ("task", unknown, ""),
        ("task", queue, ", but a queue has it"),
        ("queue", "look", ", but a task has it"),
    ]
    words = {"task": "no waiting task has this name", "queue": "no task waits for a queue with"}
    page = browser.get("/pauses").text
    for what, name in (("task", "look"), ("queue", queue)):
        proposed = page.partition(f'id="{what}s"')[2].partition("</datalist>")[0]
        assert [f'value="{each}"' in proposed for each in ("look", queue)] == [
            each == name for each in ("look", queue)
        ]
    try:
        for what, name, _ in (("task", "look", ""), *wrong):
            assert browser.post("/pauses/pause", what=what, name=name).status_code == 303
        _, *rows = browser.get("/pauses").text.partition("</table>")[0].split("<tr>")[1:]
        assert not any(each in rows[0] for each in words.values())
        for row, (what, name, other) in zip(rows[1:], wrong, strict=True):
            assert (name in row, words[what] in row) == (True, True)
            assert other in row
            assert bool(other) is ("has it" in row)
    finally:
        for what, name, _ in (("task", "look", ""), *wrong):
            shop.rabbitdelay.resume(**{what: name})


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
    for wrong in (
        {"when": "now and then"},
        {"when": "every 9999999999999999d"},
        {"timezone": "../../etc/passwd"},
    ):
        assert browser.post("/schedules/edit", name=name, **wrong).status_code == 400, wrong
    assert own.get(name) == after
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


def test_the_command_makes_passwords_and_serves_the_page_to_those_who_have_one(
    configuration: dict[str, Any],
) -> None:
    told = [run_command(configuration, "web --new-password --json").stdout for _ in range(2)]
    (ada, vera) = map(json.loads, told)
    assert len({ada["password"], vera["password"]}) == 2
    users = {"ada": {"password": ada["hash"]}}
    with ServedPage({**configuration, "rabbitdelay_web": {"users": users}}) as page:
        assert f"http://127.0.0.1:{page.port}" in page.log
        for own, status in ((ada, 200), (vera, 401)):
            browser = Browser(None, page.address(), auth=("ada", own["password"]))
            assert browser.get("/work").status_code == status
        os.kill(page.pid, signal.SIGTERM)
        wait_for(lambda: not page.running, "its end, without force", PATIENCE / 2)
        assert "guest:guest" not in page.log


def test_the_command_refuses_to_serve_the_page_to_strangers(configuration: dict[str, Any]) -> None:
    told = run_command(configuration, "web --host :: --port 0")
    assert told.returncode == 2, told.stderr
    assert "the page listens on this machine's loopback only" in told.stderr


def test_workers_say_where_they_take_from_and_a_queue_without_one_is_named(
    shop: Any, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "UNSERVED_PERIOD", 0.0)
    monkeypatch.setattr(site, "WORKERS_PERIOD", 0.0)
    queue = named(shop, "default")
    send(shop)
    assert browser.json("/workers")["unserved"] == [queue]
    with Worker(shop.configuration, None, "-n", "one@here"):
        wait_for(lambda: not browser.json("/workers")["unserved"], "a consumer", PATIENCE)
        wait_for(lambda: browser.json("/workers")["workers"], "its answer", PATIENCE)
        (told,) = browser.json("/workers")["workers"]
        assert (told["name"], told["error"], told["running"]) == ("one@here", None, [])
        assert queue in told["queues"]
        assert told["processes"] >= 1
        assert told["uptime"] >= 0
        assert "celery_rabbitdelay" in told["versions"]
        assert_harmless(browser.get("/workers").text)
        key, began = uuid4().hex, time.monotonic()
        shop.tasks["hold"].apply_async(kwargs={"key": key})

        def running() -> list[dict[str, Any]]:
            return [each for one in browser.json("/workers")["workers"] for each in one["running"]]

        wait_for(running, "the running task", PATIENCE)
        (task_at_work,) = running()
        shop.backend.client.set(f"{key}:ends", "1")
        assert task_at_work["name"] == "hold"
        assert 0 <= task_at_work["seconds"] <= time.monotonic() - began + 1
