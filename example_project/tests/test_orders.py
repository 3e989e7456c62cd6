"""Orders, the rows that are written for them, and the instants at which they are due."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

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


def due(orders: DataFrame, day: timedelta) -> dict[str, timedelta]:
    """When the reminders of the first three days are due after the replay's begin, by order."""
    early = orders.where("ordered_on < date '1997-01-04'")
    reminders = spark_job.reminders(early, BEGINS, day)
    rows = reminders.select("order_id", F.unix_micros("eta")).collect()
    begins = round(BEGINS.timestamp() * 1e6)
    return {order: timedelta(microseconds=micros - begins) for order, micros in rows}


def test_a_reminder_is_due_at_its_own_time_of_the_day_a_fortnight_after_the_order(
    orders: DataFrame,
) -> None:
    found = due(orders, DAY)
    assert len(found) > 500
    for order, delay in found.items():
        days = int(order.split("-")[1]) - 19970101
        assert timedelta(days=days + 14) <= delay < timedelta(days=days + 15), order
    assert found == due(orders.repartition(3), DAY), "the same in every run"
    assert len(set(found.values())) == len(found)
    for order, delay in due(orders, timedelta(seconds=1)).items():
        assert delay / timedelta(seconds=1) == pytest.approx(found[order] / DAY, abs=1e-6)


def test_each_line_is_cut_between_its_words_into_an_order_with_an_id_of_its_own(
    orders: DataFrame,
) -> None:
    header, *lines = gzip.decompress(spark_job.ORDERS.read_bytes()).decode().splitlines()
    assert not re.match(spark_job.ORDER_LINE, header)
    assert len(lines) == orders.select("order_id").distinct().count() == 69_659
    for line in lines:
        # At the columns, counted from 1, as Spark's ``substring`` does.
        cut = [line[start - 1 :][:width].strip() for start, width in spark_job.COLUMNS.values()]
        assert cut == line.split()
        assert re.match(spark_job.ORDER_LINE, line)
