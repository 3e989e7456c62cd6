"""Layouts: the four kinds, their levels, and the ones that are none."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import DelayTooLong, InvalidLayout
from celery_rabbitdelay.kombu import Layout, binary, clock, custom, geometric
from celery_rabbitdelay.levels.layout import MAX_TTL, Level
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


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (clock(tick=1), ["hours.x1", "minutes.x1", "seconds.x1"]),
        (clock(tick=0.001), ["ms.x100", "ms.x10", "ms.x1"]),
        (binary(tick=1, levels=2), ["seconds.x2", "seconds.x1"]),
        (binary(tick=1.5, levels=2), ["ms.x3000", "ms.x1500"]),
        (geometric(tick=2, factor=3, levels=2), ["seconds.x6", "seconds.x2"]),
        (custom([("hours", 24, 3600), ("quarters", 4, 900)]), ["hours.x1", "quarters.x1"]),
        (custom([("days", 10, timedelta(days=10))]), ["days.x10"]),
        (custom([("a-Z_9" * 10, 2, 1)]), ["a-Z_9" * 10 + ".x1"]),
    ],
)
def test_the_last_levels_are_called(layout: Layout, names: list[str]) -> None:
    assert [level.name for level in layout.levels][-len(names) :] == names


def test_queues_are_counted_in_the_level_s_unit() -> None:
    tens_of_days, minutes = clock().levels[2], clock().levels[5]
    assert [tens_of_days.queue_name(digit) for digit in (1, 9)] == ["days.10", "days.90"]
    assert [minutes.queue_name(digit) for digit in (1, 59)] == ["minutes.1", "minutes.59"]


def test_the_binary_layout_has_28_levels_of_one_bit() -> None:
    layout = binary(tick=1)
    assert (layout.bases, layout.capacity_ms) == ((2,) * 28, (2**28 - 1) * 1000)


def test_the_geometric_layout_counts_in_its_factor() -> None:
    layout = geometric(tick=0.1, factor=60, levels=3)
    assert [level.place_ms for level in layout.levels] == [360_000, 6_000, 100]


def test_the_layouts_have_a_tick_of_a_tenth_of_a_second() -> None:
    assert [layout.tick_ms for layout in (clock(), binary(), geometric())] == [100] * 3
    assert (len(binary().levels), geometric().bases) == (28, (10,) * 9)


def test_the_queue_of_a_zero_digit_is_called_after_its_level() -> None:
    assert clock().levels[2].queue_name(0) == "days.x10.0"


def test_custom_levels_bring_their_own_tick() -> None:
    assert custom([("hours", 24, timedelta(hours=1)), ("quarters", 4, 900)]).tick_ms == 900_000


@given(layouts, st.data())
def test_a_delay_is_the_sum_of_its_digits_and_places(layout: Layout, data: st.DataObject) -> None:
    delay_ms = data.draw(st.integers(0, layout.capacity_ms))

    written = layout.digits(delay_ms)

    assert len(written) == len(layout.levels)
    assert all(0 <= digit < base for digit, base in zip(written, layout.bases, strict=True))
    total_ms = sum(d * place_ms for d, place_ms in zip(written, layout.places_ms, strict=True))
    assert 0 <= total_ms - delay_ms < layout.tick_ms


@given(layouts, st.data())
def test_a_message_is_always_in_one_of_the_digits_where_it_may_be(
    layout: Layout, data: st.DataObject
) -> None:
    delay_ms = data.draw(st.integers(1, layout.capacity_ms))
    passed_ms = data.draw(st.integers(0, delay_ms - 1))
    until_ms = 0
    for level, digit in zip(layout.levels, layout.digits(delay_ms), strict=True):
        until_ms += digit * level.place_ms
        if passed_ms < until_ms:
            assert (level, digit) in layout.may_wait_in(delay_ms - passed_ms)
            return
    raise AssertionError("it left the levels before it was due")


@given(layouts, st.data())
def test_a_message_is_in_one_of_the_digits_where_it_waits_by_when_it_was_sent(
    layout: Layout, data: st.DataObject
) -> None:
    delay_ms = data.draw(st.integers(1, layout.capacity_ms))
    tolerance_ms = data.draw(st.integers(0, delay_ms))
    coarsest = data.draw(st.booleans())
    real_ms = layout.round_to_fewest_stops(delay_ms, tolerance_ms, coarsest=coarsest)
    passed_ms = data.draw(st.integers(0, real_ms - 1))
    # It was sent a moment before or after that.
    noted_ms = passed_ms + data.draw(st.integers(-5, 5))
    until_ms = 0
    for level, digit in zip(layout.levels, layout.digits(real_ms), strict=True):
        until_ms += digit * level.place_ms
        if passed_ms < until_ms:
            found = layout.waits_in(delay_ms, noted_ms, tolerance_ms, 5)
            assert (level, digit) in found
            return
    raise AssertionError("it left the levels before it was due")


def test_between_two_digits_there_are_no_more_than_these() -> None:
    two_and_a_half_hours = partial(clock().waits_in, 9_000_000, tolerance_ms=0, slack_ms=2000)
    names = [
        [f"{level.unit}.{digit * level.multiple}" for level, digit in two_and_a_half_hours(passed)]
        for passed in (0, 3_600_000, 7_200_000, 7_300_000)
    ]
    assert names == [
        ["hours.2"],
        ["hours.2"],
        ["hours.2", "minutes.30", "minutes.29"],
        ["minutes.30", "minutes.29"],
    ]


def test_a_message_is_not_said_to_be_where_it_cannot_be() -> None:
    half_an_hour = [(level.name, digit) for level, digit in clock().may_wait_in(1_800_000)]
    assert [digit for name, digit in half_an_hour if name == "minutes.x1"] == [*range(30, 60)]
    assert not {"seconds.x1", "ms.x100"} & {name for name, _ in half_an_hour}
    assert ("hours.x1", 1) in half_an_hour


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


@given(layouts)
def test_the_capacity_fits_and_one_millisecond_more_does_not(layout: Layout) -> None:
    largest = layout.digits(layout.capacity_ms)
    assert largest == tuple(base - 1 for base in layout.bases)
    with pytest.raises(DelayTooLong) as caught:
        layout.digits(layout.capacity_ms + 1)
    assert caught.value.capacity_ms == layout.capacity_ms
    assert f"{layout.capacity_ms / 1000:,.3f} s" in str(caught.value)
    # No level asks for a time to live that RabbitMQ refuses.
    assert all((level.base - 1) * level.place_ms <= MAX_TTL for level in layout.levels)


def test_a_delay_that_is_past_is_all_zeros() -> None:
    assert set(clock().digits(-5)) == {0}


def test_a_digit_may_wait_ten_years_and_no_millisecond_longer() -> None:
    assert custom([("years", 11, timedelta(days=365))]).places_ms == (31_536_000_000,)
    ten_years = timedelta(milliseconds=315_360_000_000)
    assert custom([("decades", 2, ten_years)]).capacity_ms == 315_360_000_000
    with pytest.raises(InvalidLayout) as caught:
        custom([("decades", 2, ten_years + timedelta(milliseconds=1))])
    assert str(caught.value) == (
        "layout 'custom': level decades.x1: needs a TTL of 315360000001 ms, "
        "RabbitMQ's bound is 315360000000"
    )
    with pytest.raises(InvalidLayout, match="needs a TTL of 346896000000 ms"):
        custom([("years", 12, timedelta(days=365))])


def test_the_most_levels_leave_room_for_a_destination_in_a_routing_key() -> None:
    longest = binary(tick=0.001, levels=39)
    assert sum(len(f"{base - 1}.") for base in longest.bases) == 78
    with pytest.raises(InvalidLayout, match="RabbitMQ's bound"):
        binary(tick=0.001, levels=40)


def test_one_level_of_two_digits_is_the_smallest_layout() -> None:
    smallest = Layout("mine", (Level("ms", 1, 2, 1),))
    assert (smallest.zeros, smallest.capacity_ms, smallest.tick_ms) == ("bind", 1, 1)
    for broken in (Level("ms", 1, 1, 1), Level("ms", 0, 2, 1), Level("ms", 1, 2, 0)):
        with pytest.raises(InvalidLayout, match="base of at least 2 and a unit of at least 1 ms"):
            Layout("mine", (broken,))


NO_UNIT: Any = ("s", 2)
NO_NAME: Any = (5, 2, 1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: custom([]), "at least one level"),
        (lambda: custom([NO_UNIT]), "level ('s', 2): takes a (name, base, unit)"),
        (lambda: custom([NO_NAME]), "level 5: takes a name of up to 50 letters, digits, - and _"),
        (lambda: custom([("n" * 51, 2, 1)]), f"level '{'n' * 51}': takes a name of up to 50"),
        (lambda: custom([("a.b", 2, 1)]), "letters, digits"),
        (
            lambda: custom([("s", 1, 1)]),
            "layout 'custom': level s.x1: takes a base of at least 2 and a unit of",
        ),
        (
            lambda: custom([("minutes", 60, 60), ("seconds", 59, 1)]),
            "one minutes.x1 is 60000 ms, but 59 of seconds.x1 are 59000 ms; they have to be equal",
        ),
        (lambda: custom([("s", 2, 2), ("s", 2, 1)]), "same name"),
        (lambda: custom([("days", 2, 3600)]), "whole number of days"),
        (
            lambda: custom([("hours", 2, 1800)]),
            "level 'hours': 1800 is not a whole number of hours",
        ),
        (lambda: custom([("s", 2, 0)]), "whole number"),
        (lambda: clock(tick=0.3), "tick of 1, 0.1"),
        (lambda: clock(zeros="jump"), "bind, skip, queue"),  # type: ignore[arg-type]
        (lambda: binary(tick=1, levels=35), "RabbitMQ's bound"),
        (lambda: binary(tick=0.001, levels=61), "RabbitMQ's bound"),
        (lambda: geometric(factor=1), "base of at least 2"),
        (lambda: binary(tick=0), "at least 1 ms"),
    ],
)
def test_what_is_no_layout_is_refused_with_the_reason(make: Any, problem: str) -> None:
    with pytest.raises(InvalidLayout) as caught:
        make()
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "fingerprint"),
    [
        (clock(), "clock-a934f5bbf4"),
        (clock(zeros="skip"), "clock-c61849cdd8"),
        (binary(levels=5, zeros="queue"), "binary-03b67241a4"),
        (geometric(levels=3), "geometric-c118dcb1dc"),
        (custom([("days", 10, 86400), ("hours", 24, 3600)]), "custom-619f9a26a5"),
    ],
)
def test_a_fingerprint_is_that_of_levels_on_brokers(layout: Layout, fingerprint: str) -> None:
    assert layout.fingerprint == fingerprint


def test_layouts_that_differ_in_anything_have_different_fingerprints() -> None:
    different = [
        *(clock(), clock(tick=1), clock(zeros="skip"), binary(), binary(tick=1)),
        *(binary(levels=20), geometric(), geometric(factor=7)),
        custom([("hours", 24, 3600), ("minutes", 60, 60)]),
    ]
    assert len({layout.fingerprint for layout in different}) == len(different)
    assert clock().fingerprint == clock().fingerprint
