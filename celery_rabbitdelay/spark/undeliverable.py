"""Reading what could not be delivered: a copy of each message in ``undeliverable``, as rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from celery_rabbitdelay.operations.undeliverable.messages import (
    LIMIT,
    UndeliverableMessage,
    headers_as_json,
    undeliverable_messages,
)
from celery_rabbitdelay.spark.application import application_of
from celery_rabbitdelay.spark.options import ReadOptions

#: The columns of the undeliverable messages.
UNDELIVERABLE: Final = (
    "task_id string, task string, queue string, due timestamp, reason string, last_stop string, "
    "since timestamp, headers string, body binary, size bigint"
)

#: The size of a batch for Spark: its rows, and the bytes of their bodies, which may be large.
BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 8_000_000


class UndeliverableReader(DataSourceReader):
    """Reads the undeliverable messages, in one partition, as a queue has only one end.

    Args:
        options: The options.
    """

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages in batches of Arrow, oldest first."""
        app = application_of(self._options.application)
        limit = LIMIT if self._options.limit is None else self._options.limit
        with app.connection_for_read() as connection:
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
    return pa.RecordBatch.from_arrays(
        [
            pa.array(values, field.type)
            for values, field in zip(zip(*rows, strict=True), schema, strict=True)
        ],
        schema=schema,
    )
