"""The instant at which a message is due, and how much of its delay is left."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final, NamedTuple

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType
from celery_rabbitdelay.levels.place_value import Delay, milliseconds, milliseconds_until

__all__ = ["Due", "refuse_two"]

_NS_PER_MS: Final = 1_000_000

#: The latest instant that AMQP can write as an integer, in milliseconds since 1970.
LATEST: Final = 2**63 - 1

#: A length of time keeps its digits while less than one in so many of it was lost on the way to the
#: broker: an hour stays one stop although connecting took a moment.
NEGLIGIBLE: Final = 1000


class Due(NamedTuple):
    """When a message may reach its destination, fixed when the caller asked.

    Attributes:
        at_ns: The instant, in nanoseconds since 1970-01-01 UTC.
        delay_ms: How far ahead it was when the caller asked, in milliseconds, rounded up.
        is_instant: Whether the caller named the instant and not the length.
        tolerance_ms: How many milliseconds later is early enough.
    """

    at_ns: int
    delay_ms: int
    is_instant: bool = False
    tolerance_ms: int = 0

    @classmethod
    def after(cls, delay: Delay, tolerance_ms: int = 0) -> Due:
        """Due after a length of time, in seconds or as a timedelta, from now on.

        Args:
            delay: The length of time.
            tolerance_ms: How many milliseconds later is early enough.

        Raises:
            InvalidDelay: It is not finite, or ends later than 64 bits can count.
            InvalidDelayType: It is not a length of time.
        """
        delay_ms = milliseconds(delay)
        # What is over may be so since before AMQP can count: it is since 1970 then.
        at_ns = max(time.time_ns() + delay_ms * _NS_PER_MS, 0)
        due = cls(at_ns, delay_ms, tolerance_ms=tolerance_ms)
        if due.at_ms > LATEST:
            raise InvalidDelay(
                delay, "takes what ends before 64 bits of milliseconds since 1970 do"
            )
        return due

    @classmethod
    def at(cls, instant: datetime, tolerance_ms: int = 0) -> Due:
        """Due at an instant.

        Args:
            instant: The instant.
            tolerance_ms: How many milliseconds later is early enough.

        Raises:
            InvalidDelay: The datetime is naive.
            InvalidDelayType: It is no datetime.
        """
        delay_ms = milliseconds_until(instant, datetime.now(UTC))
        at_ns = time.time_ns() + delay_ms * _NS_PER_MS
        return cls(at_ns, delay_ms, is_instant=True, tolerance_ms=tolerance_ms)

    @property
    def at_ms(self) -> int:
        """The instant in milliseconds since 1970-01-01 UTC, as the header has it."""
        return self.at_ns // _NS_PER_MS

    @property
    def is_over(self) -> bool:
        """Whether it was due already when the caller asked."""
        return self.delay_ms <= 0

    def left_ms(self) -> int:
        """Milliseconds to wait from now on, rounded up.

        What was lost since the caller asked is taken off, unless it is too little to matter beside
        a length of time, which then keeps its digits.
        """
        left = -((time.time_ns() - self.at_ns) // _NS_PER_MS)
        lost = self.delay_ms - left
        if not self.is_instant and lost * NEGLIGIBLE <= self.delay_ms:
            return self.delay_ms
        return left


def refuse_two(delay: Delay, countdown: float | None, eta: datetime | str | None) -> None:
    """Refuse a delay together with a countdown or an eta.

    Raises:
        InvalidDelayType: Both were given.
    """
    for name, value in (("countdown", countdown), ("eta", eta)):
        if value is not None:
            raise InvalidDelayType(delay, f"cannot be combined with {name} = {value!r}")
