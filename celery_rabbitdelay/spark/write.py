"""A write: each partition is sent by an executor, and Spark's commit lets all tasks run.

With a registry, a write is a job: the executors open it, its tasks do not run before Spark commits,
and none of them does if Spark aborts. So a partition that was sent twice, or only half, is no harm.
Without a registry, each task is sent at least once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from uuid import uuid4

import celery
from pyspark import TaskContext
from pyspark.errors import PythonException
from pyspark.sql import DataFrame
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.spark.application import (
    STREAMS_BATCHES,
    StreamWriterBase,
    application_of,
    explained,
    find_task,
)
from celery_rabbitdelay.spark.columns import Columns, TaskIds, is_case_sensitive, numbers_taken
from celery_rabbitdelay.spark.grouped import Grouping
from celery_rabbitdelay.spark.grouped_columns import (
    GroupedColumns,
    columns_of,
    planned_columns_of,
)
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import PartitionSender, Sent, check_folder

#: The row that each partition returns: its :class:`.Sent` as JSON.
SCHEMA: Final = "sent string"


@dataclass(frozen=True)
class Dispatched:
    """The report of :func:`dispatch`.

    Attributes:
        partitions: The reports of the partitions, in the order of their numbers.
        job: The job of the registry; None without one.
        rows: How many rows there were.
        confirmed: How many rows RabbitMQ has confirmed.
        known: Of how many rows the registry knew the task's id before this write sent it: the task
            has arrived or is cancelled, or it waits and is tracked or has a key. Others that wait
            are not known, though only one message of each runs. Looked up with ``jobId`` or a
            column ``task_id``; other ids are new.
        messages: In how many messages.
        envelopes: How many of these hold several rows.
        resent: How often a message was published again.
        dropped: How many rows were not sent since their time had passed (``past = "drop"``).
        refused: How many rows were refused, by the name of the error.
    """

    partitions: tuple[Sent, ...]
    job: str | None
    rows: int
    confirmed: int
    known: int
    messages: int
    envelopes: int
    resent: int
    dropped: int
    refused: Counter[str]

    @classmethod
    def of(cls, found: Iterable[Sent], job: str | None) -> Self:
        """Return the sums of the reports of partitions."""
        partitions = tuple(sorted(found, key=lambda each: each.partition))
        counts = ("rows", "confirmed", "known", "messages", "envelopes", "resent", "dropped")
        sums = {name: sum(getattr(each, name) for each in partitions) for name in counts}
        refused = sum((each.refused for each in partitions), Counter[str]())
        return cls(partitions, job, **sums, refused=refused)

    def __str__(self) -> str:
        lines = [
            f"{self.confirmed:,} of {self.rows:,} rows confirmed, in {self.messages:,} messages",
            f"{self.envelopes:,} of these are envelopes; {self.resent:,} resent",
            *([f"{self.known:,} of the ids were known already"] if self.known else []),
            *([f"{self.dropped:,} dropped: past"] if self.dropped else []),
            *(f"{number:,} refused: {name}" for name, number in self.refused.most_common()),
            f"{'partition':>9} {'rows':>12} {'confirmed':>12} {'messages':>12} {'rows/s':>10}",
        ]
        for each in self.partitions:
            rate = each.confirmed / each.seconds if each.seconds else 0.0
            lines.append(
                f"{each.partition:9} {each.rows:12,} {each.confirmed:12,} {each.messages:12,} "
                f"{rate:10,.0f}"
            )
        return "\n".join(lines)


#: An error of this package, with its notes, in the text of Spark's own.
OURS: Final = re.compile(
    r"^celery_rabbitdelay\.exceptions\.\w+: .*?(?=^\s*(?:at |SQLSTATE)|\Z)",
    re.DOTALL | re.M,
)


def dispatch(
    frame: DataFrame,
    task: str | celery.Task[Any, Any] | None = None,
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
    is_sensitive = is_case_sensitive(frame)
    if group or (group is None and checked.tolerance > 0):
        grouping = Grouping(frame.schema, checked._replace(job_id=job_id), is_sensitive)
        if grouping.refusal is None:
            frame = grouping.of(frame)
        elif group:
            raise grouping.refusal
    columns = columns_of(frame.schema, checked, is_sensitive)
    writer = BatchWriter(frame.schema, checked, columns, job_id)

    def send(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"sent": [writer.write(batches).as_json()]})

    try:
        found = [Sent.of_json(row.sent) for row in frame.mapInArrow(send, SCHEMA).collect()]
    except BaseException as error:  # an interrupt as well: no task of an aborted job runs
        writer.abort([])
        if "ModuleNotFoundError" in str(error):
            error.add_note(
                "Spark runs PYSPARK_PYTHON, or python3 of the PATH: set PYSPARK_PYTHON, before "
                "Spark starts, to a Python that has this package and the application."
            )
        if ours := OURS.search(str(error)):
            # Spark's own text begins with tracebacks.
            raise PythonException(ours[0]) from error
        raise
    writer.commit(found)
    return Dispatched.of(found, writer.job)


#: The properties that Spark sets for the tasks of a stream: which batch, of which query, in which
#: run of it.
BATCH_ID: Final = "streaming.sql.batchId"
QUERY_ID: Final = "sql.streaming.queryId"
RUN_ID: Final = "spark.jobGroup.id"


class _Write:
    """The part that the writers of a batch and of a stream share; pickled for the executors.

    Args:
        schema: The schema of the rows.
        options: The options.
        columns: What reads the rows.

    Attributes:
        has_registry: Whether a write is a job.

    Raises:
        InvalidColumn: The schema does not fit.
        InvalidOption: The application cannot be imported, or does not know the task, or the task
            does not take these arguments.
    """

    def __init__(
        self, schema: StructType, options: WriteOptions, columns: Columns | GroupedColumns
    ) -> None:
        self._schema = schema
        self._options = options
        types = columns.types
        app = application_of(options.application)
        if options.task is not None:
            task = find_task(app, options.task, options.allow_unknown_tasks)
            if task is not None and "task" not in types:
                numbers_taken(task, types, options.kwargs_from_columns)
        if options.errors_path is not None:
            check_folder(options.errors_path)
        self.has_registry = bool(app.rabbitdelay.has_registry)
        if self.has_registry:
            return
        takes = "takes a registry: set rabbitdelay_registry_url, or the option registry"
        if "key" in types:
            raise exceptions.InvalidColumn("key", types["key"].simpleString(), takes)
        for name, value in (("job", options.job), ("maxRate", options.max_rate)):
            if value is not None:
                raise exceptions.InvalidOption(name, str(value), takes)

    def send(
        self,
        given: Iterator[Any],
        ids: TaskIds,
        job: str,
        began_ms: int,
        in_batches: bool = True,
    ) -> Sent:
        """Send the rows of one partition; runs in an executor.

        Args:
            given: Arrow batches, or Spark's rows.
            ids: Derives the tasks' ids.
            job: The write's name, which is its job if there is a registry.
            began_ms: Rows that were due before that are past, in milliseconds since 1970-01-01 UTC.
            in_batches: Which of them.
        """
        app = application_of(self._options.application)
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        attempt = 0 if context is None else context.attemptNumber()
        columns = columns_of(self._schema, self._options, is_case_sensitive())
        try:
            if self.has_registry and self._options.job is None:
                self._open(app, job)
            told = (job, self.has_registry, partition, attempt, began_ms)
            sender = PartitionSender(app, columns, self._options, ids, *told)
            return sender.send(columns.taken(given, in_batches))
        except Exception as error:
            # Spark does not say of which partition.
            where = f"This was partition {partition} of the write, whose rows are counted from 0"
            dropped = ", without those that were dropped" if self._options.past == "drop" else ""
            error.add_note(f"{where}{dropped}.")
            raise
        finally:
            # In order: Spark ends its Python processes without a word.
            app.rabbitdelay.close()

    def end(self, messages: Sequence[WriterCommitMessage | None], job: str, commits: bool) -> None:
        """Commit or abort the job; runs in the driver.

        Raises:
            JobClosed: It has expired, so none of its tasks runs.
            RegistryUnavailable: Redis does not answer at the commit; the job expires.
        """
        app = application_of(self._options.application)
        if not self.has_registry or self._options.job is not None:
            return
        try:
            if not commits:
                # The user gets the error that ended the write; without Redis, the job expires.
                with suppress(exceptions.RegistryUnavailable):
                    # An executor that still sends, or begins to, must not find an open job.
                    self._open(app, job)
                    app.rabbitdelay.abort_job(job)
            elif any(isinstance(each, Sent) and each.rows for each in messages):
                app.rabbitdelay.commit_job(job)
        finally:
            app.rabbitdelay.close()

    def _open(self, app: Celery, job: str) -> None:
        """Open the job, unless another executor has.

        Raises:
            JobClosed: It was aborted already, or has expired.
        """
        jobs = app.rabbitdelay.registry.jobs
        try:
            jobs.open(job, milliseconds(self._options.job_expires))
        except exceptions.JobClosed as there:
            if there.state != JobState.OPEN.value:
                raise


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of one DataFrame.

    Args:
        schema: The schema of the rows.
        options: The options.
        columns: What reads the rows; None where Spark plans a write.
        job_id: What ids are derived from; None for what the options say, or a random one.

    Attributes:
        application: The application.
        job: The job of the registry; None without one.
    """

    def __init__(
        self,
        schema: StructType,
        options: WriteOptions,
        columns: Columns | GroupedColumns | None = None,
        job_id: str | None = None,
    ) -> None:
        self.application = options.application
        columns = columns or planned_columns_of(schema, options)
        self._write = _Write(schema, options, columns)
        self._began_ms = wall_clock.ms()
        job_id = job_id or options.job_id or str(uuid4())
        self._ids = TaskIds(job_id)
        # A job that was written before may be written again.
        self._job = options.job or f"spark:{job_id}:{uuid4().hex}"
        self.job = self._job if self._write.has_registry else None

    @explained
    def write(self, iterator: Iterator[Any]) -> Sent:
        """Send the rows of one partition."""
        return self._write.send(iterator, self._ids, self._job, self._began_ms)

    @explained
    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let the tasks run: all partitions are sent."""
        self._write.end(messages, self._job, commits=True)

    @explained
    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Let no task run: a partition has failed."""
        self._write.end(messages, self._job, commits=False)


