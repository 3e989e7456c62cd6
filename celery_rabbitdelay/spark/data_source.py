"""The format ``rabbitdelay`` of Spark: ``df.write.format("rabbitdelay")`` and ``spark.read``.

A read returns the registry's tracked tasks, the levels' queues, or the undeliverable messages.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import pairwise
from typing import ClassVar, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.exceptions import InvalidOption
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.operations import undeliverable as messages
from celery_rabbitdelay.publishing import kombu_internals
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.registry.index import Filter, Index
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.spark.application import application_of, brief, briefly, tracks
from celery_rabbitdelay.spark.options import ReadOptions, WriteOptions
from celery_rabbitdelay.spark.write import Writer

#: The values that readers yield.
Rows: TypeAlias = "Iterator[tuple[object, ...] | pa.RecordBatch]"


class RabbitDelayDataSource(DataSource):
    """Writes delayed tasks, and reads waiting tasks. Spark finds this class by the format's name.

    The options are the attributes of :class:`.WriteOptions` and :class:`.ReadOptions`, in camel
    case.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "rabbitdelay"

    @briefly
    def schema(self) -> str:
        """Return the columns of a read."""
        return READERS[ReadOptions.of(self.options).what].columns

    @briefly
    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader."""
        options = ReadOptions.of(self.options)
        return READERS[options.what](options)

    @briefly
    def writer(self, schema: StructType, overwrite: bool) -> Writer:
        """Return the writer of a DataFrame.

        Raises:
            InvalidOption: An option is invalid, or the mode is overwrite.
            InvalidColumn: The schema is invalid.
        """
        if overwrite:
            raise InvalidOption("mode", "overwrite", "takes append: tasks cannot be overwritten")
        return Writer(schema, WriteOptions.of(self.options))

    @briefly
    def streamWriter(self, schema: StructType, overwrite: bool) -> Writer:  # noqa: N802
        """Return the writer of a stream.

        Raises:
            InvalidOption: An option is invalid, or the output mode is complete.
            InvalidColumn: The schema is invalid.
        """
        if overwrite:
            raise InvalidOption("outputMode", "complete", "takes append or update")
        return Writer(schema, WriteOptions.of(self.options), is_stream=True)


class _Reader(DataSourceReader):
    """Reads one kind of rows.

    Args:
        options: The options.

    Attributes:
        columns: The columns, as Spark's DDL.
    """

    columns: ClassVar[str]

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Rows:
        """Yield the rows of a partition, or batches of Arrow."""
        try:
            app = application_of(self._options.application)
            with closing(app.rabbitdelay):
                yield from self._rows(app, partition)
        except Exception as error:  # noqa: BLE001 - raised again
            raise brief(error) from None

    @abstractmethod
    def _rows(self, app: Celery, partition: InputPartition) -> Rows: ...


#: The precision of the bounds between partitions: a second.
BOUND_MS: Final = 1000

#: The longest time from the first due time to the last, in milliseconds: a hundred years.
MAX_SPAN_MS: Final = 100 * 366 * 86_400_000


class PendingReader(_Reader):
    """Reads the tracked tasks that wait."""

    columns = "task_id string, task string, due timestamp, key string, job string, job_state string"

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._wanted = Filter(options.task, options.key, options.job)

    @briefly
    def partitions(self) -> Sequence[InputPartition]:
        """Divide the tasks by their due times into parts of about the same size."""
        app, wanted = application_of(self._options.application), self._wanted
        with closing(app.rabbitdelay):
            index = app.rabbitdelay.registry.index
            if not (tracks(app) or index.count(Filter())):
                takes = "lists tracked tasks, but no task is tracked: set rabbitdelay_track"
                raise InvalidOption("what", "pending", takes)
            bounds = _bounds(index, wanted, self._options.partitions)
        edges = [wanted.due_after_ms, *bounds, wanted.due_before_ms]
        return [
            InputPartition(wanted._replace(due_after_ms=after, due_before_ms=before))
            for after, before in pairwise(edges)
        ]

    def _rows(self, app: Celery, partition: InputPartition) -> Rows:
        """Yield the tasks of a part in the order in which they are due."""
        registry = app.rabbitdelay.registry
        for part in registry.index.parts(partition.value):
            states = registry.jobs.states({(each.job, "") for each in part.tasks if each.job})
            for each in part.tasks:
                state = states.get((each.job or "", ""))
                shown = state.value if isinstance(state, JobState) else None
                yield (each.task_id, each.task, each.due, each.key, each.job, shown)


def _bounds(index: Index, wanted: Filter, parts: int) -> list[int]:
    """Return the due times that separate the parts, found by counting tasks."""
    total = index.count(wanted)
    if total < parts or parts == 1:
        return []
    first = wanted.due_after_ms or milliseconds_of(next(index.pending(wanted)).due)
    instants = range(first, wanted.due_before_ms or first + MAX_SPAN_MS, BOUND_MS)

    def due_before(instant_ms: int) -> int:
        return index.count(wanted._replace(due_before_ms=instant_ms))

    shares = (total * part // parts for part in range(1, parts))
    found = {bisect_left(instants, share, key=due_before) for share in shares}
    return [instants[number] for number in sorted(found) if number < len(instants)]


class LevelsReader(_Reader):
    """Reads how many messages wait in each queue of the levels."""

    columns = "level string, queue string, wait_ms bigint, messages bigint"

    def _rows(self, app: Celery, partition: InputPartition) -> Rows:
        """Yield the queues from the longest wait to the shortest."""
        queues = app.rabbitdelay.topology.digit_queues
        with kombu_internals.closing(app.connection_for_write()) as connection:
            counts = queue_counts(connection, queues)
        for queue in queues:
            found = counts[queue.name]
            level, _, _ = queue.name.rpartition(".")
            wait_ms = (queue.queue_arguments or {})["x-message-ttl"]
            yield (level, queue.name, wait_ms, None if found is None else found.messages)


#: The columns of the undeliverable messages, and their types for Arrow.
UNDELIVERABLE: Final = (
    "task_id string, task string, queue string, due timestamp, reason string, last_stop string, "
    "since timestamp, headers string, body binary, size bigint"
)
ARROW: Final = {
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "bigint": pa.int64(),
}

#: The maximum number of rows in a batch, and the bytes of message bodies that end a batch.
BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 8_000_000


class UndeliverableReader(_Reader):
    """Reads the undeliverable messages in one partition: a queue can only be read from its head."""

    columns = UNDELIVERABLE

    def _rows(self, app: Celery, partition: InputPartition) -> Rows:
        """Yield the messages in batches of Arrow."""
        limit, topology = self._options.limit or messages.LIMIT, app.rabbitdelay.topology
        with kombu_internals.closing(app.connection_for_read()) as connection:
            yield from batches(messages.undeliverable_messages(connection, topology, limit))


def batches(found: Iterable[messages.UndeliverableMessage]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of messages in batches of Arrow."""
    columns = [each.split() for each in UNDELIVERABLE.split(", ")]
    schema = pa.schema([(name, ARROW[kind]) for name, kind in columns])
    rows, size = list[dict[str, object]](), 0
    for message in found:
        rows.append(_row(message))
        size += len(message.body)
        if len(rows) == BATCH_ROWS or size >= BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(rows, schema)
            rows, size = [], 0
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema)


def _row(message: messages.UndeliverableMessage) -> dict[str, object]:
    found, encoding = asdict(message.found), ("utf-8", "backslashreplace")
    # py-amqp reads lone surrogates, which UTF-8 cannot express.
    texts = {name: text for name, text in found.items() if isinstance(text, str)}
    found |= {name: text.encode(*encoding).decode() for name, text in texts.items()}
    headers = messages.headers_as_json(message.headers)
    return {**found, "headers": headers, "body": message.body, "size": len(message.body)}


READERS: Final[dict[str, type[_Reader]]] = {
    "pending": PendingReader,
    "levels": LevelsReader,
    "undeliverable": UndeliverableReader,
}
