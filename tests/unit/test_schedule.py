"""When the occurrences of a schedule are due, and what is said about them."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule, solar
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.schedules.recurrence import Recurrence
from celery_rabbitdelay.schedules.occurrence import (
    ALWAYS,
    UNTIL_NEXT,
    Definition,
    Occurrence,
    definition_of,
)

MINUTE_MS = 60_000


def local(text: str, zone: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))


def due(recurrence: Recurrence, begin: datetime, end: datetime) -> list[datetime]:
    """All instants after one and up to another."""
    found, instant_ms = [], recurrence.after(milliseconds_of(begin))
    while instant_ms is not None and instant_ms <= milliseconds_of(end):
        found.append(instant_of(instant_ms))
        instant_ms = recurrence.after(instant_ms)
    return found


LORD_HOWE = "Australia/Lord_Howe"
BERLIN = "Europe/Berlin"
ZONES = ("Europe/Berlin", "America/New_York", LORD_HOWE, "Pacific/Apia", "UTC")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize(("cron", "wanted", "days"), [("7", {7}, 365), ("*/20", {0, 20, 40}, 100)])
def test_a_cron_is_due_whenever_the_clock_shows_one_of_its_minutes(
    zone: str, cron: str, wanted: set[int], days: int
) -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    # All zones are a multiple of ten minutes away from UTC.
    steps = (begin + timedelta(minutes=min(wanted) % 10 + 10 * each) for each in range(days * 144))
    walked = [at for at in steps if at.astimezone(ZoneInfo(zone)).minute in wanted]
    before = begin - timedelta(seconds=1)
    assert due(Recurrence.of(f"{cron} * * * *", zone), before, walked[-1]) == walked


@pytest.mark.parametrize(
    ("cron", "zone", "begin", "instants"),
    [
        # The clock goes from 02:00 to 03:00, and back from 03:00 to 02:00.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28", "2026-03-28T02:30+01 2026-03-29T03+02"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25", "2026-10-25T02:30+02 2026-10-26T02:30+01"),
        ("9 15,30 2 * * *", BERLIN, "2026-03-29", "2026-03-29T03+02 2026-03-30T02:15:09+02"),
        # Lord Howe changes by half an hour.
        ("15 2 * * *", LORD_HOWE, "2026-10-04", "2026-10-04T02:30+11 2026-10-05T02:15+11"),
        ("45 1 * * *", LORD_HOWE, "2026-04-05", "2026-04-05T01:45+11 2026-04-06T01:45+10:30"),
        ("0 0 L * *", "UTC", "2028-01-15", "2028-01-31T00+00 2028-02-29T00+00"),
        ("0 12 29 2 *", "UTC", "2026-01-01", "2028-02-29T12+00 2032-02-29T12+00"),
        ("*/20 * * * * *", "UTC", "2026-01-01", "2026-01-01T00:00:20+00 2026-01-01T00:00:40+00"),
        ("@daily", "America/New_York", "2026-03-07", "2026-03-08T00-05 2026-03-09T00-04"),
    ],
)  # fmt: skip
def test_clocks_that_change_and_days_that_are_rare(
    cron: str, zone: str, begin: str, instants: str
) -> None:
    recurrence = Recurrence.of(cron, zone)
    wanted = [*map(datetime.fromisoformat, instants.split())]
    assert due(recurrence, local(begin, zone), wanted[-1]) == wanted


@pytest.mark.parametrize(
    ("when", "rule"),
    [
        (crontab(), "crontab * * * * *"),
        (schedule(90), "every 90000"),
        (timedelta(hours=1), "every 3600000"),
        (timedelta(seconds=1), "every 1000"),
        (" 0  7 * * 1-5 ", "0 7 * * 1-5"),
        ("@midnight", "0 0 * * *"),
        (timedelta(days=36_500), "every 3153600000000"),
    ],
)  # fmt: skip
def test_what_celery_and_cron_write_is_a_rule(when: Any, rule: str) -> None:
    assert Recurrence.of(when, "UTC").rules == (rule,)


def test_the_most_that_a_schedule_may_have_is_not_refused() -> None:
    rules, excluded = ["@daily"] * 20, [date(2026, 1, 1)] * 100
    made = Recurrence.of(rules, "UTC", exclude=excluded)
    assert (len(made.rules), len(made.excluded)) == (20, 100)
    assert Recurrence.read([*made]) == made


def test_celerys_crontab_is_due_if_both_days_fit() -> None:
    first_monday = Recurrence.of(crontab(0, 9, "mon", day_of_month="1-7"), "UTC")
    found = due(first_monday, datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 12, 31, tzinfo=UTC))
    assert len(found) == 12
    assert all(each.weekday() == 0 and each.day <= 7 for each in found)


def test_an_interval_counts_from_its_start_and_stops_at_its_end() -> None:
    start = datetime(2030, 1, 1, 0, 0, 10, tzinfo=UTC)
    recurrence = Recurrence.of(timedelta(seconds=7), "UTC", start, start + timedelta(seconds=20))
    wanted = [start + timedelta(seconds=each) for each in (0, 7, 14)]
    assert due(recurrence, start - timedelta(days=1), start + timedelta(days=1)) == wanted
    assert recurrence.latest(milliseconds_of(start) - 1) is None
    assert recurrence.latest(milliseconds_of(start + timedelta(days=9))) == milliseconds_of(
        wanted[-1]
    )


@pytest.mark.parametrize(
    ("when", "zone", "reason"),
    [
        ("61 * * * *", "UTC", "minute"),
        ("* * *", "UTC", "fields"),
        ("0 0 30 2 *", "UTC", "day-of-month"),
        ("0 0 31 2,4 *", "UTC", "day-of-month|never due"),
        (timedelta(milliseconds=999), "UTC", "a second at least"),
        (7, "UTC", "takes a timedelta"),
        ([], "UTC", "1 to 20"),
        (["@daily"] * 21, "UTC", "1 to 20"),
        ("@daily", "Europe/Nowhere", "Nowhere"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_early(when: Any, zone: str, reason: str) -> None:
    with pytest.raises(InvalidSchedule, match=f"(?i){reason}"):
        Recurrence.of(when, zone)


CRONS = (
    "*/5 * * * *",
    "15 * * * *",
    "30 2 * * *",
    "30 1,2 * * *",
    "crontab 0 9 1-7 * 1",
    "0 0 L * *",
)
RULES = st.sampled_from(["every 7000", *CRONS])
NOW = milliseconds_of(datetime(2026, 3, 20, tzinfo=UTC))

#: When a clock changes in one of the zones.
CHANGES = [
    datetime.fromisoformat(each)
    for each in (
        *("2026-03-29T01:00Z", "2026-10-25T01:00Z", "2026-03-08T07:00Z", "2026-11-01T06:00Z"),
        *("2026-04-04T15:00Z", "2026-10-03T15:30Z"),
    )
]
instants = st.builds(
    lambda change, offset: milliseconds_of(change) + offset,
    st.sampled_from(CHANGES),
    st.integers(-6 * 3_600_000, 6 * 3_600_000),
) | st.integers(NOW, NOW + 300 * 86_400_000)


@given(st.lists(RULES, min_size=1, max_size=3, unique=True), st.sampled_from(ZONES), instants)
def test_the_latest_instant_is_the_one_before_the_next(
    rules: list[str], zone: str, at: int
) -> None:
    recurrence = Recurrence(tuple(rules), zone)
    last, following = recurrence.latest(at), recurrence.after(at)
    assert last is not None
    assert following is not None
    assert last <= at < following
    assert recurrence.after(last) == following
    assert recurrence.latest(last) == last
    assert recurrence.latest(following - 1) == last


@given(
    st.sampled_from([ALWAYS, UNTIL_NEXT, 0, 90_000]), st.lists(st.integers(0, 400_000), max_size=30)
)
def test_however_late_they_come_each_instant_comes_once_or_was_left_out(
    catch_up_ms: int, lateness: list[int]
) -> None:
    every = Recurrence((f"every {MINUTE_MS}",))
    occurrence: Occurrence | None = Occurrence("a", NOW, every, catch_up_ms, "r")
    ran, came, now = [], [], NOW
    for late in lateness:
        assert occurrence is not None
        now = max(now, occurrence.instant_ms) + late
        came.append(occurrence)
        runs, following = occurrence.at(now)
        if runs:
            ran.append(occurrence.instant_ms)
        assert following is not None
        # Each occurrence that was left out is too late to run.
        left_out = range(occurrence.instant_ms + MINUTE_MS, following.instant_ms, MINUTE_MS)
        for each in left_out:
            assert not occurrence._replace(instant_ms=each).at(now)[0]
        if catch_up_ms == UNTIL_NEXT:
            assert runs == (now < occurrence.instant_ms + MINUTE_MS)
        occurrence = following
    assert ran == sorted(set(ran))
    assert all(a.task_id < b.task_id for a, b in pairwise(came))
    if catch_up_ms == ALWAYS:
        assert [*ran] == [NOW + MINUTE_MS * each for each in range(len(lateness))]


def test_a_schedule_whose_end_is_over_is_no_error() -> None:
    start = datetime(2020, 1, 1, tzinfo=UTC)
    ended = Recurrence.of(timedelta(hours=1), "UTC", start, start + timedelta(hours=3))
    assert ended.after(NOW) is None
    assert ended.latest(NOW) == milliseconds_of(start + timedelta(hours=3))


def test_an_occurrence_is_found_by_the_id_of_its_task() -> None:
    occurrence = Occurrence("a:b", NOW, Recurrence(("every 60000",)), UNTIL_NEXT, "0a")
    later = occurrence._replace(instant_ms=NOW + MINUTE_MS)
    assert occurrence.with_id(later.task_id) == later
    for task_id in ("", "a:b", f"x:{NOW:015d}:0a", f"a:b:{NOW:015d}:0b", "a:b:x:0a"):
        assert occurrence.with_id(task_id) is None


def test_an_occurrence_runs_as_late_as_its_schedule_lets_it_catch_up() -> None:
    hourly = Recurrence.of("@hourly", "UTC")
    occurrence = Occurrence("a", 3_600_000, hourly, 1_800_000, "r")
    assert occurrence.key == "schedule:a"
    assert occurrence.at(5_400_000)[0]
    runs, following = occurrence.at(5_400_001)
    assert not runs
    assert following is not None
    assert following.instant_ms == 7_200_000


def test_what_json_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidSchedule, match="JSON"):
        definition_of("note", [object()], {}, {})


@pytest.mark.parametrize(
    ("args", "serializer"),
    [
        ([date(2030, 1, 2), datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.10")], "json"),
        ([UUID(int=7), b"text", b"\xff", time(3, 4), 1.5, None], "json"),
        ([date(2030, 1, 2), b"\xff"], "yaml"),
        ([(1, 2), {3: 4, "a": 5}, {6, 7}], "pickle"),
    ],
)
def test_what_a_schedule_sends_is_read_as_it_was_given(args: list[Any], serializer: str) -> None:
    written = definition_of("note", args, {"b": args}, {"priority": 3}, serializer)
    found = Definition("note", args, {"b": args}, {"priority": 3})
    assert repr(Definition.of(written, [serializer])) == repr(found)
    assert (Definition.of(written, ["json"]) is None) == (serializer == "pickle")
    if serializer == "pickle":
        del args[-1]  # as Celery sends it
        written = definition_of("note", args, {}, {})
        assert Definition.of(written, []) == ("note", [[1, 2], {"3": 4, "a": 5}], {}, {})


def test_an_occurrence_is_read_as_it_was_written() -> None:
    recurrence = Recurrence.of(
        [timedelta(hours=1), "0 7 * * *"], "Europe/Berlin", exclude=["2026-12-25", "* * 1 1 *"]
    )
    occurrence = Occurrence("täglich", NOW, recurrence, UNTIL_NEXT, "0a", 5000, "queue-one")
    assert Occurrence.of(occurrence.text) == occurrence


@given(
    st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(str) | st.none()
)
def test_anything_else_is_no_occurrence(text: Any) -> None:
    assert Occurrence.of(text) is None


@pytest.mark.parametrize(
    "text",
    [
        '["a",1,[["every 1"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["every x"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * *"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["crontab * * * * MON"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["crontab * * 30 2 1"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC+25:00",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"../etc",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[[],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1.5,[["* * * * *"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,[]],-3,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,["9999-99-99"]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,["x"]],-1,"r",0,"allow"]',
        '["a",1,[["solar noon 0 0"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["solar sunrise 91 0"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,[]],-1,"r",86400001,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,[]],-1,"r",0,"maybe"]',
        '["a",1,[["* * * * *"],"UTC",0,null,[]],-1,"r",0,[]]',
        '["a",1,[["* * * * *"],"UTC",0,[],[]],-1,"r",0,"allow"]',
        '["\\ud800",1,[["* * * * *"],"UTC",0,null,[]],-1,"r",0,"allow"]',
        '["a",1,[["* * * * *"],"UTC",0,null,[]],-1,"\\ud800",0,"allow"]',
        "[" * 3000,
    ],
)
def test_what_a_stranger_writes_is_refused(text: str) -> None:
    assert Occurrence.of(text) is None


@pytest.mark.parametrize("more", ["", ',"of a later version"'])
def test_a_well_formed_one_is_not_refused(more: str) -> None:
    text = f'["a",1,[["* * * * *"],"UTC",0,null,[]{more}],-1,"r",0,"allow"{more}]'
    assert Occurrence.of(text) == Occurrence("a", 1, Recurrence(("* * * * *",)), -1, "r")


def test_an_id_with_thousands_of_digits_is_that_of_no_occurrence() -> None:
    occurrence = Occurrence("a", NOW, Recurrence(("every 60000",)), UNTIL_NEXT, "r")
    assert occurrence.with_id(f"a:{'1' * 5000}:r") is None


def test_what_is_excluded_is_what_the_clock_shows() -> None:
    """Where the clock changes, a time comes twice, or another one in its place."""
    excluded = Recurrence.of("0 3 * * *", BERLIN, exclude="30 2 * * *")
    night = local("2027-03-28T00:00", BERLIN)
    assert excluded.after(milliseconds_of(night)) == milliseconds_of(
        local("2027-03-28T03:00", BERLIN)
    )
    twice = Recurrence.of(timedelta(minutes=30), BERLIN, exclude="30 2 * * *")
    begin = local("2026-10-25T01:45", BERLIN)
    found = due(twice, begin, begin + timedelta(hours=3))
    assert [f"{each.astimezone(ZoneInfo(BERLIN)):%H:%M}" for each in found] == [
        *("02:00", "02:00", "03:00", "03:30", "04:00", "04:30")
    ]


def test_of_a_clock_that_changes_by_half_an_hour_no_occurrence_follows_itself() -> None:
    lord_howe = Recurrence.of("* 23 * * *", LORD_HOWE)
    at = milliseconds_of(datetime(2026, 4, 4, 12, 29, tzinfo=UTC))
    occurrence = Occurrence("a", at, lord_howe, UNTIL_NEXT, "r")
    _, following = occurrence.at(at + 10 * MINUTE_MS)
    assert following is not None
    assert following.instant_ms > at


def test_days_and_minutes_are_excluded_in_the_time_zone() -> None:
    excluded = ["2026-12-24", date(2026, 12, 25), "* 12 * * *", "* * * * 0,6"]
    recurrence = Recurrence.of("30 */4 * * *", BERLIN, exclude=excluded)
    begin, end = local("2026-12-23T10:00", BERLIN), local("2026-12-28T09:00", BERLIN)
    # The 26th is a Saturday.
    wanted = ["23T16:30", "23T20:30", "28T00:30", "28T04:30", "28T08:30"]
    found = due(recurrence, begin, end)
    assert found == [local(f"2026-12-{each}", BERLIN) for each in wanted]
    assert recurrence.latest(milliseconds_of(end)) == milliseconds_of(found[-1])
    assert recurrence.latest(milliseconds_of(local("2026-12-27T23:59", BERLIN))) == milliseconds_of(
        found[1]
    )


def test_a_day_that_is_excluded_begins_and_ends_where_the_clock_changes() -> None:
    recurrence = Recurrence.of("@hourly", BERLIN, exclude="2026-10-25")
    before = local("2026-10-24T23:00", BERLIN)
    after = recurrence.after(milliseconds_of(before))
    assert after is not None
    assert instant_of(after) - before == timedelta(hours=26)
    assert recurrence.latest(after - 1) == milliseconds_of(before)


@pytest.mark.parametrize(
    "exclude", ["every 1000", "christmas", timedelta(hours=1), "*/2 * * * * *", ["* * * * *"] * 101]
)
def test_what_cannot_be_excluded_is_said_early(exclude: Any) -> None:
    with pytest.raises(InvalidSchedule):
        Recurrence.of("@hourly", "UTC", exclude=exclude)


def test_what_excludes_everything_is_said_early() -> None:
    with pytest.raises(InvalidSchedule, match="so much is excluded"):
        Recurrence.of("* * * * *", "UTC", exclude="0-59 0-23 * * *")


@pytest.mark.parametrize(
    ("event", "latitude", "longitude"),
    [
        ("sunrise", 52.52, 13.4),
        ("sunset", -33.9, 151.2),
        ("solar_noon", 0.0, 0.0),
        ("dawn_astronomical", 60.0, 20.0),
        ("dusk_civil", 69.6, 18.9),
    ],
)
def test_the_sun_rises_when_celery_says_so(event: Any, latitude: float, longitude: float) -> None:
    """Celery asks ephem too, and has a table of horizons of its own."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    recurrence = Recurrence.of(solar(event, latitude, longitude), "UTC")
    compared = 0
    for _ in range(40):
        of_celery = solar(
            event, latitude, longitude, nowfun=partial(type(at).fromisoformat, f"{at}")
        )
        found = recurrence.after(milliseconds_of(at))
        assert found is not None
        # Celery before 5.7 fails on a day on which that does not happen.
        with suppress(TypeError):
            expected = at + of_celery.remaining_estimate(at)
            # ephem finds another second from each start.
            assert abs(expected - instant_of(found)) < timedelta(seconds=3)
            compared += 1
        assert recurrence.latest(found) == found
        assert recurrence.latest(found - 1) != found
        at = instant_of(found) + timedelta(days=9, hours=5)
    assert compared > 30