class StreamWriter(StreamWriterBase):
    """Writes the micro-batches of a query; each is a job.

    Args:
        schema: The schema of the rows.
        options: The options.

    Attributes:
        application: The application.
    """

    def __init__(self, schema: StructType, options: WriteOptions) -> None:
        self.application = options.application
        self._write = _Write(schema, options, planned_columns_of(schema, options))
        self._options = options

    @explained
    def write(self, iterator: Iterator[Any]) -> Sent:
        """Send the rows of one partition of a batch."""
        context = TaskContext.get()
        assert context is not None, "a stream is written by Spark's tasks"
        batch, query, run = map(context.getLocalProperty, (BATCH_ID, QUERY_ID, RUN_ID))
        batch_of_query = f"{self._options.job_id or query}:{batch}"
        # A batch whose run was killed is written again by the next run, as another job.
        job = self._options.job or f"spark:{batch_of_query}:{run}"
        ids, now_ms = TaskIds(batch_of_query), wall_clock.ms()
        return self._write.send(iterator, ids, job, now_ms, STREAMS_BATCHES)

    @explained
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Let the tasks of a batch run."""
        self._end(messages, commits=True)

    @explained
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Let no task of a batch run."""
        self._end(messages, commits=False)

    def _end(self, messages: list[WriterCommitMessage | None], commits: bool) -> None:
        # Only the executors know the batch's job, which is the same for all of them.
        for job in {each.job for each in messages if isinstance(each, Sent)}:
            self._write.end(messages, job, commits)
