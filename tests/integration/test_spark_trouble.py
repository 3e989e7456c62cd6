"""Spark runs a part of a write again, or dies: with the registry, each row is one task or none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app
from tests.integration.spark import REPOSITORY, spark_session
from tests.integration.spark_program import COUNTED_IN
from tests.integration.worker import ShopProcess, Worker

APP = "tests.integration.shop:app"

#: Rows of a write, half of them in each partition; Spark hands on ten at a time, once there are
#: some kilobytes of them.
ROWS = 2000
FAILS_AFTER = 900

#: Seconds; longer than a write with its attempts takes.
DELAY = 8.0


@pytest.fixture(scope="module")
def registry() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def without_registry(module_broker_url: str, redis_url: str) -> dict[str, Any]:
    return small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def settings(without_registry: dict[str, Any], registry: RedisServer) -> dict[str, Any]:
    return {**without_registry, "rabbitdelay_registry_url": registry.url}


@pytest.fixture(scope="module")
def spark(settings: dict[str, Any]) -> Iterator[SparkSession]:
    """A session that tries a task of its own twice, and hands on ten rows at a time."""
    ten = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10"}
    environment = ShopProcess.environment(settings)
    with spark_session(environment, ten, master="local[2,2]") as session:
        yield session


@pytest.fixture(scope="module")
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(settings)
    with Worker(settings):
        yield app
    app.close()


def rows(spark: SparkSession, noted: Notes) -> DataFrame:
    return spark.sql(
        f"select array(id) args, named_struct('key', '{noted.key}') kwargs, {DELAY}D delay "
        f"from range(0, {ROWS}, 1, 2)"
    )


def fails_half_way(frame: DataFrame, attempts: int) -> DataFrame:
    """The same rows; the first partition fails after most of them, in its first attempts."""

    def failing(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        fails = context.partitionId() == 0 and context.attemptNumber() < attempts
        for number, batch in enumerate(batches):
            if fails and number * 10 == FAILS_AFTER:
                raise RuntimeError("it was made to fail")
            yield batch

    return frame.mapInArrow(failing, frame.schema)


def write(frame: DataFrame, **options: str) -> None:
    given = {"app": APP, "task": "note", **options}
    frame.write.format("rabbitdelay").mode("append").options(**given).save()


def wait_for_a_later_task(shop: Any, noted: Notes) -> None:
    shop.tasks["note"].apply_async((-1,), {"key": noted.key}, delay=DELAY + 1)
    wait_for(lambda: -1 in noted(), "a later task", PATIENCE)


def test_a_partition_that_fails_half_way_and_is_run_again_sends_each_row_once(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    write(fails_half_way(rows(spark, noted), attempts=1))
    wait_for(lambda: len(set(noted())) >= ROWS, "all tasks", PATIENCE)
    wait_for_a_later_task(shop, noted)
    assert sorted(noted()) == [-1, *range(ROWS)]


def test_a_write_that_fails_in_the_end_sends_no_row(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    with pytest.raises(PySparkException, match="made to fail"):
        write(fails_half_way(rows(spark, noted), attempts=2))
    wait_for_a_later_task(shop, noted)
    assert noted() == [-1]


@pytest.mark.timeout(300)
def test_a_driver_that_is_killed_before_the_commit_sends_no_row_and_the_next_run_sends_each_once(
    spark: SparkSession, settings: dict[str, Any], shop: Any, noted: Notes, tmp_path: Path
) -> None:
    counts = tmp_path / "counts"
    environment = {**os.environ, **ShopProcess.environment(settings), COUNTED_IN: str(counts)}
    environment["TMPDIR"] = str(tmp_path)
    arguments = [noted.key, str(ROWS), str(DELAY)]
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.spark_program", *arguments],
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: counts.exists() and counts.stat().st_size >= 2, "the commit", 120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    write(rows(spark, noted))
    wait_for(lambda: len(set(noted())) >= ROWS, "the tasks of the second run", PATIENCE)
    wait_for_a_later_task(shop, noted)
    assert sorted(noted()) == [-1, *range(ROWS)]


def test_without_a_registry_rows_that_were_sent_before_the_failure_are_sent_again(
    spark: SparkSession, without_registry: dict[str, Any], noted: Notes
) -> None:
    """At least once: the tasks have the same ids."""
    broker = without_registry["broker_url"]
    prefix = f"test-{uuid4().hex[:8]}"
    queue = {"queue": f"{without_registry['prefix']}.default"}
    given = {"broker": broker.replace(":guest@", "@"), "brokerPassword": "guest", "prefix": prefix}
    frame = fails_half_way(rows(spark, noted), attempts=1)
    # Nobody serves distribution under that prefix.
    options = {**given, **queue, "task": "note", "layout": "clock", "envelopes": "false"}
    frame.write.format("rabbitdelay").mode("append").options(**options).save()
    wait_for(lambda: len(set(noted())) >= ROWS, "all tasks", PATIENCE)
    deadline = time.monotonic() + PATIENCE
    wait_for(lambda: len(noted()) > ROWS or time.monotonic() > deadline, "a second copy", PATIENCE)
    assert ROWS < len(noted()) <= ROWS + FAILS_AFTER
