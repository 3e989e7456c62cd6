"""Reads the registry's tracked tasks, the levels' queues and undeliverable messages, as rows."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final

from amqp.exceptions import AMQPError
from pyspark.sql.datasource import DataSourceReader, InputPartition

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.exceptions import InvalidOption
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.operations.undeliverable import (
    LIMIT,
    UndeliverableMessage,
    headers_as_json,
    undeliverable_messages,
)
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.publishing.kombu_internals import closing
from celery_rabbitdelay.registry.index import Filter as Wanted
from celery_rabbitdelay.registry.index import Index
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.spark.application import application_of, explain, explained, tracks
from celery_rabbitdelay.spark.options import ReadOptions

#: The columns of the undeliverable messages.
UNDELIVERABLE: Final = (
    "task_id string, task string, queue string, due timestamp, reason string, last_stop string, "
    "since timestamp, headers string, body binary, size bigint"
)

#: The size of a batch for Spark: its rows, and the bytes of their bodies, which may be large.
BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 8_000_000


class _Reader(DataSourceReader):
    """Reads one kind of rows.

    Args:
        options: The options.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self.application = options.application

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of a partition, or batches of Arrow."""
        try:
            app = application_of(self._options.application)
            yield from self._rows(app, partition)
        except Exception as error:
            explain(error, self._options.application, OSError, AMQPError)
            raise error from None

    @abstractmethod
    def _rows(self, app: Celery, partition: InputPartition) -> Iterator[Any]: ...


class UndeliverableReader(_Reader):
    """Reads the undeliverable messages, in one partition, as a queue has only one end."""

    def _rows(self, app: Celery, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages in batches of Arrow."""
        limit = LIMIT if self._options.limit is None else self._options.limit
        with closing(app.connection_for_read()) as connection:
            messages = undeliverable_messages(connection, app.rabbitdelay.topology, limit)
            for rows in _batched(map(to_row, messages)):
                yield _to_arrow(rows)


def to_row(message: UndeliverableMessage) -> tuple[Any, ...]:
    """Return a message's row."""
    found = message.found
    return (
        _readable(found.task_id),
        _readable(found.task),
        _readable(found.queue),
        found.due,
        _readable(found.reason),
        _readable(found.last_stop),
        found.since,
        headers_as_json(message.headers),
        message.body,
        len(message.body),
    )


def _readable(text: str | None) -> str | None:
    """Return a text that UTF-8 can express: py-amqp reads half a character, Arrow does not."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _batched(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row[-1]
        if len(batch) == BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _to_arrow(rows: list[tuple[Any, ...]]) -> Any:
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "binary": pa.binary(),
        "bigint": pa.int64(),
    }
    columns = (column.split() for column in UNDELIVERABLE.split(", "))
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns])
    values = zip(zip(*rows, strict=True), schema.types, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(*each) for each in values], schema=schema)


#: The columns of the tasks that wait.
PENDING: Final = (
    "task_id string, task string, due timestamp, key string, job string, job_state string"
)

#: The columns of the levels' queues.
LEVELS: Final = "level string, queue string, wait_ms bigint, messages bigint"

#: How closely the bounds of the partitions are looked for: to a second.
BOUND_MS: Final = 1000

#: No task is due later than this after the first one, in milliseconds: a hundred years.
MAX_SPAN_MS: Final = 100 * 366 * 86_400_000


class PendingReader(_Reader):
    """Reads the tracked tasks that wait.

    Args:
        options: The options.

    Attributes:
        wanted: Which tasks.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self.wanted = Wanted(options.task, options.key, options.job)

    @explained
    def partitions(self) -> Sequence[InputPartition]:
        """Divide the tasks by their due times into parts of about the same number."""
        app = application_of(self._options.application)
        try:
            index: Index = app.rabbitdelay.registry.index
            if not (tracks(app) or index.count(Wanted())):
                takes = (
                    "lists tracked tasks, and the application tracks none: set rabbitdelay_track, "
                    "or track=True of a task"
                )
                raise InvalidOption("what", "pending", takes)
            bounds = _bounds(index, self.wanted, self._options.partitions)
        finally:
            app.rabbitdelay.close()
        edges = [self.wanted.due_after_ms, *bounds, self.wanted.due_before_ms]
        return [
            InputPartition(self.wanted._replace(due_after_ms=after, due_before_ms=before))
            for after, before in pairwise(edges)
        ]

    def _rows(self, app: Celery, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield the tasks of a part in the order in which they are due."""
        try:
            registry = app.rabbitdelay.registry
            for part in registry.index.parts(partition.value):
                states = registry.jobs.states({(each.job, "") for each in part.tasks if each.job})
                for each in part.tasks:
                    state = states.get((each.job or "", ""))
                    shown = state.value if isinstance(state, JobState) else None
                    yield (each.task_id, each.task, each.due, each.key, each.job, shown)
        finally:
            app.rabbitdelay.close()


class LevelsReader(_Reader):
    """Reads how many messages wait in each queue of the levels."""

    def _rows(self, app: Celery, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        """Yield the queues from the longest wait to the shortest."""
        queues = app.rabbitdelay.topology.digit_queues
        with closing(app.connection_for_write()) as connection:
            counts = queue_counts(connection, queues)
        for queue in queues:
            found = counts[queue.name]
            level, _, _ = queue.name.rpartition(".")
            wait_ms = (queue.queue_arguments or {})["x-message-ttl"]
            yield (level, queue.name, wait_ms, None if found is None else found.messages)


def _bounds(index: Index, wanted: Wanted, parts: int) -> list[int]:
    """Return the due times between the parts, found by counting."""
    total = index.count(wanted)
    if total < parts or parts == 1:
        return []
    first = wanted.due_after_ms
    if first is None:
        first = to_ms(next(index.pending(wanted)).due)
    instants = range(first, wanted.due_before_ms or first + MAX_SPAN_MS, BOUND_MS)

    def due_before(instant_ms: int) -> int:
        return index.count(wanted._replace(due_before_ms=instant_ms))

    found: set[int] = set()
    end = len(instants)
    for part in range(parts - 1, 0, -1):
        end = bisect_left(instants, total * part // parts, hi=end, key=due_before)
        found.add(end)
    return [instants[number] for number in sorted(found) if number < len(instants)]


def to_ms(instant: datetime) -> int:
    """Return the milliseconds since 1970-01-01 UTC of an instant; a naive one is UTC."""
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return milliseconds_of(aware)
