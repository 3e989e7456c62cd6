"""In which digits a message may wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.kombu import Layout, clock
from celery_rabbitdelay.registry.record import may_wait_in, waits_in
from tests.kernel.unit.strategies import layouts


@given(layouts, st.data())
def test_a_message_is_in_one_of_the_digits_where_it_may_be(
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
            assert (level, digit) in may_wait_in(layout, real_ms - passed_ms)
            assert (level, digit) in waits_in(layout, delay_ms, noted_ms, tolerance_ms, 5)
            return
    raise AssertionError("it left the levels before it was due")


@pytest.mark.parametrize(
    ("passed_ms", "expected"),
    [
        (3_600_000, ["hours.2"]),
        (7_200_000, ["hours.2", "minutes.30", "minutes.29"]),
        (7_300_000, ["minutes.30", "minutes.29"]),
    ],
)
def test_it_is_said_to_be_in_no_others(passed_ms: int, expected: list[str]) -> None:
    two_and_a_half_hours = waits_in(clock(), 9_000_000, passed_ms, tolerance_ms=0, slack_ms=2000)
    assert [level.queue_name(digit) for level, digit in two_and_a_half_hours] == expected
    half_an_hour = list(may_wait_in(clock(), 1_800_000))
    assert [digit for level, digit in half_an_hour if level.unit == "minutes"] == [*range(30, 60)]
    assert not [digit for level, digit in half_an_hour if level.unit in ("seconds", "ms")]
