"""DataFrames become delayed tasks: real Spark, a worker, RabbitMQ and Redis."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection
from kombu.utils.json import loads
from pyarrow import parquet as pq
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know
from pyspark.sql.streaming.readwriter import DataStreamWriter

from celery_rabbitdelay import InvalidColumn
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.spark import dispatch, grouped, task_id
from celery_rabbitdelay.spark.columns import Columns
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import ATTEMPT, CHUNK_BYTES, ERROR, JOB, REASON
from celery_rabbitdelay.testing import wait_for
from tests.integration import away_shop
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


def test_each_row_becomes_a_task_that_runs_when_it_is_due(
    spark: SparkSession, noted: Notes
) -> None:
    began = time.time()
    write(notes(spark, noted, 50))
    wait_for(lambda: len(noted()) >= 50, "all tasks", PATIENCE)
    assert time.time() - began >= DELAY
    assert sorted(noted()) == [*range(50)]


@pytest.mark.parametrize(
    "columns",
    [
        "array(id) args, map('key', '{key}') kwargs, interval 1 second delay",
        "struct(id) args, to_json(map('key', '{key}')) kwargs, 1 delay",
        "to_json(array(id)) args, named_struct('key', '{key}') kwargs, 1.5BD delay",
        "array(id) args, map('key', '{key}') kwargs, now() + interval 1 second eta",
        "array(id) args, map('key', '{key}') kwargs, 1 delay, 'note' task, 0.1 tolerance",
        "array(id) args, map('key', '{key}') kwargs, 1 delay, map('a', 'x') headers, 3 priority",
        "array(id) Args, map('key', '{key}') KWARGS, 1 delaY, 'note' TASK",
    ],
    ids=["maps", "structs", "decimals", "eta", "task", "headers", "names"],
)
def test_columns_may_have_several_types(spark: SparkSession, noted: Notes, columns: str) -> None:
    frame = spark.sql(f"select {columns.format(key=noted.key)} from range(3)")
    write(frame)
    wait_for(lambda: len(noted()) >= 3, "all tasks", PATIENCE)
    assert sorted(noted()) == [0, 1, 2]


def test_names_of_columns_are_case_sensitive_where_the_session_says_so(
    spark: SparkSession, driver: None, shop: Any, noted: Notes
) -> None:
    frame = notes(spark, noted, 3, "1D")
    other = frame.withColumnRenamed("delay", "Delay")
    both = frame.selectExpr("args", "args[0] ARGS", "kwargs.key who", "delay")
    queue = f"spark-{uuid4().hex}"
    given = {"app": APP, "queue": queue, "kwargsFromColumns": "true", "idColumn": "ARGS"}
    given |= {"task": "nobody.knows", "allowUnknownTasks": "true"}
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        write(frame)
        with pytest.raises(PySparkException, match=r"column Delay \(double\): is unknown"):
            write(other)
        with pytest.raises(InvalidColumn, match=r"column Delay \(double\): is unknown"):
            dispatch(other, "note", app=APP)
        write(both, **given)
        write(grouped(both, **given), **given)
        for group in (False, True):
            dispatch(both, group=group, **given)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(PySparkException, match=r"column ARGS \(bigint\): is there twice"):
        write(both, **given)
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == 12, "the tasks", PATIENCE)
        channel: Any = connection.default_channel
        bodies = [loads(channel.basic_get(queue, no_ack=True).body) for _ in range(12)]
        channel.queue_delete(queue)
    assert sorted(args[0] for args, *_ in bodies) == sorted([0, 1, 2] * 4)
    assert all(kwargs == {"ARGS": args[0], "who": noted.key} for args, kwargs, _ in bodies)
    assert sorted(noted.until(DELAY)) == [0, 1, 2]


def test_rows_of_unknown_tasks_are_refused_unless_they_are_allowed(
    spark: SparkSession, driver: None, noted: Notes, shop: Any, tmp_path: Path
) -> None:
    frame = notes(spark, noted, 4, "1D").selectExpr(
        "*", "if(args[0] < 2, 'note', 'elsewhere') task"
    )
    with pytest.raises(PySparkException, match="its task is unknown to the application"):
        dispatch(frame, app=APP)
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    report = dispatch(frame, app=APP, **errors)
    assert (report.confirmed, report.refused) == (2, {"InvalidRow": 2})
    queue = f"spark-{uuid4().hex}"
    elsewhere = frame.where("task = 'elsewhere'")
    assert dispatch(elsewhere, app=APP, queue=queue, allowUnknownTasks=True).confirmed == 2
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == 2, "the tasks of another service", PATIENCE)
        channel: Any = connection.default_channel
        channel.queue_delete(queue)
    wait_for(lambda: len(noted()) >= 2, "the known ones", PATIENCE)
    assert sorted(noted()) == [0, 1]


def test_further_columns_may_be_keyword_arguments(spark: SparkSession, shop: Any) -> None:
    queue = f"spark-{uuid4().hex}"
    frame = spark.sql(
        "select 1.50BD price, date '2026-01-02' day, map('a', named_struct('b', 1)) box, 0.1 delay"
    )
    with pytest.raises(AnalysisException, match=r"column price \(decimal.*is unknown.*kwargsFrom"):
        write(frame)
    unknown = {"task": "nobody.knows", "allowUnknownTasks": "true"}
    write(frame, **unknown, queue=queue, kwargsFromColumns="true")
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == 1, "the task", PATIENCE)
        channel: Any = connection.default_channel
        message = channel.basic_get(queue, no_ack=True)
        channel.queue_delete(queue)
    args, kwargs, _ = loads(message.body)
    assert args == []
    assert kwargs == {"price": Decimal("1.50"), "day": date(2026, 1, 2), "box": {"a": {"b": 1}}}


@pytest.mark.parametrize(
    ("delays", "options"),
    [(("4D", "4D"), {}), (("2D", "3D"), {"idColumn": "args"})],
    ids=["the same rows", "the same id column"],
)
def test_a_job_that_is_run_twice_runs_each_task_once(
    spark: SparkSession, noted: Notes, delays: tuple[str, str], options: dict[str, str]
) -> None:
    for delay in delays:
        write(notes(spark, noted, 20, delay), jobId=f"job-{noted.key}", **options)
    wait_for(lambda: len(noted()) >= 20, "the tasks", PATIENCE)
    assert sorted(noted.until(DELAY + 2)) == [*range(20)]


def test_of_a_changed_row_the_one_that_is_due_first_runs_or_with_a_key_the_newest(
    spark: SparkSession, driver: None, shop: Any
) -> None:
    # One row is changed to a later time, and one to an earlier time; each without and with a key.
    changes = [(0, 2, False), (2, 0, False), (0, 2, True), (2, 0, True)]
    schema = "args array<string>, kwargs struct<key: string>, eta timestamp, key string"
    for seconds in (20, 80, 320):  # for the machine that sends both in time
        noted = [Notes(shop) for _ in changes]
        first_due = datetime.now(UTC) + timedelta(seconds=seconds)
        for version, text in enumerate(("old", "changed")):
            rows = [
                ([text], (each.key,), first_due + timedelta(seconds=change[version]), key)
                for each, change in zip(noted, changes, strict=True)
                for key in [each.key if change[-1] else None]
            ]
            given: dict[str, Any] = {"app": APP, "jobId": f"job-{noted[0].key}"}
            dispatch(spark.createDataFrame(rows, schema), "note", idColumn="kwargs", **given)
        if datetime.now(UTC) < first_due:
            break
    noted[0].until(seconds + 2)
    found = [each() for each in noted]
    for each in noted:
        each.forget()
    assert found == [["old"], ["changed"], ["changed"], ["changed"]]


def test_no_task_of_a_write_that_fails_runs(spark: SparkSession, noted: Notes) -> None:
    rows = notes(spark, noted, 40).repartition(2)
    bad = spark.sql(
        f"select array(99L) args, named_struct('key', '{noted.key}') kwargs, double('nan') delay"
    )
    with pytest.raises(PySparkException, match="nan"):
        write(rows.union(bad))
    assert noted.until(DELAY + 2) == []


def test_refused_rows_are_collected_mended_and_written_again(
    spark: SparkSession, noted: Notes, tmp_path: Path
) -> None:
    frame = spark.sql(
        f"select array(id) Args, named_struct('key', '{noted.key}') kwargs, "
        "case id when 0 then double('nan') when 1 then null when 2 then -1D else 1D end delay "
        "from range(6)"
    )
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    write(frame, **errors)
    wait_for(lambda: len(noted()) >= 4, "the good rows", PATIENCE)
    assert sorted(noted()) == [2, 3, 4, 5]
    refused = spark.read.parquet(str(tmp_path)).orderBy("Args")
    found = refused.select(*FURTHER).collect()
    assert [row.rabbitdelay_error for row in found] == ["InvalidDelay", "InvalidRow"]
    assert all(len(row.rabbitdelay_reason) < 300 for row in found)
    # Of two partitions, in the first attempt of each.
    assert {row.rabbitdelay_attempt for row in found} <= {"0.0", "1.0"}
    assert {row.rabbitdelay_job.split(":")[0] for row in found} == {"spark"}
    rows = refused.drop(*FURTHER)
    assert rows.schema.simpleString() == frame.schema.simpleString()
    assert [repr(row.delay) for row in rows.collect()] == ["nan", "None"]
    write(rows.withColumn("delay", F.lit(0.1)), **errors)
    wait_for(lambda: len(noted()) >= 6, "the mended rows", PATIENCE)
    assert sorted(noted()) == [*range(6)]
    write(frame, **errors)
    jobs = spark.read.parquet(str(tmp_path)).groupBy("rabbitdelay_job").count().collect()
    assert [count for _, count in jobs] == [2, 2]


def test_large_refused_rows_are_written_some_at_a_time(
    spark: SparkSession, driver: None, tmp_path: Path
) -> None:
    # Of 400 MB, in one partition.
    frame = spark.sql(
        "select array(repeat(string(id % 10), 2000000)) args, double(null) delay "
        "from range(0, 200, 1, 1)"
    )
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": tmp_path.as_uri()}
    assert dispatch(frame, "look", app=APP, **errors).refused == {"InvalidRow": 200}
    rows = [pq.read_metadata(path).num_rows for path in tmp_path.iterdir()]
    assert sum(rows) == 200
    assert max(rows) * 2_000_000 <= 3 * CHUNK_BYTES


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
    given = {"app": APP, "kwargsFromColumns": True, "allowUnknownTasks": True, **errors}
    report = dispatch(frame, "nobody.knows", **given)
    assert (report.confirmed, report.refused) == (0, {"InvalidDelay": 1})
    back = spark.read.parquet(str(tmp_path)).drop(*FURTHER)
    # Parquet has no columns of nulls alone.
    expected = frame.schema.simpleString().replace(":void", ":string").replace("<void>", "<string>")
    assert back.schema.simpleString() == expected
    assert back.collect() == frame.collect()


def test_a_driver_gets_a_report_on_what_it_has_sent(
    spark: SparkSession, driver: None, shop: Any, noted: Notes
) -> None:
    began = time.time()
    frame = notes(spark, noted, 40).repartition(2)
    # The application is that of the task.
    report = dispatch(frame, shop.tasks["note"], envelopes=False, tolerance="100 milliseconds")
    assert (report.rows, report.confirmed, report.messages) == (40, 40, 40)
    assert [each.partition for each in report.partitions] == [0, 1]
    assert "40 of 40 rows confirmed, in 40 messages" in str(report)
    assert report.job is not None
    wait_for(lambda: len(noted()) >= 40, "all tasks", PATIENCE)
    assert time.time() - began >= DELAY
    assert sorted(noted()) == [*range(40)]


@pytest.mark.parametrize("group", [False, True], ids=["rows", "grouped"])
def test_a_report_says_which_ids_the_registry_knew_already(
    spark: SparkSession, driver: None, shop: Any, noted: Notes, group: bool
) -> None:
    frame = notes(spark, noted, 6, "1D")
    job_id = f"job-{noted.key}"
    ids = [task_id(job_id, row) for row in frame.select("args").collect()]
    shop.rabbitdelay.cancel(ids[:2])
    given: dict[str, Any] = {"app": APP, "jobId": job_id, "idColumn": "args", "group": group}
    report = dispatch(frame.where("args[0] < 4"), "note", **given)
    assert (report.confirmed, report.known) == (4, 2)
    wait_for(lambda: len(noted()) >= 2, "the tasks that are not cancelled", PATIENCE)
    again = dispatch(frame, "note", **given)
    assert (again.confirmed, again.known) == (6, 4)
    assert "4 of the ids were known already" in str(again)
    wait_for(lambda: len(noted()) >= 4, "the tasks that are new", PATIENCE)
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


def test_no_task_of_a_dispatch_that_fails_runs(
    spark: SparkSession, driver: None, noted: Notes
) -> None:
    bad = notes(spark, noted, 20).withColumn("delay", F.when(F.col("args")[0] < 19, 1.0))
    with pytest.raises(PySparkException, match="its delay is null"):
        dispatch(bad, "note", app=APP)
    assert noted.until(DELAY + 2) == []


def write_stream(frame: DataFrame, folder: Path, **options: Any) -> None:
    """Send a DataFrame's rows as a stream of one batch."""
    rows, checkpoint = str(folder / "rows"), str(folder / "checkpoint")
    frame.write.parquet(rows)
    stream = frame.sparkSession.readStream.schema(frame.schema).parquet(rows).writeStream
    stream = stream.format("rabbitdelay").options(app=APP, task="note", **options)
    stream.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    stream.start().awaitTermination()


