"""Many rows of one task: each runs once, not before it is due, as if it had been sent alone."""

import os
import time
from collections import Counter, UserDict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain, pairwise
from typing import Any
from uuid import uuid4

import pytest
from celery import signals
from kombu import Connection

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.rows import Report, Row
from celery_rabbitdelay.app.send_many import MAX_ERRORS, PROGRESS_INTERVAL
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import take
from tests.kernel.integration.notes import Notes, listening
from tests.kernel.integration.publishing import work
from tests.kernel.integration.shop import PATIENCE, make_app, named

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
        listening(before_publish, signals.before_task_publish),
        listening(after_publish, signals.after_task_publish),
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


# Rows that cannot be sent: exactly these are named.


class Detached(UserDict[str, Any]):
    """A row of a database that is read when it is asked for."""

    def keys(self) -> Any:
        raise RuntimeError("the database is gone")


class Nasty:
    """Fails in a way of its own when JSON asks for it."""

    def __json__(self) -> Any:
        raise RuntimeError("the database is gone")


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD: dict[str, Any] = {
    "a wrong key": {"argz": (1,)},
    "no row": 5,
    "a row that cannot be read": Detached(),
    "a delay of text": {"delay": "x"},
    "two times": {"delay": 1, "eta": datetime.now(UTC)},
    "no instant": {"eta": "tomorrow"},
    "an endless delay": {"delay": float("inf")},
    "a delay beyond all counting": {"delay": 10**18},
    "what JSON cannot write": {"args": (object(),)},
    "what JSON must not write": {"args": (DEEP,)},
    "what fails by itself": {"args": (Nasty(),)},
    "arguments of text": {"args": "abc"},
    "arguments of a mapping": {"args": {"a": 1}},
    "keyword arguments of a list": {"kwargs": [1]},
    "an id of a number": {"task_id": 5},
    "an id that is too long": {"task_id": "k" * 256},
    "a key": {"key": "order:7"},
}


@both_ways
def test_what_the_rows_raise_is_raised_once_all_before_it_are_confirmed(
    send_many: Any, notes: Notes, envelopes: bool
) -> None:
    broken = ConnectionResetError("the database is gone")

    def rows() -> Iterator[Any]:
        for number in range(30):
            yield notes.row(number, delay=0.2) if number != 7 else {"delay": "x"}
        raise broken

    with pytest.raises(ConnectionResetError) as caught:
        send_many("note", rows(), envelopes=envelopes)
    assert caught.value is broken
    cause = caught.value.__cause__
    assert isinstance(cause, exceptions.RowsNotConfirmed)
    assert (list(cause.errors), cause.rest) == ([7], 30)
    assert numbers(notes.wait(29)) == [number for number in range(30) if number != 7]


@both_ways
def test_a_row_that_cannot_be_sent_is_an_error_of_its_own(
    send_many: Any, notes: Notes, envelopes: bool
) -> None:
    good = [notes.row(number, delay=0.2) for number in range(len(BAD) + 1)]
    rows = [*chain(*zip(BAD.values(), good, strict=False)), good[-1], BAD["a wrong key"]]
    with pytest.raises(exceptions.RowsNotConfirmed) as caught:
        # By name: nobody knows the signature.
        send_many("note", iter(rows), envelopes=envelopes)
    assert {*caught.value.errors} == {*range(0, len(rows), 2)} - {len(rows) - 2} | {len(rows) - 1}
    assert (caught.value.rest, caught.value.report.confirmed) == (None, len(good))
    assert numbers(notes.wait(len(good))) == [*range(len(good))]


def test_a_row_that_a_worker_would_refuse_for_its_size_is_an_error_of_its_own(
    make_shop: Any,
) -> None:
    shop = make_shop(rabbitdelay_max_message_bytes=20_000)
    # Together, they are larger than one message may be.
    rows: list[Any] = [{"args": (os.urandom(3000).hex(),), "delay": 0.2} for _ in range(12)]
    rows[0]["args"] = rows[7]["args"] = ("x" * 20_000,)
    with pytest.raises(exceptions.RowsNotConfirmed) as caught:
        shop.rabbitdelay.send_many("look", rows, envelopes=True, priority=9)
    assert sorted(caught.value.errors) == [0, 7]
    assert {*map(type, caught.value.errors.values())} == {exceptions.MessageTooLarge}
    # A single message goes straight to its queue.
    assert shop.rabbitdelay.send_many("look", rows, envelopes=True).confirmed == 12


