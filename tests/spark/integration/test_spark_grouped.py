"""Rows that Spark writes are those that Python would have written, byte by byte."""

import time
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay import InvalidColumn, InvalidOption, Row
from celery_rabbitdelay.app.copies import Template, capture
from celery_rabbitdelay.app.rows import WrittenRows
from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.spark import grouped
from celery_rabbitdelay.spark.application import application_of
from celery_rabbitdelay.spark.columns import DUE, ITEM, ROW, Columns, TaskIds
from celery_rabbitdelay.spark.options import WriteOptions

#: A port that nothing listens on: grouping opens no connection.
NOWHERE = "amqp://guest@127.0.0.1:1//"
GIVEN = {"broker": NOWHERE, "task": "remind", "jobId": "the job"}

#: Strings that Spark writes, and those that it leaves to Python.
PLAIN = ("a", "B c", "7", "", "order-1_2.3:4/5;6,7!?*+~@#$%^&=|`>)]}", "long " * 50)
NOT_PLAIN = ("it's", '"', "a\\b", "Umlaut \u00e4", "(1)", "[1", "{1", "<1", "a\n", "\x7f")

#: Doubles, likewise.
EXACT_DOUBLES = (0.0, 1.5, -3.0, 0.25, -0.125, 1234567.001, 999_999_999_999.0, 600.0, 0.1)
OTHER_DOUBLES = (0.1234, 1e15, float("inf"), -0.0, 1e-7, 1e300)

#: The other values of a row, by column: for each the type, and values that Spark writes.
EXACT: Mapping[str, tuple[T.DataType, Sequence[Any]]] = {
    "whole": (T.LongType(), [0, -1, 2**63 - 1]),
    "byte": (T.ByteType(), [7, -128]),
    "flag": (T.BooleanType(), [True, False]),
    "price": (T.DecimalType(8, 2), [Decimal("12.50"), Decimal("-0.01"), Decimal("0.00")]),
    "small": (T.DecimalType(7, 6), [Decimal("0.000001"), Decimal("0.000000")]),
    "day": (T.DateType(), [date(1997, 1, 5), date(1, 1, 1), date(9999, 12, 31)]),
    "tags": (T.ArrayType(T.StringType()), [["a", "b"], []]),
    "ranks": (T.ArrayType(T.IntegerType()), [[1, -2], [3], []]),
    "flags": (T.ArrayType(T.BooleanType()), [[True, None]]),
    "numbers": (T.ArrayType(T.DoubleType()), [[0.5, -2.0], [None]]),
    "inner": (
        T.StructType([T.StructField("b", T.StringType()), T.StructField("a", T.LongType())]),
        [("x", 1), (None, None)],
    ),
}


def options(**more: str) -> WriteOptions:
    return WriteOptions.of({name.lower(): value for name, value in {**GIVEN, **more}.items()})


def by_python(frame: DataFrame, given: WriteOptions) -> dict[str, bytes]:
    """The rows as Python writes them, by their ids."""
    app, ids = application_of(given.application), TaskIds(given.job_id or "")
    first = Call("first", (), {}, Due.after(60))
    made = capture(app.rabbitdelay, "remind", first, {})
    write, found = Template(made, first, {}), {}
    for each in Columns(frame.schema, given).taken(frame.toArrow().to_batches(), ids):
        assert isinstance(each.row, Row), each.row
        task_id = str(each.row.task_id)
        call = Call(task_id, each.row.args, each.row.kwargs, Due.after(60))
        found[task_id] = write.item(call)
    return found


def written(frame: DataFrame, **more: str) -> tuple[dict[str, bytes], list[Any]]:
    """The rows that Spark has written, by their ids, and those that it has left to Python."""
    rows = grouped(frame, **{**GIVEN, **more}).collect()
    items = [bytes(row[ITEM]) for row in rows if row[ITEM] is not None]
    by_id = {item.partition(b'"id":"')[2].partition(b'"')[0].decode(): item for item in items}
    return by_id, [row[ROW] for row in rows if row[ITEM] is None]


def assert_written_as_python_does(items: dict[str, bytes], frame: DataFrame, **more: str) -> None:
    python = by_python(frame, options(**more))
    assert items == {task_id: item for task_id, item in python.items() if task_id in items}


def test_spark_writes_plain_strings_as_python_does_and_leaves_the_others_to_it(
    spark: SparkSession,
) -> None:
    plain: list[Any] = [*([each] for each in PLAIN), list(PLAIN[:3]), []]
    others: list[Any] = [*([each] for each in NOT_PLAIN), [None, "a"], ["x" * 600, "y" * 600], None]
    given = [(args, float(600 + number)) for number, args in enumerate([*plain, *others])]
    frame = spark.createDataFrame(given, "args array<string>, delay double")
    items, left = written(frame)
    assert_written_as_python_does(items, frame)
    assert len(items) == len(plain)
    assert [row.args for row in left] == others


