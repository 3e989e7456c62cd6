"""Options, columns, ids and groups of Spark's format ``rabbitdelay``, without a Java machine."""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Any
from uuid import uuid5
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu import Queue
from pyspark.sql import types as T  # noqa: N812 - the name that Spark's users know
from pyspark.sql.types import StructType

from celery_rabbitdelay import Celery, InvalidColumn, InvalidOption, InvalidRow, Row
from celery_rabbitdelay.app.rows import MAX_GROUP_BYTES, MAX_GROUP_MESSAGES, WrittenRows
from celery_rabbitdelay.spark.application import numbers_taken
from celery_rabbitdelay.spark.columns import (
    DUE,
    ITEM,
    ROW,
    Columns,
    Shared,
    Taken,
    TaskIds,
    task_id,
)
from celery_rabbitdelay.spark.options import ApplicationOptions, ReadOptions, WriteOptions
from tests.given_times import KINDS

#: As Spark passes them.
LEAST = {"app": "shop", "task": "remind"}


def options(**more: str) -> WriteOptions:
    return WriteOptions.of({**LEAST, **{name.lower(): value for name, value in more.items()}})


def schema(**columns: T.DataType) -> StructType:
    return StructType([T.StructField(name, kind) for name, kind in columns.items()])


def taken(columns: Mapping[str, tuple[T.DataType, list[Any]]], **more: str) -> list[Taken]:
    """Return the rows of columns: for each its type in Spark, and its values."""
    read = Columns(schema(**{name: kind for name, (kind, _) in columns.items()}), options(**more))
    batch = pa.RecordBatch.from_pydict({name: values for name, (_, values) in columns.items()})
    return list(read.taken([batch], JUNE))


def rows(columns: Mapping[str, tuple[T.DataType, list[Any]]], **more: str) -> list[Any]:
    """Return them as ``send_many`` takes them, without the ids that are derived."""
    found: list[Any] = [each.row for each in taken(columns, **more)]
    return [row if row.task_id == "mine" else row._replace(task_id=None) for row in found]


JUNE = TaskIds("june")
LONG, TEXT, DAYS = T.LongType(), T.StringType(), T.DayTimeIntervalType()
DELAY: tuple[T.DataType, list[Any]] = (T.DoubleType(), [1.5])

INSTANT = datetime(2030, 1, 2, 3, 4, 5, 678_000, UTC)


def test_a_row_has_the_arguments_and_the_delay_of_its_columns() -> None:
    positions = T.StructType([T.StructField("b", LONG), T.StructField("a", TEXT)])
    columns: dict[str, tuple[T.DataType, list[Any]]] = {
        "args": (positions, [{"b": 7, "a": "x"}, None]),
        "kwargs": (T.StructType([T.StructField("a", LONG)]), [{"a": 3}, {"a": None}]),
        "delay": (T.DecimalType(8, 2), [Decimal("1.50"), Decimal("2.50")]),
        "key": (TEXT, ["order:1", None]),
        "task_id": (TEXT, [None, "mine"]),
    }
    assert rows(columns) == [
        Row((7, "x"), {"a": 3}, 1.5, key="order:1"),
        Row((), {"a": None}, 2.5, task_id="mine"),
    ]
    columns = {"args": (TEXT, ['[1, {"a": 2}]']), "kwargs": (TEXT, ['{"b": null}'])}
    columns["eta"] = (T.TimestampType(), [INSTANT])
    assert rows(columns) == [Row([1, {"a": 2}], {"b": None}, eta=INSTANT)]
    # Those without a meaning are keyword arguments, if asked for.
    columns = {"day": (T.DateType(), [date(2030, 1, 2)]), "delay": (DAYS, [timedelta(days=-1)])}
    expected = Row((), {"day": date(2030, 1, 2)}, timedelta(days=-1))
    assert rows(columns, kwargsFromColumns="true") == [expected]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"args": (T.StringType(), ["{}"])}, "its args is JSON, but not a list"),
        ({"kwargs": (T.StringType(), ["[1"])}, "its kwargs is not JSON"),
        ({"delay": (T.DoubleType(), [None])}, "its delay is null"),
    ],
)
def test_a_row_that_is_no_task_is_its_own_error(columns: dict[str, Any], reason: str) -> None:
    (found,) = taken({"delay": DELAY, **columns})
    assert isinstance(found.row, InvalidRow)
    assert reason in str(found.row)