def test_rows_whose_time_has_passed_are_dropped_or_refused_if_asked_for(
    spark: SparkSession, driver: None, noted: Notes, tmp_path: Path
) -> None:
    rows = f"named_struct('key', '{noted.key}') kwargs from range(4)"
    past, given = {"past": "drop"}, {"task": "note", "app": APP}
    eta = "if(id % 2 = 0, timestamp '2013-01-01', now() + interval 1 hour) eta"
    interval = "if(id % 2 = 0, interval '-1' second, interval '1' second) delay"
    number = "if(id % 2 = 0, -0.001D, 1D) delay"
    for time_column in (eta, interval, number):
        frame = spark.sql(f"select array(id) args, {time_column}, {rows}")
        for group in (False, True):
            report = dispatch(frame, group=group, **given, **past)
            assert (report.rows, report.confirmed, report.dropped) == (4, 2, 2)
            assert "2 dropped: past" in str(report)
    write(frame, **past)
    write(grouped(frame, **given, **past), **past)
    write_stream(frame, tmp_path, **past)
    refused = r"its time has passed \(past = 'refuse'\)"
    with pytest.raises(PySparkException, match=refused):
        write(frame, past="refuse")
    errors: dict[str, Any] = {"onError": "collect", "errorsPath": (tmp_path / "errors").as_uri()}
    report = dispatch(frame, past="refuse", group=True, **given, **errors)
    assert (report.confirmed, report.dropped, report.refused) == (2, 0, {"InvalidRow": 2})
    wait_for(lambda: len(noted()) >= 16, "the tasks that are not past", PATIENCE)
    assert set(noted()) == {1, 3}


