"""What a module has done, and how fast; the clock is a fake."""

from __future__ import annotations

import pytest

from celery_rabbitdelay.modules import attempts as statistics_module
from celery_rabbitdelay.modules.attempts import ModuleStatistics


class Clock:
    """Stands in for the module ``time``, because no real clock can be told how late it is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(statistics_module, "time", clock)
    return clock


@pytest.fixture
def statistics(clock: Clock) -> ModuleStatistics:
    return ModuleStatistics()


def work(statistics: ModuleStatistics, received: int, published: int) -> None:
    statistics.received += received
    statistics.published += published


def rates(statistics: ModuleStatistics) -> tuple[float, float]:
    status = statistics.status()
    return status["received_per_second"], status["published_per_second"]


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
    work(statistics, 3, 300)
    statistics.undeliverable += 2
    status = statistics.status()
    assert (status["received"], status["published"]) == (3, 300)
    assert (status["undeliverable"], status["backlog"]) == (2, 50)


def test_at_first_rates_are_over_ten_seconds(statistics: ModuleStatistics, clock: Clock) -> None:
    clock.now += 1
    work(statistics, 20, 50)
    assert rates(statistics) == (2.0, 5.0)


def test_rates_are_over_the_time_since_start(statistics: ModuleStatistics, clock: Clock) -> None:
    clock.now += 2
    work(statistics, 10, 30)
    statistics.sample(0)
    assert rates(statistics) == (5.0, 15.0)
    clock.now += 2
    work(statistics, 2, 10)
    assert rates(statistics) == (3.0, 10.0)


def test_rates_have_one_decimal_place(statistics: ModuleStatistics, clock: Clock) -> None:
    clock.now += 3
    work(statistics, 1, 2)
    statistics.sample(0)
    assert rates(statistics) == (0.3, 0.7)


def test_rates_forget_after_ten_seconds(statistics: ModuleStatistics, clock: Clock) -> None:
    work(statistics, 1000, 5000)
    for _ in range(20):
        clock.now += 2
        work(statistics, 2, 20)
        statistics.sample(0)
    assert rates(statistics) == (1.0, 10.0)


def test_rates_are_over_up_to_one_sample_more(statistics: ModuleStatistics, clock: Clock) -> None:
    clock.now += 4
    work(statistics, 100, 100)
    statistics.sample(0)
    clock.now += 10
    statistics.sample(0)
    assert rates(statistics) == (round(100 / 14, 1), round(100 / 14, 1))
    clock.now += 0.5
    statistics.sample(0)
    assert rates(statistics) == (0.0, 0.0)


def test_after_a_long_pause_rates_are_over_it(statistics: ModuleStatistics, clock: Clock) -> None:
    clock.now += 1000
    statistics.sample(0)
    clock.now += 1000
    work(statistics, 1000, 2000)
    statistics.sample(0)
    assert rates(statistics) == (1.0, 2.0)


def test_samples_of_an_instant_have_a_rate(statistics: ModuleStatistics, clock: Clock) -> None:
    work(statistics, 5, 5)
    statistics.sample(0)
    assert rates(statistics) == (0.5, 0.5)
    clock.now += 0.000_001
    statistics.sample(0)
    assert rates(statistics) == (5000.0, 5000.0)
