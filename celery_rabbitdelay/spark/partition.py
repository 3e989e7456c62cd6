"""The rows of one partition go through ``send_many``; refused rows fail it, or are collected."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Final
from uuid import uuid4

from kombu.exceptions import EncodeError
from kombu.utils.json import dumps
from pyspark.sql.datasource import WriterCommitMessage

from celery_rabbitdelay.app.rows import Report, Row
from celery_rabbitdelay.exceptions import InvalidEnvelope, MessageRefused, RowsNotConfirmed
from celery_rabbitdelay.spark.application import know_queue
from celery_rabbitdelay.spark.columns import Columns, Shared, Taken
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.task_ids import TaskIds

__all__ = ["PartitionSender", "Sent"]

#: Rows that are kept in memory, where rows differ in their task or queue, or refused ones are
#: collected. Only these share envelopes.
CHUNK_ROWS: Final = 200_000

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
        columns: Columns,
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
        self._refused_lines: list[str] = []

    def send(self, taken: Iterator[Taken]) -> Sent:
        """Send rows; the broker has confirmed all of them on return.

        Raises:
            RowsNotConfirmed: Rows were not confirmed, and are not collected.
            InvalidRow: A row is invalid, likewise.
        """
        if self._columns.are_shared and not self._options.collects:
            self._send_all(taken)
        else:
            while chunk := list(islice(taken, CHUNK_ROWS)):
                self._send_chunk(chunk)
        self._write_refused()
        return self._sent

    def _send_all(self, taken: Iterator[Taken]) -> None:
        """Send rows that need not be kept."""
        first = next(taken, None)
        if first is not None:
            self._send_many(first.shared, map(self._row, chain([first], taken)))

    def _row(self, taken: Taken) -> Row:
        self._sent.rows += 1
        if taken.row is None:
            assert taken.error is not None
            raise taken.error
        if taken.row.task_id is not None:
            return taken.row
        return taken.row._replace(task_id=self._ids.of(taken.identity))

    def _send_chunk(self, chunk: list[Taken]) -> None:
        groups: dict[Shared, list[tuple[Taken, Row]]] = defaultdict(list)
        for each in chunk:
            try:
                row = self._row(each)
            except ROW_ERRORS as error:
                self._refuse(each, error)
            else:
                groups[each.shared].append((each, row))
        for shared, members in groups.items():
            while members:
                members = self._send_group(shared, members)

    def _send_group(
        self, shared: Shared, members: list[tuple[Taken, Row]]
    ) -> list[tuple[Taken, Row]]:
        """Send rows; return those that were not taken because many before them were refused."""
        try:
            self._send_many(shared, (row for _, row in members))
        except RowsNotConfirmed as failed:
            for number, error in failed.errors.items():
                if not self._options.collects or not isinstance(error, ROW_ERRORS):
                    raise
                self._refuse(members[number][0], error)
            return [] if failed.rest is None else members[failed.rest :]
        return []

    def _send_many(self, shared: Shared, rows: Iterable[Row]) -> None:
        delays = self._app.rabbitdelay
        know_queue(self._app, shared.queue)
        task = self._app.tasks.get(shared.task, shared.task)
        options = {**shared.options, **self._registered}
        try:
            report = delays.send_many(
                task,
                rows,
                tolerance=shared.tolerance,
                envelopes=self._options.envelopes,
                **options,
            )
        except RowsNotConfirmed as failed:
            self._sent.add(failed.report)
            raise
        self._sent.add(report)

    def _refuse(self, taken: Taken, error: Exception) -> None:
        if not self._options.collects:
            raise error
        self._sent.refused[type(error).__name__] += 1
        line = {
            "error": type(error).__name__,
            "reason": str(error),
            "identity": taken.identity,
            "row": None if taken.row is None else taken.row._asdict(),
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


def _json_line(fields: Mapping[str, Any]) -> str:
    try:
        return f"{dumps(fields)}\n"
    except (TypeError, ValueError):
        # It may have been refused because JSON cannot express it.
        return f"{json.dumps({name: repr(value) for name, value in fields.items()})}\n"
