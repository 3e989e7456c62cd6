"""The rows of one partition go through ``send_many``; refused rows fail it, or are collected."""

from __future__ import annotations

import json
import re
import sys
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from inspect import signature
from itertools import accumulate, chain, islice
from typing import Any, Final, Self, TypeAlias
from uuid import uuid4

import pyarrow as pa
from kombu.exceptions import EncodeError
from pyarrow import fs
from pyarrow import parquet as pq
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.sending.rows import Report, Row, WrittenRows
from celery_rabbitdelay.exceptions import (
    InvalidEnvelope,
    InvalidOption,
    InvalidRow,
    MessageRefused,
    RowsNotConfirmed,
)
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.spark.application import find_task, know_queue
from celery_rabbitdelay.spark.columns import Columns, Shared, Taken, TaskIds
from celery_rabbitdelay.spark.grouped_columns import GroupedColumns
from celery_rabbitdelay.spark.options import WriteOptions

#: About how many bytes of rows are kept in memory where rows differ in their task or queue, or
#: refused ones are collected, and how many a row takes beside its values. Only rows that are kept
#: together share envelopes, or a file of refused rows.
CHUNK_BYTES: Final = 64_000_000
ROW_BYTES: Final = 1000

#: The further columns of refused rows: the error's name and its text, the job of the write, and the
#: partition and the attempt of Spark that has read them, such as "3.0".
ERROR: Final = "rabbitdelay_error"
REASON: Final = "rabbitdelay_reason"
JOB: Final = "rabbitdelay_job"
ATTEMPT: Final = "rabbitdelay_attempt"

#: Where a file of Parquet says which types its columns have in Spark.
SPARKS_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"

#: Rows, or groups of them, whose ids are looked up in the registry in one round trip.
LOOKED_UP: Final = 500

#: The seconds for which a partition reserves its part of the rate that all share.
RESERVED_FOR: Final = 0.25

#: A row as it was read, and as it is sent.
Member: TypeAlias = "tuple[Taken | WrittenRows, Row | WrittenRows]"

#: The errors of one row, which say nothing about the others.
ROW_ERRORS: Final = (TypeError, ValueError, EncodeError, MessageRefused, InvalidEnvelope)


@dataclass
class Sent(WriterCommitMessage):
    """The report of one partition.

    Attributes:
        partition: Its number.
        job: The job of the registry; empty without one.
        rows: How many rows it had.
        confirmed: How many of these the broker has confirmed.
        known: Of how many of these the registry knew the id already; see :class:`.Dispatched`.
        messages: In how many messages.
        envelopes: How many of these hold several rows.
        resent: How often a message was published again.
        dropped: How many rows were not sent since their time had passed (``past = "drop"``).
        seconds: How long sending took.
        refused: How many rows were refused, by reason.
    """

    partition: int
    job: str
    rows: int = 0
    confirmed: int = 0
    known: int = 0
    messages: int = 0
    envelopes: int = 0
    resent: int = 0
    dropped: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_json(cls, text: str) -> Self:
        """Return the report that :meth:`as_json` has written."""
        written = json.loads(text)
        return cls(**{**written, "refused": Counter(written["refused"])})

    def as_json(self) -> str:
        """Return the report as a text."""
        return json.dumps(vars(self))

    def add(self, report: Report) -> None:
        """Add a report of ``send_many``."""
        self.confirmed += report.confirmed
        self.messages += report.messages
        self.envelopes += report.envelopes
        self.resent += report.resent
        self.seconds += report.seconds


