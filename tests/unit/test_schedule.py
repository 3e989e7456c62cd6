"""When the occurrences of a schedule are due, and what is said about them."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule, solar
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidSchedule
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.schedules.occurrence import ALL, LAST, MAX_TEXT, Occurrence
from celery_rabbitdelay.schedules.recurrence import INVALID, Recurrence

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


def minutely(name: str = "a", **fields: Any) -> Occurrence:
    """An occurrence of a schedule that is due at each full minute."""
    every = Recurrence((f"every {MINUTE_MS}",))
    return Occurrence(name, NOW, every, LAST)._replace(**fields)


def at_berlin(text: str) -> int:
    return milliseconds_of(local(text, BERLIN))


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
def test_no_instant_is_between_a_time_and_the_next_one(
    rules: list[str], zone: str, at: int
) -> None:
    recurrence = Recurrence(tuple(rules), zone)
    following = recurrence.after(at)
    assert following is not None
    assert at < following
    # No instant is between, from wherever it is looked for.
    assert recurrence.after(following - 1) == following
    assert recurrence.after((at + following) // 2) == following


@given(
    st.sampled_from([ALL, LAST, 0, 90_000]),
    st.sampled_from([0, 999, MINUTE_MS]),
    st.lists(st.integers(-MINUTE_MS, 400_000), max_size=30),
)
def test_however_late_they_come_each_instant_comes_once_or_was_left_out(
    catch_up_ms: int, jitter_ms: int, lateness: list[int]
) -> None:
    occurrence = minutely(catch_up_ms=catch_up_ms, jitter_ms=jitter_ms)
    came, now = [], NOW
    for late in lateness:
        now = max(now, occurrence.due_ms + late)
        came.append(occurrence)
        runs, following_ms = occurrence.at(now)
        assert following_ms is not None
        following = occurrence._replace(instant_ms=following_ms)
        between = range(occurrence.instant_ms + MINUTE_MS, following_ms, MINUTE_MS)
        left_out = [occurrence._replace(instant_ms=each) for each in between]
        if catch_up_ms == ALL:
            assert (runs, left_out) == (True, [])
        elif catch_up_ms == LAST:
            # It runs for all that are over; the first one that is still ahead follows.
            assert runs
            assert following.due_ms > now
            assert all(each.due_ms <= now for each in left_out)
        else:
            assert runs == (now - occurrence.due_ms <= catch_up_ms)
            assert following.due_ms >= now - catch_up_ms
            assert not any(each.at(now)[0] for each in left_out)
        occurrence = following
    assert all(a.task_id < b.task_id for a, b in pairwise(came))


def test_a_schedule_whose_end_is_over_is_no_error() -> None:
    start = datetime(2020, 1, 1, tzinfo=UTC)
    ended = Recurrence.of(timedelta(hours=1), "UTC", start, start + timedelta(hours=3))
    assert ended.after(NOW) is None


def test_the_id_of_a_task_says_its_schedule_its_instant_and_the_edit() -> None:
    occurrence = minutely("a:b", order=1_700_000_000_123_456)
    assert occurrence.task_id == f"a:b:{NOW:015d}:1700000000123456"
    for other in ({"name": "a"}, {"instant_ms": NOW + MINUTE_MS}, {"order": 0}):
        assert occurrence._replace(**other).task_id != occurrence.task_id
    # Messages of one occurrence are those of one task.
    again = occurrence._replace(message="0b", turns=2, is_followed=True)
    assert again.task_id == occurrence.task_id


def test_what_waits_runs_for_all_that_was_missed_and_the_next_is_still_ahead() -> None:
    daily = Recurrence.of("0 9 * * *", BERLIN)
    occurrence = Occurrence("a", at_berlin("2026-03-20T09:00"), daily, LAST)
    # On time, and days late, over a change of the clock.
    assert occurrence.at(occurrence.instant_ms) == (True, at_berlin("2026-03-21T09:00"))
    assert occurrence.at(at_berlin("2026-03-30T08:59")) == (True, at_berlin("2026-03-30T09:00"))
    assert occurrence.at(at_berlin("2026-03-30T09:00")) == (True, at_berlin("2026-03-31T09:00"))
    ended = occurrence._replace(
        recurrence=daily._replace(end_ms=at_berlin("2026-03-25T09:00")),
    )
    assert ended.at(at_berlin("2026-03-30T09:00")) == (True, None)


def test_an_occurrence_runs_as_late_as_its_schedule_lets_it_catch_up() -> None:
    hourly = Recurrence.of("@hourly", "UTC")
    occurrence = Occurrence("a", 3_600_000, hourly, 1_800_000)
    assert occurrence.at(5_400_000) == (True, 7_200_000)
    assert occurrence.at(5_400_001) == (False, 7_200_000)
    # The latest of those that are not too late follows, also if it is over.
    assert occurrence.at(10_800_000 + 1_800_000) == (False, 10_800_000)


def test_an_occurrence_is_read_as_it_was_written() -> None:
    recurrence = Recurrence.of(
        [timedelta(hours=1), "0 7 * * *"], "Europe/Berlin", exclude=["2026-12-25", "* * 1 1 *"]
    )
    occurrence = Occurrence(
        *("täglich", NOW, recurrence, LAST, 5000, "queue-one"),
        {"priority": 3, "headers": {"tenant": "ü", "from": datetime(2030, 1, 2, tzinfo=UTC)}},
        *(1_700_000_000_123_456, "0a", "0b", 3, True),
    )
    assert Occurrence.of(occurrence.text) == occurrence


@given(
    st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(str) | st.none()
)
def test_anything_else_is_no_occurrence(text: Any) -> None:
    assert Occurrence.of(text) is None


#: What JSON can say.
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    # Values that kombu writes, and others that look like them.
    | st.builds(
        lambda kind, value: {"__type__": kind, "__value__": value},
        st.sampled_from(["datetime", "date", "time", "decimal", "uuid", "bytes", "base64", "x"]),
        st.none() | st.text(max_size=9) | st.integers(),
    ),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=8,
)
WRITTEN: list[Any] = [
    *("a", NOW, [["every 60000", "0 9 * * *"], BERLIN, 0, None, ["2026-12-25"]], LAST, 0),
    *("allow", {"priority": 3}, 7, "0a", "0b", 1, True),
]
rules = st.sampled_from(["every ", "crontab ", "solar sunset ", "@daily", "* * * *", "L", ""])
recurrences = st.tuples(
    st.lists(
        st.builds("{}{}".format, rules, st.text("0123456789*/,-#L? ", max_size=9)), max_size=3
    ),
    st.sampled_from(["UTC", "UTC+05:30", "UTC+99:99", "../x", BERLIN, "\0"]) | st.text(max_size=9),
    *[st.none() | st.integers()] * 2,
    st.lists(st.text(max_size=12), max_size=3),
)


@given(st.integers(0, len(WRITTEN) - 1), anything | recurrences, st.integers(0, len(WRITTEN)))
def test_whatever_a_stranger_has_changed_an_occurrence_can_be_used_or_is_none(
    at: int, value: Any, length: int
) -> None:
    text = json.dumps([*WRITTEN[:at], value, *WRITTEN[at + 1 :]][: length or None])
    found = Occurrence.of(text)
    if found is None:
        return
    assert Occurrence.of(found.text) == found
    assert found.task_id.encode()
    assert 0 <= found.due_ms - found.instant_ms <= found.jitter_ms
    for now_ms in (0, NOW, found.due_ms + MINUTE_MS):
        with suppress(*INVALID):
            _, following_ms = found.at(now_ms)
            assert following_ms is None or following_ms > found.instant_ms


@given(st.text(max_size=60), st.integers(0, 200), st.integers(0, 200))
def test_a_header_that_was_cut_or_overwritten_raises_nothing(
    text: str, begin: int, length: int
) -> None:
    written = json.dumps(WRITTEN)
    Occurrence.of(written[:begin] + text + written[begin + length :])


RULE = '[["* * * * *"],"UTC",0,null,[]]'


@pytest.mark.parametrize(
    "text",
    [
        '["a",1,[["every 1"],"UTC",0,null,[]],-1]',
        '["a",1,[["every x"],"UTC",0,null,[]],-1]',
        '["a",1,[["* * *"],"UTC",0,null,[]],-1]',
        '["a",1,[["crontab * * * * MON"],"UTC",0,null,[]],-1]',
        '["a",1,[["crontab * * 30 2 1"],"UTC",0,null,[]],-1]',
        '["a",1,[["* * * * *"],"UTC+25:00",0,null,[]],-1]',
        '["a",1,[["* * * * *"],"../etc",0,null,[]],-1]',
        '["a",1,[[],"UTC",0,null,[]],-1]',
        '["a",1,[["* * * * *"],"UTC",0,null,["9999-99-99"]],-1]',
        '["a",1,[["* * * * *"],"UTC",0,null,["x"]],-1]',
        '["a",1,[["* * * * *"],"UTC",0,[],[]],-1]',
        '["a",1,[["solar noon 0 0"],"UTC",0,null,[]],-1]',
        '["a",1,[["solar sunrise 91 0"],"UTC",0,null,[]],-1]',
        f'["a",1.5,{RULE},-1]',
        f'["a",-1,{RULE},-1]',
        f'["a",true,{RULE},-1]',
        f'["a",1,{RULE},-3]',
        f'["a",1,{RULE},-1,86400001]',
        f'["a",1,{RULE},-1,-1]',
        f'["a",1,{RULE},-1,0,"maybe"]',
        f'["a",1,{RULE},-1,0,[]]',
        f'["a",1,{RULE},-1,0,"allow",[]]',
        f'["a",1,{RULE},-1,0,"allow",{{}},-1]',
        f'["a",1,{RULE},-1,0,"allow",{{}},9007199254740992]',
        f'["a",1,{RULE},-1,0,"allow",{{}},"1"]',
        # A record joins them with spaces and colons.
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"A:b"]',
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"a","b c"]',
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"a","{"b" * 33}"]',
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"\\ud800"]',
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"a","b",-1]',
        f'["a",1,{RULE},-1,0,"allow",{{}},1,"a","b",NaN]',
        f'["\\ud800",1,{RULE},-1]',
        f"[7,1,{RULE},-1]",
        f'["a",1,{RULE}]',
        "[" * MAX_TEXT,
        f'["a",1,{RULE},-1,{" " * MAX_TEXT}0]',
    ],
)
def test_what_a_stranger_writes_is_refused(text: str) -> None:
    assert Occurrence.of(text) is None


@pytest.mark.parametrize("more", ["", ',"of a later version"'])
def test_a_well_formed_one_is_not_refused(more: str) -> None:
    text = (
        f'["a",1,[["* * * * *"],"UTC",0,null,[]{more}],-1,7,"skip",{{"priority":3}},'
        f'9007199254740991,"0a","{"b" * 32}",2,true{more}]'
    )
    recurrence = Recurrence(("* * * * *",))
    options = {"priority": 3}
    assert Occurrence.of(text) == Occurrence(
        *("a", 1, recurrence, -1, 7, "skip", options, 2**53 - 1, "0a", "b" * 32, 2, True)
    )
    short = Occurrence.of(f'["a",1,{RULE},-1]')
    assert short == Occurrence("a", 1, recurrence, LAST)


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
    occurrence = Occurrence("a", at, lord_howe, LAST)
    _, following_ms = occurrence.at(at + 10 * MINUTE_MS)
    assert following_ms is not None
    assert following_ms > at + 10 * MINUTE_MS


def test_days_and_minutes_are_excluded_in_the_time_zone() -> None:
    excluded = ["2026-12-24", date(2026, 12, 25), "* 12 * * *", "* * * * 0,6"]
    recurrence = Recurrence.of("30 */4 * * *", BERLIN, exclude=excluded)
    begin, end = local("2026-12-23T10:00", BERLIN), local("2026-12-28T09:00", BERLIN)
    # The 26th is a Saturday.
    wanted = ["23T16:30", "23T20:30", "28T00:30", "28T04:30", "28T08:30"]
    found = due(recurrence, begin, end)
    assert found == [local(f"2026-12-{each}", BERLIN) for each in wanted]


def test_a_day_that_is_excluded_begins_and_ends_where_the_clock_changes() -> None:
    recurrence = Recurrence.of("@hourly", BERLIN, exclude="2026-10-25")
    before = local("2026-10-24T23:00", BERLIN)
    after = recurrence.after(milliseconds_of(before))
    assert after is not None
    assert instant_of(after) - before == timedelta(hours=26)


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
        assert recurrence.after(found - 1) == found
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
    occurrence = minutely(instant_ms=NOW + MINUTE_MS * number, jitter_ms=jitter_ms)
    again = Occurrence.of(occurrence.text)
    assert again is not None
    assert again.due_ms == occurrence.due_ms
    assert 0 <= occurrence.due_ms - occurrence.instant_ms <= jitter_ms


def test_jitter_spreads() -> None:
    occurrences = [minutely(f"a{number}", jitter_ms=9_999) for number in range(1000)]
    tenths = Counter((each.due_ms - NOW) // 1000 for each in occurrences)
    assert sorted(tenths) == [*range(10)]
    assert min(tenths.values()) > 50
