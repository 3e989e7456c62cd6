"""The geometry of pictures: nice numbers, times of a clock or calendar, stacks of bars."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.web import charts
from celery_rabbitdelay.web.charts import DAY, HOUR, MINUTE, STEPS

BERLIN, KOLKATA = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata")
ZONES = [UTC, BERLIN, KOLKATA, ZoneInfo("America/Sao_Paulo"), ZoneInfo("Australia/Lord_Howe")]

INSTANTS = st.datetimes(datetime(2000, 1, 1), datetime(2040, 1, 1), timezones=st.just(UTC))


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 1]),
        (3, [0, 1, 2, 3]),
        (10, [0, 5, 10]),
        (16, [0, 5, 10, 15, 20]),
        (1234, [0, 500, 1000, 1500]),
    ],
)
def test_gridlines_stand_at_nice_whole_numbers(most: float, expected: list[float]) -> None:
    assert charts.scale(most) == expected


@given(st.floats(1e-6, 1e12))
def test_gridlines_are_few_and_the_last_one_is_not_exceeded(most: float) -> None:
    for whole in (True, False):
        found = charts.scale(most, whole=whole)
        assert 2 <= len(found) <= charts.MOST_LINES + 1
        assert found[-1] >= most * (1 - 1e-6)
        assert found[-2] < most or found == [0, 1]


@pytest.mark.parametrize(
    ("grid", "unit", "expected"),
    [
        ([0, 600, 1200], "", ["0", "600", "1,200"]),
        ([0, 5_000, 10_000, 15_000], "", ["0", "5k", "10k", "15k"]),
        ([0, 500_000, 3_500_000], "", ["0", "0.5M", "3.5M"]),
        ([0, 0.5], "s", ["0 s", "0.5 s"]),
        ([0, 20_000], "s", ["0 s", "20,000 s"]),
    ],
)
def test_numbers_of_an_axis_are_short_and_alike(
    grid: list[float], unit: str, expected: list[str]
) -> None:
    assert charts.number_labels(grid, unit) == expected


def test_a_week_has_a_label_for_today_in_the_middle_of_what_is_left_of_the_day() -> None:
    start = datetime(2026, 11, 29, 9, tzinfo=UTC)
    first, *_, last = charts.times(start, start + 7 * DAY, UTC)
    assert first == (start + timedelta(hours=7.5), "Today")
    assert last == (datetime(2026, 12, 5, 12, tzinfo=UTC), "Sat 5")


@given(INSTANTS, st.sampled_from(STEPS), st.sampled_from(ZONES))
def test_steps_rise_and_hold_the_time_that_they_are_for(
    start: datetime, step: timedelta, zone: ZoneInfo
) -> None:
    found = charts.aligned(start, start + 5 * step, step, zone)
    assert all(before < after for before, after in pairwise(found))
    assert found[0] <= start < found[0] + 2 * step
    assert found[-2] < start + 5 * step <= found[-1]


def test_hours_and_days_follow_the_clock_of_the_zone_while_it_is_set() -> None:
    start = datetime(2026, 3, 28, 12, 30, tzinfo=UTC)
    days = charts.aligned(start, start + 3 * DAY, DAY, BERLIN)
    assert [each.hour for each in days] == [23, 23, 22, 22, 22]
    quarters = charts.aligned(start, start + DAY, timedelta(hours=6), BERLIN)
    assert [each.astimezone(BERLIN).hour for each in quarters] == [12, 18, 0, 6, 12, 18]
    (first, *_) = charts.aligned(start, start + HOUR, HOUR, KOLKATA)
    assert first == datetime(2026, 3, 28, 12, 30, tzinfo=UTC)
    weeks = charts.aligned(start, start + 30 * DAY, 14 * DAY, BERLIN)
    assert [each.astimezone(BERLIN).weekday() for each in weeks] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (MINUTE, ["21:04:40", "21:04:50", "21:05:00", "21:05:10", "21:05:20", "21:05:30"]),
        (HOUR, ["21:10", "21:20", "21:30", "21:40", "21:50", "22:00"]),
        (DAY, ["Mon 30", "06:00", "12:00", "18:00"]),
        (7 * DAY, ["Mon 30", "Tue 1", "Wed 2", "Thu 3", "Fri 4", "Sat 5", "Sun 6"]),
        (365 * DAY, ["18 Jan", "15 Mar", "10 May", "5 Jul", "30 Aug", "25 Oct"]),
    ],
)
def test_an_axis_of_times_has_few_round_labels(length: timedelta, expected: list[str]) -> None:
    start = datetime(2026, 11, 29, 20, 4, 33, tzinfo=UTC)
    found = charts.times(start, start + length, BERLIN)
    assert [label for _, label in found] == expected


@given(INSTANTS, st.integers(1, 400 * 86_400), st.sampled_from(ZONES))
def test_an_axis_of_times_has_at_most_a_few_labels(
    start: datetime, seconds: int, zone: ZoneInfo
) -> None:
    end = start + timedelta(seconds=seconds)
    found = charts.times(start, end, zone)
    assert len(found) <= charts.MOST_TIMES + 2
    assert all(start <= at <= end for at, _ in found)


def test_bars_are_stacked_and_the_axis_is_as_high_as_the_highest_stack() -> None:
    start = datetime(2026, 11, 29, 20, tzinfo=UTC)
    edges = [start + each * MINUTE for each in range(3)]
    line = [(start, 10.0), (edges[2], 0.0)]
    found = charts.plot(edges, [[5, 0], [10, 0]], BERLIN, line)
    assert [each.label for each in found.scale] == ["0", "5", "10", "15"]
    below, above = found.bars
    assert (below.series, above.series) == (1, 2)
    assert below.y == pytest.approx(above.y + above.height)
    assert below.y + below.height == pytest.approx(100)
    assert above.y == 0
    assert [each.values for each in found.columns] == [[5, 10], [0, 0]]
    assert found.columns[0].span == "Sun 29 Nov, 21:00 to 21:01"
    assert found.path == "0.0 33.333 L100.0 100.0"


def test_the_span_of_a_step_says_as_much_as_its_length_needs() -> None:
    start = datetime(2026, 11, 30, 23, tzinfo=UTC)
    assert charts.span(start, start + timedelta(seconds=2), BERLIN) == "00:00:00 to 00:00:02"
    assert charts.span(start, start + 31 * DAY, BERLIN) == "Tue 1 Dec to Fri 1 Jan"
