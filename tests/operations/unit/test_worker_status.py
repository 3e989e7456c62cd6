"""How late delayed tasks start at a worker; the clock is a fake."""

import math
from typing import Any

import pytest

from celery_rabbitdelay.app.instruments import LATENESS, SENT
from celery_rabbitdelay.operations import worker_status
from celery_rabbitdelay.operations.worker_status import Arrivals
from tests.kernel.unit.clock import NS_PER_S, Clock

DUE_MS = 1_900_000_000_000
DUE_NS = DUE_MS * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(DUE_MS / 1000)
    monkeypatch.setattr(worker_status, "time", clock)
    return clock


def test_the_latest_task_of_each_minute_is_told(clock: Clock) -> None:
    arrivals = Arrivals()
    base = DUE_NS - int(clock.now_ns / NS_PER_S) % 60 * NS_PER_S
    for seconds, late in [(0, 3), (59, 1), (125, 0.5)]:
        clock.now_ns = base + seconds * NS_PER_S
        arrivals({LATENESS: late}, "remind", "mail")
        arrivals({SENT: 1}, "remind", "mail")
    told = arrivals.status(True)
    assert told["by_minute"] == [0.5, None, 3, *[None] * 57]
    assert told["received_by_minute"] == [1, 0, 2, *[0] * 57]
    clock.now_ns = base + 700 * NS_PER_S
    assert arrivals.status()["latest"] == 0.5
    clock.now_ns = base + 60 * 61 * NS_PER_S
    assert arrivals.status(True)["by_minute"] == [*[None] * 59, 0.5]
    assert arrivals.status()["latest"] == 0


def test_the_lateness_of_each_task_is_counted_for_an_hour_at_most(clock: Clock) -> None:
    arrivals = Arrivals()

    def counted() -> dict[str, dict[float, int]]:
        told: dict[str, Any] = arrivals.status(True)
        return {
            name: {late: number for late, number in zip(bounds, counts, strict=True) if number}
            for bounds in [[*told["late_bounds"], math.inf]]
            for name, counts in told["late_by_task"].items()
        }

    def note(task: str, *lates: float) -> None:
        for late in lates:
            arrivals({LATENESS: late}, task, "mail")

    note("pay", 0, 0.1, 0.2, 20, 4000)
    note("ship", 0.3)
    paid = {0.1: 2, 0.25: 1, 30.0: 1, math.inf: 1}
    assert counted() == {"pay": paid, "ship": {0.5: 1}}
    clock.now_ns += 30 * 60 * NS_PER_S
    note("pay", 0)
    assert counted() == {"pay": {**paid, 0.1: 3}, "ship": {0.5: 1}}
    clock.now_ns += 30 * 60 * NS_PER_S
    assert counted() == {"pay": {0.1: 1}}
    for number in range(worker_status.MOST_TASKS + 5):
        note(f"task-{number}", 0)
    assert counted()[worker_status.OTHER] == {0.1: 5}
    clock.now_ns += 90 * 60 * NS_PER_S
    assert counted() == {}
