"""How late delayed tasks arrive at a worker."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from celery_rabbitdelay.app.instruments import LATENESS
from celery_rabbitdelay.app.metrics import Metrics
from celery_rabbitdelay.levels.delay import NS_PER_MS

#: Seconds over which the latest arrival is told, and how precisely.
SPAN: Final = 600
STEP: Final = 60


class Arrivals:
    """Notes when delayed tasks arrive, and when they were due.

    Attributes:
        received: How many delayed tasks have arrived.
    """

    def __init__(self) -> None:
        self.received = 0
        #: For each minute with arrivals, of the last ten: its number, and the latest arrival.
        self._latest: deque[tuple[int, int]] = deque()

    def note(self, due_ms: object) -> None:
        """Note that a task arrives now.

        Args:
            due_ms: The value of its header ``rabbitdelay-due``; any sender may have written it.
        """
        self.received += 1
        if not isinstance(due_ms, int):
            return
        late_ms, step = time.time_ns() // NS_PER_MS - due_ms, int(time.monotonic()) // STEP
        if self._latest and self._latest[-1][0] == step:
            late_ms = max(self._latest.pop()[1], late_ms)
        self._latest.append((step, late_ms))
        self._forget(step)

    def status(self) -> dict[str, float]:
        """Return how many tasks have arrived, and how many seconds late the latest one was."""
        self._forget(int(time.monotonic()) // STEP)
        latest_ms = max((late_ms for _, late_ms in tuple(self._latest)), default=0)
        return {"received": self.received, "latest": max(latest_ms, 0) / 1000}

    def _forget(self, step: int) -> None:
        while self._latest and self._latest[0][0] <= step - SPAN // STEP:
            self._latest.popleft()


def record_lateness(metrics: Metrics, due_ms: object, task: str, queue: str) -> None:
    """Count a task that is about to run, by how late it is.

    Args:
        metrics: Where to.
        due_ms: The value of its header ``rabbitdelay-due``; any sender may have written it.
        task: The task's name.
        queue: The queue that it came from.
    """
    late_ms = time.time_ns() // NS_PER_MS - due_ms if isinstance(due_ms, int) else 0
    metrics.record(LATENESS, max(late_ms, 0) / 1000, task, queue)