@pytest.mark.parametrize(("task", "envelopes"), [("look", 1), ("look", 0), ("celery-own", 1)])
def test_after_so_many_errors_the_first_row_that_was_not_taken_is_named_if_there_is_one(
    shop: Any, task: str, envelopes: bool
) -> None:
    for further in (0, 1):
        rows = iter([{"delay": "x"}] * (MAX_ERRORS + further))
        with pytest.raises(exceptions.RowsNotConfirmed) as caught:
            shop.rabbitdelay.send_many(task, rows, envelopes=envelopes)
        assert len(caught.value.errors) == MAX_ERRORS
        assert caught.value.rest == (MAX_ERRORS if further else None)
        assert ("were not sent" in str(caught.value)) == bool(further)


OPTIONS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (exceptions.UnknownOption, "delay", {"delay": 5}),
    (exceptions.UnknownOption, "task_id", {"task_id": "any"}),
    (exceptions.RegistryRequired, "job = 'import-7'", {"job": "import-7"}),
    (exceptions.InvalidDelay, "tolerance", {"tolerance": -1}),
    (exceptions.NeedsDistribution, "distribution", {"envelopes": True}),
    (exceptions.NeedsDistribution, "distribution", {"priority": 9}),
]


def test_options_that_no_row_could_be_sent_with_are_an_error_at_once(make_shop: Any) -> None:
    shop = make_shop(rabbitdelay_modules=[])
    for error, words, options in OPTIONS:
        with pytest.raises(error, match=words):
            shop.rabbitdelay.send_many("look", [Row()], **options)
    with pytest.raises(exceptions.UnknownOption, match="producer"):
        shop.rabbitdelay.send_many("celery-own", [Row()], producer="any")


@both_ways
def test_what_no_broker_was_tried_with_does_not_count_as_sent(
    configuration: Any, envelopes: bool
) -> None:
    shop = make_app({**configuration, "broker_url": "amqp://guest:guest@127.0.0.1:1//"})
    rows = [Row(eta=datetime(2100, 1, 1, second=number, tzinfo=UTC)) for number in range(30)]
    with pytest.raises(exceptions.RowsNotConfirmed) as caught:
        shop.rabbitdelay.send_many("look", rows, envelopes=envelopes, retry=False)
    assert (caught.value.report.sent, caught.value.report.confirmed) == (1, 0)
    assert len(caught.value.errors) == (30 if envelopes else 1)
    # Rows that share an envelope are all taken before any message is sent.
    assert caught.value.rest == (None if envelopes else 1)


def test_without_distribution_every_row_is_a_message(
    make_shop: Any, connection: Connection
) -> None:
    shop = make_shop(rabbitdelay_modules=[])
    report = shop.rabbitdelay.send_many("look", [Row((n,), delay=0.3) for n in range(50)])
    assert (report.messages, report.envelopes) == (50, 0)
    arrivals = take(connection, [shop.amqp.queues[named(shop, "default")]], 50)
    assert sorted(arrival.body[0][0] for arrival in arrivals) == list(range(50))
    # Without check-in as well, what is above the capacity of 5.9 s is refused.
    with pytest.raises(exceptions.RowsNotConfirmed) as caught:
        shop.rabbitdelay.send_many("look", [Row(delay=5), Row(delay=50)])
    assert list(caught.value.errors) == [1]


def test_what_keeps_celery_s_own_behavior_is_sent_one_by_one(
    shop: Any, connection: Connection
) -> None:
    told: list[int] = []
    rows = [{"delay": 50}, {"delay": "x"}, {}, {"eta": datetime(2100, 1, 1, tzinfo=UTC)}]
    for task in (shop.tasks["celery-own"], "celery-own"):
        with pytest.raises(exceptions.RowsNotConfirmed) as caught:
            shop.rabbitdelay.send_many(task, rows, progress=lambda r: told.append(r.confirmed))
        assert list(caught.value.errors) == [1]
    assert told[-1] == 3
    arrivals = take(connection, [shop.amqp.queues[named(shop, "default")]], 6)
    assert Counter(bool(a.message.headers["eta"]) for a in arrivals) == {True: 4, False: 2}
    assert not [arrival for arrival in arrivals if headers.DUE in arrival.message.headers]


def test_one_by_one_an_error_of_the_rows_keeps_those_of_the_rows_before_it(make_shop: Any) -> None:
    shop = make_shop(task_always_eager=True)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"delay": "x"}
        yield {}
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        shop.rabbitdelay.send_many(shop.tasks["look"], rows())
    cause = caught.value.__cause__
    assert isinstance(cause, exceptions.RowsNotConfirmed)
    assert (list(cause.errors), cause.rest, cause.report.confirmed) == ([0], 2, 1)