def test_tables_and_views_of_sql_send_tasks_and_read(spark: SparkSession, noted: Notes) -> None:
    name = f"notes_{uuid4().hex}"
    columns = "args array<bigint>, kwargs struct<key: string>, delay double"
    options = f"app '{APP}', task 'note'"
    levels = f"app '{APP}', what 'levels'"
    rows = f"named_struct('key', '{noted.key}'), 1D"
    try:
        spark.sql(f"create table {name}_rows ({columns}) using rabbitdelay options ({options})")
        spark.sql(
            f"create table {name}_read using rabbitdelay options ({levels}) "
            "comment 'what waits' tblproperties ('team' = 'billing')"
        )
        spark.sql(
            f"create temporary view {name}_view ({columns}) using rabbitdelay options ({options})"
        )
        spark.sql(f"insert into {name}_rows with ({options}) select array(1L), {rows}")
        spark.sql(f"insert into {name}_view select array(2L), {rows}")
        with pytest.raises(AnalysisException, match=r"Spark passes on no options of a table"):
            spark.sql(f"insert into {name}_rows select array(3L), {rows}")
        spark.sql(f"create temporary view {name}_levels using rabbitdelay options ({levels})")
        for source in (f"{name}_read with ({levels})", f"{name}_levels"):
            assert spark.sql(f"select level, messages from {source}").count() > 10
        wait_for(lambda: len(noted()) >= 2, "all tasks", PATIENCE)
    finally:
        for each in ("table {}_rows", "table {}_read", "view {}_view", "view {}_levels"):
            kind, _, made = each.format(name).partition(" ")
            spark.sql(f"drop {kind} if exists {made}")
    assert sorted(noted()) == [1, 2]


