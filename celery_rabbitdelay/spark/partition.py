"""Sends the rows of one partition with ``send_many``; collects refused rows, or stops."""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from inspect import signature
from itertools import accumulate
from typing import Any, Final, TypeAlias
from uuid import uuid4

import pyarrow as pa
from kombu import Queue
from kombu.exceptions import EncodeError
from pyarrow import fs
from pyarrow import parquet as pq
from pyspark import TaskContext
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.rows import Report, Row, WrittenRows
from celery_rabbitdelay.exceptions import InvalidOption, InvalidRow
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.spark.application import MADE_FROM_URL, CeleryTask, find_task
from celery_rabbitdelay.spark.columns import Columns, Shared, Taken, TaskIds, seconds, shown
from celery_rabbitdelay.spark.options import WriteOptions

#: The approximate bytes of rows in memory, if rows differ in their task or queue or if refused rows
#: are collected; and the bytes of a row without its values. Only rows that are in memory together
#: share envelopes, or a file of refused rows.
CHUNK_BYTES: Final = 64_000_000
ROW_BYTES: Final = 1000

#: The additional columns of refused rows: the error's name and its text, the job of the write, and
#: Spark's partition and attempt, such as "3.0".
FURTHER: Final = tuple(f"rabbitdelay_{each}" for each in ("error", "reason", "job", "attempt"))

#: The key in the metadata of a Parquet file for its columns' types in Spark.
SPARKS_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"

#: The seconds for which a partition reserves its share of the common rate.
RESERVED_FOR: Final = 0.25

#: A row for ``send_many``.
Given: TypeAlias = "Row | WrittenRows"

#: Errors of a single row: the other rows are sent.
ROW_ERRORS: Final = (TypeError, ValueError, EncodeError, exceptions.MessageRefused)


@dataclass(kw_only=True)
class Counts:
    """The counts of a write.

    Attributes:
        rows: The number of rows.
        confirmed: The number of rows that RabbitMQ has confirmed.
        messages: The number of confirmed messages.
        envelopes: The number of confirmed messages that hold several rows.
        resent: How often a message was published again.
        dropped: The number of rows that were dropped because their due time had passed (``past =
            "drop"``).
        seconds: The total sending time of all partitions, in seconds.
        refused: The number of refused rows per error name.
    """

    rows: int = 0
    confirmed: int = 0
    messages: int = 0
    envelopes: int = 0
    resent: int = 0
    dropped: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, report: object) -> None:
        """Add the counts of another report."""
        for name in [each.name for each in fields(Counts) if hasattr(report, each.name)]:
            setattr(self, name, getattr(self, name) + getattr(report, name))


@dataclass
class PartitionReport(Counts, WriterCommitMessage):
    """The report of one partition, with its :class:`.Counts`.

    Attributes:
        partition: The partition's number.
        job: The job of the registry; empty without a registry.
    """

    partition: int
    job: str


