"""Sending a DataFrame's rows from a driver, which gets a report: the format cannot return one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import DataFrame

from celery_rabbitdelay.spark.grouped import Grouping
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import Sent
from celery_rabbitdelay.spark.write import BatchWriter

#: The row that each partition returns: its :class:`.Sent` as JSON.
SCHEMA: Final = "sent string"


@dataclass(frozen=True)
class Dispatched:
    """The report of :func:`dispatch`.

    Attributes:
        partitions: The reports of the partitions, in the order of their numbers.
        job: The job of the registry; None without one.
    """

    partitions: tuple[Sent, ...]
    job: str | None

    @property
    def rows(self) -> int:
        """How many rows there were."""
        return sum(each.rows for each in self.partitions)

    @property
    def confirmed(self) -> int:
        """How many rows RabbitMQ has confirmed."""
        return sum(each.confirmed for each in self.partitions)

    @property
    def messages(self) -> int:
        """In how many messages."""
        return sum(each.messages for each in self.partitions)

    @property
    def envelopes(self) -> int:
        """How many of these hold several rows."""
        return sum(each.envelopes for each in self.partitions)

    @property
    def resent(self) -> int:
        """How often a message was published again."""
        return sum(each.resent for each in self.partitions)

    @property
    def refused(self) -> Counter[str]:
        """How many rows were refused, by the name of the error."""
        return sum((each.refused for each in self.partitions), Counter())

    def __str__(self) -> str:
        lines = [
            f"{self.confirmed:,} of {self.rows:,} rows confirmed, in {self.messages:,} messages",
            f"{self.envelopes:,} of these are envelopes; {self.resent:,} resent",
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


def dispatch(
    frame: DataFrame, task: str | None = None, *, group: bool | None = None, **options: Any
) -> Dispatched:
    """Send a task for each row of a DataFrame, as the format ``rabbitdelay`` does.

    Args:
        frame: The rows; see the guide for its columns.
        task: The task's name, if there is no such column.
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
    checked = checked._replace(job_id=checked.job_id or str(uuid4()))
    if group or (group is None and checked.tolerance > 0):
        grouping = Grouping(frame.schema, checked)
        if grouping.refusal is None:
            frame = grouping.of(frame)
        elif group:
            raise grouping.refusal
    writer = BatchWriter(frame.schema, checked)

    def send(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({"sent": [writer.write(batches).as_json()]})

    try:
        found = [Sent.of_json(row.sent) for row in frame.mapInArrow(send, SCHEMA).collect()]
    except BaseException:  # an interrupt as well: no task of an aborted job runs
        writer.abort([])
        raise
    writer.commit(found)
    return Dispatched(tuple(sorted(found, key=lambda each: each.partition)), writer.job)
