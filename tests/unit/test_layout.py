"""Layouts: the four kinds, their levels, and the ones that are none."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidLayout
from celery_rabbitdelay.levels.layout import MAX_TTL, Layout, binary, clock, custom, geometric
from tests.unit.strategies import layouts, small_layouts


def test_the_clock_has_180_queues_and_4000_days_less_a_tick() -> None:
    layout = clock()
    names = [level.name for level in layout.levels]
    assert names == [
        *("days.x1000", "days.x100", "days.x10", "days.x1"),
        *("hours.x1", "minutes.x1", "seconds.x1", "ms.x100"),
    ]
    assert sum(base - 1 for base in layout.bases) == 180
    assert layout.capacity_ms == timedelta(days=4000) // timedelta(milliseconds=1) - 100


def test_a_finer_tick_gives_the_clock_more_levels() -> None:
    names = [level.name for level in clock(tick=0.001).levels]
    assert names[-3:] == ["ms.x100", "ms.x10", "ms.x1"]
    assert [level.name for level in clock(tick=1).levels][-1] == "seconds.x1"


def test_queues_are_counted_in_the_level_s_unit() -> None:
    tens_of_days, minutes = clock().levels[2], clock().levels[5]
    assert [tens_of_days.queue_name(digit) for digit in (1, 9)] == ["days.10", "days.90"]
    assert [minutes.queue_name(digit) for digit in (1, 59)] == ["minutes.1", "minutes.59"]


def test_the_binary_layout_has_28_levels_of_one_bit() -> None:
    layout = binary(tick=1)
    assert layout.bases == (2,) * 28
    assert layout.capacity_ms == (2**28 - 1) * 1000


def test_the_geometric_layout_counts_in_its_factor() -> None:
    layout = geometric(tick=0.1, factor=60, levels=3)
    assert [level.place_ms for level in layout.levels] == [360_000, 6_000, 100]


def test_custom_levels_bring_their_own_tick() -> None:
    layout = custom([("hours", 24, timedelta(hours=1)), ("quarters", 4, 900)])
    assert [level.name for level in layout.levels] == ["hours.x1", "quarters.x1"]
    assert layout.tick_ms == 900_000
    assert custom([("days", 10, timedelta(days=10))]).levels[0].name == "days.x10"


@given(layouts, st.data())
def test_a_delay_is_the_sum_of_its_digits_times_their_place_values(
    layout: Layout, data: st.DataObject
) -> None:
    delay_ms = data.draw(st.integers(0, layout.capacity_ms))

    written = layout.digits(delay_ms)

    assert len(written) == len(layout.levels)
    assert all(0 <= digit < base for digit, base in zip(written, layout.bases, strict=True))
    total_ms = sum(d * place_ms for d, place_ms in zip(written, layout.places_ms, strict=True))
    assert 0 <= total_ms - delay_ms < layout.tick_ms


def trailing_zeros(layout: Layout, delay_ms: int) -> int:
    digits = layout.digits(delay_ms)
    return next((n for n, digit in enumerate(reversed(digits)) if digit), len(digits))


@given(small_layouts(), st.data())
def test_in_the_range_of_a_tolerance_the_delay_with_the_fewest_stops_is_found(
    layout: Layout, data: st.DataObject
) -> None:
    delay_ms = data.draw(st.integers(1, layout.capacity_ms))
    tolerance_ms = data.draw(st.integers(0, layout.capacity_ms + 10 * layout.tick_ms))

    found = layout.with_fewest_stops(delay_ms, tolerance_ms)
    coarsest = layout.with_fewest_stops(delay_ms, tolerance_ms, coarsest=True)

    def stops(value: int) -> int:
        return sum(map(bool, layout.digits(value)))

    longest = min(delay_ms + tolerance_ms, layout.capacity_ms)
    ticks = range(-(-delay_ms // layout.tick_ms), longest // layout.tick_ms + 1)
    every = [tick * layout.tick_ms for tick in ticks] or [delay_ms]
    assert found == min(every, key=lambda value: (stops(value), value))
    assert coarsest == max(every, key=lambda value: (trailing_zeros(layout, value), -value))
    assert stops(coarsest) == stops(found)


@pytest.mark.parametrize("coarsest", [False, True])
@pytest.mark.parametrize("delay_ms", [-5000, -1, 0, clock().capacity_ms + 1])
def test_a_delay_that_no_level_takes_stays_as_it_is_whatever_the_tolerance(
    delay_ms: int, coarsest: bool
) -> None:
    assert clock().with_fewest_stops(delay_ms, 10**9, coarsest=coarsest) == delay_ms


@given(layouts)
def test_the_capacity_fits_and_one_millisecond_more_does_not(layout: Layout) -> None:
    largest = layout.digits(layout.capacity_ms)
    assert largest == tuple(base - 1 for base in layout.bases)
    with pytest.raises(DelayTooLong) as caught:
        layout.digits(layout.capacity_ms + 1)
    assert caught.value.capacity == layout.capacity_ms
    assert f"{layout.capacity_ms / 1000:,.3f} s" in str(caught.value)


@given(layouts)
def test_no_level_asks_for_a_time_to_live_that_rabbitmq_refuses(layout: Layout) -> None:
    assert all((level.base - 1) * level.place_ms <= MAX_TTL for level in layout.levels)


def test_a_delay_that_is_past_is_all_zeros() -> None:
    assert set(clock().digits(-5)) == {0}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: custom([]), "at least one level"),
        (lambda: custom([("s", 1, 1)]), "base of at least 2"),
        (lambda: custom([("m", 60, 60), ("s", 59, 1)]), "have to be equal"),
        (lambda: custom([("s", 2, 2), ("s", 2, 1)]), "same name"),
        (lambda: custom([("days", 2, 3600)]), "whole number of days"),
        (lambda: custom([("a.b", 2, 1)]), "letters, digits"),
        (lambda: custom([("s", 2, 0)]), "whole number"),
        (lambda: clock(tick=0.3), "tick of 1, 0.1"),
        (lambda: clock(zeros="jump"), "bind, skip, queue"),  # type: ignore[arg-type]
        (lambda: binary(tick=1, levels=35), "RabbitMQ's bound"),
        (lambda: binary(tick=0.001, levels=61), "RabbitMQ's bound"),
        (lambda: geometric(factor=1), "base of at least 2"),
        (lambda: binary(tick=0), "at least 1 ms"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_reason(make: object, problem: str) -> None:
    with pytest.raises(InvalidLayout, match=problem):
        make()  # type: ignore[operator]


def test_layouts_that_differ_in_anything_have_different_fingerprints() -> None:
    different = [
        *(clock(), clock(tick=1), clock(zeros="skip"), binary(), binary(tick=1)),
        *(binary(levels=20), geometric(), geometric(factor=7)),
        custom([("hours", 24, 3600), ("minutes", 60, 60)]),
    ]
    assert len({layout.fingerprint for layout in different}) == len(different)
    assert clock().fingerprint == clock().fingerprint