def test_a_stream_sends_each_row_once_although_its_batch_is_written_again(
    spark: SparkSession, noted: Notes, tmp_path: Path
) -> None:
    def run() -> None:
        stream = stream_of(spark, noted, tmp_path).format("rabbitdelay")
        stream.options(app=APP, task="note").start().awaitTermination()

    add_file(tmp_path, range(5))
    run()
    # As if Spark had been killed after our commit and before it has noted the batch.
    for path in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        path.unlink()
    add_file(tmp_path, range(5, 8))
    run()
    wait_for(lambda: len(noted()) >= 8, "the tasks", PATIENCE)
    assert sorted(noted.until(DELAY + 2)) == [*range(8)]


def test_without_a_registry_a_batch_that_is_written_again_sends_its_rows_again(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path
) -> None:
    given = {
        "broker": shop.conf.broker_url.replace(":guest@", "@"),
        "brokerPassword": "guest",
        "prefix": f"test-{uuid4().hex[:8]}",
        "layout": "binary",  # of few queues, which a slow machine declares in time
        "queue": shop.conf.task_default_queue,
        "task": "note",
        "envelopes": False,  # nobody serves distribution under that prefix
    }

    def run() -> None:
        stream = stream_of(spark, noted, tmp_path).format("rabbitdelay")
        stream.options(**given).start().awaitTermination()

    add_file(tmp_path, range(5))
    run()
    for path in (tmp_path / "checkpoint" / "commits").glob("*0*"):
        path.unlink()
    add_file(tmp_path, range(5, 8))
    run()
    wait_for(lambda: len(noted()) >= 13, "all tasks, some twice", PATIENCE)
    assert Counter(noted()) == {**dict.fromkeys(range(5), 2), **dict.fromkeys(range(5, 8), 1)}


