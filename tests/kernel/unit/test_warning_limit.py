"""Which warnings are logged, and how many are left out; the clock is a fake."""

import logging

import pytest

from celery_rabbitdelay.levels import warning_limit
from celery_rabbitdelay.levels.warning_limit import LOGGED, WarningLimit
from tests.kernel.unit.clock import NS_PER_S, Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1_900_000_000)
    monkeypatch.setattr(warning_limit, "time", clock)
    return clock


def test_each_subject_is_logged_once_a_period_up_to_five(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limit = WarningLimit(logging.getLogger("limit"), "Refusals", every=60)
    assert [limit.allows(each) for each in ("a", "a", *"bcdef")] == [
        *(True, False),
        *[True] * (LOGGED - 1),
        False,
    ]
    clock.now_ns += 59 * NS_PER_S
    assert not limit.allows("g")
    assert caplog.messages == []

    clock.now_ns += 2 * NS_PER_S
    assert limit.allows("a")
    assert caplog.messages == ["Refusals: 3 more within 61 s, not logged individually"]


def test_a_new_period_begins_at_once_when_the_cause_is_over(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limit = WarningLimit(logging.getLogger("limit"), "Refusals")
    assert [limit.allows(), limit.allows()] == [True, False]
    limit.forget()
    assert [limit.allows(), limit.allows()] == [True, False]
    assert caplog.messages == []