class PartitionSender:
    """Sends the rows of one partition.

    Args:
        app: The application.
        columns: Reads the rows.
        options: The options of the write.
        ids: Derives the tasks' ids.
        write: The name of the write, which is the job of the registry that all tasks belong to.
        has_registry: Whether there is one.
        partition: The partition's number.
        attempt: How often Spark has run the partition before.
        began_ms: Rows that were due before that are past, in milliseconds since 1970-01-01 UTC.
    """

    def __init__(
        self,
        app: Celery,
        columns: Columns | GroupedColumns,
        options: WriteOptions,
        ids: TaskIds,
        write: str,
        has_registry: bool,
        partition: int,
        attempt: int,
        began_ms: int,
    ) -> None:
        self._app = app
        self._columns = columns
        self._options = options
        self._ids = ids
        self._registered = {"job": write, "once": True} if has_registry else {}
        self._sent = Sent(partition, write if has_registry else "")
        self._origin = {JOB: write, ATTEMPT: f"{partition}.{attempt}"}
        self._began_ms = began_ms
        self._tasks: dict[str, Any] = {}
        self._refused: list[tuple[Taken, Exception]] = []
        self._tables: list[Any] = []

    def send(self, taken: Iterator[Taken | WrittenRows]) -> Sent:
        """Send rows; the broker has confirmed all of them on return.

        Raises:
            RowsNotConfirmed: Rows were not confirmed, and are not collected.
            InvalidRow: A row is invalid, likewise.
        """
        if not self._columns.are_shared or self._options.errors_path is not None:
            for chunk in _chunks(taken):
                self._send_chunk(chunk)
        elif (first := next(taken, None)) is not None:
            # No row need be kept.
            rows = map(self._row, chain([first], taken))
            self._send_many(self._columns.shared, (row for row in rows if row is not None))
        self._write_refused()
        return self._sent

    def _row(self, taken: Taken | WrittenRows) -> Row | WrittenRows | None:
        """Return a row as it is sent; None if it is dropped."""
        if isinstance(taken, WrittenRows):
            self._sent.rows += taken.count
            return taken
        self._sent.rows += 1
        if taken.row is None:
            assert taken.error is not None
            raise taken.error
        if isinstance(unknown := self._task(taken.shared.task), InvalidOption):
            raise InvalidRow({"task": taken.shared.task}, f"its task {unknown.takes}")
        if self._options.past != "send" and _is_past(taken.row, self._began_ms):
            if self._options.past == "drop":
                self._sent.dropped += 1
                return None
            time = {"delay": taken.row.delay} if taken.row.eta is None else {"eta": taken.row.eta}
            raise InvalidRow(time, "its time has passed (past = 'refuse')")
        if taken.row.task_id is not None:
            return taken.row
        return taken.row._replace(task_id=self._ids.of(taken.identity))

    def _task(self, name: str) -> Any:
        """Return a task; its name if only that is known; why it cannot be sent, as an error."""
        if name not in self._tasks:
            try:
                found = find_task(self._app, name, self._options.allow_unknown_tasks)
            except InvalidOption as unknown:
                found = unknown
            self._tasks[name] = found or name
        return self._tasks[name]

    def _send_chunk(self, chunk: list[Taken | WrittenRows]) -> None:
        groups: dict[Shared, list[Member]] = defaultdict(list)
        for each in chunk:
            try:
                row = self._row(each)
            except ROW_ERRORS as error:
                assert isinstance(each, Taken), "written rows are valid"
                self._refuse(each, error)
            else:
                shared = self._columns.shared if isinstance(each, WrittenRows) else each.shared
                if row is not None:
                    groups[shared].append((each, row))
        for shared, members in groups.items():
            while members:
                members = self._send_group(shared, members)
        if self._refused:
            self._tables.append(_as_table(self._columns, self._refused, self._origin))
            self._refused = []
        if sum(table.nbytes for table in self._tables) > CHUNK_BYTES:
            self._write_refused()

    def _send_group(self, shared: Shared, members: list[Member]) -> list[Member]:
        """Send rows; return those that were not taken because many before them were refused."""
        try:
            self._send_many(shared, (row for _, row in members))
        except RowsNotConfirmed as failed:
            if self._options.errors_path is None:
                raise
            # The number of each member's first row.
            numbers = list(accumulate((_count(row) for _, row in members), initial=0))
            for number, error in failed.errors.items():
                taken, _ = members[bisect_right(numbers, number) - 1]
                # Spark writes small and valid rows only.
                if not isinstance(taken, Taken) or not isinstance(error, ROW_ERRORS):
                    raise
                self._refuse(taken, error)
            return [] if failed.rest is None else members[numbers.index(failed.rest) :]
        return []

    def _send_many(self, shared: Shared, rows: Iterable[Row | WrittenRows]) -> None:
        delays = self._app.rabbitdelay
        know_queue(self._app, shared.queue)
        options = {**shared.options, **self._registered}
        if self._sent.job and self._may_be_known:
            rows = self._looked_up(rows)
        if self._options.max_rate is not None:
            rows = self._paced(rows, self._options.max_rate)
        try:
            report = delays.send_many(
                self._task(shared.task),
                rows,
                tolerance=shared.tolerance,
                envelopes=self._options.envelopes,
                **options,
            )
        except RowsNotConfirmed as failed:
            self._sent.add(failed.report)
            raise
        self._sent.add(report)

    @property
    def _may_be_known(self) -> bool:
        """Whether another write may have sent the same ids: they are not random."""
        return self._options.job_id is not None or "task_id" in self._columns.types

    def _looked_up(self, rows: Iterable[Row | WrittenRows]) -> Iterator[Row | WrittenRows]:
        """Yield rows, and count those whose tasks the registry knows before they are sent."""
        index, source = self._app.rabbitdelay.registry.index, iter(rows)
        while batch := list(islice(source, LOOKED_UP)):
            names = [index.names.of("task", each) for row in batch for each in _ids(row)]
            found = iter(index.store.commands(partial(_look_up, names)))
            for row in batch:
                self._sent.known += sum(islice(found, _count(row)))
                yield row

    def _paced(self, rows: Iterable[Row | WrittenRows], rate: float) -> Iterator[Row | WrittenRows]:
        """Yield rows when their time has come, by the rate that all partitions share."""
        registry, reserved = self._app.rabbitdelay.registry, 0
        for row in rows:
            if reserved < _count(row):
                number = max(_count(row), int(rate * RESERVED_FOR))
                time.sleep(registry.reserve(self._sent.job, number, rate))
                reserved += number
            reserved -= _count(row)
            yield row

    def _refuse(self, taken: Taken, error: Exception) -> None:
        if self._options.errors_path is None:
            raise error
        self._sent.refused[type(error).__name__] += 1
        self._refused.append((taken, error))

    def _write_refused(self) -> None:
        """Write the refused rows that are collected so far."""
        path = self._options.errors_path
        if path is None or not self._tables:
            return
        filesystem, folder = fs.FileSystem.from_uri(path)
        filesystem.create_dir(folder, recursive=True)
        # A random name: Spark may run the same partition again.
        name = f"part-{self._sent.partition:05}-{uuid4()}.parquet"
        pq.write_table(pa.concat_tables(self._tables), f"{folder}/{name}", filesystem=filesystem)
        self._tables = []


