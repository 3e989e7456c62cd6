"""What a module has done, and how fast; the clock is a fake."""

from __future__ import annotations

import pytest

from celery_rabbitdelay.modules import module as statistics_module
from celery_rabbitdelay.modules.module import ModuleStatistics
from tests.unit.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000)
    monkeypatch.setattr(statistics_module, "time", clock)
    return clock


@pytest.fixture
def statistics(clock: Clock) -> ModuleStatistics:
    return ModuleStatistics()


def test_a_module_that_has_done_nothing_says_so(statistics: ModuleStatistics) -> None:
    assert statistics.finished == 0
    assert statistics.status() == {
        "received": 0,
        "published": 0,
        "redelivered": 0,
        "undeliverable": 0,
        "backlog": 0,
        "received_per_second": 0,
        "published_per_second": 0,
    }


def test_counts_are_of_now_and_the_backlog_of_the_last_sample(statistics: ModuleStatistics) -> None:
    statistics.sample(70)
    statistics.sample(50)
    statistics.received, statistics.published, statistics.undeliverable = 3, 300, 2
    status = statistics.status()
    assert (status["received"], status["published"]) == (3, 300)
    assert (status["undeliverable"], status["backlog"]) == (2, 50)


#: After so many seconds, so many were received and published; whether a sample is taken then.
Step = tuple[float, int, int, bool]


@pytest.mark.parametrize(
    ("steps", "received", "published"),
    [
        pytest.param([(1, 20, 50, False)], 2.0, 5.0, id="at first over ten seconds"),
        pytest.param([(2, 10, 30, True)], 5.0, 15.0, id="over the time since the start"),
        pytest.param([(2, 10, 30, True), (2, 2, 10, False)], 3.0, 10.0, id="up to now"),
        pytest.param([(3, 1, 2, True)], 0.3, 0.7, id="one decimal place"),
        pytest.param(
            [(0, 1000, 5000, False), *[(2, 2, 20, True)] * 20], 1.0, 10.0, id="forgets after ten"
        ),
        pytest.param(
            [(4, 100, 100, True), (10, 0, 0, True)],
            *[round(100 / 14, 1)] * 2,
            id="over up to one sample more",
        ),
        pytest.param(
            [(4, 100, 100, True), (10, 0, 0, True), (0.5, 0, 0, True)], 0.0, 0.0, id="not more"
        ),
        pytest.param([(1000, 0, 0, True), (1000, 1000, 2000, True)], 1.0, 2.0, id="a long pause"),
        pytest.param([(0, 5, 5, True)], 0.5, 0.5, id="the first instant"),
        pytest.param(
            [(0, 5, 5, True), (0.000_001, 0, 0, True)], 5000.0, 5000.0, id="nearly an instant"
        ),
    ],
)
def test_rates_are_over_the_last_seconds(
    statistics: ModuleStatistics, clock: Clock, steps: list[Step], received: float, published: float
) -> None:
    for seconds, more_received, more_published, is_sampled in steps:
        clock.now += seconds
        statistics.received += more_received
        statistics.published += more_published
        if is_sampled:
            statistics.sample(0)
    status = statistics.status()
    assert status["received_per_second"] == received
    assert status["published_per_second"] == published
