"""Writes rows: an executor sends each partition, and Spark's commit lets all tasks run.

With a registry, a write is a job, which the executors open. The job's tasks run only after Spark
commits, and never if Spark aborts. So Spark may send a partition twice or only in part without
harm. Without a registry, each task is sent at least once.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, datasource
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import DataType, StructType

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.spark import application
from celery_rabbitdelay.spark.columns import Columns, TaskIds
from celery_rabbitdelay.spark.grouped import Grouping
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import Counts, PartitionReport, PartitionSender, folder_of


@dataclass
class Dispatched(Counts):
    """The report of :func:`dispatch`, with the sums of :class:`.Counts`.

    Attributes:
        partitions: The reports of the partitions, in the order of their numbers.
        job: The job of the registry; None without a registry.
    """

    partitions: Sequence[PartitionReport]
    job: str | None

    def __str__(self) -> str:
        names = ("rows", "confirmed", "messages", "envelopes", "resent", "dropped")
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
        task: The task or its name, if there is no column ``task``. Without ``app`` and ``broker``,
            a task is sent by its own application, which executors import.
        group: Whether Spark groups tasks that are due together, as :func:`.grouped` does. None to
            group if there is a tolerance, and the columns allow it.
        **options: The options of a write.

    Returns:
        The report. With a registry, no task runs before all rows are sent; without a registry,
        tasks may run earlier.

    Raises:
        InvalidOption: An option is invalid, or tasks cannot be grouped.
        InvalidColumn: The schema is invalid, or cannot be grouped.
        pyspark.errors.PySparkException: A partition failed. With a registry, no task runs.
    """
    checked = WriteOptions.of_call(options if task is None else {**options, "task": task})
    # Ids are derived from the same job, whether Spark or Python writes a row.
    job_id = checked.job_id or str(uuid4())
    if group or (group is None and checked.tolerance > 0):
        try:
            frame = Grouping(frame.schema, checked._replace(job_id=job_id)).of(frame)
        except (exceptions.InvalidColumn, exceptions.InvalidOption):
            if group:
                raise
    writer = Writer(frame.schema, checked, job_id)

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"sent": [pickle.dumps(writer.write(batches))]})

    try:
        rows = frame.mapInArrow(send, "sent binary").collect()
    except BaseException:  # even an interrupt: no task of an aborted job runs
        writer.abort([])
        raise
    # Pickled by send, above.
    found: list[PartitionReport] = [pickle.loads(row.sent) for row in rows]  # noqa: S301
    writer.commit(found)
    report = Dispatched(sorted(found, key=lambda each: each.partition), writer.job)
    for each in found:
        report.add(each)
    return report


#: Spark's properties of the tasks of a stream: the batch, the query, and the run of the query.
OF_STREAM: Final = ("streaming.sql.batchId", "sql.streaming.queryId", "spark.jobGroup.id")

Messages: TypeAlias = Sequence[WriterCommitMessage | None]


class Names(NamedTuple):
    """The names that all tasks of a DataFrame, or of a micro-batch, share.

    Attributes:
        job_id: The text from which the ids of the tasks are derived.
        write: The name of the write, which is its job if there is a registry.
        began_ms: When the write began, in milliseconds since 1970-01-01 UTC: rows that were due
            earlier are past.
    """

    job_id: str
    write: str
    began_ms: int