def check_folder(path: str) -> None:
    """Find out whether refused rows can be written to a folder, which is created.

    Raises:
        InvalidOption: They cannot.
    """
    try:
        filesystem, folder = fs.FileSystem.from_uri(path)
        filesystem.create_dir(folder, recursive=True)
        # Spark's readers pass over such a name.
        probe = f"{folder}/_rabbitdelay-{uuid4()}"
        filesystem.open_output_stream(probe).close()
        filesystem.delete_file(probe)
    except (OSError, ValueError, NotImplementedError) as failed:
        takes = f"takes the URI of a folder, or an absolute path, that can be written: {failed}"
        raise InvalidOption("errorsPath", path, takes) from None


def _as_table(
    columns: Columns | GroupedColumns,
    refused: Sequence[tuple[Taken, Exception]],
    origin: Mapping[str, str],
) -> Any:
    """Return rows as they were, with their errors, as a table that Spark reads with their types."""
    # Parquet has no columns of nulls alone.
    kinds = re.sub('ype":"void"', 'ype":"string"', columns.schema.json())
    schema = T.StructType.fromJson(json.loads(kinds))
    values = [[taken.given[name] for taken, _ in refused] for name in columns.types]
    further = {
        ERROR: [type(error).__name__ for _, error in refused],
        REASON: [str(error) for _, error in refused],
        **{name: [value] * len(refused) for name, value in origin.items()},
    }
    for name, texts in further.items():
        schema = schema.add(name, T.StringType())
        values.append(texts)
    has_zone = "timezone" in signature(to_arrow_schema).parameters
    zone: dict[str, Any] = {"timezone": "UTC"} if has_zone else {}
    arrow: pa.Schema = to_arrow_schema(schema, **zone)
    arrays = [pa.array(*each) for each in zip(values, arrow.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=arrow.with_metadata({SPARKS_SCHEMA: schema.json()}))


def _look_up(names: Iterable[str], pipeline: Any) -> None:
    for name in names:
        pipeline.exists(name)


def _ids(row: Row | WrittenRows) -> Iterable[str]:
    """Return the ids of the tasks of rows."""
    if isinstance(row, WrittenRows):
        return (str(each.task_id) for each, _ in row.read())
    return (str(row.task_id),)


def _is_past(row: Row, began_ms: int) -> bool:
    delay = row.delay
    if isinstance(row.eta, datetime):
        return milliseconds_of(row.eta) < began_ms
    if isinstance(delay, timedelta):
        return delay < timedelta(0)
    return delay is not None and float(delay) < 0


def _count(row: Row | Taken | WrittenRows) -> int:
    return row.count if isinstance(row, WrittenRows) else 1


def _chunks(taken: Iterator[Taken | WrittenRows]) -> Iterator[list[Taken | WrittenRows]]:
    chunk: list[Taken | WrittenRows] = []
    left = CHUNK_BYTES
    for each in taken:
        chunk.append(each)
        left -= ROW_BYTES + _size(each.items if isinstance(each, WrittenRows) else each.given)
        if left <= 0:
            yield chunk
            chunk, left = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _size(value: Any) -> int:
    """Return about how many bytes a value takes in memory."""
    size = sys.getsizeof(value)
    if isinstance(value, Mapping):
        return size + sum(map(_size, value.values()))
    return size + sum(map(_size, value)) if isinstance(value, list | tuple) else size
