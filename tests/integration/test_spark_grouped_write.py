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
from tests.integration.notes import Notes
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


@pytest.mark.parametrize(
    ("task", "first"),
    [
        ("note", "id"),
        ("note", "if(id % 2 = 0, 'it\\'s ' || id, string(id))"),
        ("compressed-note", "id"),
    ],
    ids=["by Spark", "every second by Python", "by Celery"],
)
def test_grouped_rows_run_once_each_whoever_writes_them(
    spark: SparkSession, noted: Notes, task: str, first: str
) -> None:
    frame = spark.sql(
        f"select array({first}) args, named_struct('key', '{noted.key}') kwargs, {DELAY}D delay "
        "from range(200)"
    )
    report = dispatch(frame, task, app=APP, group=True)
    assert report.rows == report.confirmed == 200
    if (task, first) == ("note", "id"):
        assert report.envelopes == report.messages < 20
    noted.wait(200)
    assert sorted(map(str, noted())) == sorted(
        f"it's {number}" if "it" in first and number % 2 == 0 else str(number)
        for number in range(200)
    )


def test_a_job_that_is_written_grouped_and_row_by_row_runs_each_task_once(
    spark: SparkSession, noted: Notes
) -> None:
    given = {"app": APP, "task": "note", "tolerance": "1", "jobId": f"job-{noted.key}"}
    frame = notes(spark, noted, 100)
    write(grouped(frame, **given), **given)
    write(frame, **given)
    noted.wait(100)
    assert sorted(noted.until(2)) == [*range(100)]


def test_an_invalid_row_of_a_grouped_write_fails_it_or_is_collected(
    spark: SparkSession, noted: Notes, tmp_path: Path
) -> None:
    bad = notes(spark, noted, 20, f"if(id = 7, double('nan'), {DELAY}D)")
    with pytest.raises(PySparkException, match="takes a finite number"):
        dispatch(bad, "note", app=APP, group=True)
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    report = dispatch(bad, "note", app=APP, group=True, **errors)
    assert (report.rows, report.confirmed, report.refused) == (20, 19, {"InvalidDelay": 1})
    (refused,) = spark.read.parquet(str(tmp_path)).collect()
    assert refused.args == [7]
    noted.wait(19)
    assert len(noted()) == 19


def test_what_cannot_be_grouped_is_sent_row_by_row_unless_it_is_asked_for(
    spark: SparkSession, noted: Notes
) -> None:
    frame = notes(spark, noted, 5).selectExpr("to_json(args) args", "kwargs", "delay")
    with pytest.raises(InvalidColumn, match="leave grouped out"):
        dispatch(frame, "note", app=APP, tolerance=1, group=True)
    assert dispatch(frame, "note", app=APP, tolerance=1).confirmed == 5


def test_a_write_of_the_callers_own_job_runs_when_the_caller_commits(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    job = f"import-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=600)
    report = dispatch(notes(spark, noted, 20, "0.1D"), "note", app=APP, tolerance=1, job=job)
    assert (report.confirmed, report.job) == (20, job)
    assert noted.until(1) == []
    shop.rabbitdelay.commit_job(job)
    noted.wait(20)
    assert sorted(noted()) == [*range(20)]


def test_all_partitions_share_a_rate(spark: SparkSession, noted: Notes) -> None:
    frame = notes(spark, noted, 60).repartition(3)
    began = time.monotonic()
    assert dispatch(frame, "note", app=APP, maxRate=20, envelopes=False).confirmed == 60
    # The first ones of each are sent at once.
    assert time.monotonic() - began >= 60 / 20 - 3 * 0.25 - 0.1


def test_a_rate_and_a_job_need_a_registry(spark: SparkSession, shop: Any, noted: Notes) -> None:
    broker = shop.conf.broker_url.replace("guest:guest@", "guest@")
    for name, value in (("maxRate", "5"), ("job", "import")):
        with pytest.raises(AnalysisException, match=f"option {name}.*takes a reg"):
            write_to(notes(spark, noted, 1), broker=broker, **{name: value})
