"""The registry's circuit breaker, by a clock that stands still."""

from __future__ import annotations

import pytest

from celery_rabbitdelay.registry.connection import FIRST_PAUSE, MAX_PAUSE, Breaker
from tests.unit.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000)


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def pause(breaker: Breaker, clock: Clock) -> float:
    """Return for how many seconds the breaker is open, in tenths; the clock stands after them."""
    start = clock.now
    while breaker.is_open:
        clock.now = round(clock.now + 0.1, 1)
    return round(clock.now - start, 1)


def test_calls_are_tried_at_first_and_after_each_success(breaker: Breaker) -> None:
    assert not breaker.is_open
    breaker.succeeded()
    assert not breaker.is_open


def test_the_pause_doubles_with_each_failure_in_a_row(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(7):
        breaker.failed()
        pauses.append(pause(breaker, clock))
    assert (pauses, pauses[-1]) == ([1, 2, 4, 8, 16, 30, 30], MAX_PAUSE)


def test_after_a_success_the_next_failure_is_a_first_one(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
        clock.now += MAX_PAUSE
    breaker.failed()
    breaker.succeeded()
    assert not breaker.is_open
    breaker.failed()
    assert pause(breaker, clock) == FIRST_PAUSE


def test_many_calls_that_fail_together_are_one_failure(breaker: Breaker, clock: Clock) -> None:
    for _ in range(20):
        breaker.failed()
    assert pause(breaker, clock) == FIRST_PAUSE


def test_redis_may_be_away_for_as_long_as_it_likes(breaker: Breaker, clock: Clock) -> None:
    for _ in range(5000):
        breaker.failed()
        clock.now += MAX_PAUSE
    breaker.failed()
    assert breaker.is_open
