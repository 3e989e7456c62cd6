"""Grouped DataFrames become the same tasks as others, many in a message."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from celery_rabbitdelay import InvalidColumn
from celery_rabbitdelay.spark import dispatch, grouped
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE
from tests.integration.spark_apps import app_of
from tests.integration.spark_fixtures import (
    DELAY,
    driver,
    notes,
    registry,
    settings,
    shop,
    spark,
    without_registry,
)
from tests.integration.spark_fixtures import write as write_to

__all__ = ["driver", "registry", "settings", "shop", "spark", "without_registry"]

#: Where Spark's Python processes find the application.
APP = app_of(__name__)

write = partial(write_to, app=APP)

pytestmark = pytest.mark.usefixtures("driver")

#: Rows of which most share a message.
ROWS = 500


def test_rows_that_spark_has_written_run_once_each_in_few_messages(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    frame = notes(spark, noted, ROWS)
    report = dispatch(frame, "note", app=APP, tolerance=1)
    assert report.confirmed == report.rows == ROWS
    assert report.envelopes == report.messages < 20
    noted.wait(ROWS)
    assert sorted(noted()) == [*range(ROWS)]


def test_a_job_that_is_written_grouped_and_row_by_row_runs_each_task_once(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    given = {"app": APP, "task": "note", "tolerance": "1", "jobId": f"job-{noted.key}"}
    frame = notes(spark, noted, 100)
    write(grouped(frame, **given), **given)
    write(frame, **given)
    write(notes(spark, noted, 1, f"{DELAY + 3}D"), jobId=f"later-{noted.key}")
    wait_for(lambda: noted().count(0) >= 2, "the later task", PATIENCE)
    assert sorted(noted()) == [0, *range(100)]


def test_rows_that_only_python_writes_are_sent_with_the_others(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    frame = spark.sql(
        f"select array(if(id % 2 = 0, 'it\\'s ' || id, string(id))) args, "
        f"named_struct('key', '{noted.key}') kwargs, {DELAY} delay from range(50)"
    )
    report = dispatch(frame, "note", app=APP, group=True)
    assert report.rows == report.confirmed == 50
    wait_for(lambda: len(noted()) >= 50, "all tasks", PATIENCE)
    expected = [f"it's {number}" if number % 2 == 0 else str(number) for number in range(50)]
    assert sorted(noted()) == sorted(expected)


def test_a_task_that_celery_writes_otherwise_is_written_by_celery(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    frame = notes(spark, noted, 30)
    report = dispatch(frame, "compressed-note", app=APP, group=True)
    assert report.confirmed == 30
    wait_for(lambda: len(noted()) >= 30, "all tasks", PATIENCE)
    assert sorted(noted()) == [*range(30)]


def test_an_invalid_row_of_a_grouped_write_fails_it_or_is_collected(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path
) -> None:
    bad = notes(spark, noted, 20, f"if(id = 7, double('nan'), {DELAY}D)")
    with pytest.raises(PySparkException, match="takes a finite number"):
        dispatch(bad, "note", app=APP, group=True)
    assert noted() == []
    errors = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    report = dispatch(bad, "note", app=APP, group=True, **errors)
    assert (report.rows, report.confirmed, report.refused) == (20, 19, {"InvalidDelay": 1})
    (refused,) = spark.read.parquet(str(tmp_path)).collect()
    assert "finite" in refused.rabbitdelay_reason
    assert refused.args == [7]
    wait_for(lambda: len(noted()) >= 19, "the others", PATIENCE)


def test_what_cannot_be_grouped_is_sent_row_by_row_unless_it_is_asked_for(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    frame = notes(spark, noted, 5).selectExpr("to_json(args) args", "kwargs", "delay")
    with pytest.raises(InvalidColumn, match="leave grouped out"):
        dispatch(frame, "note", app=APP, tolerance=1, group=True)
    assert dispatch(frame, "note", app=APP, tolerance=1).confirmed == 5


def test_a_write_of_the_callers_own_job_runs_when_the_caller_commits(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    job, delays = f"import-{uuid4().hex}", shop.rabbitdelay
    delays.open_job(job, expires=600)
    began = time.time()
    for first in (0, 100):
        frame = notes(spark, noted, 100, "1D").selectExpr(
            f"transform(args, each -> each + {first}) args", "kwargs", "delay"
        )
        report = dispatch(frame, "note", app=APP, tolerance=1, job=job)
        assert (report.confirmed, report.job) == (100, job)
    write(notes(spark, noted, 1, "2D"), jobId=f"later-{noted.key}")
    wait_for(lambda: noted() == [0], "the task of another job", PATIENCE)
    delays.commit_job(job)
    wait_for(lambda: len(noted()) >= 201, "all tasks", PATIENCE)
    assert sorted(noted()) == [0, *range(200)]
    assert time.time() - began >= 1


def test_all_partitions_share_a_rate(spark: SparkSession, shop: Any, noted: Notes) -> None:
    frame = notes(spark, noted, 60).repartition(3)
    began = time.monotonic()
    report = dispatch(frame, "note", app=APP, maxRate=20, envelopes=False)
    assert report.confirmed == 60
    # The first ones of each are sent at once.
    assert time.monotonic() - began >= 60 / 20 - 3 * 0.25 - 0.1


def test_a_rate_and_a_job_need_a_registry(spark: SparkSession, shop: Any, noted: Notes) -> None:
    broker = shop.conf.broker_url.replace("guest:guest@", "guest@")
    for option in ({"maxRate": "5"}, {"job": "import"}):
        given = {"broker": broker, "task": "note", **option}
        frame = notes(spark, noted, 1)
        with pytest.raises(AnalysisException, match=f"option {next(iter(option))}.*takes a reg"):
            frame.write.format("rabbitdelay").mode("append").options(**given).save()