def test_a_year_of_sunrises_is_one_a_day() -> None:
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    found = due(
        Recurrence.of(solar("sunrise", 52.52, 13.4), "UTC"), begin, begin + timedelta(days=365)
    )
    assert len(found) == 365
    assert all(timedelta(hours=23) < b - a < timedelta(hours=25) for a, b in pairwise(found))


@given(st.integers(0, 86_400_000), st.integers(0, 10_000))
def test_jitter_is_within_its_bound_and_the_same_for_everybody(jitter_ms: int, number: int) -> None:
    every = Recurrence((f"every {MINUTE_MS}",))
    occurrence = Occurrence("a", NOW + MINUTE_MS * number, every, UNTIL_NEXT, "r", jitter_ms)
    again = Occurrence.of(occurrence.text)
    assert again is not None
    assert again.due_ms == occurrence.due_ms
    assert 0 <= occurrence.due_ms - occurrence.instant_ms <= jitter_ms


def test_jitter_spreads() -> None:
    every = Recurrence((f"every {MINUTE_MS}",))
    occurrences = [
        Occurrence(f"a{number}", NOW, every, UNTIL_NEXT, "r", 9_999) for number in range(1000)
    ]
    tenths = Counter((each.due_ms - NOW) // 1000 for each in occurrences)
    assert sorted(tenths) == [*range(10)]
    assert min(tenths.values()) > 50
