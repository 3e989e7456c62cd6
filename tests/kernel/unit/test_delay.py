"""Delays as numbers and as texts, and when a message is due; the clock is a fake."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType
from celery_rabbitdelay.levels import delay as delay_module
from celery_rabbitdelay.levels import wall_clock
from tests.kernel.unit.clock import Clock, frozen

#: The error, and what else it is.
INVALID = InvalidDelay, ValueError

#: A second with a part of a millisecond.
START_NS = 1_900_000_000_000_400_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stopped(monkeypatch)


def stopped(monkeypatch: pytest.MonkeyPatch, now_ns: int = START_NS) -> Clock:
    """Let time stand still."""
    clock = Clock()
    clock.now_ns = now_ns
    monkeypatch.setattr(wall_clock, "ns", clock.time_ns)
    return clock


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (3, 3000),
        (1.1, 1100),
        (np.float64(1.1), 1100),
        (0.0001, 1),
        *((negative, 0) for negative in (-1.5, -0.0001, Fraction(-1, 3), timedelta.min)),
        (Decimal("1.0001"), 1001),
        (Fraction(1, 3), 334),
        (timedelta(microseconds=1), 1),
        (pd.Timedelta(nanoseconds=1_000_001), 2),
        (timedelta.max, 86_400_000_000_000_000),
        # More milliseconds than a float holds.
        (1e306, 10**309),
        # Its milliseconds exceed 32 bits.
        (np.int32(3_000_000), 3_000_000_000),
        (np.uint8(200), 200_000),
    ],
)
def test_a_delay_in_milliseconds_is_rounded_up(delay: float, expected: int) -> None:
    assert delay_module.milliseconds(delay) == expected


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        # NumPy's timedelta64 counts as an integer, although its unit is not the second.
        *(
            ((InvalidDelayType, TypeError), value)
            for value in (True, "5", None, 1j, datetime.now(UTC), np.timedelta64(5, "m"))
        ),
        *((INVALID, float(value)) for value in ("nan", "inf", "-inf")),
        *((INVALID, Decimal(value)) for value in ("NaN", "sNaN", "-Infinity", "1e400", "-1e400")),
    ],
)
def test_what_is_no_length_of_time_is_an_error_with_the_value(
    error: tuple[type[InvalidDelay], type[Exception]], wrong: Any
) -> None:
    with pytest.raises(error[0], match=r"finite|takes seconds") as caught:
        delay_module.milliseconds(wrong)
    assert isinstance(caught.value, error[1])
    assert caught.value.value is wrong
    assert repr(wrong) in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(delay_module.Due.after, delay) for delay in (0, -0.001, -1e300, timedelta.min)),
        *(
            partial(delay_module.Due.at, datetime(year, 12, 31, 23, 59, 59, tzinfo=UTC))
            for year in (1, 1969, 2020)
        ),
    ],
)
def test_a_negative_delay_and_an_instant_in_the_past_mean_now(clock: Clock, make: Any) -> None:
    due = make()
    assert due.is_past
    assert (due.at_ns, due.delay_ms, due.remaining_ms()) == (START_NS, 0, 0)
    assert (due.tolerance_ms, delay_module.Due.after(0.001).is_past) == (0, False)


def test_redis_is_told_the_time_only_while_a_test_sets_the_clock() -> None:
    assert wall_clock.own_us() is None
    with frozen(1_900_000_000.5):
        assert wall_clock.own_us() == 1_900_000_000_500_000
        assert wall_clock.ms() == 1_900_000_000_500


def test_what_amqp_cannot_count_any_more_is_refused(clock: Clock) -> None:
    latest_ms = 2**63 - 1 - START_NS // 1_000_000
    assert delay_module.Due.after(10**12).at_ms > 10**15
    assert delay_module.Due.after(Fraction(latest_ms, 1000)).at_ms == 2**63 - 1
    with pytest.raises(InvalidDelay, match="64 bits"):
        delay_module.Due.after(Fraction(latest_ms + 1, 1000))


@given(st.floats(0.001, 1e7), st.integers(0, 10**13))
def test_the_wait_that_is_left_never_ends_too_early(delay: float, lost_ns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = stopped(patch)
        due = delay_module.Due.after(delay)
        clock.now_ns += lost_ns
        ends_ns = clock.now_ns + due.remaining_ms() * 1_000_000
    assert ends_ns >= due.at_ns
    late_ns = max(ends_ns - due.at_ns - 1_000_000, 0)
    assert late_ns <= lost_ns
    assert late_ns * 1000 <= due.delay_ms * 1_000_000


@given(st.datetimes(timezones=st.timezones()), st.integers(0, 10**19))
def test_an_instant_is_met_to_the_millisecond(instant: datetime, now_ns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stopped(patch, now_ns)
        due = delay_module.Due.at(instant, 5)
        assert due.is_instant
        assert due.tolerance_ms == 5
        assert 0 <= due.at_ms <= delay_module.MAX_DUE_MS
        microseconds = (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        assert (due.at_ns, due.remaining_ms()) == (max(microseconds * 1000, now_ns), due.delay_ms)
        ends_ns = now_ns + due.remaining_ms() * 1_000_000
        assert 0 <= ends_ns - due.at_ns < 1_000_000


def test_neither_a_naive_datetime_nor_a_number_names_an_instant() -> None:
    naive = datetime(2030, 1, 1)
    with pytest.raises(InvalidDelay, match="is naive: use an aware one") as caught:
        delay_module.Due.at(naive)
    assert caught.value.value is naive
    with pytest.raises(
        InvalidDelayType, match=r"eta 5: takes a datetime or ISO 8601, such as 2030-01-31T"
    ):
        delay_module.Due.at(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidDelay, match=r"instant .* is naive"):
        delay_module.milliseconds_of(naive)


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("1.1", Fraction(11, 10)),
        (" 0 ", timedelta()),
        ("3d7h45m30s", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        ("1.5h", timedelta(minutes=90)),
        ("2w", timedelta(weeks=2)),
        ("1M1ms", timedelta(minutes=1, milliseconds=1)),
        ("1:30:00", timedelta(minutes=90)),
        ("100:00:00.1", timedelta(hours=100, milliseconds=100)),
        ("3 days 7:45:30", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        *((negative, timedelta()) for negative in ("-5", "-0.001", "-1h30m", "-0:00:01")),
    ],
)
def test_a_delay_is_read_as_it_is_written(text: str, delay: Any) -> None:
    assert delay_module.milliseconds(delay_module.parse_delay(text)) == delay_module.milliseconds(
        delay
    )


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "1:30", "1:60:00", "1:30:61", "5m3h", "1h1h", "1e3", "nan", "1 2", "٣"),
        *("3h7", "--5", "-"),
    ],
)
def test_what_is_no_delay_or_could_mean_two_is_refused_with_what_is_taken(text: str) -> None:
    with pytest.raises(InvalidDelay, match="takes seconds") as refused:
        delay_module.parse_delay(text)
    assert (refused.value.value, refused.value.what) == (text, "delay")


@given(st.integers(0, 10**15))
def test_a_length_of_time_is_read_back_as_it_was_written(length_ms: int) -> None:
    text = delay_module.duration_text(length_ms).replace(",", "")
    if "day" in text and ":" not in text:
        text += " 0:00:00"
    assert delay_module.milliseconds(delay_module.parse_delay(text)) == length_ms
    assert ("1 day " in f" {text} ") == (length_ms // 86_400_000 == 1)
