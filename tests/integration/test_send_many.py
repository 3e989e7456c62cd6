"""Many rows of one task: each runs once, not before it is due, as if it had been sent alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from celery import signals
from kombu import Connection

from celery_rabbitdelay.app.sending.rows import PROGRESS_INTERVAL, Report, Row
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.publishing import work
from tests.integration.shop import PATIENCE, named

both_ways = pytest.mark.parametrize("envelopes", [True, False], ids=["envelopes", "one-by-one"])


@pytest.fixture
def notes(served_shop: Any) -> Notes:
    return Notes(served_shop)


@pytest.fixture
def send_many(served_shop: Any) -> Any:
    """Sends many tasks to the module's worker."""
    return served_shop.rabbitdelay.send_many


def numbers(noted: list[dict[str, Any]]) -> list[int]:
    return sorted(note["given"][0] for note in noted)


def mixed_rows(notes: Notes, not_before: list[float], how_many: int) -> Iterator[Any]:
    """Rows of every kind, and when each may run at the earliest."""
    for number in range(how_many):
        now = time.time()
        wait = (0.0, 0.7, 1.5, 1.23, 2.0)[number % 5]
        times: list[dict[str, Any]] = [
            {},
            {"delay": wait},
            {"eta": datetime.fromtimestamp(now + wait, UTC)},
            {"delay": timedelta(seconds=wait)},
            {"eta": datetime.fromtimestamp(now + wait, UTC).isoformat()},
        ]
        not_before.append(now + wait)
        row = notes.row(number, **times[number % 5])
        yield row if number % 2 else Row(**row)


@both_ways
def test_each_row_of_any_kind_runs_once_and_none_is_early(
    served_shop: Any, send_many: Any, notes: Notes, envelopes: bool
) -> None:
    not_before: list[float] = []
    report = send_many("note", mixed_rows(notes, not_before, 100), envelopes=envelopes)
    noted = notes.wait(100)
    assert numbers(noted) == list(range(100))
    assert all(note["at"] >= not_before[note["given"][0]] for note in noted)
    assert all(headers.DUE in note["headers"] for note in noted)
    assert (report.sent, report.confirmed, report.resent) == (100, 100, 0)
    assert not report.errors
    assert report.rate > 0
    if envelopes:
        assert 0 < report.envelopes <= report.messages < 100
    else:
        assert (report.envelopes, report.messages) == (0, 100)


def test_a_task_of_an_envelope_can_be_retried(served_shop: Any, send_many: Any) -> None:
    ids = [str(uuid4()) for _ in range(5)]
    rows = [{"args": ([], 2, {"delay": 0.3}), "delay": 0.2, "task_id": each} for each in ids]
    report = send_many("retry", rows)
    assert report.envelopes >= 1
    for each in ids:
        past = served_shop.AsyncResult(each).get(timeout=PATIENCE)
        assert [attempt["retries"] for attempt in past] == [0, 1, 2]
        assert {attempt["correlation_id"] for attempt in past} == {each}
        assert {attempt["routing_key"] for attempt in past} == {named(served_shop, "default")}
        assert all(b["at"] >= a["at"] + 0.3 for a, b in pairwise(past))


@both_ways
def test_every_row_has_what_the_options_say(
    served_shop: Any, send_many: Any, notes: Notes, envelopes: bool
) -> None:
    ids = [str(uuid4()) for _ in range(6)]
    given: list[Any] = ["it's", {"é": [1, None]}, 1.5]
    send_many(
        served_shop.tasks["look"],
        [{"args": (n, *given), "delay": 0.3, "task_id": each} for n, each in enumerate(ids)],
        envelopes=envelopes,
        queue=named(served_shop, "second"),
        priority=9,
        headers={"tenant": "é", "list": [1, 2]},
        expires=3600,
        link=served_shop.tasks["note"].s(key=notes.key),
    )
    for number, each in enumerate(ids):
        seen = served_shop.AsyncResult(each).get(timeout=PATIENCE)
        assert (seen["given"], seen["correlation_id"]) == ([number, *given], each)
        assert seen["exchange"] == ""  # as Celery has it where the exchange is direct
        assert seen["routing_key"] == named(served_shop, "second")
        assert seen["priority"] == 9
        assert (seen["headers"]["tenant"], seen["headers"]["list"]) == ("é", [1, 2])
    linked = notes.wait(6)
    assert sorted(note["given"][0]["given"][0] for note in linked) == list(range(6))


