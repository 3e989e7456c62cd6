"""DataFrames become delayed tasks: real Spark, a worker, RabbitMQ and Redis."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from kombu import Connection
from kombu.utils.json import loads
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay import InvalidColumn
from celery_rabbitdelay.app.send_many import MAX_ERRORS
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.spark import dispatch, grouped, task_id
from celery_rabbitdelay.spark.columns import Columns, TaskIds
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.partition import FURTHER
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE
from tests.spark.integration.spark_apps import APP, publish
from tests.spark.integration.spark_fixtures import DELAY, notes, shop, write

__all__ = ["shop"]

#: For rows of a task that no worker knows.
UNKNOWN: Final[dict[str, Any]] = {"task": "nobody.knows", "allowUnknownTasks": "true"}


@pytest.fixture
def queue(shop: Any) -> Iterator[str]:
    """The name of a queue that no worker serves."""
    name = f"spark-{uuid4().hex}"
    yield name
    with Connection(shop.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(name)


@pytest.fixture
def errors(tmp_path: Path) -> dict[str, Any]:
    """The options of a write that collects refused rows."""
    return {"onError": "collect", "errorsPath": tmp_path.as_uri()}


def bodies(shop: Any, queue: str, number: int) -> list[Any]:
    """Return the bodies of so many messages in a queue."""
    with Connection(shop.conf.broker_url) as connection:
        wait_for(lambda: count(connection, queue) == number, "the tasks", PATIENCE)
        channel: Any = connection.default_channel
        return [loads(channel.basic_get(queue, no_ack=True).body) for _ in range(number)]


def test_rows_become_tasks_that_run_when_they_are_due(spark: SparkSession, noted: Notes) -> None:
    """By the call; the format takes Spark several Python processes, which start for seconds."""
    began = time.time()
    report = dispatch(notes(spark, noted, 3, "2D", partitions=1), "note", app=APP)
    assert (report.rows, report.confirmed) == (3, 3)
    assert all(note["at"] >= began + 2 for note in noted.wait(3))
    assert sorted(noted()) == [0, 1, 2]


def test_the_format_takes_columns_of_many_types(spark: SparkSession, noted: Notes) -> None:
    columns = [
        "array(id) args, map('key', '{key}') kwargs, interval 3 second delay",
        "struct(id) args, to_json(map('key', '{key}')) kwargs, 3 delay",
        "to_json(array(id)) args, named_struct('key', '{key}') kwargs, 3.5BD delay",
        "array(id) args, map('key', '{key}') kwargs, now() + interval 3 second eta",
        "array(id) Args, map('key', '{key}') KWARGS, 3 delaY, 'note' TASK, 0.1 tolerance",
    ]
    began = time.time()
    for each in columns:
        write(spark.sql(f"select {each.format(key=noted.key)} from range(0, 2, 1, 1)"))
    assert all(note["at"] >= began + 3 for note in noted.wait(2 * len(columns)))
    assert sorted(noted()) == [0] * len(columns) + [1] * len(columns)


def test_names_of_columns_are_case_insensitive_whatever_the_session_says(
    spark: SparkSession, shop: Any, noted: Notes, queue: str
) -> None:
    frame = notes(spark, noted, 3, "1D").selectExpr("args ARGS", "kwargs.key WHO", "delay Delay")
    given = {"app": APP, "queue": queue, "idColumn": "args", "kwargsFromColumns": "true", **UNKNOWN}
    with pytest.raises(PySparkException, match=r"column args \(string\): appears twice"):
        write(frame.withColumnRenamed("WHO", "args"), **given)
    for is_sensitive in ("false", "true"):
        spark.conf.set("spark.sql.caseSensitive", is_sensitive)
        try:
            write(frame, **given)
            write(grouped(frame, **given), **given)
        finally:
            spark.conf.unset("spark.sql.caseSensitive")
    sent = [(number, kwargs) for (number,), kwargs, _ in bodies(shop, queue, 12)]
    assert sorted(number for number, _ in sent) == sorted(4 * [0, 1, 2])
    assert all(kwargs == {"WHO": noted.key} for _, kwargs in sent)


def test_a_job_that_is_run_twice_runs_each_task_once(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    """Also if it is grouped the second time."""
    frame, job_id = notes(spark, noted, 6), f"job-{noted.key}"
    ids = [task_id(job_id, row) for row in frame.select("args").collect()]
    shop.rabbitdelay.cancel(ids[:2])
    given: dict[str, Any] = {"app": APP, "jobId": job_id, "idColumn": "args"}
    report = dispatch(frame.where("args[0] < 4"), "note", **given, group=False)
    assert report.confirmed == 4
    assert {each["correlation_id"] for each in noted.wait(2)} == {*ids[2:4]}
    again = dispatch(frame, "note", **given, group=True)
    assert (again.rows, again.confirmed) == (6, 6)
    titles, *_, total = (line.split() for line in str(again).splitlines())
    assert dict(zip(titles, total, strict=True)).items() >= {("rows", "6"), ("confirmed", "6")}
    noted.wait(4)
    assert sorted(noted.until(1)) == [2, 3, 4, 5]


def test_grouped_rows_run_once_each_whoever_writes_them(spark: SparkSession, noted: Notes) -> None:
    """Spark, for every second row Python, and Celery for a task that it compresses."""
    frame, plain = notes(spark, noted, 100), "string(args[0])"
    half = f"if(args[0] % 2 = 0, 'it\\'s ' || args[0], {plain})"
    for task, first in (("note", plain), ("note", half), ("compressed-note", plain)):
        rows = frame.selectExpr(f"array({first}) args", "kwargs", "delay")
        report = dispatch(rows, task, app=APP, group=True)
        assert report.rows == report.confirmed == 100
        if (task, first) == ("note", plain):
            assert report.envelopes == report.messages < 20
    noted.wait(300)
    halves = [str(each) if each % 2 else f"it's {each}" for each in range(100)]
    assert sorted(noted()) == sorted([*halves, *2 * [str(each) for each in range(100)]])


def test_refused_rows_are_collected_with_their_types_mended_and_written_again(
    spark: SparkSession, noted: Notes, errors: dict[str, Any], tmp_path: Path
) -> None:
    frame = notes(
        spark,
        noted,
        6,
        "case id when 0 then double('nan') when 1 then null when 2 then -1D else 3D end",
    )
    write(frame, **errors)
    noted.wait(4)
    assert sorted(noted()) == [2, 3, 4, 5]
    refused = spark.read.parquet(str(tmp_path)).orderBy("args")
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


def test_rows_behind_many_refused_ones_are_sent_and_one_refused_row_may_fail_a_write(
    spark: SparkSession, noted: Notes, errors: dict[str, Any], tmp_path: Path
) -> None:
    # More than send_many refuses before it takes no more.
    bad = MAX_ERRORS + 100
    rows = notes(spark, noted, bad + 50, f"if(id < {bad}, double('nan'), 3D)", partitions=1)
    report = dispatch(rows, "note", app=APP, **errors)
    assert (report.confirmed, report.refused) == (50, {"InvalidDelay": bad})
    assert spark.read.parquet(str(tmp_path)).count() == bad
    noted.wait(50)
    assert sorted(noted()) == [*range(bad, bad + 50)]
    with pytest.raises(PySparkException, match="takes a finite number"):
        dispatch(rows, "note", app=APP, group=True)
    report = dispatch(rows.where(f"args[0] > {bad - 2}"), "note", app=APP, group=True, **errors)
    assert (report.rows, report.confirmed, report.refused) == (51, 50, {"InvalidDelay": 1})


def test_refused_rows_keep_the_types_of_their_columns(
    spark: SparkSession, errors: dict[str, Any], tmp_path: Path
) -> None:
    frame = spark.sql(
        """
        select interval '36501 2:3:4' day to second delay, 1.50BD price, timestamp '2026-01-02' at,
            timestamp_ntz '2026-01-02' local, date '2026-01-02' day, binary('x') blob, 7Y small,
            1.1F amount, map('a', named_struct('b', array(1, null))) box, array() nothing, null void
        """
    )
    report = dispatch(frame, app=APP, kwargsFromColumns=True, **UNKNOWN, **errors)
    assert (report.confirmed, report.refused) == (0, {"InvalidDelay": 1})
    back = spark.read.parquet(str(tmp_path)).drop(*FURTHER)
    # Parquet has no columns of nulls alone.
    expected = frame.schema.simpleString().replace(":void", ":string").replace("<void>", "<string>")
    assert back.schema.simpleString() == expected
    assert back.collect() == frame.collect()


def test_rows_whose_time_has_passed_are_dropped_or_refused_if_asked_for(
    spark: SparkSession,
) -> None:
    etas = "if(id % 2 = 0, timestamp '2013-01-01', now() + interval 1 hour) eta"
    frame = spark.sql(f"select array(id) args, {etas} from range(4)")
    for group in (False, True):
        report = dispatch(frame, "look", app=APP, group=group, past="drop")
        assert (report.rows, report.confirmed, report.dropped) == (4, 2, 2)
    with pytest.raises(PySparkException, match=r"its time has passed \(past = 'refuse'\)"):
        dispatch(frame, "look", app=APP, past="refuse")


def test_what_cannot_be_grouped_is_sent_row_by_row_unless_it_is_asked_for(
    spark: SparkSession, noted: Notes
) -> None:
    frame = notes(spark, noted, 5).selectExpr("to_json(args) args", "kwargs", "delay")
    with pytest.raises(InvalidColumn, match="write without grouped"):
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
        with pytest.raises(AnalysisException, match=r"Spark drops a table's options"):
            spark.sql(f"insert into {name}_rows select array(3L), {row}")
        for source in (f"{name}_read with ({levels})", f"{name}_levels"):
            assert spark.sql(f"select level, messages from {source}").count() > 10
        noted.wait(2)
    finally:
        for what in made:
            spark.sql(f"drop {what.replace('temporary ', '').replace(' ', ' if exists ')}")
    assert sorted(noted()) == [1, 2]


@pytest.mark.parametrize("dies", ["before its commit", "after its commit", "in foreachBatch"])
def test_a_batch_that_is_written_again_since_its_driver_died_sends_each_row_once(
    spark: SparkSession,
    spark_settings: dict[str, Any],
    spark_folder: Path,
    noted: Notes,
    tmp_path: Path,
    dies: str,
) -> None:
    publish(spark_folder, "dying", {**spark_settings, "commits": False})

    def send(batch: DataFrame, batch_id: int) -> None:
        dispatch(batch, "note", app=APP, tolerance=0.1, jobId=f"{noted.key}:{batch_id}")

    def write_all(app: str, *numbers: int) -> None:
        """Write what has come, as if Spark had not noted the first batch."""
        lines = "\n".join(f'{{"id": {each}}}' for each in numbers)
        (tmp_path / f"{numbers[0]}.json").write_text(lines)
        for path in (tmp_path / "checkpoint" / "commits").glob("*0*"):
            path.unlink()
        rows = spark.readStream.schema("id bigint").json(str(tmp_path / "*.json"))
        rows = rows.selectExpr("array(id) args", f"map('key', '{noted.key}') kwargs", "4D delay")
        stream = rows.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        stream = stream.trigger(availableNow=True)
        if dies == "in foreachBatch":
            stream = stream.foreachBatch(send)
        else:
            stream = stream.format("rabbitdelay").options(task="note", app=app)
        stream.start().awaitTermination()

    write_all(APP.replace("shop", "dying") if dies == "before its commit" else APP, *range(5))
    write_all(APP, *range(5, 8))
    noted.wait(8)
    assert sorted(noted.until(DELAY)) == [*range(8)]


def test_an_eta_is_an_instant_when_the_clocks_of_the_session_change(spark: SparkSession) -> None:
    # Each half hour of a year.
    query = "select timestamp_seconds(1800000000 + 1800 * id) eta from range(0, 17520, 1, 1)"
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Australia/Lord_Howe")
    try:
        frame = spark.sql(query)
        batches = frame.toArrow().to_batches()
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(before))
    columns = Columns(frame.schema, WriteOptions.of_call({"app": APP, "task": "note"}))
    found: list[Any] = [each.row for each in columns.taken(batches, TaskIds("june"))]
    etas = [row.eta for row in found]
    assert [Due.at(each).at_ms for each in etas] == [
        (1_800_000_000 + 1800 * number) * 1000 for number in range(17520)
    ]


def test_what_is_wrong_is_said_before_anything_is_sent(spark: SparkSession, shop: Any) -> None:
    """A column, an option, an application; tests/spark/unit/test_spark_values.py has more."""
    url = {"broker": shop.conf.broker_url.replace("guest:guest@", "guest@")}
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("1 delay, now() eta", {}, "both are present"),
        ("1 delay", {"tasks": "x"}, "option tasks: is unknown; did you mean task"),
        ("1 delay", {"task": "notes"}, "option task = 'notes': is unknown to the application; did"),
        ("1 delay", {"app": "no.such.module"}, "option app = 'no.such.module': cannot be imported"),
        ("1 delay, 'x' cat", {"kwargsFromColumns": "true"}, "does not take these columns as its a"),
        ("1 delay", {**url, "maxRate": "5"}, "needs a reg"),
        ("1 delay", {**url, "job": "import"}, "needs a reg"),
    ]
    for columns, options, error in wrong:
        with pytest.raises(AnalysisException) as raised:
            write(spark.sql(f"select {columns}"), **options)
        assert error in str(raised.value)
