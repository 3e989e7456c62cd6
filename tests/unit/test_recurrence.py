"""Crontabs beside Celery's own, and instants beside a walk of clocks that change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab, solar

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.schedules import recurrence as recurrences
from celery_rabbitdelay.schedules.recurrence import Recurrence

SECOND, MINUTE, DAY = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=1)
FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
SPANS = {
    "minute": (0, 59),
    "hour": (0, 23),
    "day_of_month": (1, 31),
    "month_of_year": (1, 12),
    "day_of_week": (0, 6),
}
NAMES = {
    "day_of_week": ["sun", "mon", "Tuesday", "wed", "thu", "FRI", "saturday"],
    "month_of_year": ["", "jan", "feb", "march", "Apr", "may", "jun", "july", "aug", "sep", "oct"],
}


def any_field(random: Random, name: str) -> Any:
    """A field as somebody may write it."""
    first, last = SPANS[name]
    number = random.randint

    def one() -> str:
        at, names = number(first, last), NAMES.get(name, [])
        return names[at] if at < len(names) and names[at] and random.random() < 0.3 else f"{at}"

    def part() -> str:
        step = number(1, last - first + 5)
        span = f"{one()}-{one()}"
        return random.choice([one(), span, f"{span}/{step}", f"*/{step}"])

    return random.choice(
        [
            *("*", "*", part(), part()),
            ",".join(part() for _ in range(number(2, 4))),
            number(first, last),
            [number(first, last) for _ in range(number(1, 4))],
            {number(first, last) for _ in range(number(1, 9))},
        ]
    )


def crontabs(number: int) -> Iterator[Any]:
    """Yield random crontabs, the same ones each time."""
    app, random = Celery(set_as_current=False), Random(48)
    while number:
        fields = {name: any_field(random, name) for name in FIELDS}
        try:
            yield crontab(**fields, app=app)
        except ValueError:  # it is never due
            continue
        number -= 1


def test_fifteen_hundred_crontabs_are_due_when_celery_says_so() -> None:
    """From places all over a leap cycle, with each day of the week on the 29th of February."""
    random, begin = Random(49), datetime(2026, 1, 1, tzinfo=UTC)
    for when in crontabs(1500):
        recurrence = Recurrence.of(when, "UTC")
        _, *written = recurrence.rules[0].split()
        again = crontab(**dict(zip(FIELDS, written, strict=True)))
        assert [getattr(again, each) for each in FIELDS] == [getattr(when, each) for each in FIELDS]
        for _ in range(3):
            at = begin + random.randrange(28 * 366 * 86_400) * SECOND
            for _ in range(3):
                when.nowfun = lambda at=at: at
                expected = at + when.remaining_estimate(at)
                found = recurrence.after(milliseconds_of(at))
                assert found is not None
                assert instant_of(found) == expected, (when, at)
                for now, is_due in ((expected - SECOND, False), (expected, True)):
                    when.nowfun = lambda now=now: now
                    assert when.is_due(at).is_due == is_due
                at = expected


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"minute": "3-3/6"}, "crontab 3 * * * *"),
        ({"minute": 0, "hour": "22-2,12"}, "crontab 0 0-2,12,22-23 * * *"),
        ({"minute": "*/15", "day_of_week": "fri-mon"}, "crontab 0,15,30,45 * * * 0-1,5-6"),
        ({"month_of_year": "*/5"}, "crontab * * * 1,6,11 *"),
        ({"minute": 0, "day_of_month": "1-7", "day_of_week": 1}, "crontab 0 * 1-7 * 1"),
    ],
)
def test_the_rule_of_a_crontab_is_its_numbers(fields: Any, rule: str) -> None:
    assert Recurrence.of(crontab(**fields), "UTC").rules == (rule,)
    # As an export writes it, and an import reads it.
    assert Recurrence.of([rule], "UTC").rules == (rule,)


@pytest.mark.parametrize("text", ["3-3/6 * * * *", "* * * * mon", "* * * * * *", "* * * *", ""])
def test_the_rule_of_a_crontab_takes_nothing_that_cron_reads_otherwise(text: str) -> None:
    with pytest.raises(InvalidSchedule):
        Recurrence.of(f"crontab {text}", "UTC")


@pytest.mark.parametrize(
    ("when", "begin", "expected"),
    [
        (crontab(day_of_month="1,15", day_of_week="mon"), "2027-03-16", "2027-11-01"),
        (crontab(0, 0, "mon", 29, 2), "2026-01-01", "2044-02-29"),
        # 2100 is no leap year.
        (crontab(0, 0, "sat", 29, 2), "2076-03-01", "2116-02-29"),
        ("* * 29 2 *", "2096-03-01", "2104-02-29"),
        ("* * * * * *", "2026-03-02", "2026-03-02T00:00:01"),
    ],
)
def test_a_day_that_is_far_is_found(when: Any, begin: str, expected: str) -> None:
    at, then = (
        milliseconds_of(datetime.fromisoformat(each).replace(tzinfo=UTC))
        for each in (begin, expected)
    )
    recurrence = Recurrence.of(when, "UTC")
    assert recurrence.after(at) == then


@pytest.mark.parametrize(
    "when",
    [
        "0 0 30 2 *",
        ["@daily", "0 0 31 2,4,6 *"],
        "crontab 0 0 30 2 1",
        ["@daily", "crontab 0 0 31 4 *"],
        solar("sunset", 90, 0),
    ],
)
def test_what_is_never_due_is_refused(when: Any) -> None:
    with pytest.raises(InvalidSchedule, match="never due"):
        Recurrence.of(when, "UTC")


def test_most_minutes_of_a_day_may_be_excluded() -> None:
    """Whenever it is put, and whenever it is due."""
    recurrence = Recurrence.of("* * * * *", "UTC", exclude="* 1-23 * * *")
    midnight, minute_ms = milliseconds_of(datetime(2026, 6, 1, tzinfo=UTC)), 60_000
    assert recurrence.after(midnight + 59 * minute_ms) == midnight + 24 * 60 * minute_ms


def test_an_event_of_the_sun_that_is_years_away_is_an_error_and_no_end() -> None:
    """Near the pole, the sun sets in some years only."""
    at = milliseconds_of(datetime(2025, 10, 1, tzinfo=UTC))
    recurrence = Recurrence(("solar sunset 89.9 10",))
    with pytest.raises(ValueError, match="never due within a year"):
        recurrence.after(at)


#: Where clocks change by an hour, by half of it or by two, at midnight, and backward in spring.
ZONES = (
    *("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Europe/Dublin"),
    *("America/Havana", "Asia/Beirut", "Africa/Casablanca", "Antarctica/Troll"),
    *("Atlantic/Azores", "America/St_Johns", "America/Santiago", "Pacific/Chatham"),
    *("Africa/Cairo", "Asia/Jerusalem", "America/Scoresbysund", "UTC+05:30"),
)


def clock_of(zone: str) -> tzinfo:
    return ZoneInfo(zone) if "/" in zone else timezone(timedelta(hours=5, minutes=30))


def changes(zone: str) -> list[datetime]:
    """The hours of two years in which a clock changes; one hour of a clock that does not."""
    hours = [datetime(2028, 1, 1, tzinfo=UTC) + timedelta(hours=each) for each in range(731 * 24)]
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
    """A cron text or a crontab around midnight, its minutes and its hours."""
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
    rules = [any_rule(random) for _ in range(8)]
    rules += [("*/20 2 * * *", {0, 20, 40}, {2}), ("*/20 * * * *", {0, 20, 40}, {*range(24)})]
    for change in changes(zone):
        begin, end = change - timedelta(hours=30), change + timedelta(hours=30)
        walked = [*walk(zone, begin, end)]
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


@pytest.mark.parametrize("cron", ["*/20 2 * * *", "*/20 * * * *", "45 1,2 * * *", "* 1-2 * * *"])
def test_a_later_start_finds_the_rest_of_what_an_earlier_one_finds(cron: str) -> None:
    """Where the clock goes back, and forward, by half an hour."""
    recurrence = Recurrence.of(cron, "Australia/Lord_Howe")
    for day in (datetime(2026, 4, 3, 12, tzinfo=UTC), datetime(2026, 10, 2, 12, tzinfo=UTC)):
        end = milliseconds_of(day + 2 * DAY)
        sequence = [recurrence.after(milliseconds_of(day)) or 0]
        while (found := recurrence.after(sequence[-1]) or 0) <= end:
            sequence.append(found)
        for at in range(sequence[0], sequence[-1], 300_000):
            place = bisect_right(sequence, at)
            assert recurrence.after(at) == sequence[place], instant_of(at)


def test_a_night_does_not_hide_the_weekend_that_it_is_part_of() -> None:
    """Each minute, but not at night, at weekends, and on holidays: over a long weekend."""
    zone = ZoneInfo("Europe/Berlin")
    excluded = ["* 0-7,18-23 * * *", "* * * * 0,6", "2026-04-03", "2026-04-06"]
    recurrence = Recurrence.of(MINUTE, zone.key, exclude=excluded)
    last = milliseconds_of(datetime(2026, 4, 2, 17, 59, tzinfo=zone))
    next_one = milliseconds_of(datetime(2026, 4, 7, 8, tzinfo=zone))
    assert recurrence.after(last) == next_one


@pytest.mark.parametrize(
    "rules", [["0 0 29 2 *"], ["0 0 29 2 *"] * 20, ["0 0 29 2 *", "0 0 28 2 *"]]
)
def test_no_search_goes_beyond_a_century(rules: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def nearest(*given: Any) -> int:
        searches.append(given)
        return known(*given)

    known = recurrences._next
    monkeypatch.setattr(recurrences, "_next", nearest)
    with pytest.raises(InvalidSchedule, match="so much is excluded"):
        Recurrence.of(rules, "UTC", exclude="* * * 2 *")
    assert len(searches) < 300
