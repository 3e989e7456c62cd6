"""A write: each partition is sent by an executor, and Spark's commit lets all tasks run.

With a registry, a write is a job: the executors open it, its tasks do not run before Spark commits,
and none of them does if Spark aborts. So a partition that was sent twice, or only half, is no harm.
Without a registry, each task is sent at least once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, datasource
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.spark import application, columns
from celery_rabbitdelay.spark.columns import Batch, Columns, TaskIds
from celery_rabbitdelay.spark.grouped import Grouping
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import Counts, PartitionSender, Sent, folder_of

#: Whether the writer of a stream gets batches of Arrow, and not rows (PySpark 4.1).
STREAMS_BATCHES: Final = hasattr(datasource, "DataSourceStreamArrowWriter")

if TYPE_CHECKING or STREAMS_BATCHES:
    StreamWriterBase = datasource.DataSourceStreamArrowWriter
else:
    StreamWriterBase = datasource.DataSourceStreamWriter

#: How many rows of a stream are read together where Spark hands on single rows.
ROWS_TOGETHER: Final = 10_000


@dataclass
class Dispatched(Counts):
    """The report of :func:`dispatch`, with the sums of :class:`.Counts`.

    Attributes:
        partitions: The reports of the partitions, in the order of their numbers.
        job: The job of the registry; None without one.
    """

    partitions: Sequence[Sent]
    job: str | None

    def __str__(self) -> str:
        names = ("rows", "confirmed", "messages", "envelopes", "resent", "known", "dropped")
        lines = ["".join(f"{title:>12}" for title in ("partition", *names))]
        for label, report in [*((each.partition, each) for each in self.partitions), ("all", self)]:
            counts = "".join(f"{getattr(report, name):12,}" for name in names)
            lines.append(f"{label:>12}{counts}")
        refused = self.refused.most_common()
        return "\n".join([*lines, *(f"{number:,} refused: {name}" for name, number in refused)])


def dispatch(
    frame: DataFrame,
    task: str | application.CeleryTask | None = None,
    *,
    group: bool | None = None,
    **options: Any,
) -> Dispatched:
    """Send a task for each row of a DataFrame, as the format ``rabbitdelay`` does.

    Args:
        frame: The rows; see the guide for its columns.
        task: The task or its name, if there is no such column. Without ``app`` and ``broker``, a
            task is sent by its own application, which executors import.
        group: Whether Spark brings together what is due together, as :func:`.grouped` does. None:
            if there is a tolerance, and the columns can be grouped.
        **options: The options of a write.

    Returns:
        The report. With a registry, the tasks run from now on; without one, they do as soon as they
        are sent.

    Raises:
        InvalidOption: An option is wrong, or tasks cannot be grouped.
        InvalidColumn: The schema does not fit, or cannot be grouped.
        pyspark.errors.PySparkException: A partition failed. With a registry, no task runs.
    """
    checked = WriteOptions.of_call(options if task is None else {**options, "task": task})
    # The rows that Spark writes have ids of the same job as the others.
    job_id = checked.job_id or str(uuid4())
    is_sensitive = columns.is_case_sensitive(frame)
    if group or (group is None and checked.tolerance > 0):
        try:
            frame = Grouping(frame.schema, checked._replace(job_id=job_id), is_sensitive).of(frame)
        except (exceptions.InvalidColumn, exceptions.InvalidOption):
            if group:
                raise
    Columns(frame.schema, checked, is_sensitive)  # checks more than what plans a write can
    writer = BatchWriter(frame.schema, checked, job_id)

    def send(batches: Iterator[Batch]) -> Iterator[Batch]:
        sent = json.dumps(vars(writer.write(batches)))
        yield pa.RecordBatch.from_pydict({"sent": [sent]})

    try:
        rows = frame.mapInArrow(send, "sent string").collect()
    except BaseException:  # an interrupt as well: no task of an aborted job runs
        writer.abort([])
        raise
    found = [Sent(**json.loads(row.sent)) for row in rows]
    writer.commit(found)
    report = Dispatched(sorted(found, key=lambda each: each.partition), writer.job)
    for each in found:
        report.add(each)
    return report


#: The properties that Spark sets for the tasks of a stream: which batch, of which query, in which
#: run of it.
OF_STREAM: Final = ("streaming.sql.batchId", "sql.streaming.queryId", "spark.jobGroup.id")


class _Writer:
    """The part that the writers of a batch and of a stream share; pickled for the executors.

    Args:
        schema: The schema of the rows.
        options: The options.

    Raises:
        InvalidColumn: The schema does not fit.
        InvalidOption: The application cannot be imported, or does not know the task, or the task
            does not take these arguments.
    """

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        self._schema = schema
        self._options = options
        types = Columns.planned(schema, options).types
        app = application.application_of(options.application)
        task = application.find_task(app, options.task, options.allow_unknown_tasks)
        if "task" not in types:
            application.numbers_taken(task, types, options)
        if options.errors_path is not None:
            folder_of(options.errors_path)
        self._has_registry = app.rabbitdelay.has_registry
        if self._has_registry:
            return
        takes = "takes a registry: set rabbitdelay_registry_url, or the option registry"
        if "key" in types:
            raise exceptions.InvalidColumn("key", types["key"].simpleString(), takes)
        for name, value in (("job", options.job), ("maxRate", options.max_rate)):
            if value is not None:
                raise exceptions.InvalidOption(name, str(value), takes)

    def _send(self, batches: Iterator[Batch], ids: TaskIds, job: str, began_ms: int) -> Sent:
        """Send the rows of one partition; runs in an executor.

        Args:
            batches: The rows.
            ids: Derives the tasks' ids.
            job: The write's name, which is its job if there is a registry.
            began_ms: Rows that were due before that are past, in milliseconds since 1970-01-01 UTC.
        """
        app, options = application.application_of(self._options.application), self._options
        found = Columns(self._schema, options, columns.is_case_sensitive())
        # Closed in order: Spark ends its Python processes without a word.
        with closing(app.rabbitdelay):
            if self._has_registry and options.job is None:
                self._open(app, job)
            sender = PartitionSender(app, found, options, job, self._has_registry, began_ms)
            return sender.send(batches, ids)

    def _end(
        self, messages: Sequence[WriterCommitMessage | None], jobs: Collection[str], commits: bool
    ) -> None:
        """Commit or abort the jobs; runs in the driver.

        Raises:
            JobClosed: One has expired, so none of its tasks runs.
            RegistryUnavailable: Redis does not answer at the commit; the job expires.
        """
        app = application.application_of(self._options.application)
        if not self._has_registry or self._options.job is not None:
            return
        with closing(app.rabbitdelay):
            for job in jobs:
                if commits and any(isinstance(each, Sent) and each.rows for each in messages):
                    app.rabbitdelay.commit_job(job)
                elif not commits:
                    # The user gets the error that ended the write; without Redis, the job expires.
                    with suppress(exceptions.RegistryUnavailable):
                        # An executor that still sends, or begins to, must not find an open job.
                        self._open(app, job)
                        app.rabbitdelay.abort_job(job)

    def _open(self, app: Celery, job: str) -> None:
        """Open the job, unless another executor has.

        Raises:
            JobClosed: It was aborted already, or has expired.
        """
        try:
            app.rabbitdelay.registry.jobs.open(job, milliseconds(self._options.job_expires))
        except exceptions.JobClosed as there:
            if there.state != JobState.OPEN.value:
                raise


class BatchWriter(_Writer, datasource.DataSourceArrowWriter):
    """Writes the rows of one DataFrame.

    Args:
        schema: The schema of the rows.
        options: The options.
        job_id: What ids are derived from; None for what the options say, or a random one.

    Attributes:
        job: The job of the registry; None without one.
    """

    def __init__(
        self, schema: StructType, options: WriteOptions, job_id: str | None = None
    ) -> None:
        super().__init__(schema, options)
        self._began_ms = wall_clock.ms()
        job_id = job_id or options.job_id or str(uuid4())
        self._ids = TaskIds(job_id)
        # A job that was written before may be written again.
        self._job = options.job or f"spark:{job_id}:{uuid4().hex}"
        self.job = self._job if self._has_registry else None

    @application.briefly
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Send the rows of one partition."""
        return self._send(iterator, self._ids, self._job, self._began_ms)

    @application.briefly
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let the tasks run: all partitions are sent."""
        self._end(messages, {self._job}, commits=True)

    @application.briefly
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let no task run: a partition has failed."""
        self._end(messages, {self._job}, commits=False)


class StreamWriter(_Writer, StreamWriterBase):
    """Writes the micro-batches of a query; each is a job."""

    @application.briefly
    def write(self, iterator: Iterator[Any]) -> Sent:
        """Send the rows of one partition of a batch."""
        context = TaskContext.get()
        assert context is not None, "a stream is written by Spark's tasks"
        batch, query, run = map(context.getLocalProperty, OF_STREAM)
        batch_of_query = f"{self._options.job_id or query}:{batch}"
        # A batch whose run was killed is written again by the next run, as another job.
        job = self._options.job or f"spark:{batch_of_query}:{run}"
        if not STREAMS_BATCHES:
            rows = iterator
            iterator = iter(lambda: list(islice(rows, ROWS_TOGETHER)), [])
        return self._send(iterator, TaskIds(batch_of_query), job, wall_clock.ms())

    @application.briefly
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Let the tasks of a batch run."""
        self._end(messages, _jobs(messages), commits=True)

    @application.briefly
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Let no task of a batch run."""
        self._end(messages, _jobs(messages), commits=False)


def _jobs(messages: Sequence[WriterCommitMessage | None]) -> set[str]:
    # Only the executors know a batch's job, which is the same for all of them.
    return {each.job for each in messages if isinstance(each, Sent)}
