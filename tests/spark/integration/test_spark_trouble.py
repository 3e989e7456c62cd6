"""Spark runs a part of a write again, or dies: with the registry, each row is one task or none."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kombu import Connection
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.spark import dispatch
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.notes import Notes
from tests.spark.integration.spark_apps import APP
from tests.spark.integration.spark_fixtures import notes, shop, write

__all__ = ["shop"]

#: Rows of a write, half of them in each partition; Spark hands on ten at a time, once there are
#: some kilobytes of them, so the rows are long.
ROWS = 1000
FAILS_AFTER = 400

#: Seconds; on most machines longer than a write with its attempts takes.
DELAY = 5.0

#: The setting of how many rows Spark hands on at a time.
ROWS_AT_A_TIME = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def rows(spark: SparkSession, noted: Notes) -> Iterator[DataFrame]:
    """Rows that Spark hands on by ten."""
    spark.conf.set(ROWS_AT_A_TIME, "10")
    frame = notes(spark, noted, ROWS, f"{DELAY}D", partitions=2)
    yield frame.selectExpr("struct(args[0], repeat('x', 400)) args", "kwargs", "delay")
    spark.conf.unset(ROWS_AT_A_TIME)


def half_way(frame: DataFrame, attempts: int, then: Callable[[], object]) -> DataFrame:
    """The same rows; something happens to the first partition after most of them.

    Args:
        frame: The rows.
        attempts: In how many of its first attempts.
        then: Makes it happen.
    """

    def happening(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        happens = context.partitionId() == 0 and context.attemptNumber() < attempts
        for number, batch in enumerate(batches):
            if happens and number * 10 == FAILS_AFTER:
                then()
            yield batch

    return frame.mapInArrow(happening, frame.schema)


def fail(when: Path | None = None) -> None:
    """Fail, once there is a file."""
    if when is not None:
        wait_for(when.exists, "the file")
    raise RuntimeError("it was made to fail")


def wait_for_good(waits: Path) -> None:
    """Make a file, and wait until somebody ends the process."""
    waits.touch()
    signal.pause()


def when_messages_wait(shop: Any, then: Callable[[], object]) -> Thread:
    """Do something in a thread as soon as the levels hold rows, so that these are sent already."""

    def waiting() -> bool:
        with Connection(shop.conf.broker_url) as connection:
            found = queue_counts(connection, shop.rabbitdelay.topology.queues)
        return sum(each.messages for each in found.values() if each is not None) >= 100

    def watch() -> None:
        wait_for(waiting, "messages")
        then()

    thread = Thread(target=watch)
    thread.start()
    return thread


def test_a_partition_that_fails_half_way_and_is_run_again_sends_each_row_once(
    rows: DataFrame, noted: Notes
) -> None:
    write(half_way(rows, 1, fail))
    noted.wait(ROWS)
    assert sorted(noted.until(1)) == [*range(ROWS)]


def test_a_write_that_fails_in_the_end_runs_no_row_and_run_again_later_each_row_once(
    rows: DataFrame, shop: Any, noted: Notes, tmp_path: Path
) -> None:
    # Tracked, and no row waits in Spark's processes until an envelope is full.
    given = {"task": "tracked-note", "jobId": f"job-{noted.key}", "envelopes": "false"}
    sent = tmp_path / "sent"
    watcher = when_messages_wait(shop, sent.touch)
    with pytest.raises(PySparkException, match="made to fail"):
        write(half_way(rows, 2, partial(fail, sent)), **given)
    watcher.join()
    assert noted.until(DELAY) == []
    write(rows, **given)
    noted.wait(ROWS)
    assert sorted(noted.until(1)) == [*range(ROWS)]


@pytest.mark.parametrize("by_dispatch", [False, True], ids=["a group", "dispatch"])
def test_no_row_of_a_write_that_is_cancelled_runs(
    spark: SparkSession, rows: DataFrame, shop: Any, noted: Notes, tmp_path: Path, by_dispatch: bool
) -> None:
    waits, context = tmp_path / "waits", spark.sparkContext
    frame = half_way(rows, 1, partial(wait_for_good, waits))

    def cancel() -> None:
        wait_for(waits.exists, "half of the rows")
        spark.interruptAll() if by_dispatch else context.cancelJobGroup("reminders")

    # In a thread of its own, PySpark does not find a format that is written in Python.
    context.setJobGroup("reminders", "tasks", interruptOnCancel=True)
    user = when_messages_wait(shop, cancel)
    send = partial(dispatch, task="note", app=APP) if by_dispatch else write
    try:
        # Of PySpark, or of its bridge to Java.
        with pytest.raises(Exception, match="cancelled"):
            send(frame, envelopes=False)
    finally:
        user.join()
        of_no_group: Any = None
        context.setLocalProperty("spark.jobGroup.id", of_no_group)
    assert noted.until(DELAY) == []
