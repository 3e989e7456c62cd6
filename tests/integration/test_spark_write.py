"""DataFrames become delayed tasks: real Spark, a worker, RabbitMQ and Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection
from kombu.utils.json import loads
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql.streaming.readwriter import DataStreamWriter

from celery_rabbitdelay.app.sending.rows import MAX_ERRORS
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.spark import dispatch, grouped, task_id
from celery_rabbitdelay.spark.columns import Columns
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import ATTEMPT, ERROR, JOB, REASON
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count
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

#: The columns that refused rows have in addition to their own.
FURTHER = (ERROR, REASON, JOB, ATTEMPT)

#: For rows of a task that no worker knows.
UNKNOWN: dict[str, Any] = {"task": "nobody.knows", "allowUnknownTasks": "true"}


@pytest.fixture
def queue(shop: Any) -> Iterator[str]:
    """The name of a queue that no worker serves."""
    name = f"spark-{uuid4().hex}"
    yield name
    with Connection(shop.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(name)


def bodies(shop: Any, queue: str, number: int) -> list[Any]:
    """Return the bodies of so many messages in a queue."""
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == number, "the tasks", PATIENCE)
        channel: Any = connection.default_channel
        return [loads(channel.basic_get(queue, no_ack=True).body) for _ in range(number)]


@pytest.mark.parametrize(
    "columns",
    [
        "array(id) args, map('key', '{key}') kwargs, interval 3 second delay",
        "struct(id) args, to_json(map('key', '{key}')) kwargs, 3 delay",
        "to_json(array(id)) args, named_struct('key', '{key}') kwargs, 3.5BD delay",
        "array(id) args, map('key', '{key}') kwargs, now() + interval 3 second eta",
        "array(id) Args, map('key', '{key}') KWARGS, 3 delaY, 'note' TASK, 0.1 tolerance",
    ],
    ids=["maps", "structs", "decimals", "eta", "all"],
)
def test_each_row_becomes_a_task_whatever_the_types_of_its_columns(
    spark: SparkSession, noted: Notes, columns: str
) -> None:
    began = time.time()
    write(spark.sql(f"select {columns.format(key=noted.key)} from range(3)"))
    noted.wait(3)
    assert time.time() - began >= 3
    assert sorted(noted()) == [0, 1, 2]


def test_names_of_columns_are_case_sensitive_where_the_session_says_so(
    spark: SparkSession, driver: None, shop: Any, noted: Notes, queue: str
) -> None:
    frame = notes(spark, noted, 3, "1D")
    both = frame.selectExpr("args", "args[0] ARGS", "kwargs.key who", "delay")
    given: dict[str, Any] = {"app": APP, "queue": queue, "idColumn": "ARGS", **UNKNOWN}
    given["kwargsFromColumns"] = "true"
    with pytest.raises(PySparkException, match=r"column ARGS \(bigint\): is there twice"):
        write(both, **given)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        write(both, **given)
        write(grouped(both, **given), **given)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    for (number,), kwargs, _ in bodies(shop, queue, 6):
        assert kwargs == {"ARGS": number, "who": noted.key}


def test_rows_of_unknown_tasks_are_refused_unless_they_are_allowed(
    spark: SparkSession, driver: None, shop: Any, queue: str, tmp_path: Path
) -> None:
    frame = spark.sql("select array(id) args, 0.1 delay, 'elsewhere' task from range(2)")
    with pytest.raises(PySparkException, match="its task is unknown to the application"):
        dispatch(frame, app=APP)
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    assert dispatch(frame, app=APP, **errors).refused == {"InvalidRow": 2}
    dispatch(frame, app=APP, queue=queue, allowUnknownTasks=True)
    assert sorted(args[0] for args, *_ in bodies(shop, queue, 2)) == [0, 1]


def test_further_columns_may_be_keyword_arguments(
    spark: SparkSession, shop: Any, queue: str
) -> None:
    frame = spark.sql(
        "select 1.50BD price, date '2026-01-02' day, map('a', named_struct('b', 1)) box, 0.1 delay"
    )
    write(frame, **UNKNOWN, queue=queue, kwargsFromColumns="true")
    ((args, kwargs, _),) = bodies(shop, queue, 1)
    assert args == []
    assert kwargs == {"price": Decimal("1.50"), "day": date(2026, 1, 2), "box": {"a": {"b": 1}}}


@pytest.mark.parametrize("group", [False, True], ids=["rows", "grouped"])
def test_a_job_that_is_run_twice_runs_each_task_once_and_reports_the_known_ids(
    spark: SparkSession, driver: None, shop: Any, noted: Notes, group: bool
) -> None:
    frame, job_id = notes(spark, noted, 6, f"{DELAY}D"), f"job-{noted.key}"
    ids = [task_id(job_id, row) for row in frame.select("args").collect()]
    shop.rabbitdelay.cancel(ids[:2])
    given: dict[str, Any] = {"app": APP, "jobId": job_id, "idColumn": "args", "group": group}
    report = dispatch(frame.where("args[0] < 4"), "note", **given)
    assert (report.confirmed, report.known) == (4, 2)
    assert {each["correlation_id"] for each in noted.wait(2)} == {*ids[2:4]}
    again = dispatch(frame, "note", **given)
    assert (again.rows, again.confirmed, again.known) == (6, 6, 4)
    assert "4 of the ids were known already" in str(again)
    noted.wait(4)
    assert sorted(noted.until(1)) == [2, 3, 4, 5]


def test_a_report_knows_a_task_that_still_waits_only_if_it_is_tracked_or_has_a_key(
    spark: SparkSession, driver: None, noted: Notes
) -> None:
    frame = notes(spark, noted, 3, "3600D")
    keyed = frame.withColumn("key", F.concat(F.lit(noted.key), F.col("args")[0].cast("string")))
    for rows, known in ((frame, 0), (keyed, 3)):
        given: dict[str, Any] = {"app": APP, "jobId": f"job-{uuid4().hex}", "idColumn": "args"}
        dispatch(rows, "note", **given)
        again = dispatch(rows, "note", **given)
        assert (again.confirmed, again.known) == (3, known)


def test_refused_rows_are_collected_with_their_types_mended_and_written_again(
    spark: SparkSession, noted: Notes, tmp_path: Path
) -> None:
    frame = spark.sql(
        f"select array(id) Args, named_struct('key', '{noted.key}') kwargs, "
        "case id when 0 then double('nan') when 1 then null when 2 then -1D else 3D end delay "
        "from range(6)"
    )
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    write(frame, **errors)
    noted.wait(4)
    assert sorted(noted()) == [2, 3, 4, 5]
    refused = spark.read.parquet(str(tmp_path)).orderBy("Args")
    found = refused.select(*FURTHER).collect()
    assert [row.rabbitdelay_error for row in found] == ["InvalidDelay", "InvalidRow"]
    # Of two partitions, in the first attempt of each.
    assert {row.rabbitdelay_attempt for row in found} <= {"0.0", "1.0"}
    assert {row.rabbitdelay_job.split(":")[0] for row in found} == {"spark"}
    rows = refused.drop(*FURTHER)
    assert rows.schema.simpleString() == frame.schema.simpleString()
    assert [repr(row.delay) for row in rows.collect()] == ["nan", "None"]
    write(rows.withColumn("delay", F.lit(0.1)), **errors)
    noted.wait(6)
    assert sorted(noted()) == [*range(6)]


def test_no_task_of_a_write_that_fails_runs_although_other_partitions_were_sent(
    spark: SparkSession, noted: Notes
) -> None:
    bad = notes(spark, noted, 1, "double('nan')", partitions=1)
    with pytest.raises(PySparkException, match="nan"):
        write(notes(spark, noted, 20, partitions=2).union(bad))
    assert noted.until(DELAY) == []


def test_rows_behind_many_refused_ones_are_sent(
    spark: SparkSession, driver: None, noted: Notes, tmp_path: Path
) -> None:
    # More than send_many refuses before it takes no more.
    bad = MAX_ERRORS + 100
    rows = notes(spark, noted, bad + 50, f"if(id < {bad}, double('nan'), 3D)", partitions=1)
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    report = dispatch(rows, "note", app=APP, **errors)
    assert (report.confirmed, report.refused) == (50, {"InvalidDelay": bad})
    assert spark.read.parquet(str(tmp_path)).count() == bad
    noted.wait(50)
    assert sorted(noted()) == [*range(bad, bad + 50)]


def test_refused_rows_keep_the_types_of_their_columns(
    spark: SparkSession, driver: None, tmp_path: Path
) -> None:
    frame = spark.sql(
        """
        select interval '36501 2:3:4' day to second delay, 1.50BD price, timestamp '2026-01-02' at,
            timestamp_ntz '2026-01-02' local, date '2026-01-02' day, binary('x') blob, 7Y small,
            1.1F amount, map('a', named_struct('b', array(1, null))) box, array() nothing, null void
        """
    )
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    report = dispatch(frame, app=APP, kwargsFromColumns=True, **UNKNOWN, **errors)
    assert (report.confirmed, report.refused) == (0, {"InvalidDelay": 1})
    back = spark.read.parquet(str(tmp_path)).drop(*FURTHER)
    # Parquet has no columns of nulls alone.
    expected = frame.schema.simpleString().replace(":void", ":string").replace("<void>", "<string>")
    assert back.schema.simpleString() == expected
    assert back.collect() == frame.collect()


@pytest.mark.parametrize(
    "past_every_second_row",
    [
        "if(id % 2 = 0, timestamp '2013-01-01', now() + interval 1 hour) eta",
        "if(id % 2 = 0, interval '-1' second, interval '1' hour) delay",
        "if(id % 2 = 0, -0.001D, 3600D) delay",
    ],
    ids=["eta", "interval", "number"],
)
def test_rows_whose_time_has_passed_are_dropped_or_refused_if_asked_for(
    spark: SparkSession, driver: None, past_every_second_row: str
) -> None:
    frame = spark.sql(f"select array(id) args, {past_every_second_row} from range(4)")
    for group in (False, True):
        report = dispatch(frame, "look", app=APP, group=group, past="drop")
        assert (report.rows, report.confirmed, report.dropped) == (4, 2, 2)
        with pytest.raises(PySparkException, match=r"its time has passed \(past = 'refuse'\)"):
            dispatch(frame, "look", app=APP, group=group, past="refuse")


def test_tables_and_views_of_sql_send_tasks_and_read(spark: SparkSession, noted: Notes) -> None:
    name = f"notes_{uuid4().hex}"
    columns = "args array<bigint>, kwargs struct<key: string>, delay double"
    options, levels = f"app '{APP}', task 'note'", f"app '{APP}', what 'levels'"
    row = f"named_struct('key', '{noted.key}'), 0.1D"
    made = {
        f"table {name}_rows": f"({columns}) using rabbitdelay options ({options})",
        f"table {name}_read": f"using rabbitdelay options ({levels}) comment 'what waits'",
        f"temporary view {name}_view": f"({columns}) using rabbitdelay options ({options})",
        f"temporary view {name}_levels": f"using rabbitdelay options ({levels})",
    }
    try:
        for what, how in made.items():
            spark.sql(f"create {what} {how}")
        spark.sql(f"insert into {name}_rows with ({options}) select array(1L), {row}")
        spark.sql(f"insert into {name}_view select array(2L), {row}")
        with pytest.raises(AnalysisException, match=r"Spark passes on no options of a table"):
            spark.sql(f"insert into {name}_rows select array(3L), {row}")
        for source in (f"{name}_read with ({levels})", f"{name}_levels"):
            assert spark.sql(f"select level, messages from {source}").count() > 10
        noted.wait(2)
    finally:
        for what in made:
            spark.sql(f"drop {what.replace('temporary ', '').replace(' ', ' if exists ')}")
    assert sorted(noted()) == [1, 2]


def stream_of(spark: SparkSession, noted: Notes, folder: Path) -> DataStreamWriter:
    """A stream of the rows in the files of a folder: a run of it ends when all are written."""
    frame = spark.readStream.schema("id bigint").json(str(folder / "*.json"))
    frame = frame.selectExpr(
        "array(id) args", f"named_struct('key', '{noted.key}') kwargs", f"{DELAY}D delay"
    )
    stream = frame.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    return stream.trigger(availableNow=True)


def add_file(folder: Path, numbers: range) -> None:
    lines = "\n".join(f'{{"id": {each}}}' for each in numbers)
    (folder / f"from-{numbers.start}.json").write_text(lines)


def forget_the_commit(folder: Path) -> None:
    """As if Spark had been killed after our commit and before it has noted the batch."""
    for path in (folder / "checkpoint" / "commits").glob("*0*"):
        path.unlink()


@pytest.mark.parametrize("has_registry", [True, False], ids=["registry", "no registry"])
def test_a_batch_that_is_written_again_sends_each_row_once_or_without_a_registry_twice(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path, has_registry: bool
) -> None:
    own: dict[str, Any] = {"app": APP}
    if not has_registry:
        own = {
            "broker": shop.conf.broker_url.replace(":guest@", "@"),
            "brokerPassword": "guest",
            "prefix": f"test-{uuid4().hex[:8]}",
            "layout": "binary",  # of few queues, which a slow machine declares in time
            "queue": shop.conf.task_default_queue,
            "envelopes": False,  # nobody serves distribution under that prefix
        }

    def run() -> None:
        stream = stream_of(spark, noted, tmp_path).format("rabbitdelay")
        stream.options(task="note", **own).start().awaitTermination()

    add_file(tmp_path, range(5))
    run()
    forget_the_commit(tmp_path)
    add_file(tmp_path, range(5, 8))
    run()
    expected = sorted([*range(8), *(() if has_registry else range(5))])
    noted.wait(len(expected))
    assert sorted(noted.until(DELAY)) == expected


def test_a_batch_that_foreach_batch_dispatches_twice_runs_each_row_once(
    spark: SparkSession, driver: None, noted: Notes, tmp_path: Path
) -> None:
    def send(batch: DataFrame, batch_id: int) -> None:
        job_id = f"{noted.key}:{batch_id}"
        assert dispatch(batch, "note", app=APP, tolerance=0.1, jobId=job_id).confirmed == 5

    add_file(tmp_path, range(5))
    for _ in range(2):
        stream_of(spark, noted, tmp_path).foreachBatch(send).start().awaitTermination()
        forget_the_commit(tmp_path)
    noted.wait(5)
    assert sorted(noted.until(DELAY)) == [*range(5)]


def test_an_eta_is_an_instant_when_the_clocks_of_the_session_change(spark: SparkSession) -> None:
    # Each half hour of a year.
    frame = spark.sql("select timestamp_seconds(1800000000 + 1800 * id) eta, id from range(17520)")
    columns = Columns(frame.drop("id").schema, WriteOptions.of_call({"app": APP, "task": "note"}))

    def wrong(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            rows = columns.taken([batch.select(["eta"])])
            for number, taken in zip(batch.column("id").to_pylist(), rows, strict=True):
                eta: Any = None if taken.row is None else taken.row.eta
                if Due.at(eta).at_ms != (1_800_000_000 + 1800 * number) * 1000:
                    yield batch.slice(0, 1).select(["id"])

    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Australia/Lord_Howe")
    try:
        assert frame.mapInArrow(wrong, "id bigint").collect() == []
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


#: A column, two columns, an option, and an application; tests/unit/test_spark_values.py has more.
WRONG: list[tuple[str, dict[str, str], str]] = [
    ("1 delay, now() eta", {}, "there are both"),
    ("1 delay, struct(interval 1 year) args", {}, "JSON cannot express interval year"),
    ("1 delay", {"tasks": "x"}, "option tasks: is unknown; did you mean task"),
    ("1 delay", {"task": "notes"}, "option task = 'notes': is unknown to the application; did you"),
    ("1 delay", {"app": "no.such.module"}, "option app = 'no.such.module': cannot be imported"),
    ("1 delay", {"app": "<Celery shop>"}, "option app = '<Celery shop>': takes the import path"),
    ("1 delay, 'x' cat", {"kwargsFromColumns": "true"}, "does not take these columns as its arg"),
    (
        "1 delay",
        {"task": "look", "onError": "collect", "errorsPath": "errs"},
        "option errorsPath = 'errs': takes the URI of",
    ),
]


@pytest.mark.parametrize(("columns", "options", "error"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_sent(
    spark: SparkSession, shop: Any, columns: str, options: dict[str, str], error: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        write(spark.sql(f"select {columns}"), **options)
    assert error in str(raised.value)
