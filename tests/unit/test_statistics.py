"""What a module has done, and how fast; the clock is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from celery_rabbitdelay.modules import deliveries as statistics_module
from celery_rabbitdelay.modules.deliveries import ModuleStatistics
from tests.unit.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000)
    monkeypatch.setattr(statistics_module, "time", clock)
    return clock


@pytest.fixture
def statistics(clock: Clock) -> ModuleStatistics:
    return ModuleStatistics()


def test_counts_are_of_now_and_the_backlog_of_the_last_sample(statistics: ModuleStatistics) -> None:
    statistics.sample(70)
    statistics.sample(50)
    statistics.received, statistics.published, statistics.undeliverable = 3, 300, 2
    assert statistics.status() == {
        "received": 3,
        "published": 300,
        "redelivered": 0,
        "undeliverable": 2,
        "backlog": 50,
        "received_per_second": 0.3,
        "published_per_second": 30,
    }


#: Seconds, what was received and published in them, and whether a sample is taken then.
@pytest.mark.parametrize(
    ("steps", "received", "published"),
    [
        pytest.param([(2, 10, 30, True), (2, 2, 10, False)], 3.0, 10.0, id="then up to now"),
        pytest.param([(0, 9, 50, False), *[(2, 2, 20, True)] * 20], 1.0, 10.0, id="forgets"),
        pytest.param([(4, 9, 70, True), (10, 0, 0, True)], 0.6, 5.0, id="up to one sample more"),
        pytest.param([(4, 9, 70, True), (10, 0, 0, True), (0.5, 0, 0, True)], 0, 0, id="not more"),
        pytest.param([(0, 5, 5, True)], 0.5, 0.5, id="the first instant"),
        pytest.param([(0, 5, 5, True), (1e-6, 0, 0, True)], 5000.0, 5000.0, id="nearly an instant"),
    ],
)
def test_rates_are_over_the_last_seconds(
    statistics: ModuleStatistics, clock: Clock, steps: Any, received: float, published: float
) -> None:
    for seconds, more_received, more_published, is_sampled in steps:
        clock.now += seconds
        statistics.received += more_received
        statistics.published += more_published
        if is_sampled:
            statistics.sample(0)
    status = statistics.status()
    found = status["received_per_second"], status["published_per_second"]
    assert found == (received, published)
