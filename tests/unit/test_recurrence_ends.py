"""When a recurrence ends, when it is never due, and when that cannot be said."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from celery.schedules import solar

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.schedules.recurrence import Recurrence

DAY = timedelta(days=1)
NEVER = solar("sunset", 90, 0)
#: Near the pole, the sun sets in some years only, and not in the year after this.
RARELY, BEGIN = "solar sunset 89.9 10", datetime(2025, 10, 1, tzinfo=UTC)


def after(recurrence: Recurrence, instant: datetime) -> datetime | None:
    found = recurrence.after(milliseconds_of(instant))
    return None if found is None else instant_of(found)


@pytest.mark.parametrize("others", [["0 12 * * *"], [DAY], [solar("sunset", 52.5, 13.4)]])
def test_a_sun_that_is_away_hides_no_other_rule(others: list[Any]) -> None:
    alone = Recurrence.of(others, "UTC")
    for rules in ([NEVER, *others], [*others, NEVER]):
        both = Recurrence.of(rules, "UTC")
        assert Recurrence.read(list(both)) == both
        for day in (0, 200):
            instant = BEGIN + day * DAY
            assert after(both, instant) == after(alone, instant)


def test_suns_that_are_all_away_are_an_error() -> None:
    with pytest.raises(InvalidSchedule, match="sunset 90 0' is never due within a year"):
        Recurrence.of([NEVER, solar("sunrise", -90, 0)], "UTC")


def test_a_sun_that_is_away_until_the_end_ends_and_no_later_one_does() -> None:
    """An end beyond the year that was searched is no end yet: the sun may set before it."""
    for rules in ((RARELY,), (RARELY, "0 0 1 10 *")):
        ends = milliseconds_of(BEGIN + 300 * DAY)
        assert after(Recurrence(rules, end_ms=ends), BEGIN) is None
    with pytest.raises(ValueError, match="never due within a year"):
        after(Recurrence((RARELY,), end_ms=milliseconds_of(BEGIN + 400 * DAY)), BEGIN)
    # This one is due on a Monday, in 2044.
    rare, end = "crontab 0 0 29 2 1", milliseconds_of(BEGIN + 3000 * DAY)
    with pytest.raises(ValueError, match=r"sunset 89\.9 10' is never due within a year"):
        after(Recurrence((rare, RARELY), end_ms=end), BEGIN)
    assert after(Recurrence((rare,), end_ms=end), BEGIN) is None


@pytest.mark.parametrize(
    ("when", "start", "end", "exclude"),
    [
        ("0 12 * * *", 10, 10.1, ()),
        (timedelta(hours=1), 10, 9, ()),
        ("0 0 * * *", 0, 5, [(wall_clock.now() + each * DAY).date() for each in range(7)]),
        ("* * * * *", None, 5, "* * * * *"),
    ],
)
def test_what_can_never_be_due_between_its_start_and_its_end_is_refused(
    when: Any, start: float | None, end: float, exclude: Any
) -> None:
    midnight = datetime.combine(wall_clock.now(), datetime.min.time(), UTC)
    begins = None if start is None else midnight + start * DAY
    with pytest.raises(InvalidSchedule, match=r"from its start to its end|so much is excluded"):
        Recurrence.of(when, "UTC", begins, midnight + end * DAY, exclude)


def test_an_end_that_is_over_is_no_error() -> None:
    begin = datetime(2020, 1, 1, 13, tzinfo=UTC)
    for end in (begin, begin + timedelta(hours=1), begin + 5 * DAY):
        assert after(Recurrence.of("0 12 * * *", "UTC", begin, end), wall_clock.now()) is None


def test_an_end_before_which_nothing_is_due_any_more_is_no_error() -> None:
    """A program that puts it again on its last day goes on."""
    now = wall_clock.now()
    minute = (now - timedelta(minutes=2)).strftime("%M %H * * *")
    ended = Recurrence.of(minute, "UTC", now - 9 * DAY, now + timedelta(hours=1))
    assert after(ended, now) is None
    started = Recurrence.of(minute, "UTC", None, now + 2 * DAY, date.today() + DAY)
    assert started.end_ms is not None


def test_a_bound_that_is_reached_is_an_error_and_no_end() -> None:
    end = milliseconds_of(BEGIN + 40_000 * DAY)
    excluded = Recurrence(("0 0 29 2 *",), end_ms=end, excluded=("* * * 2 *",))
    with pytest.raises(ValueError, match="so much is excluded"):
        after(excluded, BEGIN)
    minutes = Recurrence(("* * * * *",), excluded=("* 0-22 * * *", "0-58 23 * 1-11 *"))
    assert after(minutes, BEGIN) == BEGIN + timedelta(hours=23, minutes=59)
    with pytest.raises(ValueError, match="so much is excluded"):
        after(minutes._replace(excluded=(*minutes.excluded, "59 23 * 1-11 *")), BEGIN - 200 * DAY)
