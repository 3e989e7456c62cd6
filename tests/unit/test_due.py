"""When a message is due, and what is left of its delay; the clock is a fake."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_rabbitdelay.exceptions import InvalidDelay
from celery_rabbitdelay.levels import due as due_module
from celery_rabbitdelay.levels.due import Due

#: A second with a part of a millisecond.
START_NS = 1_900_000_000_000_400_000


class Clock:
    """Stands in for the module ``time``, because no real clock can be told to stand still."""

    def __init__(self) -> None:
        self.now_ns = START_NS

    def time_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(due_module, "time", clock)
    return clock


def test_what_is_due_is_fixed_when_the_caller_asks(clock: Clock) -> None:
    due = Due.after(timedelta(seconds=90))
    clock.now_ns += 10_000_000_000
    assert due.at_ms == START_NS // 1_000_000 + 90_000
    assert due.left_ms() == 80_000


@pytest.mark.parametrize(("lost_ms", "left_ms"), [(0, 10_000), (9, 10_000), (11, 9_989)])
def test_a_length_of_time_keeps_its_digits_while_next_to_nothing_was_lost(
    clock: Clock, lost_ms: int, left_ms: int
) -> None:
    due = Due.after(10)
    clock.now_ns += lost_ms * 1_000_000
    assert due.left_ms() == left_ms


def test_an_instant_is_met_whatever_was_lost(clock: Clock) -> None:
    due = Due.at(datetime.now(UTC) + timedelta(days=1))
    before = due.left_ms()
    clock.now_ns += 5_000_000
    assert due.left_ms() == before - 5


def test_what_is_past_is_over(clock: Clock) -> None:
    assert Due.at(datetime.now(UTC) - timedelta(seconds=1)).is_over
    assert Due.after(0).is_over
    assert not Due.after(0.001).is_over


def test_what_amqp_cannot_count_any_more_is_refused(clock: Clock) -> None:
    latest = 2**63 - 1 - START_NS // 1_000_000
    assert Due.after(10**12).at_ms > 10**15
    assert Due.after(latest // 1000).at_ms <= 2**63 - 1
    with pytest.raises(InvalidDelay, match="64 bits"):
        Due.after(latest // 1000 + 1)


@pytest.mark.parametrize("delay", [-1e300, -(10**30), timedelta.min])
def test_what_was_over_before_amqp_can_count_is_over(clock: Clock, delay: Any) -> None:
    due = Due.after(delay)
    assert due.is_over
    assert due.left_ms() < 0
    assert 0 <= due.at_ms < START_NS // 1_000_000


@given(st.floats(0.001, 1e7), st.integers(0, 10**13))
def test_the_wait_that_is_left_never_ends_before_the_message_is_due(
    delay: float, lost_ns: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(due_module, "time", clock)
        due = Due.after(delay)
        clock.now_ns += lost_ns
        ends_ns = clock.now_ns + due.left_ms() * 1_000_000
    assert ends_ns >= due.at_ns
    late_ns = max(ends_ns - due.at_ns - 1_000_000, 0)
    assert late_ns <= lost_ns
    assert late_ns * 1000 <= due.delay_ms * 1_000_000
