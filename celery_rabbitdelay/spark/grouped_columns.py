"""Reads grouped DataFrames: cuts the column of written rows into what fits into one envelope.

Opens no connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay.app.sending.grouping import MAX_GROUP_BYTES, MAX_GROUP_MESSAGES
from celery_rabbitdelay.app.sending.rows import WrittenRows
from celery_rabbitdelay.exceptions import InvalidColumn
from celery_rabbitdelay.spark.columns import Columns, Taken
from celery_rabbitdelay.spark.grouped import DUE, ITEM, ROW
from celery_rabbitdelay.spark.options import WriteOptions


def columns_of(
    schema: T.StructType, options: WriteOptions, is_case_sensitive: bool
) -> Columns | GroupedColumns:
    """Return what reads the rows of a DataFrame, by its schema: a grouped one, or any other."""
    reader = GroupedColumns if schema.names == [DUE, ITEM, ROW] else Columns
    return reader(schema, options, is_case_sensitive)


def planned_columns_of(schema: T.StructType, options: WriteOptions) -> Columns | GroupedColumns:
    """Return the same where Spark plans a write: it tells executors alone about the session.

    Raises:
        InvalidColumn: The schema fits neither if names are case-insensitive nor if they are not.
    """
    try:
        return columns_of(schema, options, False)
    except InvalidColumn as wrong:
        with suppress(InvalidColumn):
            return columns_of(schema, options, True)
        raise wrong


class GroupedColumns:
    """Reads the rows of a grouped DataFrame.

    Args:
        schema: Its schema.
        options: The options of the write.
        is_case_sensitive: As for :class:`.Columns`.

    Attributes:
        schema: As for :class:`.Columns`, of the rows as they were.
        types: Likewise.
        are_shared: Likewise.
        shared: Likewise.

    Raises:
        InvalidColumn: The schema does not fit.
    """

    def __init__(
        self, schema: T.StructType, options: WriteOptions, is_case_sensitive: bool = False
    ) -> None:
        row = schema[ROW].dataType
        assert isinstance(row, T.StructType), "it was grouped"
        self._columns = Columns(row, options, is_case_sensitive)
        self.schema, self.types = row, self._columns.types
        self.are_shared = self._columns.are_shared
        self.shared = self._columns.shared

    def taken(self, given: Iterable[Any], in_batches: bool = True) -> Iterator[Taken | WrittenRows]:
        """Yield the rows that Python has to write, and the others in groups.

        Args:
            given: Batches, each a :class:`pyarrow.RecordBatch`, sorted by due time.
            in_batches: Always true.
        """
        cutter = Cutter()
        for batch in given:
            items = batch.column(ITEM)
            if items.null_count:
                others = batch.filter(pc.is_null(items)).column(ROW)
                rows = pa.RecordBatch.from_struct_array(others)
                yield from self._columns.taken([rows])
                batch = batch.filter(pc.is_valid(items))
            yield from cutter.cut(batch.column(DUE), batch.column(ITEM))
        yield from cutter.rest()


class Cutter:
    """Brings together consecutive items that are due together."""

    def __init__(self) -> None:
        self._due_ms = 0
        self._count = 0
        self._size = 0
        self._parts: list[bytes] = []

    def cut(self, dues: Any, items: Any) -> Iterator[WrittenRows]:
        """Add items; yield the groups that are complete.

        Args:
            dues: An Arrow array of due times.
            items: An Arrow array of items, of binary or large binary type, without nulls.
        """
        if not len(items):
            return
        offset_type = np.int64 if pa.types.is_large_binary(items.type) else np.int32
        _, offsets_buffer, data = items.buffers()
        offsets = np.frombuffer(offsets_buffer, offset_type)[items.offset :][: len(items) + 1]
        due_times = dues.to_numpy()
        changes = np.flatnonzero(np.diff(due_times)) + 1
        for begin, end in zip([0, *changes], [*changes, len(items)], strict=True):
            if due_times[begin] != self._due_ms:
                yield from self.rest()
                self._due_ms = int(due_times[begin])
            while begin < end:
                # As many as fit into the group; but one fits always.
                room = offsets[begin] + MAX_GROUP_BYTES - self._size
                fitting = int(np.searchsorted(offsets, room, "right")) - 1
                until = min(end, begin + MAX_GROUP_MESSAGES - self._count, fitting)
                if until <= begin:
                    if self._count:
                        yield from self.rest()
                        continue
                    until = begin + 1
                part = data[offsets[begin] : offsets[until]].to_pybytes()
                self._parts.append(part)
                self._size += len(part)
                self._count += int(until - begin)
                begin = until

    def rest(self) -> Iterator[WrittenRows]:
        """Yield the group that is not complete, if there is one."""
        if self._count:
            yield WrittenRows(b"".join(self._parts), self._count, self._due_ms)
        self._count, self._size, self._parts = 0, 0, []
