"""How late delayed tasks arrive at a worker."""

from __future__ import annotations

import time
from typing import Final

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import DelayHeaders

#: Seconds over which a worker's status shows the latest arrival, and in which steps.
SPAN: Final = 600
STEP: Final = 60


class Arrivals:
    """Notes how late delayed tasks are that run, for the worker's status.

    Attributes:
        received: How many delayed tasks have arrived, without those that were put back.
    """

    def __init__(self) -> None:
        self.received = 0
        #: The seconds of the latest arrival in each step that had any.
        self._latest: dict[int, float] = {}

    def note(self, due_ms: object) -> None:
        """Note that a task arrives now; see :func:`lateness`."""
        self.received += 1
        step = int(time.monotonic()) // STEP
        if step not in self._latest:
            self._latest = self._recent(step)
        self._latest[step] = max(lateness(due_ms), self._latest.get(step, 0.0))

    def status(self) -> dict[str, float]:
        """Return how many tasks have arrived, and how many seconds late the latest one was."""
        recent = self._recent(int(time.monotonic()) // STEP)
        return {"received": self.received, "latest": max(recent.values(), default=0)}

    def by_minute(self) -> list[float | None]:
        """Return how many seconds late the latest task of each minute was, this minute's first.

        None for a minute in which no task has arrived.
        """
        step = int(time.monotonic()) // STEP
        recent = self._recent(step)
        return [recent.get(step - ago) for ago in range(SPAN // STEP)]

    def _recent(self, step: int) -> dict[int, float]:
        first = step - SPAN // STEP + 1
        return {each: late for each, late in tuple(self._latest.items()) if each >= first}


def may_run_since(waited: DelayHeaders) -> int | None:
    """Return since when a task that has come may run: what was put back until then is not late."""
    return None if waited.due_ms is None else max(waited.due_ms, waited.early.until_ms)


def lateness(due_ms: object) -> float:
    """Return how many seconds late a task is now; 0 if it is not due, or nobody knows.

    Args:
        due_ms: The value of its header ``rabbitdelay-due``; any sender may have written it.
    """
    late_ms = wall_clock.ms() - due_ms if isinstance(due_ms, int) else 0
    return max(late_ms, 0) / 1000
