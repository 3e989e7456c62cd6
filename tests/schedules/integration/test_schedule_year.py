"""Many schedules, in real levels, against a walk of the clock: travelled in moments.

``make travel`` travels a year of forty, with both changes of each clock, and each minute of its
first day; ``make test-schedules`` a fortnight of fewer with a leap day and one change, and the
hours and minutes of less.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.testing import Travel
from tests.testing.integration import travelling
from tests.testing.integration.travelling import app, note, ran, redis

WHOLE = bool(os.environ.get("RABBITDELAY_WHOLE_YEAR"))
ZONES: tuple[str, ...] = ("America/New_York", "Australia/Lord_Howe", "UTC")
ZONES += ("Europe/Berlin", "Pacific/Apia") if WHOLE else ()
BEGIN = datetime(2027, 9, 1, tzinfo=UTC) if WHOLE else datetime(2028, 2, 28, tzinfo=UTC)
END = BEGIN + timedelta(days=366 if WHOLE else 14)
MINUTE = timedelta(minutes=1)


#: Times of the day, and on which days they are due.
FIXED: dict[str, Callable[[date], bool]] = {
    "0 9 1 * *": lambda day: day.day == 1,
    "30 2 * * *": lambda day: True,
    "15 2 * * 0": lambda day: day.isoweekday() == 7,
    "45 1 * * 1-5": lambda day: day.isoweekday() < 6,
    "0 0 L * *": lambda day: (day + timedelta(days=1)).day == 1,
    "0 12 29 2 *": lambda day: (day.month, day.day) == (2, 29),
}


def instants_of(cron: str, zone: str) -> Iterator[datetime]:
    """Walk the days: a time that is skipped is where the clock goes on, one shown twice is once."""
    minute, hour = map(int, cron.split()[:2])
    day = BEGIN.date() - timedelta(days=1)
    while day <= END.date() + timedelta(days=1):
        if FIXED[cron](day):
            shown = datetime(day.year, day.month, day.day, hour, minute)
            instant = shown.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
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
        for cron in FIXED:
            put(f"{zone} {cron}", note, cron, (f"{zone} {cron}",), timezone=zone)
            expect(f"{zone} {cron}", instants_of(cron, zone))
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
    travel(to=END)
    found = Counter((name, instant_of(at_ms)) for name, at_ms in ran())
    assert found - expected == Counter()
    assert expected - found == Counter()