@contextmanager
def listening(signal: Any, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


@both_ways
def test_signals_and_monitors_are_told_of_each_row_and_receivers_may_add_to_it(
    served_shop: Any, send_many: Any, connection: Connection, envelopes: bool
) -> None:
    served_shop.conf.task_send_sent_event = True
    before: list[str] = []
    after: list[str] = []
    sent: list[str] = []

    def before_publish(headers: dict[str, Any], properties: dict[str, Any], **_: Any) -> None:
        before.append(headers["id"])
        headers["number"] = number = len(before)
        if number == 3:
            headers["third"] = [3]
            properties["priority"] = 9
        if number == 4:
            # JSON has no place for it: the row travels by itself.
            headers["when"] = datetime(2030, 1, 2, tzinfo=UTC)

    def after_publish(headers: dict[str, Any], **_: Any) -> None:
        after.append(headers["id"])

    def came() -> bool:
        with suppress(TimeoutError):
            own.drain_events(timeout=0.2)
        return len(sent) >= len(ids)

    ids = [str(uuid4()) for _ in range(8)]
    handlers = {"task-sent": lambda event: sent.append(event["uuid"])}
    receiver = served_shop.events.Receiver(connection, handlers=handlers)
    with (
        receiver.consumer_context() as (own, *_),
        listening(signals.before_task_publish, before_publish),
        listening(signals.after_task_publish, after_publish),
    ):
        rows = [{"delay": 0.4, "task_id": each} for each in ids]
        report = send_many("look", rows, envelopes=envelopes)
        wait_for(came, "the events")
    assert before == after == sent == ids
    assert bool(report.envelopes) == envelopes
    for number, each in enumerate(ids, 1):
        seen = served_shop.AsyncResult(each).get(timeout=PATIENCE)
        assert seen["headers"]["number"] == number
        assert seen["headers"].get("third") == ([3] if number == 3 else None)
        assert ("when" in seen["headers"]) == (number == 4)
        assert not envelopes or seen["priority"] == (9 if number == 3 else 0)


def test_progress_is_told_with_growing_numbers_and_at_the_end(send_many: Any) -> None:
    told: list[tuple[int, int, float]] = []

    def progress(report: Report) -> None:
        told.append((report.sent, report.confirmed, report.seconds))

    def slow_rows() -> Iterator[Row]:
        yield Row()
        work(PROGRESS_INTERVAL)
        yield Row()

    report = send_many("look", slow_rows(), progress=progress, envelopes=False)
    assert len(told) >= 2
    assert told == sorted(told)
    assert told[-1] == (2, 2, report.seconds)
    assert send_many("look", [], progress=progress)
    assert told[-1][:2] == (0, 0)


def test_with_a_tolerance_rows_share_an_envelope_and_none_is_early(
    send_many: Any, notes: Notes
) -> None:
    not_before = [time.time() + 1.03 + number / 100 for number in range(40)]
    rows = [notes.row(number, delay=1.03 + number / 100) for number in range(40)]
    report = send_many("note", rows, tolerance=timedelta(seconds=1))
    noted = notes.wait(40)
    assert numbers(noted) == list(range(40))
    assert all(note["at"] >= not_before[note["given"][0]] for note in noted)
    # All are due at 2 s, but for what was taken while a tick went by.
    assert report.messages <= 20 * (1 + report.seconds / 0.1)
