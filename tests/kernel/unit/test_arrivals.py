"""How late delayed tasks arrive at a worker; the clock is a fake."""

import pytest

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.worker import restore
from celery_rabbitdelay.worker.restore import Arrivals
from tests.kernel.unit.clock import NS_PER_S, Clock

DUE_MS = 1_900_000_000_000
DUE_NS = DUE_MS * 1_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(DUE_MS / 1000)
    monkeypatch.setattr(restore, "time", clock)
    monkeypatch.setattr(wall_clock, "ns", clock.time_ns)
    return clock


def test_the_latest_task_of_each_minute_is_told(clock: Clock) -> None:
    arrivals = Arrivals()
    base = DUE_NS - int(clock.now_ns / NS_PER_S) % 60 * NS_PER_S
    for seconds, late in [(0, 3), (59, 1), (125, 0.5)]:
        clock.now_ns = base + seconds * NS_PER_S
        arrivals.note(clock.now_ns // 1_000_000 - round(late * 1000))
    assert arrivals.status(True)["by_minute"] == [0.5, None, 3, *[None] * 7]
    clock.now_ns = base + 700 * NS_PER_S
    assert arrivals.status(True)["by_minute"] == [*[None] * 9, 0.5]