@dataclass
class PartitionSender:
    """Sends the rows of one partition.

    Attributes:
        app: The application.
        columns: Reads the rows.
        options: The options of the write.
        write: The name of the write.
        began_ms: When the write began, in milliseconds since 1970-01-01 UTC; rows that were due
            earlier are past.
        report: The report.
    """

    app: Celery
    columns: Columns
    options: WriteOptions
    write: str
    began_ms: int
    report: PartitionReport
    _tasks: dict[str, CeleryTask | str | InvalidRow] = field(default_factory=dict, init=False)
    _refused: list[list[object]] = field(default_factory=list, init=False)

    def send(self, batches: Iterator[pa.RecordBatch], ids: TaskIds) -> PartitionReport:
        """Send rows, and wait for all confirms.

        Raises:
            RowsNotConfirmed: Rows were not confirmed, and are not collected.
            InvalidRow: A row is invalid, and is not collected.
        """
        try:
            if self.columns.are_shared and self.options.errors_path is None:
                # The rows need not be kept.
                taken = self.columns.taken(batches, ids)
                self._send_many(self.columns.shared, filter(None, map(self._row, taken)))
            else:
                for chunk in _chunks(batches):
                    self._send_chunk(self.columns.taken(chunk, ids))
        except Exception as error:
            # Spark's error does not name the partition.
            number = self.report.partition
            error.add_note(f"This is partition {number}. Its rows are numbered from 0.")
            raise
        return self.report

    def _row(self, taken: Taken) -> Given | None:
        """Return the row to send; None if it is dropped."""
        row = taken.row
        self.report.rows += row.count if isinstance(row, WrittenRows) else 1
        if isinstance(row, Exception):
            raise row
        if self.options.past == "send" or isinstance(row, WrittenRows) or not self._is_past(row):
            return row
        if self.options.past == "refuse":
            raise InvalidRow(shown(taken.given), "its time has passed (past = 'refuse')")
        self.report.dropped += 1
        return None

    def _is_past(self, row: Row) -> bool:
        if isinstance(row.eta, datetime):
            return milliseconds_of(row.eta) < self.began_ms
        return row.delay is not None and seconds(row.delay) < 0

    def _task(self, name: str) -> CeleryTask | str:
        """Return a task, or its name if only the name is known.

        Raises:
            InvalidRow: The application does not know the task.
        """
        if name not in self._tasks:
            try:
                task = find_task(self.app, name, self.options.allow_unknown_tasks)
                self._tasks[name] = task or name
            except InvalidOption as unknown:
                self._tasks[name] = InvalidRow({"task": name}, f"its task {unknown.takes}")
        if isinstance(found := self._tasks[name], InvalidRow):
            raise found.with_traceback(None)
        return found

    def _send_chunk(self, chunk: Iterator[Taken]) -> None:
        groups: dict[Shared, list[tuple[Taken, Given]]] = defaultdict(list)
        for each in chunk:
            try:
                if (row := self._row(each)) is not None:
                    self._task(each.shared.task)
                    groups[each.shared].append((each, row))
            except ROW_ERRORS as error:
                self._refuse(each, error)
        for shared, members in groups.items():
            while members:
                try:
                    self._send_many(shared, (row for _, row in members))
                    break
                except exceptions.RowsNotConfirmed as failed:
                    # The number of each member's first row.
                    numbers = list(accumulate((_count(row) for _, row in members), initial=0))
                    for number, why in failed.errors.items():
                        if self.options.errors_path is None or not isinstance(why, ROW_ERRORS):
                            raise
                        self._refuse(members[bisect_right(numbers, number) - 1][0], why)
                    # After too many refused rows, send_many took no more rows.
                    members = [] if failed.rest is None else members[numbers.index(failed.rest) :]
        self._write_refused()

    def _send_many(self, shared: Shared, rows: Iterable[Given]) -> None:
        options: dict[str, Any] = json.loads(shared.options)
        if self.report.job:
            options |= {"job": self.report.job, "once": True}
        if self.app.main == MADE_FROM_URL:
            # An application made from a URL does not know how the queue is declared.
            queue = options.get("queue") or self.app.conf.task_default_queue
            self.app.amqp.queues.add(Queue(queue, no_declare=True))
        if self.options.max_rate is not None:
            rows = self._paced(rows, self.options.max_rate)
        options |= {"tolerance": shared.tolerance, "envelopes": self.options.envelopes}
        report = Report()
        try:
            report = self.app.rabbitdelay.send_many(self._task(shared.task), rows, **options)
        except exceptions.RowsNotConfirmed as failed:
            report = failed.report
            raise
        finally:
            self.report.add(report)

    def _paced(self, rows: Iterable[Given], rate: float) -> Iterator[Given]:
        """Yield rows at the rate that all partitions share."""
        registry, reserved = self.app.rabbitdelay.registry, 0
        for row in rows:
            if reserved < _count(row):
                number = max(_count(row), int(rate * RESERVED_FOR))
                time.sleep(registry.reserve(self.report.job, number, rate))
                reserved += number
            reserved -= _count(row)
            yield row

    def _refuse(self, taken: Taken, error: Exception) -> None:
        # Rows that Spark has serialized are small and valid.
        if self.options.errors_path is None or isinstance(taken.row, WrittenRows):
            raise error
        self.report.refused[type(error).__name__] += 1
        context = TaskContext.get()
        attempt = f"{self.report.partition}.{0 if context is None else context.attemptNumber()}"
        texts = (type(error).__name__, str(error), self.write, attempt)
        self._refused.append([*taken.given.values(), *texts])

    def _write_refused(self) -> None:
        """Write the refused rows, with their types in Spark, and their errors."""
        if self.options.errors_path is None or not self._refused:
            return
        # Parquet cannot store a column that has only nulls.
        kinds = re.sub('ype":"void"', 'ype":"string"', self.columns.schema.json())
        schema = T.StructType.fromJson(json.loads(kinds))
        for name in FURTHER:
            schema = schema.add(name, T.StringType())
        takes_zone = "timezone" in signature(to_arrow_schema).parameters  # not in PySpark 4.0
        arrow = to_arrow_schema(schema, timezone="UTC") if takes_zone else to_arrow_schema(schema)
        columns = zip(*self._refused, strict=True)
        arrays = [pa.array(*each) for each in zip(columns, arrow.types, strict=True)]
        arrow = arrow.with_metadata({SPARKS_SCHEMA: schema.json()})
        filesystem, folder = folder_of(self.options.errors_path)
        # A random name: Spark may run the same partition again.
        name = f"{folder}/part-{self.report.partition:05}-{uuid4()}.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, schema=arrow), name, filesystem=filesystem)
        self._refused = []


def folder_of(path: str) -> tuple[fs.FileSystem, str]:
    """Create the folder for refused rows; return its file system, and its path there.

    Raises:
        InvalidOption: The folder cannot be created.
    """
    try:
        filesystem, folder = fs.FileSystem.from_uri(path)
        filesystem.create_dir(folder, recursive=True)
    except (OSError, ValueError, NotImplementedError) as failed:
        takes = f"takes the URI or the absolute path of a folder that can be written: {failed}"
        raise InvalidOption("errorsPath", path, takes) from None
    return filesystem, folder


def _count(row: Given) -> int:
    return 1 if isinstance(row, Row) else row.count


def _chunks(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    chunk, size = list[pa.RecordBatch](), 0
    for batch in batches:
        chunk.append(batch)
        size += batch.nbytes + ROW_BYTES * len(batch)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
