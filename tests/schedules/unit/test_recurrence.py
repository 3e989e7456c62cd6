"""When something is due again: beside Celery's own crontabs, and a walk of clocks that change."""

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, schedule

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.schedules.recurrence import Recurrence

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
DAY = timedelta(days=1)
BERLIN, LORD_HOWE = "Europe/Berlin", "Australia/Lord_Howe"

#: How many times as many random rules as usual.
MORE = 8 if "RABBITDELAY_WHOLE_YEAR" in os.environ else 1

BEGIN = datetime(2025, 10, 1, tzinfo=UTC)


def after(recurrence: Recurrence, instant: datetime) -> datetime | None:
    found = recurrence.after(milliseconds_of(instant))
    return None if found is None else instant_of(found)


def due(recurrence: Recurrence, begin: datetime, end: datetime) -> list[datetime]:
    """All instants after one and up to another."""
    found, at = [], after(recurrence, begin)
    while at is not None and at <= end:
        found.append(at)
        at = after(recurrence, at)
    return found


def local(text: str, zone: str = BERLIN) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


SPANS = {
    "minute": (0, 59),
    "hour": (0, 23),
    "day_of_month": (1, 31),
    "month_of_year": (1, 12),
    "day_of_week": (0, 6),
}


def crontabs(number: int) -> Iterator[Any]:
    """Yield random crontabs, the same ones each time."""
    app, random = Celery(set_as_current=False), Random(48)

    def field(first: int, last: int) -> Any:
        if random.random() < 0.4:
            return "*"
        return {random.randint(first, last) for _ in range(random.choice([1, 2, 4, 9]))}

    while number:
        with suppress(ValueError):  # it is never due
            yield crontab(**{name: field(*span) for name, span in SPANS.items()}, app=app)
            number -= 1


def test_crontabs_are_due_when_celery_says_so() -> None:
    """From places all over a leap cycle, with each day of the week on the 29th of February."""
    random, begin = Random(49), datetime(2026, 1, 1, tzinfo=UTC)
    for when in crontabs(250 * MORE):
        recurrence = Recurrence.of(when, "UTC")
        _, *written = recurrence.rules[0].split()
        again = crontab(**dict(zip(SPANS, written, strict=True)))
        assert [getattr(again, each) for each in SPANS] == [getattr(when, each) for each in SPANS]
        at = begin + random.randrange(28 * 366 * 86_400) * SECOND
        for _ in range(3):
            when.nowfun = lambda at=at: at
            expected = at + when.remaining_estimate(at)
            assert after(recurrence, at) == expected, (when, at)
            at = expected


@pytest.mark.parametrize(
    ("when", "rule"),
    [
        (crontab(0, "22-2,12"), "crontab 0 0,1,2,12,22,23 * * *"),
        (crontab("*/15", day_of_week="fri-mon"), "crontab 0,15,30,45 * * * 0,1,5,6"),
        ("crontab 0 * 1-7 * 1", "crontab 0 * 1-7 * 1"),  # as an export writes it
        (schedule(90), "every 90000"),
        (36_500 * DAY, "every 3153600000000"),
        (" 0  7 * * 1-5 ", "0 7 * * 1-5"),
        ("@midnight", "0 0 * * *"),
    ],
)
def test_what_celery_and_cron_write_is_a_rule(when: Any, rule: str) -> None:
    assert Recurrence.of(when, "UTC").rules == (rule,)
    # As much as a schedule may have.
    most = Recurrence.of([when] * 20, "UTC", exclude=[date(2026, 1, 1)] * 100)
    assert (len(most.rules), len(most.excluded)) == (20, 100)
    assert Recurrence.read([*most]) == most


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ("61 * * * *", "minute"),
        ("* * *", "fields"),
        (timedelta(milliseconds=999), "from a second to"),
        (7, "takes a timedelta"),
        ([], "1 to 20"),
        (["@daily"] * 21, "1 to 20"),
        (["@daily", "0 0 31 2,4,6 *"], "never due"),
        ("crontab 0 0 30 2 1", "never due"),
    ],
)
def test_what_is_wrong_or_never_due_is_said_early(when: Any, reason: str) -> None:
    with pytest.raises(InvalidSchedule, match=f"(?i){reason}"):
        Recurrence.of(when, "UTC")