def test_spark_writes_values_of_each_type_as_python_does(spark: SparkSession) -> None:
    names = ["amount", *EXACT]
    kinds = [T.DoubleType(), *(kind for kind, _ in EXACT.values())]
    fields = [T.StructField(name, kind) for name, kind in zip(names, kinds, strict=True)]
    fields.append(T.StructField("eta", T.TimestampType()))
    rows: list[tuple[Any, ...]] = [(None,) * len(names)]
    rows += [(each, *(None for _ in EXACT)) for each in (*EXACT_DOUBLES, *OTHER_DOUBLES)]
    for name, (_, values) in EXACT.items():
        rows += [tuple(value if each == name else None for each in names) for value in values]
    rows += [(1.5, *(values[0] for _, values in EXACT.values()))]
    soon = datetime.now().astimezone() + timedelta(days=30)
    etas = [soon.replace(microsecond=1000 * number) for number in range(len(rows))]
    frame = spark.createDataFrame(
        [(*row, eta) for row, eta in zip(rows, etas, strict=True)], T.StructType(fields)
    )
    items, left = written(frame, kwargsFromColumns="true")
    assert_written_as_python_does(items, frame, kwargsFromColumns="true")
    assert [row.amount for row in left] == list(OTHER_DOUBLES)
    assert len(items) == len(rows) - len(OTHER_DOUBLES)


@pytest.mark.parametrize(
    "times",
    [
        "timestamp_seconds({now} + id * 60) eta",
        "id * 0.5 delay",
        "make_dt_interval(0, 0, 0, id) delay",
    ],
    ids=["eta", "decimal", "interval"],
)
def test_rows_that_are_past_are_due_now_and_left_to_python_unless_they_are_sent(
    spark: SparkSession, times: str
) -> None:
    given = times.format(now=int(time.time()))
    frame = spark.sql(f"select array(id) args, {given} from range(-2, 3)").where("args[0] <> 0")
    items, left = written(frame)
    assert items == by_python(frame, options())
    assert (len(items), left) == (4, [])
    assert len({row[DUE] for row in grouped(frame, **GIVEN).collect()}) == 3
    items, left = written(frame, past="drop")
    assert (len(items), sorted(row.args[0] for row in left)) == (2, [-2, -1])


def test_ids_are_derived_from_the_same_columns_and_delays(spark: SparkSession) -> None:
    frame = spark.sql(
        """
        select struct(id, concat('order-', id)) args,
            make_dt_interval(id % 3 - 1, id, 0, id / 1000) delay,
            if(id = 4, 'given-4', null) task_id
        from range(40)
        """
    )
    items, left = written(frame)
    assert items == by_python(frame, options())
    assert (len(items), left) == (40, [])
    assert "given-4" in items
    assert written(frame.toDF("Args", "DELAY", "Task_ID")) == (items, [])
    one, _ = written(frame.drop("task_id"), idColumn="ARGS")
    assert one == by_python(frame.drop("task_id"), options(idColumn="args"))


def test_ids_are_the_same_whatever_the_time_zone_of_the_session_is(spark: SparkSession) -> None:
    # Around the hour that occurs twice in New York, and before time zones were of whole minutes.
    query = """
        select timestamp_seconds(at) eta, struct(id) args
        from values (-3e9, 1), (1793507400, 2), (1793511000, 3), (1893553445.678, 4) rows(at, id)
        """
    former, found = spark.conf.get("spark.sql.session.timeZone"), []
    try:
        for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            frame = spark.sql(query)
            items, left = written(frame)
            assert left == []
            assert items.keys() == by_python(frame, options()).keys()
            found.append(items.keys())
    finally:
        spark.conf.set("spark.sql.session.timeZone", former or "UTC")
    assert found == [found[0]] * 3


def test_tasks_that_are_due_in_the_same_tick_come_together(spark: SparkSession) -> None:
    frame = spark.sql("select array(id) args, 3600 + id % 100 delay from range(0, 10000, 1, 4)")
    given = {**GIVEN, "tolerance": "60"}
    began_ms = time.time_ns() // 1_000_000
    rows = grouped(frame, **given)
    columns = Columns(rows.schema, options(tolerance="60"))
    batches = rows.select(DUE, ITEM).toArrow().to_batches()
    found = [each.row for each in columns.taken(batches, TaskIds("the job"))]
    groups = [each for each in found if isinstance(each, WrittenRows)]
    assert found == groups
    # Whole minutes from 60 to 62.
    assert len({each.due_ms for each in groups}) == 3
    assert max(each.count for each in groups) == 1000
    numbers = [row.args[0] for each in groups for row, _ in each.read()]
    assert sorted(numbers) == list(range(10_000))
    for each in groups:
        for row, _ in each.read():
            late_ms = each.due_ms - began_ms - (3600 + row.args[0] % 100) * 1000
            # Never early; it may have begun later.
            assert late_ms >= 0


def test_rows_without_a_valid_time_are_left_to_python(spark: SparkSession) -> None:
    delays = "double('nan'), null, double('inf'), -double('inf'), 1e300D, 0D, 5D"
    etas = "timestamp '2020-01-01 00:00:00', null"
    for column, values, valid in (("delay", delays, 2), ("eta", etas, 1)):
        query = f"select array('a') args, explode(array({values})) {column}"
        items, left = written(spark.sql(query))
        assert (len(items), len(left)) == (valid, len(values.split(", ")) - valid)


def test_what_cannot_be_grouped_says_what_to_do(spark: SparkSession) -> None:
    for columns, name in (
        ("'{}' kwargs, 1 delay", "kwargs"),
        ("map('a', 1) kwargs, 1 delay", "kwargs"),
        ("array(1F) args, 1 delay", "args"),
        ("struct(current_timestamp()) args, 1 delay", "args"),
        ("array(1) args, 1 delay, 5 priority", "priority"),
    ):
        with pytest.raises(InvalidColumn, match="write without grouped") as caught:
            grouped(spark.sql(f"select {columns}"), **GIVEN)
        assert caught.value.name == name
    with pytest.raises(InvalidOption, match="envelopes"):
        grouped(spark.sql("select array(1) args, 1 delay"), **GIVEN, envelopes=False)
