"""Orders, the moment of their reminder, the calendar that runs faster."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta
from decimal import Decimal

from example_project.orders import (
    FIELDS,
    LEAST_DOLLARS,
    ORDER_LINE,
    ORDERS_FILE,
    REMIND_AFTER,
    Calendar,
    Order,
)

ORDER = Order("00002-19970112-1", "00002", date(1997, 1, 12), 5, Decimal("77.00"))


def fields_of(line: str) -> dict[str, str]:
    """Cut a line at the columns, counted from 1, as Spark's ``substring`` does."""
    return {name: line[start - 1 :][:width].strip() for name, start, width in FIELDS}


def test_an_order_is_placed_at_some_time_of_its_day() -> None:
    assert ORDER.placed_at.date() == ORDER.ordered_on


def test_the_time_of_day_is_the_same_in_every_run() -> None:
    assert ORDER.placed_at == ORDER._replace().placed_at
    assert ORDER.placed_at != ORDER._replace(order_id="00002-19970112-2").placed_at


def test_a_reminder_comes_a_fortnight_after_the_order() -> None:
    assert ORDER.reminder_at - ORDER.placed_at == timedelta(days=14) == REMIND_AFTER


def test_a_day_of_the_calendar_lasts_as_long_as_it_says() -> None:
    calendar = Calendar(date(1997, 1, 1), begins=1_000.0, seconds_per_day=2.0)
    assert calendar.instant(datetime(1997, 1, 1)) == 1_000.0
    assert calendar.instant(datetime(1997, 1, 15, 12)) == 1_029.0


def test_the_columns_cut_every_line_of_the_file_between_its_words() -> None:
    header, *lines = ORDERS_FILE.read_text().splitlines()
    assert not re.match(ORDER_LINE, header)
    assert len(lines) == 8_928
    for line in lines:
        assert re.match(ORDER_LINE, line)
        assert list(fields_of(line).values()) == line.split()


def test_the_orders_worth_a_reminder_are_as_many_as_the_comment_says() -> None:
    _, *lines = ORDERS_FILE.read_text().splitlines()
    assert sum(Decimal(fields_of(line)["dollars"]) >= LEAST_DOLLARS for line in lines) == 6_027
