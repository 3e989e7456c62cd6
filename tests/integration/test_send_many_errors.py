"""Rows that cannot be sent, and brokers that cannot be reached: exactly these rows are named."""

from __future__ import annotations

import os
from collections import Counter, UserDict
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.app.sending.rows import MAX_ERRORS, Row
from celery_rabbitdelay.exceptions import (
    InvalidDelay,
    MessageTooLarge,
    NeedsDistribution,
    RegistryRequired,
    RowsNotConfirmed,
    UnknownOption,
)
from celery_rabbitdelay.levels import headers
from tests.integration.arrivals import take
from tests.integration.notes import Notes
from tests.integration.shop import make_app, named
from tests.integration.test_send_many import both_ways, notes, numbers, send_many

__all__ = ["notes", "send_many"]


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
    assert isinstance(cause, RowsNotConfirmed)
    assert (list(cause.errors), cause.rest) == ([7], 30)
    assert numbers(notes.wait(29)) == [number for number in range(30) if number != 7]


@both_ways
def test_a_row_that_cannot_be_sent_is_an_error_of_its_own(
    send_many: Any, notes: Notes, envelopes: bool
) -> None:
    good = [notes.row(number, delay=0.2) for number in range(len(BAD) + 1)]
    rows = [*chain(*zip(BAD.values(), good, strict=False)), good[-1], BAD["a wrong key"]]
    with pytest.raises(RowsNotConfirmed) as caught:
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
    with pytest.raises(RowsNotConfirmed) as caught:
        shop.rabbitdelay.send_many("look", rows, envelopes=True, priority=9)
    assert sorted(caught.value.errors) == [0, 7]
    assert {*map(type, caught.value.errors.values())} == {MessageTooLarge}
    # A single message goes straight to its queue.
    assert shop.rabbitdelay.send_many("look", rows, envelopes=True).confirmed == 12


@pytest.mark.parametrize(("task", "envelopes"), [("look", 1), ("look", 0), ("celery-own", 1)])
def test_after_so_many_errors_the_first_row_that_was_not_taken_is_named_if_there_is_one(
    shop: Any, task: str, envelopes: bool
) -> None:
    for further in (0, 1):
        rows = iter([{"delay": "x"}] * (MAX_ERRORS + further))
        with pytest.raises(RowsNotConfirmed) as caught:
            shop.rabbitdelay.send_many(task, rows, envelopes=envelopes)
        assert len(caught.value.errors) == MAX_ERRORS
        assert caught.value.rest == (MAX_ERRORS if further else None)
        assert ("were not taken" in str(caught.value)) == bool(further)


@pytest.mark.parametrize("task", ["look", "celery-own"])
def test_what_is_a_row_s_own_is_no_option_of_all_rows(shop: Any, task: str) -> None:
    for name in ("delay", "task_id", "producer"):
        with pytest.raises(UnknownOption, match=name):
            shop.rabbitdelay.send_many(task, [Row()], **{name: "any"})
    with pytest.raises(RegistryRequired, match="job = 'import-7'"):
        shop.rabbitdelay.send_many(task, [Row()], job="import-7")


def test_options_that_no_row_could_be_sent_with_are_an_error_at_once(make_shop: Any) -> None:
    send_many = make_shop(rabbitdelay_modules=[]).rabbitdelay.send_many
    with pytest.raises(InvalidDelay, match="tolerance"):
        send_many("note", [Row()], tolerance=-1)
    for options in ({"envelopes": True}, {"priority": 9}):
        with pytest.raises(NeedsDistribution):
            send_many("note", [Row((1,))], **options)


@both_ways
def test_what_no_broker_was_tried_with_does_not_count_as_sent(
    configuration: Any, envelopes: bool
) -> None:
    shop = make_app({**configuration, "broker_url": "amqp://guest:guest@127.0.0.1:1//"})
    rows = [Row(eta=datetime(2100, 1, 1, second=number, tzinfo=UTC)) for number in range(30)]
    with pytest.raises(RowsNotConfirmed) as caught:
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
    with pytest.raises(RowsNotConfirmed) as caught:
        shop.rabbitdelay.send_many("look", [Row(delay=5), Row(delay=50)])
    assert list(caught.value.errors) == [1]


def test_what_keeps_celery_s_own_behavior_is_sent_one_by_one(
    shop: Any, connection: Connection
) -> None:
    told: list[int] = []
    rows = [{"delay": 50}, {"delay": "x"}, {}, {"eta": datetime(2100, 1, 1, tzinfo=UTC)}]
    for task in (shop.tasks["celery-own"], "celery-own"):
        with pytest.raises(RowsNotConfirmed) as caught:
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
    assert isinstance(cause, RowsNotConfirmed)
    assert (list(cause.errors), cause.rest, cause.report.confirmed) == ([0], 2, 1)
