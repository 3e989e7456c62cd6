"""Orders, the rows that are written for them, and the instants at which they are due."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project import spark_job
from tests.integration.spark import QUICK_JAVA, spark_session

BEGINS = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with spark_session(QUICK_JAVA) as session:
        yield session


@pytest.fixture(scope="module")
def orders(spark: SparkSession) -> DataFrame:
    return spark_job.read_orders(spark).cache()


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return gzip.decompress(spark_job.ORDERS.read_bytes()).decode().splitlines()


def fields_of(line: str) -> Mapping[str, str]:
    """Cut a line at the columns, counted from 1, as Spark's ``substring`` does."""
    return {
        name: line[start - 1 :][:width].strip()
        for name, (start, width) in spark_job.COLUMNS.items()
    }


def due(orders: DataFrame, day: timedelta) -> dict[str, timedelta]:
    """When the reminders of the first three days are due after the replay's begin, by order."""
    early = orders.where("ordered_on < date '1997-01-04'")
    reminders = spark_job.reminders(early, BEGINS, day)
    rows = reminders.select("order_id", F.unix_micros("eta")).collect()
    begins = round(BEGINS.timestamp() * 1e6)
    return {order: timedelta(microseconds=micros - begins) for order, micros in rows}


def test_a_reminder_is_due_at_some_time_of_the_day_a_fortnight_after_the_order(
    orders: DataFrame,
) -> None:
    found = due(orders, DAY)
    assert len(found) > 500
    for order, delay in found.items():
        days = int(order.split("-")[1]) - 19970101
        assert timedelta(days=days + 14) <= delay < timedelta(days=days + 15), order


def test_the_time_of_day_is_the_same_in_every_run_and_differs_between_orders(
    orders: DataFrame,
) -> None:
    found = due(orders, DAY)
    assert found == due(orders.repartition(3), DAY)
    assert len(set(found.values())) == len(found)


def test_a_day_lasts_as_long_as_the_caller_says(orders: DataFrame) -> None:
    really = due(orders, DAY)
    for order, delay in due(orders, timedelta(seconds=1)).items():
        assert delay / timedelta(seconds=1) == pytest.approx(really[order] / DAY, abs=1e-6)


def test_each_order_has_an_id_of_its_own(orders: DataFrame) -> None:
    assert orders.select("order_id").distinct().count() == 69_659


def test_the_columns_cut_every_line_of_the_file_between_its_words(lines: list[str]) -> None:
    _, *orders = lines
    assert len(orders) == 69_659
    for line in orders:
        assert list(fields_of(line).values()) == line.split()


def test_only_the_lines_with_an_order_look_like_one(lines: list[str]) -> None:
    header, *orders = lines
    assert not re.match(spark_job.ORDER_LINE, header)
    assert all(re.match(spark_job.ORDER_LINE, line) for line in orders)


def test_the_job_is_about_as_many_orders_as_the_readme_says(
    orders: DataFrame, lines: list[str]
) -> None:
    january = [fields_of(line) for line in lines[1:] if "199701" in fields_of(line)["ordered_on"]]
    assert len(january) == 8_928
    worth = sum(Decimal(order["dollars"]) >= 15 for order in january)
    assert worth == orders.where(spark_job.CHOSEN).count() == 6_027
