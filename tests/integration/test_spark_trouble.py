"""Spark runs a part of a write again, or dies: with the registry, each row is one task or none."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from kombu import Connection
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.spark import dispatch
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.spark import shared_session
from tests.integration.spark_apps import app_of, name_of, publish
from tests.integration.spark_fixtures import (
    driver,
    notes,
    registry,
    settings,
    shop,
    without_registry,
)
from tests.integration.spark_fixtures import write as write_to

__all__ = ["driver", "registry", "settings", "shop", "without_registry"]

#: Where Spark's Python processes find the application.
APP = app_of(__name__)

write = partial(write_to, app=APP)

#: Rows of a write, half of them in each partition; Spark hands on ten at a time, once there are
#: some kilobytes of them, so the rows are long.
ROWS = 1000
FAILS_AFTER = 400

#: Seconds; on most machines longer than a write with its attempts takes.
DELAY = 5.0

#: The setting of how many rows Spark hands on at a time.
ROWS_AT_A_TIME = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture(scope="module")
def spark(settings: dict[str, Any], spark_folder: Path) -> Iterator[SparkSession]:
    """The shared session, which hands on ten rows at a time."""
    publish(spark_folder, name_of(__name__), settings)
    session = shared_session(spark_folder)
    session.conf.set(ROWS_AT_A_TIME, "10")
    yield session
    session.conf.unset(ROWS_AT_A_TIME)


def rows(spark: SparkSession, noted: Notes) -> DataFrame:
    frame = notes(spark, noted, ROWS, f"{DELAY}D", partitions=2)
    return frame.selectExpr("struct(args[0], repeat('x', 400)) args", "kwargs", "delay")


def half_way(frame: DataFrame, attempts: int, then: Callable[[], object]) -> DataFrame:
    """The same rows; something happens to the first partition after most of them.

    Args:
        frame: The rows.
        attempts: In how many of its first attempts.
        then: Makes it happen.
    """

    def happening(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

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


def test_a_partition_that_fails_half_way_and_is_run_again_sends_each_row_once(
    spark: SparkSession, noted: Notes
) -> None:
    write(half_way(rows(spark, noted), 1, fail))
    noted.wait(ROWS)
    assert sorted(noted.until(1)) == [*range(ROWS)]


def write_one_by_one(frame: DataFrame, **options: str) -> None:
    """No row waits in Spark's processes until an envelope is full."""
    write(frame, envelopes="false", **options)


def dispatch_one_by_one(frame: DataFrame) -> None:
    dispatch(frame, "note", app=APP, envelopes=False)


def wait_for_messages(shop: Any) -> None:
    """Wait until the levels hold rows of a write, so that it is too late not to send them."""

    def waiting() -> int:
        with Connection(shop.conf.broker_url) as connection:
            found = queue_counts(connection, shop.rabbitdelay.topology.queues)
        return sum(each.messages for each in found.values() if each is not None)

    wait_for(lambda: waiting() >= 100, "messages")


@pytest.mark.parametrize("task", ["note", "tracked-note"])
def test_a_write_that_fails_in_the_end_runs_no_row_and_run_again_later_each_row_once(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path, task: str
) -> None:
    given, sent = {"task": task, "jobId": f"job-{noted.key}"}, tmp_path / "sent"

    def watch() -> None:
        wait_for_messages(shop)
        sent.touch()

    watcher = Thread(target=watch)
    watcher.start()
    with pytest.raises(PySparkException, match="made to fail"):
        write_one_by_one(half_way(rows(spark, noted), 2, partial(fail, sent)), **given)
    watcher.join()
    assert noted.until(DELAY) == []
    write_one_by_one(rows(spark, noted), **given)
    noted.wait(ROWS)
    assert sorted(noted.until(1)) == [*range(ROWS)]


@pytest.mark.parametrize(
    ("send", "cancel"),
    [
        (write_one_by_one, lambda spark: spark.sparkContext.cancelJobGroup("reminders")),
        (dispatch_one_by_one, lambda spark: spark.interruptAll()),
    ],
    ids=["a group", "dispatch"],
)
def test_no_row_of_a_write_that_is_cancelled_runs(
    spark: SparkSession,
    shop: Any,
    driver: None,
    noted: Notes,
    tmp_path: Path,
    send: Callable[[DataFrame], None],
    cancel: Callable[[SparkSession], None],
) -> None:
    waits = tmp_path / "waits"
    frame = half_way(rows(spark, noted), 1, partial(wait_for_good, waits))

    def cancel_half_way() -> None:
        wait_for(waits.exists, "half of the rows")
        wait_for_messages(shop)
        cancel(spark)

    # In a thread of its own, PySpark does not find a format that is written in Python.
    user = Thread(target=cancel_half_way)
    spark.sparkContext.setJobGroup("reminders", "tasks", interruptOnCancel=True)
    user.start()
    try:
        # Of PySpark, or of its bridge to Java.
        with pytest.raises(Exception, match="cancelled"):
            send(frame)
    finally:
        user.join()
        of_no_group: Any = None
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", of_no_group)
    assert noted.until(DELAY) == []
