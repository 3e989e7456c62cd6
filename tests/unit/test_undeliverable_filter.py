"""Which undeliverable messages a filter means, and how they are counted by reason."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import Envelope, Item
from celery_rabbitdelay.modules.undeliverable import Undeliverable
from celery_rabbitdelay.operations.undeliverable import messages
from tests.unit.clock import frozen

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def standstill() -> Iterator[None]:
    with frozen(NOW.timestamp()):
        yield


def copy(
    reason: str = "gone",
    minutes: float | None = 10,
    body: bytes = b"",
    told: dict[str, Any] | None = None,
    **properties: Any,
) -> messages.UndeliverableMessage:
    since = None if minutes is None else NOW - timedelta(minutes=minutes)
    found = Undeliverable("4d5e", "shop.remind", "reports", None, reason, None, since)
    return messages.UndeliverableMessage(found, told or {}, body, "", "", properties)


@pytest.mark.parametrize(
    ("options", "is_meant"),
    [
        ({"tasks": ["shop.*"], "queues": ["reports"], "ids": ["4d5e"]}, True),
        ({"tasks": ["shop.*"], "queues": ["other"]}, False),
        ({"tasks": ["shop.pay", "shop.remin?"]}, True),
        ({"tasks": ["[s]hop.remind"]}, False),
        ({"ids": ["4d5"]}, False),
        ({"reasons": ["on"]}, True),
        ({"reasons": ["on*"]}, False),
        ({"reasons": ["none", "g?ne"]}, True),
        ({"older_than": timedelta(minutes=10), "newer_than": timedelta(minutes=10)}, True),
        ({"older_than": timedelta(minutes=11)}, False),
        ({"newer_than": timedelta(minutes=9)}, False),
    ],
)
def test_a_filter_means_all_its_conditions(options: dict[str, Any], is_meant: bool) -> None:
    assert messages.UndeliverableFilter(**options).matches(copy()) is is_meant


def test_a_message_without_a_time_is_neither_older_nor_newer() -> None:
    for meant in (
        messages.UndeliverableFilter(older_than=timedelta(0)),
        messages.UndeliverableFilter(newer_than=timedelta(days=9999)),
    ):
        assert not meant.matches(copy(minutes=None))


def test_an_envelope_is_meant_by_each_of_its_tasks() -> None:
    items = (Item(b"", {"id": "1"}), Item(b"", {"id": "2", "task": "shop.pay"}))
    body = Envelope(items, {"task": "shop.ship"}).pack()
    told = {headers.EXCHANGE: "", headers.ROUTING_KEY: "letters"}
    packed = copy(body=body, told=told, content_type=ENVELOPE)
    assert messages.UndeliverableFilter(tasks=["shop.pay"], ids=["1"], queues=["letters"]).matches(
        packed
    )
    assert not messages.UndeliverableFilter(tasks=["shop.remind"]).matches(packed)
    assert messages.Contents.of(packed).messages == 2


@given(st.binary())
def test_what_is_no_envelope_is_none(body: bytes) -> None:
    contents = messages.Contents.of(copy(body=body, content_type=ENVELOPE))
    assert contents.tasks == {"shop.remind"} or contents.messages is not None


def test_reasons_that_differ_only_in_their_attempts_are_one() -> None:
    summary = messages.UndeliverableSummary()
    for minutes, reason in (
        (5, "full (7 attempts since 2026-11-22 10:00:00 UTC)"),
        (9, "full (9 attempts since 2026-11-22 10:00:01 UTC; the first time: gone (x))"),
        (7, "full"),
        (None, "full"),
        (7, "gone"),
    ):
        summary.add(copy(reason, minutes))
    (first, group), (second, _) = summary.by_count()
    assert (first, second, group.count, summary.count) == ("full", "gone", 4, 5)
    assert (group.oldest, group.newest) == (NOW - timedelta(minutes=9), NOW - timedelta(minutes=5))


def test_strangers_cannot_make_up_reasons_without_end() -> None:
    summary = messages.UndeliverableSummary()
    for number in range(messages.MOST_REASONS + 50):
        summary.add(copy(str(number)))
    assert len(summary.reasons) == messages.MOST_REASONS + 1
    assert summary.reasons[messages.OTHER_REASONS].count == 50


@pytest.mark.parametrize(
    ("body", "most", "text", "encoded"),
    [
        (b"caf\xc3\xa9", 4, "caf", None),
        (b"\xff\x00", 1, None, "/w=="),
    ],
)
def test_a_body_is_shown_as_text(body: bytes, most: int, text: Any, encoded: Any) -> None:
    shown = messages.shown_body(body, most)
    assert (shown["text"], shown["base64"]) == (text, encoded)
    assert (shown["size"], shown["is_cut_off"]) == (len(body), len(body) > most)
