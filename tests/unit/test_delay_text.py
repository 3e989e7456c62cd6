"""Delays as people write them."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels.delay import duration_text, milliseconds, parse_delay


@pytest.mark.parametrize(
    ("text", "delay"),
    [
        ("0.5", timedelta(milliseconds=500)),
        (" 0 ", timedelta()),
        ("3d7h45m30s", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        ("3d 7h 45m 30s", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        ("1.5h", timedelta(minutes=90)),
        ("2w", timedelta(weeks=2)),
        ("1M1ms", timedelta(minutes=1, milliseconds=1)),
        ("1:30:00", timedelta(minutes=90)),
        ("100:00:00.1", timedelta(hours=100, milliseconds=100)),
        ("3d 7:45:30", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        ("3 days 7:45:30", timedelta(days=3, hours=7, minutes=45, seconds=30)),
        *((negative, timedelta()) for negative in ("-5", "-0.001", "-1h30m", "-0:00:01")),
    ],
)
def test_a_delay_is_read_as_it_is_written(text: str, delay: timedelta) -> None:
    assert milliseconds(parse_delay(text)) == milliseconds(delay)


@pytest.mark.parametrize(
    "text",
    [
        *("", "soon", "1:30", "1:60:00", "1:30:61", "5m3h", "1h1h", "1e3", "nan", "1 2", "٣"),
        *("3h7", "--5", "-"),
    ],
)
def test_what_is_no_delay_or_could_mean_two_is_refused_with_what_is_taken(text: str) -> None:
    with pytest.raises(InvalidDelay, match="takes seconds") as refused:
        parse_delay(text)
    assert (refused.value.value, refused.value.what) == (text, "delay")


def test_a_decimal_fraction_is_exact_and_has_its_sign() -> None:
    assert (parse_delay("1.1"), parse_delay("-1.1m")) == (Fraction(11, 10), Fraction(-66))


@given(st.integers(0, 10**15))
def test_a_length_of_time_is_read_back_as_it_was_written(length_ms: int) -> None:
    text = duration_text(length_ms).replace(",", "")
    if "day" in text and ":" not in text:
        text += " 0:00:00"
    assert milliseconds(parse_delay(text)) == length_ms
    assert ("1 day " in f" {text} ") == (length_ms // 86_400_000 == 1)
