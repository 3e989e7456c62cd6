"""Cutting a sorted column of items into groups, without a Java machine."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.app.sending.grouping import MAX_GROUP_BYTES, MAX_GROUP_MESSAGES
from celery_rabbitdelay.app.sending.rows import WrittenRows
from celery_rabbitdelay.spark.grouped_columns import Cutter


def cut(*batches: list[tuple[int, bytes]], kind: Any = None) -> list[tuple[int, int, bytes]]:
    """The due time, number and bytes of each group."""
    cutter = Cutter()
    found: list[WrittenRows] = []
    for batch in batches:
        dues, items = ([row[0] for row in batch], [row[1] for row in batch])
        arrays = pa.array(dues, pa.int64()), pa.array(items, kind or pa.binary())
        found += cutter.cut(*arrays)
    found += cutter.rest()
    return [(each.due_ms, each.count, each.items) for each in found]


def test_a_slice_of_a_batch_has_its_own_items() -> None:
    dues, items = pa.array([1, 2, 2, 3]), pa.array([b"a", b"b", b"c", b"d"])
    cutter = Cutter()
    found = [*cutter.cut(dues[1:3], items[1:3]), *cutter.rest()]
    assert [(each.due_ms, each.items) for each in found] == [(2, b"bc")]


def test_a_group_holds_so_many_messages_and_bytes_and_a_larger_item_is_alone() -> None:
    found = cut([(7, b"x")] * (MAX_GROUP_MESSAGES - 1), [(7, b"y")] * (MAX_GROUP_MESSAGES + 2))
    assert [count for _, count, _ in found] == [MAX_GROUP_MESSAGES, MAX_GROUP_MESSAGES, 1]
    half, large = b"h" * (MAX_GROUP_BYTES // 2), b"l" * (MAX_GROUP_BYTES + 1)
    found = cut([(7, half)] * 3 + [(7, large)] * 2 + [(7, b"s"), (7, half)])
    assert [count for _, count, _ in found] == [2, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=5)), max_size=50),
    st.lists(st.integers(0, 50), max_size=3),
)
def test_what_is_due_together_comes_together_nothing_is_lost_and_order_stays(
    kind: Any, rows: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    rows.sort(key=lambda row: row[0])
    edges = [0, *sorted(cuts), len(rows)]
    batches = [rows[begin:end] for begin, end in pairwise(edges)]
    found = cut(*batches, kind=kind)
    assert [due for due, *_ in found] == sorted({due for due, _ in rows})
    for due, count, items in found:
        mine = [item for other, item in rows if other == due]
        assert (count, items) == (len(mine), b"".join(mine))
