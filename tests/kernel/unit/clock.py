"""A fake clock: no real one can be told to stand still, or how late it is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from celery_rabbitdelay.levels import wall_clock

NS_PER_S = 1_000_000_000


class Clock:
    """Stands in for the module ``time``, or for one of its functions, in seconds.

    Args:
        now: The seconds at which it begins: 0, as the clock of a machine that has just booted.

    Attributes:
        now_ns: The same in nanoseconds.
    """

    def __init__(self, now: float = 0) -> None:
        self.now = now

    @property
    def now(self) -> float:
        """The time in seconds, which a test sets."""
        return self.now_ns / NS_PER_S

    @now.setter
    def now(self, seconds: float) -> None:
        self.now_ns = round(seconds * NS_PER_S)

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return self.now_ns

    __call__ = time = monotonic


@contextmanager
def frozen(now: float | None = None) -> Iterator[Clock]:
    """Let no time pass for whoever computes what is left of a delay.

    A message then waits for the whole of its delay, in the queues that a test expects, however long
    it took to be sent.

    Args:
        now: Where the clock stands, in seconds since 1970; None for the present.
    """
    clock = Clock(time.time() if now is None else now)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_clock, "ns", clock.time_ns)
        yield clock
