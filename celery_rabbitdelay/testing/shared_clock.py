"""A wall clock that a test sets, for its own process and for its workers.

It is a file of three numbers that they all map into memory: forks of a worker see it, too. It
counts on the machine's monotonic clock, which no library that fakes the time of a test touches.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from celery.worker.request import Request
from celery.worker.state import revoked

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.modules import attempts
from celery_rabbitdelay.registry import pauses

#: Which of the numbers is what is added to the monotonic clock; the instant at which the clock
#: stands, or 0; and whether the user's own code sees this time.
_AHEAD, _STANDS_AT, _SHOWN = range(3)


class SharedClock:
    """The clock; all values are nanoseconds since 1970-01-01 UTC.

    Args:
        folder: Where its file is, or will be.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "clock"
        is_new = not path.exists()
        with path.open("a+b") as file:
            file.truncate(24)
            self._numbers = memoryview(mmap.mmap(file.fileno(), 24)).cast("q")
        if is_new:
            self.reset()

    def ns(self) -> int:
        """Return the time."""
        return self._numbers[_STANDS_AT] or time.monotonic_ns() + self._numbers[_AHEAD]

    def reset(self) -> None:
        """Show the real time again."""
        self._numbers[_AHEAD] = time.time_ns() - time.monotonic_ns()
        self._numbers[_STANDS_AT] = 0
        self._numbers[_SHOWN] = 0

    def stand_at(self, ns: int) -> None:
        """Stand still at an instant."""
        self._numbers[_STANDS_AT] = ns

    def go_on(self) -> None:
        """Go on from where it stands."""
        if stood_at := self._numbers[_STANDS_AT]:
            self._numbers[_AHEAD] = stood_at - time.monotonic_ns()
            self._numbers[_STANDS_AT] = 0

    @property
    def is_shown(self) -> bool:
        """Whether the user's own code sees this time."""
        return bool(self._numbers[_SHOWN])

    @is_shown.setter
    def is_shown(self, is_shown: bool) -> None:
        self._numbers[_SHOWN] = is_shown

    def installed(self) -> AbstractContextManager[None]:
        """Return a context in which this process, and what it forks, go by this clock."""
        return going_by(self.ns)


@contextmanager
def going_by(clock_ns: Callable[[], int]) -> Iterator[None]:
    """Let this process, and what it forks, go by a clock in a block.

    Days of a travel pass within the seconds for which the answers of the registry and of the broker
    are kept: so none is, and tasks expire by this clock as well. A travel stops wherever a task
    that is held asks again: so each asks as rarely as if there were many, and all together.

    Args:
        clock_ns: Returns the nanoseconds since 1970-01-01 UTC.
    """
    with (
        patch.object(wall_clock, "source", clock_ns),
        patch.object(pauses, "FRESH", 0.0),
        patch.object(pauses, "PER_SECOND", 1e-3),
        patch.object(pauses, "JITTER", 0.0),
        patch.object(attempts, "ASK_AGAIN", 0.0),
        patch.object(Request, "maybe_expire", _maybe_expire),
    ):
        yield


def _maybe_expire(request: Request) -> bool:
    """Let a task that has expired count as revoked, as Celery does; return whether it has."""
    if request.expires is None or wall_clock.now() <= request.expires:
        return False
    revoked.add(request.id)
    return True


def shown(instant: datetime) -> AbstractContextManager[Any]:
    """Return a context in which all code sees an instant, from which time goes on.

    Raises:
        ModuleNotFoundError: Neither ``time-machine`` nor ``freezegun`` is installed.
    """
    if find_spec("time_machine"):
        import time_machine

        return time_machine.travel(instant, tick=True)
    if find_spec("freezegun"):
        freeze: Any = import_module("freezegun").freeze_time
        context: AbstractContextManager[Any] = freeze(
            instant, tick=True, ignore=["celery_rabbitdelay.testing"]
        )
        return context
    raise ModuleNotFoundError("code sees another time with time-machine or freezegun: install one")
