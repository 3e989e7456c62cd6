"""The rows of one partition go through ``send_many``; refused rows fail it, or are collected."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from typing import Any, Final, Self, TypeAlias
from uuid import uuid4

from kombu.exceptions import EncodeError
from kombu.utils.json import dumps
from pyspark.sql.datasource import WriterCommitMessage

from celery_rabbitdelay.app.sending.rows import Report, Row, WrittenRows, one_by_one
from celery_rabbitdelay.exceptions import (
    InvalidEnvelope,
    InvalidOption,
    InvalidRow,
    MessageRefused,
    RowsNotConfirmed,
)
from celery_rabbitdelay.spark.application import find_task, know_queue
from celery_rabbitdelay.spark.columns import Columns, Shared, Taken, TaskIds
from celery_rabbitdelay.spark.grouped_columns import GroupedColumns
from celery_rabbitdelay.spark.options import WriteOptions

#: Rows that are kept in memory, where rows differ in their task or queue, or refused ones are
#: collected. Only these share envelopes.
CHUNK_ROWS: Final = 200_000

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
        messages: In how many messages.
        envelopes: How many of these hold several rows.
        resent: How often a message was published again.
        seconds: How long sending took.
        refused: How many rows were refused, by reason.
    """

    partition: int
    job: str
    rows: int = 0
    confirmed: int = 0
    messages: int = 0
    envelopes: int = 0
    resent: int = 0
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
        job: The job of the registry that all tasks belong to; empty without a registry.
        partition: The partition's number.
    """

    def __init__(
        self,
        app: Any,
        columns: Columns | GroupedColumns,
        options: WriteOptions,
        ids: TaskIds,
        job: str,
        partition: int,
    ) -> None:
        self._app = app
        self._columns = columns
        self._options = options
        self._ids = ids
        self._registered = {"job": job, "once": True} if job else {}
        self._sent = Sent(partition, job)
        self._tasks: dict[str, Any] = {}
        self._refused_lines: list[str] = []

    def send(self, taken: Iterator[Taken | WrittenRows]) -> Sent:
        """Send rows; the broker has confirmed all of them on return.

        Raises:
            RowsNotConfirmed: Rows were not confirmed, and are not collected.
            InvalidRow: A row is invalid, likewise.
        """
        if self._columns.are_shared and not self._options.collects:
            self._send_all(taken)
        else:
            for chunk in _chunks(taken):
                self._send_chunk(chunk)
        self._write_refused()
        return self._sent

    def _send_all(self, taken: Iterator[Taken | WrittenRows]) -> None:
        """Send rows that need not be kept."""
        first = next(taken, None)
        if first is not None:
            self._send_many(self._columns.shared, map(self._row, chain([first], taken)))

    def _row(self, taken: Taken | WrittenRows) -> Row | WrittenRows:
        self._sent.rows += _count(taken)
        if isinstance(taken, WrittenRows):
            return taken
        if taken.row is None:
            assert taken.error is not None
            raise taken.error
        if isinstance(unknown := self._task(taken.shared.task), InvalidOption):
            raise InvalidRow({"task": taken.shared.task}, f"its task {unknown.takes}")
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
                self._refuse(each.identity, each.row, error)
            else:
                shared = self._columns.shared if isinstance(each, WrittenRows) else each.shared
                groups[shared].append((each, row))
        for shared, members in groups.items():
            while members:
                members = self._send_group(shared, members)

    def _send_group(self, shared: Shared, members: list[Member]) -> list[Member]:
        """Send rows; return those that were not taken because many before them were refused."""
        try:
            self._send_many(shared, (row for _, row in members))
        except RowsNotConfirmed as failed:
            # The number of each member's first row.
            numbers = list(accumulate((_count(row) for _, row in members), initial=0))
            for number, error in failed.errors.items():
                if not self._options.collects or not isinstance(error, ROW_ERRORS):
                    raise
                member = bisect_right(numbers, number) - 1
                taken, row = members[member]
                if isinstance(taken, Taken):
                    self._refuse(taken.identity, taken.row, error)
                else:
                    nth = next(islice(one_by_one([row]), number - numbers[member], None))
                    self._refuse([], nth, error)
            return [] if failed.rest is None else members[numbers.index(failed.rest) :]
        return []

    def _send_many(self, shared: Shared, rows: Iterable[Row | WrittenRows]) -> None:
        delays = self._app.rabbitdelay
        know_queue(self._app, shared.queue)
        options = {**shared.options, **self._registered}
        try:
            report = delays.send_many(
                self._task(shared.task),
                self._paced(rows),
                tolerance=shared.tolerance,
                envelopes=self._options.envelopes,
                **options,
            )
        except RowsNotConfirmed as failed:
            self._sent.add(failed.report)
            raise
        self._sent.add(report)

    def _paced(self, rows: Iterable[Row | WrittenRows]) -> Iterator[Row | WrittenRows]:
        """Yield rows when their time has come, if there is a rate that all partitions share."""
        rate = self._options.max_rate
        if rate is None:
            yield from rows
            return
        registry, reserved = self._app.rabbitdelay.registry, 0
        for row in rows:
            if reserved < _count(row):
                number = max(_count(row), int(rate * RESERVED_FOR))
                time.sleep(registry.reserve(self._sent.job, number, rate))
                reserved += number
            reserved -= _count(row)
            yield row

    def _refuse(self, identity: Sequence[Any], row: Any, error: Exception) -> None:
        if not self._options.collects:
            raise error
        self._sent.refused[type(error).__name__] += 1
        line = {
            "error": type(error).__name__,
            "reason": str(error),
            "identity": identity,
            "row": row._asdict() if isinstance(row, Row) else row,
        }
        self._refused_lines.append(_json_line(line))

    def _write_refused(self) -> None:
        path = self._options.errors_path
        if path is None or not self._refused_lines:
            return
        from pyarrow import fs

        filesystem, folder = fs.FileSystem.from_uri(path)
        filesystem.create_dir(folder, recursive=True)
        # A random name: Spark may run the same partition again.
        name = f"part-{self._sent.partition:05}-{uuid4()}.json"
        with filesystem.open_output_stream(f"{folder}/{name}") as file:
            file.write("".join(self._refused_lines).encode())


def _count(row: Row | Taken | WrittenRows) -> int:
    return row.count if isinstance(row, WrittenRows) else 1


def _chunks(taken: Iterator[Taken | WrittenRows]) -> Iterator[list[Taken | WrittenRows]]:
    chunk: list[Taken | WrittenRows] = []
    left = CHUNK_ROWS
    for each in taken:
        chunk.append(each)
        left -= _count(each)
        if left <= 0:
            yield chunk
            chunk, left = [], CHUNK_ROWS
    if chunk:
        yield chunk


def _json_line(fields: Mapping[str, Any]) -> str:
    try:
        return f"{dumps(fields)}\n"
    except (TypeError, ValueError):
        # It may have been refused because JSON cannot express it.
        return f"{json.dumps({name: repr(value) for name, value in fields.items()})}\n"
