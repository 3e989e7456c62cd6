"""Delays as numbers: rounding up, digits, and what is no delay at all."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType
from celery_rabbitdelay.levels.place_value import (
    digits,
    fewest_digits,
    milliseconds,
    milliseconds_until,
    place_values,
    roundest,
    tolerated,
)

bases = st.lists(st.integers(2, 100), min_size=1, max_size=10)


@given(bases, st.data())
def test_a_number_is_the_sum_of_its_digits_times_their_place_values(
    bases: list[int], data: st.DataObject
) -> None:
    value = data.draw(st.integers(0, prod(bases) - 1))

    written = digits(value, bases)

    assert len(written) == len(bases)
    assert all(0 <= digit < base for digit, base in zip(written, bases, strict=True))
    pairs = zip(written, place_values(bases), strict=True)
    assert sum(digit * place for digit, place in pairs) == value


@given(st.lists(st.integers(2, 12), min_size=1, max_size=3), st.data())
def test_of_a_range_the_number_of_the_fewest_digits_is_found(
    bases: list[int], data: st.DataObject
) -> None:
    lowest = data.draw(st.integers(0, prod(bases) - 1))
    highest = data.draw(st.integers(lowest, prod(bases) + 10))

    found = fewest_digits(lowest, highest, bases)

    every = range(lowest, min(highest + 1, prod(bases)))

    def stops(value: int) -> int:
        return sum(map(bool, digits(value, bases)))

    assert found == min(every, key=lambda value: (stops(value), value))
    assert stops(roundest(lowest, highest, bases)) == stops(found)


@pytest.mark.parametrize(
    ("given", "expected"), [(0, 0), (60, 60_000), (0.0015, 1), (timedelta(seconds=1.5), 1500)]
)
def test_a_tolerance_is_rounded_down(given: Any, expected: int) -> None:
    assert tolerated(given) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (-1, InvalidDelay),
        ("60", InvalidDelayType),
        (True, InvalidDelayType),
        (float("nan"), InvalidDelay),
    ],
)
def test_what_is_no_tolerance_is_refused_by_that_name(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="tolerance"):
        tolerated(given)


@given(bases, st.integers(0))
def test_a_number_with_too_many_digits_is_refused(bases: list[int], excess: int) -> None:
    with pytest.raises(OverflowError):
        digits(prod(bases) + excess, bases)


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        (0, 0),
        (3, 3000),
        (1.1, 1100),
        (0.3, 300),
        (2.675, 2675),
        (0.0001, 1),
        (-1.5, -1500),
        (Decimal("1.0001"), 1001),
        (Fraction(1, 3), 334),
        (timedelta(days=3, hours=7), 284_400_000),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=-1), 0),
        (2**60, 2**60 * 1000),
        (timedelta.max, 86_400_000_000_000_000),
    ],
)
def test_a_delay_in_milliseconds_is_rounded_up(delay: float, expected: int) -> None:
    assert milliseconds(delay) == expected


def test_seconds_may_be_more_milliseconds_than_a_float_holds() -> None:
    assert milliseconds(1e306) == 10**309
    assert milliseconds(-1e306) == -(10**309)
    assert milliseconds(Fraction(10**400)) == 10**403


@given(st.floats(min_value=0, max_value=1e9))
def test_a_float_is_never_rounded_down_and_by_less_than_a_millisecond_up(delay: float) -> None:
    printed = Fraction(repr(delay)) * 1000
    assert 0 <= milliseconds(delay) - printed < 1


@pytest.mark.parametrize("delay", [True, False, "5", b"5", None, [5], 1j, datetime.now(UTC)])
def test_what_is_no_length_of_time_is_a_type_error_with_the_value(delay: object) -> None:
    with pytest.raises(TypeError) as caught:
        milliseconds(delay)  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidDelayType)
    assert caught.value.value is delay
    assert repr(delay) in str(caught.value)


@pytest.mark.parametrize("delay", [float("nan"), float("inf"), float("-inf"), Decimal("NaN")])
def test_a_number_that_is_not_finite_is_a_value_error_with_the_value(delay: float) -> None:
    with pytest.raises(ValueError, match="finite") as caught:
        milliseconds(delay)
    assert isinstance(caught.value, InvalidDelay)
    assert caught.value.value is delay


def test_until_an_instant_is_rounded_up() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert milliseconds_until(now + timedelta(microseconds=1500), now) == 2
    assert milliseconds_until(now - timedelta(seconds=2), now) == -2000


def test_a_naive_datetime_names_no_instant() -> None:
    naive = datetime(2030, 1, 1)
    with pytest.raises(InvalidDelay, match="naive") as caught:
        milliseconds_until(naive, datetime.now(UTC))
    assert caught.value.value is naive


def test_a_number_is_no_instant() -> None:
    with pytest.raises(InvalidDelayType):
        milliseconds_until(5, datetime.now(UTC))  # type: ignore[arg-type]