def test_a_stream_keeps_to_its_rate(
    spark: SparkSession, shop: Any, noted: Notes, tmp_path: Path
) -> None:
    add_file(tmp_path, range(8))
    stream = stream_of(spark, noted, tmp_path).format("rabbitdelay")
    queue = f"spark-{uuid4().hex}"
    given: dict[str, Any] = {"app": APP, "task": "nobody.knows", "queue": queue}
    given["allowUnknownTasks"] = True
    stream.options(**given, envelopes=False, maxRate=4).start().awaitTermination()
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == 8, "all tasks", PATIENCE)
        channel: Any = connection.default_channel
        messages = [channel.basic_get(queue, no_ack=True) for _ in range(8)]
        channel.queue_delete(queue)
    due_ms = [message.headers[header_names.DUE] for message in messages]
    # All have the same delay; the first one is sent at once.
    assert max(due_ms) - min(due_ms) >= 1000 * (8 - 1) / 4 - 100


def test_a_batch_that_foreach_batch_dispatches_twice_runs_each_row_once(
    spark: SparkSession, driver: None, noted: Notes, tmp_path: Path
) -> None:
    sent: list[tuple[int, int]] = []

    def send(batch: DataFrame, batch_id: int) -> None:
        job_id = f"{noted.key}:{batch_id}"
        report = dispatch(batch, "note", app=APP, tolerance=0.1, jobId=job_id)
        sent.append((batch_id, report.confirmed))
        if len(sent) == 1:
            raise RuntimeError("it was made to fail")

    def run() -> None:
        stream_of(spark, noted, tmp_path).foreachBatch(send).start().awaitTermination()

    add_file(tmp_path, range(5))
    with pytest.raises(StreamingQueryException, match="made to fail"):
        run()
    add_file(tmp_path, range(5, 8))
    run()
    assert sent == [(0, 5), (0, 5), (1, 3)]
    wait_for(lambda: len(noted()) >= 8, "the tasks", PATIENCE)
    assert sorted(noted.until(DELAY + 2)) == [*range(8)]


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


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
def test_an_eta_is_an_instant_when_the_clocks_of_the_session_change(
    spark: SparkSession, zone: str
) -> None:
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
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        assert frame.mapInArrow(wrong, "id bigint").collect() == []
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))