@pytest.mark.parametrize(
    ("exclude", "reason"),
    [
        (HOUR, "must be dates"),
        *[(each, "isoformat") for each in ("christmas", "* 12 * * *")],
        ("20261225", "is not a date such as"),
        ("2026-02-30", "range"),
        (["2026-12-25"] * 101, "at most 100"),
    ],
)
def test_what_cannot_be_excluded_is_said_early(exclude: Any, reason: str) -> None:
    with pytest.raises(InvalidSchedule, match=reason):
        Recurrence.of("* * * * *", "UTC", exclude=exclude)
    with pytest.raises(InvalidSchedule, match="Nowhere"):
        Recurrence.of("@daily", "Europe/Nowhere")


@pytest.mark.parametrize(
    ("when", "zone", "begin", "instants"),
    [
        ("9 15,30 2 * * *", BERLIN, "2026-03-29", "2026-03-29T03:00:09+02 2026-03-30T02:15:09+02"),
        ("0 0 L * *", "UTC", "2028-01-15", "2028-01-31T00+00 2028-02-29T00+00"),
        ("*/20 * * * * *", "UTC", "2026-01-01", "2026-01-01T00:00:20+00 2026-01-01T00:00:40+00"),
        (["@daily", "0 9 * * *"], "UTC", "2026-03-01", "2026-03-01T09+00 2026-03-02T00+00"),
        # A Monday; 2100 is no leap year.
        (crontab(0, 0, "mon", 29, 2), "UTC", "2026-01-01", "2044-02-29T00+00"),
        (crontab(0, 0, "sat", 29, 2), "UTC", "2076-03-01", "2116-02-29T00+00"),
    ],
)
def test_clocks_that_change_and_days_that_are_rare(
    when: Any, zone: str, begin: str, instants: str
) -> None:
    wanted = [*map(datetime.fromisoformat, instants.split())]
    assert due(Recurrence.of(when, zone), local(begin, zone), wanted[-1]) == wanted


#: Where clocks change by an hour, by half of it or by two, at midnight, and backward in spring.
ZONES = (
    *(BERLIN, LORD_HOWE, "Europe/Dublin", "America/Havana", "Africa/Casablanca"),
    *("Antarctica/Troll", "UTC+05:30"),
)


def clock_of(zone: str) -> tzinfo:
    return ZoneInfo(zone) if "/" in zone else timezone(timedelta(hours=5, minutes=30))


def changes(zone: str) -> list[datetime]:
    """The hours of two years in which a clock changes; one hour of a clock that does not."""
    hours = [datetime(2028, 1, 1, tzinfo=UTC) + each * HOUR for each in range(731 * 24)]
    offsets = [hour.astimezone(clock_of(zone)).utcoffset() for hour in hours]
    found = [
        hour for hour, *both in zip(hours, offsets, offsets[1:], strict=False) if len({*both}) > 1
    ]
    return found or hours[:1]


def walk(
    zone: str, begin: datetime, end: datetime
) -> Iterator[tuple[datetime, datetime, set[datetime]]]:
    """Yield each minute, what the clock shows, and what it shows first or has just skipped."""
    at, seen, expected = begin, set[datetime](), None
    while at <= end:
        shown = at.astimezone(clock_of(zone)).replace(tzinfo=None, fold=0)
        first = {shown}
        while expected is not None and expected < shown:
            first.add(expected)
            expected += MINUTE
        yield at, shown, first - seen
        seen |= first
        expected = shown + MINUTE
        at += MINUTE


def any_rule(random: Random) -> tuple[Any, Any, Any]:
    """A cron expression or a crontab around midnight, its minutes and its hours."""
    hours: Any = set(random.choices([0, 1, 2, 3, 23], k=2))
    if random.random() < 0.3:
        hours = {*range(24)}
    minutes: Any = set(range(0, 60, random.choice([1, 5, 15, 20])))
    if random.random() < 0.6:
        minutes = {*random.choices(range(60), k=3)}
    if random.random() < 0.5:
        return crontab(minutes, hours), minutes, hours
    of_hours = "*" if len(hours) == 24 else ",".join(map(str, hours))
    return f"{','.join(map(str, minutes))} {of_hours} * * *", minutes, hours


