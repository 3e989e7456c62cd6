"""Layouts: the four kinds, their levels, and the ones that are none."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidLayout
from celery_rabbitdelay.kombu import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.levels.layout import MAX_TTL, Level
from tests.kernel.unit.strategies import layouts, small_layouts


@pytest.mark.parametrize(
    ("layout", "names", "bases", "tick_ms"),
    [
        (
            clock(),
            "days.x1000 days.x100 days.x10 days.x1 hours.x1 minutes.x1 seconds.x1 ms.x100",
            (4, 10, 10, 10, 24, 60, 60, 10),
            100,
        ),
        (clock(tick=0.001), "ms.x100 ms.x10 ms.x1", (10, 10, 10), 1),
        (binary(), "ms.x200 ms.x100", (2,) * 28, 100),
        (binary(tick=1.5, levels=2), "ms.x3000 ms.x1500", (2, 2), 1500),
        (geometric(), "ms.x1000 ms.x100", (10,) * 9, 100),
        (geometric(tick=2, factor=3, levels=2), "seconds.x6 seconds.x2", (3, 3), 2000),
        (custom([("hours", 24, 3600), ("a-Z", 4, 900)]), "hours.x1 a-Z.x1", (24, 4), 900_000),
        (custom([("days", 10, timedelta(days=10))]), "days.x10", (10,), 864_000_000),
        (custom([("n" * 50, 2, 1)]), "n" * 50 + ".x1", (2,), 1000),
    ],
)
def test_a_layout_has_these_last_levels_and_this_tick(
    layout: Layout, names: str, bases: tuple[int, ...], tick_ms: int
) -> None:
    assert " ".join(level.name for level in layout.levels).endswith(names)
    assert (layout.bases[-len(bases) :], layout.tick_ms) == (bases, tick_ms)
    assert (layout.zeros, layout.digits(-5)) == ("bind", (0,) * len(layout.levels))


def test_the_clock_has_180_queues_named_after_their_units_and_4000_days_less_a_tick() -> None:
    layout = clock()
    names = [level.queue_name(digit) for level in layout.levels for digit in range(1, level.base)]
    assert len(names) == 180
    assert {"days.10", "days.90", "minutes.1", "minutes.59"} <= set(names)
    assert layout.levels[2].queue_name(0) == "days.x10.0"
    assert layout.capacity_ms == timedelta(days=4000) // timedelta(milliseconds=1) - 100


@settings(max_examples=50)
@given(layouts, st.data())
def test_a_delay_is_the_sum_of_its_digits_and_places(layout: Layout, data: st.DataObject) -> None:
    delay_ms = data.draw(st.integers(0, layout.capacity_ms))

    written = layout.digits(delay_ms)

    assert len(written) == len(layout.levels)
    assert all(0 <= digit < base for digit, base in zip(written, layout.bases, strict=True))
    total_ms = sum(d * place_ms for d, place_ms in zip(written, layout.places_ms, strict=True))
    assert 0 <= total_ms - delay_ms < layout.tick_ms
    assert layout.digits(layout.capacity_ms) == tuple(base - 1 for base in layout.bases)
    with pytest.raises(DelayTooLong) as caught:
        layout.digits(layout.capacity_ms + 1)
    assert caught.value.capacity_ms == layout.capacity_ms
    # No level asks for a time to live that RabbitMQ refuses.
    assert all((level.base - 1) * level.place_ms <= MAX_TTL for level in layout.levels)


def trailing_zeros(layout: Layout, delay_ms: int) -> int:
    digits = layout.digits(delay_ms)
    return next((n for n, digit in enumerate(reversed(digits)) if digit), len(digits))


@given(small_layouts(), st.data())
def test_a_tolerance_finds_a_delay_with_fewest_stops(layout: Layout, data: st.DataObject) -> None:
    delay_ms = data.draw(st.integers(1, layout.capacity_ms))
    tolerance_ms = data.draw(st.integers(0, layout.capacity_ms + 10 * layout.tick_ms))

    found = layout.round_to_fewest_stops(delay_ms, tolerance_ms)
    coarsest = layout.round_to_fewest_stops(delay_ms, tolerance_ms, coarsest=True)

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
def test_a_delay_that_no_level_takes_is_never_rounded(delay_ms: int, coarsest: bool) -> None:
    assert clock().round_to_fewest_stops(delay_ms, 10**9, coarsest=coarsest) == delay_ms


def test_a_digit_may_wait_ten_years_and_no_millisecond_longer() -> None:
    ten_years = timedelta(milliseconds=315_360_000_000)
    assert custom([("decades", 2, ten_years)]).capacity_ms == 315_360_000_000
    with pytest.raises(InvalidLayout, match="TTL 315360000001 ms exceeds RabbitMQ's maximum"):
        custom([("decades", 2, ten_years + timedelta(milliseconds=1))])
    # The most levels, so a routing key has room for a destination.
    assert len(binary(tick=0.001, levels=39).levels) == 39


#: The same, for what its types refuse.
wrong: Any = custom


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: custom([]), "takes at least one level"),
        (lambda: wrong([("s", 2)]), r"takes a \(name, base, unit\)"),
        (lambda: wrong([(5, 2, 1)]), "level 5: its name may have up to 50 letters"),
        (lambda: custom([("n" * 51, 2, 1)]), "its name may have up to 50"),
        (lambda: custom([("a.b", 2, 1)]), "letters, digits"),
        (
            lambda: custom([("minutes", 60, 60), ("seconds", 59, 1)]),
            r"one minutes\.x1 is 60000 ms, but 59 of seconds\.x1 are 59000 ms",
        ),
        (lambda: custom([("s", 2, 2), ("s", 2, 1)]), "same name"),
        (lambda: custom([("hours", 2, 1800)]), "1800 is not a whole number of hours"),
        (lambda: custom([("s", 2, 0)]), "whole number"),
        (lambda: clock(tick=0.3), "tick of 1, 0.1"),
        (lambda: wrong([("s", 2, 1)], zeros="jump"), "bind, skip, queue"),
        (lambda: binary(tick=0.001, levels=40), "RabbitMQ's maximum"),
        *(
            (lambda level=level: Layout("mine", (level,)), "a base of at least 2 and a unit of")
            for level in (Level("ms", 1, 1, 1), Level("ms", 0, 2, 1), Level("ms", 1, 2, 0))
        ),
    ],
)
def test_what_is_no_layout_is_refused_with_the_reason(make: Any, problem: str) -> None:
    with pytest.raises(InvalidLayout, match=problem):
        make()