def test_the_task_of_a_row_is_found_by_the_id_of_the_row(spark: SparkSession, noted: Notes) -> None:
    job_id = f"job-{noted.key}"
    frame = notes(spark, noted, 5, "1D")
    write(frame, jobId=job_id, idColumn="args, kwargs")
    ids = {task_id(job_id, row) for row in frame.select("args", "kwargs").collect()}
    assert {note["correlation_id"] for note in noted.wait(5)} == ids


#: A folder that is no URI and no absolute path.
COLLECT = {"onError": "collect", "errorsPath": "errs"}

#: A column, two columns, an option, and an application; tests/unit/test_spark_values.py has more.
WRONG: list[tuple[str, dict[str, str], str]] = [
    ("'x' delay", {}, "column delay (string): takes a number of seconds"),
    ("1 delay, now() eta", {}, "there are both"),
    ("1 delay, array(interval 1 day) args", {}, "column args (array<interval day>): JSON cannot"),
    ("1 delay, struct(interval 1 year) args", {}, "JSON cannot express interval year"),
    ("1 delay, parse_json('{}') v", {"kwargsFromColumns": "true"}, "column v (variant): JSON cann"),
    ("1 delay", {"tasks": "x"}, "option tasks: is unknown; did you mean task"),
    ("1 delay", {"task": "notes"}, "option task = 'notes': is unknown to the application; did you"),
    ("1 delay", {"app": "no.such.module"}, "option app = 'no.such.module': cannot be imported"),
    ("1 delay", {"app": "<Celery shop>"}, "option app = '<Celery shop>': takes the import path"),
    ("1 delay, 'x' cat", {"kwargsFromColumns": "true"}, "does not take these columns as its arg"),
    ("1 delay", {"task": "look", **COLLECT}, "option errorsPath = 'errs': takes the URI of"),
]


@pytest.mark.parametrize(("columns", "options", "error"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_sent(
    spark: SparkSession, shop: Any, columns: str, options: dict[str, str], error: str
) -> None:
    with pytest.raises(AnalysisException) as raised:
        write(spark.sql(f"select {columns}"), **options)
    assert error in str(raised.value)


def test_a_broker_that_is_away_fails_the_write_with_the_partition_and_the_reason(
    spark: SparkSession,
) -> None:
    rows = spark.sql("select array(id) args, 9 delay from range(0, 6, 1, 2)").where("args[0] > 2")
    away = f"{away_shop.__name__}:app"
    with pytest.raises(PySparkException) as failed:
        write(rows, app=away)
    with pytest.raises(PySparkException) as dispatched:
        dispatch(rows, "note", app=away)
    for text in (str(failed.value), str(dispatched.value)):
        assert "This was partition 1 of the write, whose rows" in text
        assert "3 rows were not confirmed" in text
        assert "no connection to amqp://guest:**@127.0.0.1:1//" in text
        assert away_shop.PASSWORD not in text
