"""Undeliverable messages: filtered, counted by reason, written as JSON and as Spark's rows."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.kombu import Topology, examine
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.operations import mover
from celery_rabbitdelay.operations import undeliverable as messages
from celery_rabbitdelay.operations.reasons import Undeliverable
from tests.kernel.unit.clock import frozen

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def examined(told: dict[str, Any], body: bytes = b"") -> messages.UndeliverableMessage:
    return messages.UndeliverableMessage(examine(told, Topology(), ""), told, body, "e", "")


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


def test_a_filter_means_all_its_conditions() -> None:
    ten = timedelta(minutes=10)
    conditions: list[tuple[dict[str, Any], bool]] = [
        ({"tasks": ["shop.*"], "queues": ["reports"], "ids": ["4d5e"]}, True),
        ({"tasks": ["shop.*"], "queues": ["other"]}, False),
        ({"tasks": ["shop.pay", "shop.remin?"]}, True),
        ({"tasks": ["[s]hop.remind"]}, False),
        ({"ids": ["4d5"]}, False),
        ({"reasons": ["on"]}, True),
        ({"reasons": ["on*"]}, False),
        ({"reasons": ["none", "g?ne"]}, True),
        ({"older_than": ten, "newer_than": ten}, True),
        ({"older_than": timedelta(minutes=11)}, False),
        ({"newer_than": timedelta(minutes=9)}, False),
    ]
    for options, is_meant in conditions:
        assert messages.UndeliverableFilter(**options).matches(copy()) is is_meant, options
    for timed in (
        messages.UndeliverableFilter(older_than=timedelta(0)),
        messages.UndeliverableFilter(newer_than=timedelta(days=9999)),
    ):
        assert not timed.matches(copy(minutes=None))


def test_an_envelope_is_meant_by_each_of_its_tasks() -> None:
    items = (Item(b"", {"id": "1"}), Item(b"", {"id": "2", "task": "shop.pay"}))
    body = packed(items, {"task": "shop.ship"})
    told = {headers.EXCHANGE: "", headers.ROUTING_KEY: "letters"}
    envelope = copy(body=body, told=told, content_type=ENVELOPE)
    meant = messages.UndeliverableFilter(tasks=["shop.pay"], ids=["1"], queues=["letters"])
    assert meant.matches(envelope)
    assert not messages.UndeliverableFilter(tasks=["shop.remind"]).matches(envelope)
    assert messages.Contents.of(envelope).messages == 2


@given(st.binary())
def test_what_is_no_envelope_is_none(body: bytes) -> None:
    contents = messages.Contents.of(copy(body=body, content_type=ENVELOPE))
    assert contents.tasks == {"shop.remind"} or contents.messages is not None


def test_reasons_that_differ_only_in_attempts_are_one_and_strangers_make_up_only_some() -> None:
    summary = messages.UndeliverableSummary()
    for minutes, reason in (
        (5, "full (7 attempts since 2026-11-22 10:00:00 UTC)"),
        (9, "full (9 attempts since 2026-11-22 10:00:01 UTC; the first time: gone (x))"),
        (None, "full"),
        (7, "gone"),
    ):
        summary.add(copy(reason, minutes))
    group, second = summary.by_count()
    assert (group.reason, second.reason, group.count, summary.count) == ("full", "gone", 3, 4)
    assert (group.oldest, group.newest) == (NOW - timedelta(minutes=9), NOW - timedelta(minutes=5))
    for number in range(mover.MOST_REASONS + 48):
        summary.add(copy(str(number)))
    first, *others = summary.by_count()
    assert len(others) == mover.MOST_REASONS
    assert (first.reason, first.count) == (mover.OTHER_REASONS, 50)


def test_a_body_is_shown_as_text() -> None:
    for body, most, text, encoded in ((b"caf\xc3\xa9", 4, "caf", None), (b"\xff", 1, None, "/w==")):
        shown = messages.shown_body(body, most)
        assert (shown["text"], shown["base64"]) == (text, encoded)
        assert (shown["size"], shown["is_cut_off"]) == (len(body), len(body) > most)


HALF = "\ud800"

#: What AMQP carries; half a character as well, which UTF-8 cannot express.
values = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=5)),
        *(st.text(st.characters(), max_size=5), st.just(HALF), st.decimals(), st.datetimes()),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tasks = dict.fromkeys(["id", "task", "rabbitdelay-due", "rabbitdelay-queue"], values)
tables = st.dictionaries(st.text(), values, max_size=4) | st.fixed_dictionaries({}, optional=tasks)


@given(tables)
@settings(max_examples=50)
def test_every_message_is_a_json_object(told: dict[str, Any]) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(name)  # NaN is none of JSON's words

    text = messages.headers_as_json(told)
    assert json.loads(text, parse_constant=no_constant).keys() == told.keys()
    assert text.isascii()


def test_values_that_json_lacks_are_written_as_text() -> None:
    told = {
        "at": datetime(2030, 1, 2, 3, 4, 5),
        "bytes": b"a\xff",
        "price": Decimal("1.50"),
        "list": [{"a": (1, None, True)}],
        "infinite": float("inf"),
    }
    assert json.loads(messages.headers_as_json(told)) == {
        "at": "2030-01-02T03:04:05+00:00",
        "bytes": "a\\xff",
        "price": "1.50",
        "list": [{"a": [1, None, True]}],
        "infinite": "Infinity",
    }
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    assert json.loads(messages.headers_as_json({"deep": nested, "n": 1})).keys() == {"deep", "n"}
    while nested:  # Python would free it by recursion
        nested = nested.pop()
