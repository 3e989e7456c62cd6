"""Many schedules, in real levels, against a walk of the clock: travelled in moments.

``make travel`` travels a year of forty, with both changes of each clock, and each minute of its
first day; ``make test-schedules`` a fortnight of fewer with a leap day and one change, and the
hours and minutes of less.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import solar

from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import Travel
from tests.integration import travelling
from tests.integration.travelling import app, note, ran, redis

WHOLE = bool(os.environ.get("RABBITDELAY_WHOLE_YEAR"))
ZONES = ("America/New_York", "Australia/Lord_Howe", "UTC")
ZONES += ("Europe/Berlin", "Pacific/Apia") if WHOLE else ()
BEGIN = datetime(2027, 9, 1, tzinfo=UTC) if WHOLE else datetime(2028, 2, 28, tzinfo=UTC)
END = BEGIN + timedelta(days=366 if WHOLE else 14)
MINUTE = timedelta(minutes=1)


class Fixed(NamedTuple):
    """A time of the day, on some days."""

    cron: str
    hour: int
    minute: int
    day: Callable[[date], bool]


def is_last_of_month(day: date) -> bool:
    return (day + timedelta(days=1)).day == 1


FIXED = (
    Fixed("0 9 1 * *", 9, 0, lambda day: day.day == 1),
    Fixed("30 2 * * *", 2, 30, lambda day: True),
    Fixed("15 2 * * 0", 2, 15, lambda day: day.isoweekday() == 7),
    Fixed("45 1 * * 1-5", 1, 45, lambda day: day.isoweekday() < 6),
    Fixed("0 0 L * *", 0, 0, is_last_of_month),
    Fixed("0 12 29 2 *", 12, 0, lambda day: (day.month, day.day) == (2, 29)),
)


def instants_of(fixed: Fixed, zone: str) -> Iterator[datetime]:
    """Walk the days: a time that is skipped is where the clock goes on, one shown twice is once."""
    day = BEGIN.date() - timedelta(days=1)
    while day <= END.date() + timedelta(days=1):
        if fixed.day(day):
            shown = datetime(day.year, day.month, day.day, fixed.hour, fixed.minute)
            local = shown.replace(tzinfo=ZoneInfo(zone))
            instant = local.astimezone(UTC)
            if instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None) != shown:
                while (instant - MINUTE).astimezone(ZoneInfo(zone)).replace(tzinfo=None) > shown:
                    instant -= MINUTE
            yield instant
        day += timedelta(days=1)


def each(minutes: int) -> Iterator[datetime]:
    """Walk the minutes of the clock in UTC, of which all zones here are ten minutes away."""
    instant = BEGIN
    while instant <= END:
        if not instant.minute % minutes:
            yield instant
        instant += MINUTE


@pytest.fixture(scope="session")
def rabbitdelay_celery_app() -> Any:
    return app


@pytest.mark.timeout(0 if WHOLE else 600)
def test_each_instant_of_many_schedules_comes_once(rabbitdelay_worker: Any, travel: Travel) -> None:
    redis().delete(travelling.NOTES)
    travel(to=BEGIN)
    put = app.rabbitdelay.schedules.put
    expected: Counter[tuple[str, datetime]] = Counter()

    def expect(name: str, instants: Iterator[datetime]) -> None:
        expected.update((name, instant) for instant in instants if first < instant <= END)

    # Until all are put, however long that takes.
    travel.clock.stand_at(travel.clock.ns())
    first = travel.now
    for zone in ZONES:
        for number, fixed in enumerate(FIXED):
            name = f"{zone}-{number}"
            put(name, note, fixed.cron, (name,), timezone=zone)
            expect(name, instants_of(fixed, zone))
        name, until = f"{zone}-hourly", END if WHOLE else BEGIN + timedelta(hours=6)
        put(name, note, "0 * * * *", (name,), timezone=zone, end=until)
        clock = ZoneInfo(zone)
        expect(name, (at for at in each(30) if not at.astimezone(clock).minute and at <= until))
    for number, hours in enumerate((5, 7, 36, 100)):
        name = f"every-{number}"
        put(name, note, timedelta(hours=hours), (name,), start=BEGIN + timedelta(days=1))
        instants = (BEGIN + timedelta(days=1, hours=hours * n) for n in range(9_000 // hours))
        expect(name, instants)
    until = BEGIN + (timedelta(days=1) if WHOLE else timedelta(minutes=30))
    put("minutely", note, "* * * * *", ("minutely",), end=until)
    expect("minutely", (at for at in each(1) if at <= until))
    put("sunrise", note, solar("sunrise", 52.52, 13.4), ("sunrise",))
    travel(to=END)
    found = Counter((name, instant_of(at_ms)) for name, at_ms in ran() if name != "sunrise")
    assert found - expected == Counter()
    assert expected - found == Counter()
    sunrises = [instant_of(at_ms) for name, at_ms in ran() if name == "sunrise"]
    assert [at.date() for at in sunrises] == [
        (BEGIN + timedelta(days=day)).date() for day in range((END - BEGIN).days)
    ]
