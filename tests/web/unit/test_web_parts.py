"""The parts of the page that need no server: texts, passwords, work, fields."""

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import Environment, PackageLoader
from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay import Celery
from celery_rabbitdelay.command import shared
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.options import User
from celery_rabbitdelay.web.pages import PAGES
from celery_rabbitdelay.web.site import MOST_AT_ONCE, STALE, Site, Work, Works, in_batches
from celery_rabbitdelay.web.view_request import MOST_FIELDS, Fields, fields_of
from tests.kernel.unit.clock import Clock
from tests.kernel.unit.waiting import wait_until

ADA = User("ada", "operator")


@given(st.text(st.characters()))
def test_a_shown_text_has_nothing_that_is_hidden_or_turns_text(text: str) -> None:
    found = shown.printable(text, most=50)
    assert found == text or not text.isprintable() or len(text) > 50
    assert found.isprintable()
    found.encode()
    assert len(found) <= 50 * 10 + 40


@given(st.datetimes(datetime(1970, 1, 1), timezones=st.just(UTC)))
@example(datetime.max.replace(tzinfo=UTC))
def test_any_instant_is_shown(instant: datetime) -> None:
    assert len(shared.local(instant, ZoneInfo("Asia/Tokyo"))) == len("2030-01-31 09:00:00")


@given(st.text(st.characters()))
def test_a_quoted_text_is_read_again_as_it_was(text: str) -> None:
    encoded = f"id={shown.quoted(text)}".encode()
    assert Fields([("id", text)]).multi_items() == fields_of(encoded).multi_items()
    again = fields_of(Fields([("id", text)]).address().encode())
    assert again.multi_items() == Fields([("id", text)]).multi_items()
    twice = f"quoted-id={shown.quoted(shown.quoted(text))}".encode()
    assert fields_of(twice).multi_items() == Fields([("id", text)]).multi_items()


@given(st.binary())
@example(b"a=b&" * (MOST_FIELDS + 1))
def test_any_query_is_read_or_refused(query: bytes) -> None:
    with suppress(HTTPException):
        found = fields_of(query)
        assert len(found.multi_items()) <= MOST_FIELDS
        json.dumps(shown.plain(found.multi_items()))


@pytest.mark.parametrize("page", sorted({each.template for each in PAGES if each.template}))
def test_each_template_can_be_read(page: str) -> None:
    loader = PackageLoader("celery_rabbitdelay.web")
    environment = Environment(loader=loader, autoescape=True)
    environment.parse(loader.get_source(environment, f"{page}.html")[0])


def test_a_stale_or_outdated_reading_is_waited_for_and_another_one_is_shown_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery_rabbitdelay.web.site.LONG_PATIENCE", 60.0)
    monkeypatch.setattr(wall_clock, "ns", (clock := Clock(1_900_000_000)).time_ns)
    app = Celery("shop", broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
    site, values, may_end = Site(app, {}), count(1), Event()

    def look() -> int:
        may_end.wait(60)
        return next(values)

    def latest(patience: float | None = 0.01) -> int | None:
        return site.latest("due in a day", look, 0.0, patience).value

    for number, newer in ((1, 2), (3, 5)):
        may_end.set()
        assert latest(None) == number
        may_end.clear()
        assert [latest(), latest()] == [number, number]
        if number == 1:
            clock.now += STALE.total_seconds() + 1
        else:  # the query that runs has begun before
            clock.now += 1
            site.outdate("due in ")
        Timer(0.1, may_end.set).start()
        assert latest() == newer


def until_ended(work: Work) -> Work:
    """Wait until a work has ended; return it."""
    wait_until(lambda: work.state != "running")
    return work


def test_only_so_much_work_goes_on_at_a_time_and_it_stops_between_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("celery_rabbitdelay.web.site.REMEMBERED", 6)
    monkeypatch.setattr("celery_rabbitdelay.web.site.SHORT", 0.01)
    alone: Any = SimpleNamespace(has_registry=False)
    works, may_go_on = Works(alone), Event()

    def batches() -> Iterator[int]:
        yield 1
        may_go_on.wait(10)
        yield 2
        yield 4

    def failing() -> Iterator[int]:
        yield 2
        raise OperationalError("redis://:secret@host is away")

    def begin(found: Iterator[int], about: str = "x") -> Work:
        return works.begin(Work(ADA, "cancelled", about, 5), in_batches(found))

    going = [begin(batches()) for _ in range(MOST_AT_ONCE)]
    with pytest.raises(HTTPException, match="actions are running"):
        begin(iter([1]))
    for each in going:
        assert each.shown()["state"] == "running"
        each.stopping.set()
    may_go_on.set()
    for each in going:
        until_ended(each)
        assert (each.state, each.error, each.done in (1, 3)) == ("stopped", None, True)
    caplog.set_level(logging.INFO, "celery_rabbitdelay.web")
    failed = until_ended(begin(failing(), "all"))
    assert (failed.done, failed.state, failed.error) == (2, "failed", "redis://:**@host is away")
    logged = [each for each in caplog.records if each.name.startswith("celery_rabbitdelay.web")]
    cancelled = "rabbitdelay web: user 'ada' acted on all: failed; cancelled: 2, expected: 5"
    assert [each.getMessage() for each in logged] == [cancelled]
    for _ in range(10):
        until_ended(begin(iter([1])))
    assert len(works.all()) <= 6
