"""The wall clock of all other modules.

A test that travels in time (:mod:`celery_rabbitdelay.testing.travel`) replaces :data:`ns` in its
own process and in its workers, so that due times, lateness and expiries agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

NS_PER_MS: Final = 1_000_000

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def _system_ns() -> int:
    # A function of our own: freezegun would replace a reference to time.time_ns.
    return time.time_ns()


#: Returns the nanoseconds since 1970-01-01 UTC.
ns: Callable[[], int] = _system_ns


def ms() -> int:
    """Return the milliseconds since 1970-01-01 UTC, rounded down."""
    return ns() // NS_PER_MS


def now() -> datetime:
    """Return the current time in UTC, to the microsecond."""
    return EPOCH + timedelta(microseconds=ns() // 1000)


def own_us() -> int | None:
    """Return the microseconds since 1970-01-01 UTC if a test sets the clock; None otherwise."""
    return None if ns is _system_ns else ns() // 1000
