"""Orders, the rows that are sent for them, and the instants at which they are due."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from pyspark.sql import Row

from example_project import spark_job

BEGINS = datetime(2026, 1, 1, tzinfo=UTC)
ORDER = {
    "order_id": "00002-19970112-1",
    "customer_id": "00002",
    "ordered_on": date(1997, 1, 12),
    "number_of_cds": 5,
    "dollars": Decimal("77.00"),
}


def order(**fields: object) -> Row:
    """An order with some fields of its own."""
    return Row(**{**ORDER, **fields})


def fields_of(line: str) -> Mapping[str, str]:
    """Cut a line at the columns, counted from 1, as Spark's ``substring`` does."""
    return {
        name: line[start - 1 :][:width].strip()
        for name, (start, width) in spark_job.COLUMNS.items()
    }


def test_a_reminder_is_due_at_some_time_of_the_day_a_fortnight_after_the_order() -> None:
    midnight = BEGINS + (11 + 14) * spark_job.REPLAYED_DAY
    for number in range(100):
        due = spark_job.remind_at(order(order_id=f"00002-19970112-{number}"), BEGINS)
        assert midnight <= due < midnight + spark_job.REPLAYED_DAY


def test_the_time_of_day_is_the_same_in_every_run_and_differs_between_orders() -> None:
    due = spark_job.remind_at(order(), BEGINS)
    assert due == spark_job.remind_at(order(), BEGINS)
    assert due != spark_job.remind_at(order(order_id="00002-19970112-2"), BEGINS)


def test_a_day_lasts_as_long_as_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shortly = spark_job.remind_at(order(), BEGINS) - BEGINS
    monkeypatch.setattr(spark_job, "REPLAYED_DAY", timedelta(days=1))
    really = spark_job.remind_at(order(), BEGINS) - BEGINS
    assert timedelta(days=25) <= really < timedelta(days=26)
    assert shortly / timedelta(seconds=1) == pytest.approx(really / timedelta(days=1))


def test_a_partition_that_spark_repeats_sends_the_same_rows_again() -> None:
    orders = [order(order_id=f"00002-19970112-{number}") for number in range(10)]
    sent = list(spark_job.reminders(orders, BEGINS))
    assert sent == list(spark_job.reminders(orders, BEGINS))
    assert len({row["task_id"] for row in sent}) == 10


def test_the_columns_cut_every_line_of_the_file_between_its_words() -> None:
    _, *lines = spark_job.ORDERS.read_text().splitlines()
    assert len(lines) == 8_928
    for line in lines:
        assert list(fields_of(line).values()) == line.split()


def test_only_the_lines_with_an_order_look_like_one() -> None:
    header, *lines = spark_job.ORDERS.read_text().splitlines()
    assert not re.match(spark_job.ORDER_LINE, header)
    assert all(re.match(spark_job.ORDER_LINE, line) for line in lines)


def test_the_orders_worth_a_reminder_are_as_many_as_the_readme_says() -> None:
    _, *lines = spark_job.ORDERS.read_text().splitlines()
    least = spark_job.LEAST_DOLLARS
    assert sum(Decimal(fields_of(line)["dollars"]) >= least for line in lines) == 6_027
