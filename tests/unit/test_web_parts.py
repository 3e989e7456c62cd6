"""The parts of the page that need no server: shared readings, texts, passwords, work, fields."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from unittest.mock import ANY

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.exceptions import OperationalError
from starlette.exceptions import HTTPException

from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.asked import MOST_FIELDS, Fields, fields_of
from celery_rabbitdelay.web.options import User
from celery_rabbitdelay.web.passwords import NOBODY, hash_password, is_hash, is_password
from celery_rabbitdelay.web.reading import Reading, Readings
from celery_rabbitdelay.web.sessions import COOKIE, LASTS, Session, Sessions
from celery_rabbitdelay.web.work import MOST_AT_ONCE, Work, Works, in_batches

ADA = User("ada", "operator")


def test_one_of_all_who_ask_looks_and_the_others_wait_or_get_what_was_seen_before() -> None:
    looks, may_end = [], Event()

    def look() -> int:
        looks.append(1)
        may_end.wait(10)
        return len(looks)

    readings = Readings(look, period=60)
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(readings.latest) for _ in range(5)]
        wait_for(lambda: looks, "the look")
        may_end.set()
        assert [each.result(10).value for each in asked] == [1] * 5
        may_end.clear()
        readings.outdate()
        second = pool.submit(readings.latest)
        wait_for(lambda: len(looks) == 2, "the second look")
        assert readings.latest().value == 1
        may_end.set()
        assert second.result(10).value == 2


def test_a_look_in_the_background_keeps_nobody_waiting_and_a_failed_one_ends_nothing() -> None:
    looks, may_end = [], Event()

    def look() -> int:
        looks.append(1)
        may_end.wait(10)
        if len(looks) == 2:
            raise OperationalError("amqp://ada:secret@host\nis away")
        return len(looks)

    readings = Readings(look, period=60, in_background=True)
    assert [readings.latest() for _ in range(3)] == [Reading()] * 3
    may_end.set()
    wait_for(lambda: readings.latest().value == 1, "the first look")
    readings.outdate()
    wait_for(lambda: readings.latest().error == "amqp://ada:**@host is away", "the second look")
    assert readings.latest().value == 1, "the one before"
    readings.outdate()
    wait_for(lambda: readings.latest() == (3, ANY, None), "the third look")


@given(st.text(st.characters()))
def test_a_shown_text_has_nothing_that_is_hidden_or_turns_text(text: str) -> None:
    found = shown.printable(text, most=50)
    assert found == text or not text.isprintable() or len(text) > 50
    assert found.isprintable()
    found.encode()
    assert len(found) <= 50 * 10 + 40


@given(st.text(st.characters()))
def test_a_quoted_text_is_read_again_as_it_was(text: str) -> None:
    encoded = f"id={shown.quoted(text)}".encode()
    assert Fields([("id", text)]).pairs == fields_of(encoded).pairs
    again = fields_of(Fields([("id", text)]).address().encode())
    assert again.pairs == Fields([("id", text)]).pairs
    twice = f"quoted-id={shown.quoted(shown.quoted(text))}".encode()
    assert fields_of(twice).pairs == Fields([("id", text)]).pairs


@given(st.binary())
@example(b"a=b&" * (MOST_FIELDS + 1))
def test_any_query_is_read_or_refused(query: bytes) -> None:
    with suppress(HTTPException):
        found = fields_of(query)
        assert len(found.pairs) <= MOST_FIELDS
        json.dumps(shown.plain(found.pairs))


def test_a_hash_is_of_one_password_and_two_of_it_differ() -> None:
    first, second = hash_password("a word\ud800"), hash_password("a word\ud800")
    assert first != second
    assert is_hash(first)
    assert is_password("a word\ud800", first)
    assert not is_password("a word", first)
    assert is_hash(NOBODY)
    assert not is_password("", NOBODY)
    for wrong in ("", "a word", "md5:1:1:1:x:y", None, 7, NOBODY[:-1]):
        assert not is_hash(wrong)
        assert not is_password("a word", str(wrong))


def test_a_token_is_of_one_session_user_and_secret_and_a_cookie_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sessions, session = Sessions("s" * 32), Session.new()
    token, cookie = sessions.token(session, "ada"), sessions.written(session)
    assert sessions.is_token(token, session, "ada")
    assert not sessions.is_token(token, session, "vera")
    # No two lists of words have the same token.
    joined = session._replace(key=f"{session.key}a")
    assert sessions.token(joined, "da") != token
    assert (sessions.read(cookie), Sessions().read(cookie)) == (session, None)
    monkeypatch.setitem(LASTS, COOKIE, -1)
    assert sessions.read(cookie) is None


def until_ended(work: Work) -> Work:
    """Wait until a work has ended; return it."""
    wait_for(lambda: work.state != "running", "the end of the work", 10)
    return work


def test_only_so_much_work_goes_on_at_a_time_and_it_stops_between_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("celery_rabbitdelay.web.work.REMEMBERED", 6)
    works, may_go_on = Works(), Event()

    def batches() -> Iterator[int]:
        yield 1
        may_go_on.wait(10)
        yield 2
        yield 4

    def failing() -> Iterator[int]:
        yield 2
        raise OperationalError("redis://:secret@host is away")

    going = [works.begin(ADA, "x", 7, in_batches(batches())) for _ in range(MOST_AT_ONCE)]
    with pytest.raises(HTTPException, match="503: So much"):
        works.begin(ADA, "x", 1, in_batches(iter([1])))
    for each in going:
        each.stopping.set()
    may_go_on.set()
    for each in going:
        until_ended(each)
        assert (each.state, each.error, each.done in (1, 3)) == ("stopped", None, True)
    caplog.set_level(logging.INFO, "celery_rabbitdelay.web")
    failed = until_ended(works.begin(ADA, "cancelled all", 5, in_batches(failing())))
    assert (failed.done, failed.state, failed.error) == (2, "failed", "redis://:**@host is away")
    assert caplog.messages == ["'ada' has cancelled all (failed, of 5): 2"]
    for _ in range(10):
        until_ended(works.begin(ADA, "x", 1, in_batches(iter([1]))))
    assert len(works.all()) <= 6
