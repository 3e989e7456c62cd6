"""Occurrences of a schedule: when they are due and run, and what their header says."""

import json
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.schedules.recurrence import (
    ALL,
    INVALID,
    LAST,
    MAX_TEXT,
    Occurrence,
    Recurrence,
)

MINUTE_MS = 60_000
BERLIN = "Europe/Berlin"
NOW = milliseconds_of(datetime(2026, 3, 20, tzinfo=UTC))


def minutely(name: str = "a", **fields: Any) -> Occurrence:
    """An occurrence of a schedule that is due at each full minute."""
    every = Recurrence((f"every {MINUTE_MS}",))
    return Occurrence(name, NOW, every, LAST)._replace(**fields)


def at_berlin(text: str) -> int:
    return milliseconds_of(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(BERLIN)))


@given(
    st.sampled_from([ALL, LAST, 0, 90_000]),
    st.sampled_from([0, 999, MINUTE_MS]),
    st.lists(st.integers(-MINUTE_MS, 400_000), max_size=30),
)
def test_however_late_they_come_each_instant_comes_once_or_was_left_out(
    catch_up_ms: int, jitter_ms: int, lateness: list[int]
) -> None:
    occurrence, now = minutely(catch_up_ms=catch_up_ms, jitter_ms=jitter_ms), NOW
    for late in lateness:
        now = max(now, occurrence.due_ms + late)
        runs, following_ms = occurrence.at(now)
        assert following_ms is not None
        following = occurrence._replace(instant_ms=following_ms)
        assert occurrence.task_id < following.task_id
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


def test_what_waits_runs_for_all_that_was_missed_and_the_next_is_still_ahead() -> None:
    daily = Recurrence.of("0 9 * * *", BERLIN)
    occurrence = Occurrence("a", at_berlin("2026-03-20T09:00"), daily, LAST)
    # On time, and days late, over a change of the clock.
    for now, following in (
        ("2026-03-20T09:00", "2026-03-21T09:00"),
        ("2026-03-30T08:59", "2026-03-30T09:00"),
        ("2026-03-30T09:00", "2026-03-31T09:00"),
    ):
        assert occurrence.at(at_berlin(now)) == (True, at_berlin(following))
    ended = occurrence._replace(recurrence=daily._replace(end_ms=at_berlin("2026-03-25T09:00")))
    assert ended.at(at_berlin("2026-03-30T09:00")) == (True, None)
    hourly = Occurrence("a", 3_600_000, Recurrence.of("@hourly", "UTC"), 1_800_000)
    assert hourly.at(5_400_000) == (True, 7_200_000)
    # The latest of those that are not too late follows, also if it is over.
    assert hourly.at(10_800_000 + 1_800_000) == (False, 10_800_000)


def test_jitter_spreads_within_its_bound_and_is_the_same_for_everybody() -> None:
    occurrences = [minutely(f"a{number}", jitter_ms=9_999) for number in range(1000)]
    tenths = Counter((each.due_ms - NOW) // 1000 for each in occurrences)
    assert sorted(tenths) == [*range(10)]
    assert min(tenths.values()) > 50
    assert minutely().due_ms == NOW


def test_an_occurrence_is_read_as_it_was_written() -> None:
    recurrence = Recurrence.of([timedelta(hours=1), "0 7 * * *"], BERLIN, exclude="2030-01-01")
    occurrence = Occurrence(
        *("täglich:b", NOW, recurrence, LAST, 5000, "queue-one"),
        {"priority": 3, "headers": {"tenant": "ü", "from": datetime(2030, 1, 2, tzinfo=UTC)}},
        *(1_700_000_000_123_456, "0a", "b" * 32, 3, True),
    )
    assert Occurrence.of(occurrence.text) == occurrence
    # Messages of one occurrence are those of one task.
    assert occurrence.task_id == f"täglich:b:{NOW:015d}:1700000000123456"
    assert occurrence._replace(message="0b", turns=2).task_id == occurrence.task_id
    # A later version may say more, and an earlier one less.
    fields = json.loads(occurrence.text)
    assert Occurrence.of(json.dumps([*fields[:2], [*fields[2], "?"], *fields[3:], 1])) == occurrence
    short = Occurrence.of('["a",1,[["* * * * *"],"UTC",0,null,[]],-1]')
    assert short == Occurrence("a", 1, Recurrence(("* * * * *",)), LAST)


#: What JSON can say; values that kombu writes, and others that look like them.
plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
)
kinds = st.sampled_from(["datetime", "date", "time", "decimal", "uuid", "bytes", "base64", "x"])
anything = st.recursive(
    plain | st.fixed_dictionaries({"__type__": kinds, "__value__": plain}),
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=8,
)
WRITTEN: list[Any] = [
    *("a", NOW, [["every 60000", "0 9 * * *"], BERLIN, 0, None, ["2026-12-25"]], LAST, 0),
    *("allow", {"priority": 3}, 7, "0a", "0b", 1, True),
]
rules = st.sampled_from(["every ", "crontab ", "@daily", "* * * *", "L", ""])
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


def ruled(*rules: str, zone: str = "UTC", end: Any = None, excluded: Any = ()) -> Any:
    return [rules, zone, 0, end, excluded]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        *[(0, each) for each in (7, "\ud800")],
        *[(1, each) for each in (1.5, -1, True)],
        *[(2, ruled(each)) for each in ("every 1", "* * *", "crontab * * 30 2 1")],
        *[(2, ruled("@daily", zone=each)) for each in ("UTC+25:00", "../etc")],
        *[
            (2, each)
            for each in (ruled(), ruled("@daily", end=[]), ruled("@daily", excluded=("x",)))
        ],
        *[(3, -3), (4, 86_400_001), (4, -1), (5, "maybe"), (5, []), (6, [])],
        *[(7, each) for each in (-1, 2**53, "1")],
        # A record joins them with spaces and colons.
        *[(8, "A:b"), (8, "\ud800"), (9, "b c"), (9, "b" * 33), (10, -1), (10, float("nan"))],
    ],
)
def test_what_a_stranger_writes_is_refused(at: int, value: Any) -> None:
    assert Occurrence.of(json.dumps(WRITTEN)) is not None
    assert Occurrence.of(json.dumps([*WRITTEN[:at], value, *WRITTEN[at + 1 :]])) is None


def test_a_text_that_is_no_list_too_short_or_too_long_is_no_occurrence() -> None:
    written = json.dumps(WRITTEN)
    for text in (None, "", '["a",1]', "[" * MAX_TEXT, written[:-5], written + " " * MAX_TEXT):
        assert Occurrence.of(text) is None
