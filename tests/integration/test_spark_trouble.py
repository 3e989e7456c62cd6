"""Spark runs a part of a write again, or dies: with the registry, each row is one task or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from uuid import uuid4

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
from tests.integration.spark_killing import kill_when, start
from tests.integration.spark_program import COMMITS

__all__ = ["driver", "registry", "settings", "shop", "without_registry"]

#: Where Spark's Python processes find the application.
APP = app_of(__name__)

write = partial(write_to, app=APP)

#: Rows of a write, half of them in each partition; Spark hands on ten at a time, once there are
#: some kilobytes of them, so the rows are long.
ROWS = 1000
FAILS_AFTER = 400

#: Seconds; longer than a write with its attempts takes.
DELAY = 8.0

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


def fails_half_way(frame: DataFrame, attempts: int, when: Path | None = None) -> DataFrame:
    """The same rows; the first partition fails after most of them, in its first attempts.

    Args:
        frame: The rows.
        attempts: How many attempts fail.
        when: They wait for this file before they fail.
    """

    def failing(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        fails = context.partitionId() == 0 and context.attemptNumber() < attempts
        for number, batch in enumerate(batches):
            if fails and number * 10 == FAILS_AFTER:
                if when is not None:
                    wait_for(when.exists, "the file")
                raise RuntimeError("it was made to fail")
            yield batch

    return frame.mapInArrow(failing, frame.schema)


def waits_half_way(frame: DataFrame, waits: Path) -> DataFrame:
    """The same rows; the first partition waits for good after most of them, and makes a file."""

    def waiting(batches: Iterator[Any]) -> Iterator[Any]:
        import signal

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number, batch in enumerate(batches):
            if context.partitionId() == 0 and number * 10 == FAILS_AFTER:
                waits.touch()
                signal.pause()
            yield batch

    return frame.mapInArrow(waiting, frame.schema)


def test_a_partition_that_fails_half_way_and_is_run_again_sends_each_row_once(
    spark: SparkSession, noted: Notes
) -> None:
    write(fails_half_way(rows(spark, noted), attempts=1))
    noted.wait(ROWS)
    assert sorted(noted.until(DELAY)) == [*range(ROWS)]


def write_one_by_one(frame: DataFrame, **options: str) -> None:
    """No row waits in Spark's processes until an envelope is full."""
    write(frame, envelopes="false", **options)


def dispatch_one_by_one(frame: DataFrame) -> None:
    dispatch(frame, "note", app=APP, envelopes=False)


def waiting(shop: Any) -> int:
    """Return how many messages wait for their time."""
    with Connection(shop.conf.broker_url) as connection:
        found = queue_counts(connection, shop.rabbitdelay.topology.queues)
    return sum(each.messages for each in found.values() if each is not None)


def wait_for_messages(shop: Any) -> None:
    """Wait until the levels hold rows of a write, so that it is too late not to send them."""
    wait_for(lambda: waiting(shop) >= 100, "messages")


def write_and_fail(shop: Any, frame: DataFrame, folder: Path, **options: str) -> None:
    """Write rows one by one; both attempts of a partition fail, when rows are on their way."""
    sent = folder / "sent"

    def watch() -> None:
        wait_for_messages(shop)
        sent.touch()

    watcher = Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(PySparkException, match="made to fail"):
            write_one_by_one(fails_half_way(frame, attempts=2, when=sent), **options)
    finally:
        watcher.join()


def test_a_write_that_fails_in_the_end_runs_no_row(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path
) -> None:
    write_and_fail(shop, rows(spark, noted), tmp_path)
    assert noted.until(DELAY) == []


@pytest.mark.parametrize("task", ["note", "tracked-note"])
def test_a_failed_write_that_is_run_again_after_its_tasks_came_due_runs_each_row_once(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path, task: str
) -> None:
    given = {"task": task, "jobId": f"job-{noted.key}"}
    write_and_fail(shop, rows(spark, noted), tmp_path, **given)
    assert noted.until(DELAY) == []
    write_one_by_one(rows(spark, noted), **given)
    noted.wait(ROWS)
    assert sorted(noted.until(DELAY)) == [*range(ROWS)]


@pytest.mark.parametrize(
    ("send", "cancel"),
    [
        (write_one_by_one, lambda spark: spark.sparkContext.cancelJobGroup("reminders")),
        (write_one_by_one, lambda spark: spark.sparkContext.cancelAllJobs()),
        (dispatch_one_by_one, lambda spark: spark.interruptAll()),
    ],
    ids=["a group", "all", "dispatch"],
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
    frame = waits_half_way(rows(spark, noted), waits)

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


def test_a_driver_that_is_killed_before_the_commit_sends_no_row_and_the_next_run_sends_each_once(
    spark: SparkSession, settings: dict[str, Any], noted: Notes, tmp_path: Path
) -> None:
    commits = tmp_path / "commits"
    program = start(
        "tests.integration.spark_program",
        *(noted.key, str(ROWS), str(DELAY)),
        settings=settings,
        folder=tmp_path,
        **{COMMITS: str(commits)},
    )
    kill_when(program, commits.exists, "the commit", tmp_path / "program.log")
    write(rows(spark, noted))
    noted.wait(ROWS)
    assert sorted(noted.until(DELAY)) == [*range(ROWS)]


def test_without_a_registry_rows_that_were_sent_before_the_failure_are_sent_again(
    spark: SparkSession, without_registry: dict[str, Any], noted: Notes
) -> None:
    """At least once: the tasks have the same ids."""
    broker = without_registry["broker_url"]
    prefix = f"test-{uuid4().hex[:8]}"
    queue = {"queue": f"{without_registry['prefix']}.default"}
    given = {"broker": broker.replace(":guest@", "@"), "brokerPassword": "guest", "prefix": prefix}
    frame = fails_half_way(rows(spark, noted), attempts=1)
    # Nobody serves distribution under that prefix; a slow machine declares so few queues in time.
    options = {**given, **queue, "task": "note", "layout": "binary", "envelopes": "false"}
    frame.write.format("rabbitdelay").mode("append").options(**options).save()
    noted.wait(ROWS)
    wait_for(lambda: len(noted()) > ROWS, "a second copy")
    assert ROWS < len(noted()) <= ROWS + FAILS_AFTER