def test_rows_may_differ_in_what_send_many_takes_once() -> None:
    columns: dict[str, tuple[T.DataType, list[Any]]] = {
        "delay": (T.DoubleType(), [1.0, 1.0]),
        "task": (T.StringType(), ["other", None]),
        "queue": (T.StringType(), ["q", None]),
        "tolerance": (T.LongType(), [60, None]),
        "priority": (T.IntegerType(), [3, None]),
        "headers": (T.StringType(), ['{"b": 1, "a": 2}', None]),
    }
    one, other = taken(columns, queue="mails", tolerance="5")
    own = '{"headers": {"a": 2, "b": 1}, "priority": 3, "queue": "q"}'
    assert one.shared == Shared("other", 60.0, own)
    assert other.shared == Shared("remind", 5.0, '{"queue": "mails"}')
    read = Columns(schema(delay=LONG, task=TEXT), WriteOptions.of({"app": "shop"}))
    batch = pa.RecordBatch.from_pydict({"delay": [1], "task": pa.array([None])})
    (bad,) = read.taken([batch], JUNE)
    assert "its task is null" in str(bad.row)


OWN = {"kwargsFromColumns": "true"}


@pytest.mark.parametrize(
    ("columns", "more", "text"),
    [
        ({"delay": TEXT}, {}, "column delay (string): takes a number of seconds, or"),
        ({"delay": LONG, "eta": T.TimestampType()}, {}, "column delay: use exactly one of"),
        ({"delay": LONG}, {"task": None}, "column task: add this column"),
        ({"args": TEXT}, {}, "both are missing"),
        ({"delay": LONG, "kwargs": T.MapType(LONG, LONG)}, {}, "takes a map with string keys"),
        ({"delay": LONG, "odd": LONG}, {}, "column odd (bigint): is unknown"),
        ({"delay": LONG, "kwargs": TEXT}, OWN, "column kwargs (string): cannot be combined"),
        ({"delay": LONG, "DELAY": LONG}, {}, "column DELAY (bigint): appears twice"),
        ({"delay": LONG, "args": T.ArrayType(DAYS)}, {}, "JSON cannot express interval day"),
        ({"delay": LONG, "wait": DAYS}, OWN, "express interval day to second;"),
    ],
)
def test_an_unfit_schema_is_refused(columns: Any, more: Any, text: str) -> None:
    given = {name.lower(): value for name, value in {**LEAST, **more}.items() if value}
    with pytest.raises(InvalidColumn) as raised:
        Columns(schema(**columns), WriteOptions.of(given))
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"task": "t"}, "option app: takes the import path"),
        ({"app": "shop", "prefix": "x"}, "option prefix: is a setting of the application"),
        ({"broker": "amqp://h", "brokercafile": "/ca.pem"}, "amqps://"),
        ({"broker": "amqp://me:opensesame@h/"}, "option broker = 'amqp://me:**@h/': takes a URL"),
        ({**LEAST, "jobbid": "x"}, "option jobbid: is unknown; did you mean jobId?"),
        ({**LEAST, "brokerpasword": "opensesame"}, "option brokerpasword"),
        ({**LEAST, "tolerance": "1 month"}, "option tolerance = '1 month': takes a duration"),
        ({**LEAST, "envelopes": "1"}, "option envelopes = '1': takes true or false"),
        ({**LEAST, "onerror": "collect"}, "option errorsPath: takes the folder"),
    ],
)
def test_a_wrong_option_is_refused_and_no_password_is_shown(given: Any, text: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        WriteOptions.of(given)
    assert text in str(raised.value)
    assert "opensesame" not in str(raised.value)


def test_a_duration_is_written_as_ours_or_as_sparks() -> None:
    texts = {
        "1h30m": 5400,
        "INTERVAL 1 day 2 Hours": 93_600,
        "interval '10' second": 10,
        "2 weeks 30 secs 250 milliseconds": 1_209_630.25,
    }
    length = timedelta(days=3, minutes=5)
    lengths = [(kind.length(length), 259_500) for kind in KINDS.values()]
    for written, seconds in (*texts.items(), *lengths):
        found = WriteOptions.of_call({**LEAST, "tolerance": written, "jobExpires": written})
        assert (found.tolerance, found.job_expires) == (seconds, seconds)


#: An application that executors would find.
shop = Celery("shop", set_as_current=False)


@shop.task(name="remind", shared=False)
def remind(order: int, *, by: str = "mail") -> None: ...


def test_a_task_an_application_and_a_queue_stand_for_themselves() -> None:
    here = f"{__name__}:shop"
    expected = WriteOptions.of({"app": here, "task": "remind", "queue": "q", "idcolumn": "a,b"})
    more = {"queue": Queue("q"), "idColumn": ["a", "b"], "jobId": None}
    assert WriteOptions.of_call({"app": shop, "task": remind, **more}) == expected
    assert WriteOptions.of_call({"task": remind, **more}) == expected
    hidden = Celery("hidden", set_as_current=False)
    with pytest.raises(InvalidOption, match="takes an application that executors can import"):
        WriteOptions.of_call({"app": hidden, "task": "remind"})


@pytest.mark.parametrize(
    ("columns", "from_columns", "taken"),
    [
        ({"args": schema(order=LONG), "kwargs": schema(by=TEXT)}, False, [1]),
        ({"order": LONG, "by": TEXT}, True, [0]),
        ({"args": schema(order=LONG), "kwargs": schema(to=TEXT)}, False, "argument 'to'"),
        ({"args": schema(order=LONG, more=LONG)}, False, "2 were given"),
        ({"kwargs": schema(by=TEXT)}, False, "'order'"),
        ({"args": T.ArrayType(LONG), "order": LONG, "cat": TEXT}, True, "argument 'cat'"),
    ],
)
def test_columns_that_no_row_can_make_the_tasks_arguments_are_refused(
    columns: dict[str, T.DataType], from_columns: bool, taken: list[int] | str
) -> None:
    given = options(**OWN) if from_columns else options()
    if isinstance(taken, str):
        with pytest.raises(InvalidOption, match=f"option task = 'remind'.*{taken}"):
            numbers_taken(remind, columns, given)
    else:
        assert [*numbers_taken(remind, columns, given)] == taken


def test_a_password_is_put_into_the_url_and_stays_out_of_the_text() -> None:
    given = {"broker": "amqp://me@host:5672/shop", "brokerpassword": "open/sesame"}
    found = ApplicationOptions.of({**given, "registry": "redis://host/1", "registrypassword": "p"})
    assert found.broker == "amqp://me:open%2Fsesame@host:5672/shop"
    assert found.registry == "redis://:p@host/1"
    assert "sesame" not in repr(found)


def test_sparks_own_options_are_left_alone() -> None:
    WriteOptions.of({**LEAST, "checkpointlocation": "/x", "path": "/y"})
    # As CREATE TABLE passes them, with a comment and a property of the table.
    table = {"provider": "rabbitdelay", "owner": "root", "comment": "c", "what": "levels"}
    given = {**table, "app": "shop", "option.app": "shop", "option.what": "levels"}
    assert ReadOptions.of(given) == ReadOptions.of({"app": "shop", "what": "levels"})
    with pytest.raises(InvalidOption, match="option wath: is unknown; did you mean what"):
        ReadOptions.of({**given, "option.wath": "levels"})
    with pytest.raises(InvalidOption, match=r"drops a table's options: add with \(app"):
        WriteOptions.of({})


def test_what_is_read_is_checked() -> None:
    wrong: list[dict[str, str]] = [
        *({"what": "queues"}, {"partitions": "2.5"}, {"partitions": "10001"}, {"queue": "x"}),
        *({"limit": "5"}, {"what": "undeliverable", "limit": "0"}),
        {"what": "undeliverable", "job": "x"},
    ]
    for each in wrong:
        with pytest.raises(InvalidOption):
            ReadOptions.of({"app": "shop", **each})


def test_the_id_of_a_row_depends_on_the_row_and_on_the_job_alone() -> None:
    inner = {"b": "x", "a": [{"c": 1}]}
    june = TaskIds("june")
    # It must never change: the same job may be run again after an upgrade.
    assert june.of([1, "a"]) == "68797b46-4d9b-5b6b-b0f5-c9b665b7e9ee"
    assert len({june.of([7, inner]), june.of([8, inner]), TaskIds("july").of([7, inner])}) == 3
    # It is found again from the values of the row.
    spark_row = T.Row(b="x", a=[T.Row(c=1)])
    named = {"order": inner, "number": 7}, T.Row(order=spark_row, number=7)
    for values in ((7, inner), [7, spark_row], *named):
        assert task_id("june", values) == june.of([7, inner])
    no_values: list[Any] = ["order-7", [], {}, None, 7]
    for wrong in no_values:
        with pytest.raises(InvalidOption, match=r"idColumn.*takes the row's values"):
            task_id("june", wrong)


def test_the_id_of_a_row_depends_on_its_instants_and_not_on_their_time_zone() -> None:
    zone = ZoneInfo("America/New_York")
    values = [INSTANT.astimezone(zone), {"at": [INSTANT]}, timedelta(days=-1)]
    micros = 1_893_553_445_678_000
    name = f'[{micros},{{"at":[{micros}]}},-86400000000]'
    assert task_id("june", values) == str(uuid5(TaskIds("june").namespace, name))
    # The hour that occurs twice.
    first = datetime(2026, 11, 1, 1, 30, tzinfo=zone)
    assert task_id("june", [first]) != task_id("june", [first.replace(fold=1)])


def test_the_id_of_a_row_is_that_of_its_id_columns_in_the_order_of_their_names() -> None:
    columns = {"key": (T.StringType(), ["k"]), "delay": DELAY, "args": (T.StringType(), ["[1]"])}
    (every,) = taken(columns)
    assert every.row == Row([1], {}, 1.5, task_id=JUNE.of(["[1]", 1.5, "k"]), key="k")
    otherwise = {"KEY": columns["key"], "Delay": DELAY, "Args": columns["args"]}
    assert taken(otherwise) == [every]
    (some,) = taken(otherwise, idColumn="Key, ARGS")
    assert some.row == Row([1], {}, 1.5, task_id=JUNE.of(["[1]", "k"]), key="k")
    assert task_id("june", {"KEY": "k", "Args": "[1]"}) == JUNE.of(["[1]", "k"])


# Cutting a sorted column of items into groups.

ARROW_ROW = pa.struct({"args": pa.list_(pa.int64()), "delay": pa.float64()})


GROUPED = schema(
    **{DUE: LONG, ITEM: T.BinaryType(), ROW: schema(args=T.ArrayType(LONG), delay=T.DoubleType())}
)


def cut(*batches: Sequence[tuple[int, bytes | None]], kind: Any = None) -> list[Any]:
    """The due time, number and bytes of each group, and the arguments of other rows."""
    given = [
        pa.RecordBatch.from_arrays(
            [
                pa.array([due for due, _ in rows], pa.int64()),
                pa.array([item for _, item in rows], kind or pa.binary()),
                pa.array([{"args": [due], "delay": 1.0} for due, _ in rows], ARROW_ROW),
            ],
            [DUE, ITEM, ROW],
        )
        for rows in batches
    ]
    found: list[Any] = [each.row for each in Columns(GROUPED, options()).taken(given, JUNE)]
    return [
        (each.due_ms, each.count, each.items) if isinstance(each, WrittenRows) else each.args
        for each in found
    ]


def test_rows_without_an_item_are_written_by_python() -> None:
    found = cut([(1, b"a"), (2, b"b"), (2, None), (2, b"c"), (3, b"d")])
    assert found == [[2], (1, 1, b"a"), (2, 2, b"bc"), (3, 1, b"d")]


def test_a_group_holds_so_many_messages_and_bytes_and_a_larger_item_is_alone() -> None:
    found = cut([(7, b"x")] * (MAX_GROUP_MESSAGES - 1), [(7, b"y")] * (MAX_GROUP_MESSAGES + 2))
    assert [count for _, count, _ in found] == [MAX_GROUP_MESSAGES, MAX_GROUP_MESSAGES, 1]
    half, large = b"h" * (MAX_GROUP_BYTES // 2), b"l" * (MAX_GROUP_BYTES + 1)
    found = cut([(7, half)] * 3 + [(7, large)] * 2 + [(7, b"s"), (7, half)])
    assert [count for _, count, _ in found] == [2, 1, 1, 1, 2]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=5)), max_size=50),
    st.lists(st.integers(0, 50), max_size=3),
)
def test_what_is_due_together_comes_together_nothing_is_lost_and_order_stays(
    kind: Any, rows: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    rows.sort(key=lambda row: row[0])
    edges = [0, *sorted(cuts), len(rows)]
    batches = [rows[begin:end] for begin, end in pairwise(edges)]
    found = cut(*batches, kind=kind)
    assert [due for due, *_ in found] == sorted({due for due, _ in rows})
    for due, count, items in found:
        mine = [item for other, item in rows if other == due]
        assert (count, items) == (len(mine), b"".join(mine))