@pytest.mark.parametrize("zone", ZONES)
def test_instants_are_those_of_the_clock_wherever_a_search_begins(zone: str) -> None:
    """A rule for all hours is due whenever the clock shows its minutes; others once a time."""
    random = Random(zone)
    rules = [any_rule(random) for _ in range(2 * MORE)]
    rules += [("*/20 2 * * *", {0, 20, 40}, {2}), ("*/20 * * * *", {0, 20, 40}, {*range(24)})]
    rules += [("47 * * * *", {47}, {*range(24)})]
    for change in changes(zone):
        walked = [*walk(zone, change - 30 * HOUR, change + 30 * HOUR)]
        for when, minutes, hours in rules:
            recurrence = Recurrence.of(when, zone)

            def is_due(shown: datetime) -> bool:
                return shown.minute in minutes and shown.hour in hours  # noqa: B023

            expected = [
                milliseconds_of(at)
                for at, shown, first in walked
                if any(map(is_due, {shown} if len(hours) == 24 else first))
            ]
            starts = {expected[0], *random.sample(expected, 3)}
            between = range(expected[0], expected[-1])
            for at in starts | {each - 1 for each in starts} | {*random.sample(between, 20)}:
                place = bisect_right(expected, at)
                if place < len(expected):
                    assert recurrence.after(at) == expected[place], (when, instant_of(at))


@pytest.mark.parametrize(
    ("when", "exclude", "begin", "end", "wanted"),
    [
        (
            "30 */4 * * *",
            ["2026-12-24", date(2026, 12, 25), "2026-12-26", "2026-12-27"],
            *("2026-12-23T10:00", "2026-12-28T05:00"),
            "23 12:30, 23 16:30, 23 20:30, 28 00:30, 28 04:30",
        ),
        # The days on which clocks change have 25 and 23 hours.
        (
            timedelta(hours=12),
            ["2026-10-25"],
            *("2026-10-24T00:00", "2026-10-26T14:00"),
            "24 02:00, 24 14:00, 26 01:00, 26 13:00",
        ),
        ("* * * * *", "2026-03-29", "2026-03-28T23:58", "2026-03-30T00:00", "28 23:59, 30 00:00"),
    ],
)
def test_days_are_excluded_in_the_time_zone(
    when: Any, exclude: Any, begin: str, end: str, wanted: str
) -> None:
    found = due(Recurrence.of(when, BERLIN, exclude=exclude), local(begin), local(end))
    assert ", ".join(f"{each.astimezone(ZoneInfo(BERLIN)):%d %H:%M}" for each in found) == wanted


def test_an_interval_counts_from_its_start_and_stops_at_its_end() -> None:
    start = datetime(2030, 1, 1, 0, 0, 10, tzinfo=UTC)
    recurrence = Recurrence.of(timedelta(seconds=7), "UTC", start, start + timedelta(seconds=20))
    wanted = [start + timedelta(seconds=each) for each in (0, 7, 14)]
    assert due(recurrence, start - DAY, start + DAY) == wanted


def test_only_what_can_never_be_due_between_its_start_and_its_end_is_refused() -> None:
    now = wall_clock.now()
    midnight = datetime.combine(now, datetime.min.time(), UTC)
    week = [(now + each * DAY).date() for each in range(7)]
    never: list[Any] = [("0 12 * * *", 10, 10.1, ()), (HOUR, 10, 9, ()), ("@daily", 0, 5, week)]
    for when, start, end, exclude in never:
        with pytest.raises(InvalidSchedule, match="from its start to its end"):
            Recurrence.of(when, "UTC", midnight + start * DAY, midnight + end * DAY, exclude)
    # A program that puts it again on its last day, or after its end, goes on.
    minute = (now - timedelta(minutes=2)).strftime("%M %H * * *")
    for last in (now - DAY, now + HOUR):
        assert after(Recurrence.of(minute, "UTC", now - 9 * DAY, last), now) is None