class Writer(datasource.DataSourceArrowWriter, datasource.DataSourceStreamWriter):
    """Writes a DataFrame, or the micro-batches of a query, each as a job; pickled for executors.

    Spark also passes Arrow batches for a stream, because it first checks whether a writer takes
    Arrow batches.

    Args:
        schema: The schema of the rows.
        options: The options.
        job_id: The text from which ids are derived; None to use the text in the options, or a
            random text.
        is_stream: Whether the rows are a stream.

    Attributes:
        job: The job of the registry; None without a registry, and for a stream.

    Raises:
        InvalidColumn: The schema is invalid.
        InvalidOption: The application cannot be imported, or does not know the task, or the task
            does not take these arguments.
    """

    def __init__(
        self,
        schema: StructType,
        options: WriteOptions,
        job_id: str | None = None,
        is_stream: bool = False,
    ) -> None:
        self._schema = schema
        self._options = options
        types = Columns(schema, options).types
        app = application.application_of(options.application)
        task = application.find_task(app, options.task, options.allow_unknown_tasks)
        if "task" not in types:
            application.numbers_taken(task, types, options)
        if options.errors_path is not None:
            folder_of(options.errors_path)
        self._has_registry = app.rabbitdelay.has_registry
        if not self._has_registry:
            _refuse_what_needs_a_registry(types, options)
        self._of_batch: Names | None = None
        if not is_stream:
            job_id = job_id or options.job_id or str(uuid4())
            # A later write may use the same ``jobId``.
            write = options.job or f"spark:{job_id}:{uuid4().hex}"
            self._of_batch = Names(job_id, write, wall_clock.ms())
        self.job = self._of_batch.write if self._of_batch and self._has_registry else None
        self._opens_jobs = self._has_registry and options.job is None

    @application.briefly
    def write(self, iterator: Iterator[Any]) -> PartitionReport:
        """Send the rows of one partition, which come in batches of Arrow; runs in an executor."""
        names = self._of_batch or _of_micro_batch(self._options)
        app, options = application.application_of(self._options.application), self._options
        found = Columns(self._schema, options)
        # Close the connections, because Spark kills its Python processes.
        with closing(app.rabbitdelay):
            if self._opens_jobs:
                self._open(app, names.write)
            context = TaskContext.get()
            partition = 0 if context is None else context.partitionId()
            report = PartitionReport(partition, names.write if self._has_registry else "")
            sender = PartitionSender(app, found, options, names.write, names.began_ms, report)
            return sender.send(iterator, TaskIds(names.job_id))

    @application.briefly
    def commit(self, messages: Messages, batchId: int | None = None) -> None:  # noqa: N803
        """Commit the jobs, so that their tasks run: all partitions are sent.

        Raises:
            JobClosed: The job has expired, so its tasks do not run.
            RegistryUnavailable: Redis does not answer; the job expires.
        """
        app = application.application_of(self._options.application)
        jobs = {each.job for each in messages if isinstance(each, PartitionReport) and each.rows}
        with closing(app.rabbitdelay):
            for job in jobs if self._opens_jobs else ():
                app.rabbitdelay.commit_job(job)

    @application.briefly
    def abort(self, messages: Messages, batchId: int | None = None) -> None:  # noqa: N803
        """Abort the jobs, because a partition has failed; their tasks do not run."""
        app = application.application_of(self._options.application)
        # Only the executors know a micro-batch's job, which is the same for all executors.
        jobs = {each.job for each in messages if isinstance(each, PartitionReport)}
        if self.job is not None:
            jobs.add(self.job)
        # The user gets the error that ended the write; without Redis, the job expires.
        with closing(app.rabbitdelay), suppress(exceptions.RegistryUnavailable):
            for job in jobs if self._opens_jobs else ():
                # An executor that sends, or starts to send, must not find an open job.
                self._open(app, job)
                app.rabbitdelay.abort_job(job)

    def _open(self, app: Celery, job: str) -> None:
        """Open the job, unless another executor has opened it.

        Raises:
            JobClosed: The job was aborted already, or has expired.
        """
        try:
            app.rabbitdelay.registry.jobs.open(job, milliseconds(self._options.job_expires))
        except exceptions.JobClosed as there:
            if there.state != JobState.OPEN.value:
                raise


def _of_micro_batch(options: WriteOptions) -> Names:
    context = TaskContext.get()
    assert context is not None, "a stream is written by Spark's tasks"
    batch, query, run = map(context.getLocalProperty, OF_STREAM)
    job_id = f"{options.job_id or query}:{batch}"
    # A batch whose run was killed is written again by the next run, as another job.
    return Names(job_id, options.job or f"spark:{job_id}:{run}", wall_clock.ms())


def _refuse_what_needs_a_registry(types: Mapping[str, DataType], options: WriteOptions) -> None:
    takes = "needs a registry: set rabbitdelay_registry_url, or the option registry"
    if "key" in types:
        raise exceptions.InvalidColumn("key", types["key"].simpleString(), takes)
    for name, value in (("job", options.job), ("maxRate", options.max_rate)):
        if value is not None:
            raise exceptions.InvalidOption(name, str(value), takes)
