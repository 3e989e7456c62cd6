"""Undeliverable messages as JSON and as Spark's rows, whatever anybody has written into them."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.kombu import Topology, examine
from celery_rabbitdelay.operations.undeliverable.messages import (
    UndeliverableMessage,
    headers_as_json,
)
from celery_rabbitdelay.spark import read

#: Half a character, which py-amqp reads and UTF-8 cannot express.
HALF = "\ud800"

values = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=5)),
        *(st.text(st.characters(), max_size=5), st.just(HALF), st.decimals(), st.datetimes()),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def message(headers: dict[str, Any], body: bytes = b"", key: str = "") -> UndeliverableMessage:
    return UndeliverableMessage(examine(headers, Topology(), key), headers, body, "e", key)


@given(st.dictionaries(st.text(), values, max_size=4))
@settings(max_examples=30)
def test_headers_are_a_json_object_whatever_they_hold(headers: dict[str, Any]) -> None:
    def no_constant(name: str) -> None:
        raise AssertionError(name)  # NaN is none of JSON's words

    text = headers_as_json(headers)
    assert json.loads(text, parse_constant=no_constant).keys() == headers.keys()
    assert text.isascii()


def test_values_that_json_lacks_are_written_as_text() -> None:
    headers = {
        "at": datetime(2030, 1, 2, 3, 4, 5),
        "bytes": b"a\xff",
        "price": Decimal("1.50"),
        "list": [{"a": (1, None, True)}],
        "infinite": float("inf"),
    }
    assert json.loads(headers_as_json(headers)) == {
        "at": "2030-01-02T03:04:05+00:00",
        "bytes": "a\\xff",
        "price": "1.50",
        "list": [{"a": [1, None, True]}],
        "infinite": "inf",
    }


def test_headers_that_are_nested_too_deeply_are_named() -> None:
    nested: Any = []
    for _ in range(10_000):
        nested = [nested]
    assert json.loads(headers_as_json({"deep": nested, "n": 1})).keys() == {"deep", "n"}
    while nested:  # Python would free it by recursion
        nested = nested.pop()


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(["id", "task", "rabbitdelay-due", "rabbitdelay-queue"], values)
    ),
    st.binary(max_size=5),
)
@settings(max_examples=30)
def test_every_message_is_a_row_of_arrow(headers: dict[str, Any], body: bytes) -> None:
    batch = read._to_arrow(
        [read.to_row(message(headers, body)), read.to_row(message({"id": HALF}))]
    )
    assert batch.schema.names == [column.split()[0] for column in read.UNDELIVERABLE.split(", ")]
    first, second = batch.to_pylist()
    assert (first["body"], first["size"], second["task_id"]) == (body, len(body), "\\ud800")


def test_a_batch_has_few_rows_and_few_bytes() -> None:
    small = [read.to_row(message({}))] * (2 * read.BATCH_ROWS + 1)
    assert [len(batch) for batch in read._batched(small)] == [read.BATCH_ROWS, read.BATCH_ROWS, 1]
    large = [read.to_row(message({}, bytes(read.BATCH_BYTES // 2)))] * 5
    assert [len(batch) for batch in read._batched(large)] == [2, 2, 1]
