"""Delays and due times in whole milliseconds, the unit of RabbitMQ's TTLs."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from decimal import Context, Decimal
from fractions import Fraction
from math import ceil, isfinite
from numbers import Rational, Real
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType

#: How long to wait: seconds as a number, or a timedelta.
Delay: TypeAlias = "float | Decimal | Rational | timedelta"

#: What an instant is, for errors.
INSTANT: Final = "takes an aware datetime, such as datetime.now(UTC) + timedelta(days=3)"

#: The latest due time that AMQP can carry as an integer, in milliseconds since 1970.
MAX_DUE_MS: Final = 2**63 - 1

#: The longest delay, in seconds: 100 years of 365 days.
MAX_DELAY: Final = 3_153_600_000.0

#: If no more than 1/1000 of a relative delay has passed, the original delay is used unreduced;
#: otherwise, an hour would become 59:59.9 and take three stops instead of one.
NEGLIGIBLE_DIVISOR: Final = 1000

NS_PER_MS: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

#: A float prints as at most 17 digits; the caller's own decimal context does not apply.
_EXACT: Final = Context(prec=50)


def milliseconds(delay: Delay) -> int:
    """Return a delay in milliseconds, rounded up: never early.

    A float is read as its shortest decimal representation, so 1.1 is 1,100 ms and not 1,101.

    Raises:
        InvalidDelayType: Not a real number and not a timedelta; also a bool.
        InvalidDelay: Not a number (NaN) or infinite.
    """
    if type(delay) is int:
        return delay * 1000
    if type(delay) is float and isfinite(delay):
        return ceil(_EXACT.scaleb(Decimal(repr(delay)), 3))
    if isinstance(delay, timedelta):
        return -(delay // timedelta(milliseconds=-1))
    if isinstance(delay, bool) or not isinstance(delay, Real | Decimal):
        raise InvalidDelayType(delay, "takes seconds, such as 90, or timedelta(days=3)")
    # Rationals first: one beyond the range of floats makes isfinite overflow.
    if isinstance(delay, Rational) or (isinstance(delay, Decimal) and isfinite(delay)):
        return ceil(Fraction(delay) * 1000)
    if not isfinite(delay):
        raise InvalidDelay(delay, "takes a finite number of seconds, such as 90")
    return milliseconds(float(delay))


def tolerance_milliseconds(tolerance: Delay) -> int:
    """Return a tolerance, which is not negative, in milliseconds, rounded down: never too late."""
    try:
        if milliseconds(tolerance) < 0:
            raise InvalidDelay(tolerance, "must not be negative")
    except InvalidDelay as invalid:
        raise type(invalid)(tolerance, invalid.reason, "tolerance") from None
    negative: Any = -tolerance
    return -milliseconds(negative)


class Due(NamedTuple):
    """The due time of a message, computed at the call.

    Attributes:
        at_ns: The instant, in nanoseconds since 1970-01-01 UTC.
        delay_ms: The delay at the time of the call, in milliseconds, rounded up.
        is_instant: Whether the caller gave an instant, and not a relative delay.
        tolerance_ms: How many milliseconds later the message may arrive.
    """

    at_ns: int
    delay_ms: int
    is_instant: bool = False
    tolerance_ms: int = 0

    @classmethod
    def after(cls, delay: Delay, tolerance_ms: int = 0) -> Due:
        """Due after a delay, in seconds or as a timedelta, from now on.

        Raises:
            InvalidDelay: The delay is invalid, or its due time does not fit in 64 bits.
        """
        delay_ms = milliseconds(delay)
        # A due time before 1970 cannot be written as a header; 1970 is past as well.
        at_ns = max(time.time_ns() + delay_ms * NS_PER_MS, 0)
        due = cls(at_ns, delay_ms, tolerance_ms=tolerance_ms)
        if due.at_ms > MAX_DUE_MS:
            raise InvalidDelay(delay, "is too long: milliseconds since 1970 exceed 64 bits")
        return due

    @classmethod
    def at(cls, instant: datetime, tolerance_ms: int = 0) -> Due:
        """Due at an instant, an aware datetime.

        Raises:
            InvalidDelay: The datetime is naive, so that it is unclear which instant it means.
            InvalidDelayType: It is not a datetime.
        """
        if not isinstance(instant, datetime):
            raise InvalidDelayType(instant, INSTANT, "eta")
        if instant.utcoffset() is None:
            way_out = "use an aware one, such as datetime.now(UTC), or set Celery's timezone"
            raise InvalidDelay(instant, f"is naive: {way_out}", "eta")
        at_ns = (instant - _EPOCH) // timedelta(microseconds=1) * 1000
        delay_ms = -((time.time_ns() - at_ns) // NS_PER_MS)
        return cls(max(at_ns, 0), delay_ms, True, tolerance_ms)

    @property
    def at_ms(self) -> int:
        """The instant in milliseconds since 1970-01-01 UTC, as in the header."""
        return self.at_ns // NS_PER_MS

    @property
    def is_past(self) -> bool:
        """Whether the message was due already when the caller asked."""
        return self.delay_ms <= 0

    def remaining_ms(self) -> int:
        """Return the milliseconds from now until the message is due, rounded up."""
        remaining = -((time.time_ns() - self.at_ns) // NS_PER_MS)
        passed = self.delay_ms - remaining
        if not self.is_instant and passed * NEGLIGIBLE_DIVISOR <= self.delay_ms:
            return self.delay_ms
        return remaining


def check_max_delay(due: Due) -> None:
    """Refuse a delay that is longer than :data:`MAX_DELAY`.

    Raises:
        InvalidDelay: It is longer.
    """
    if due.delay_ms > MAX_DELAY * 1000:
        reason = f"is longer than the longest delay, {MAX_DELAY:,.0f} s"
        raise InvalidDelay(due.delay_ms / 1000, reason)


def instant_of(epoch_ms: int) -> datetime:
    """Return an instant in milliseconds since 1970-01-01 UTC as an aware datetime.

    Raises:
        OverflowError: It is after the year 9999, or before the year 1.
    """
    return _EPOCH + timedelta(milliseconds=epoch_ms)


def milliseconds_of(instant: datetime) -> int:
    """Return an aware datetime in milliseconds since 1970-01-01 UTC, rounded down."""
    return (instant - _EPOCH) // timedelta(milliseconds=1)


#: The forms that :func:`parse_delay` accepts, for errors and help.
TAKES: Final = "takes seconds (90, 0.5), units (3d7h45m30s, 250ms) or hours:minutes:seconds"

#: Milliseconds of each unit, the longest first.
_UNITS: Final = {
    "w": 604_800_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
    "ms": 1,
}

_NUMBER: Final = r"\d+(?:\.\d+)?"
_SECONDS: Final = re.compile(_NUMBER)
_WITH_UNITS: Final = re.compile("".join(rf"(?:({_NUMBER})\s*{unit}\s*)?" for unit in _UNITS))
_CLOCK: Final = re.compile(r"(?:(\d+)\s*d(?:ays?)?,?\s+)?(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")


def parse_delay(text: str, what: str = "delay") -> Fraction:
    """Return a delay that is written as text, in seconds.

    Args:
        text: Seconds as a number; numbers with the units w, d, h, m, s and ms, the longest first,
            each at most once; or ``hours:minutes:seconds``, also behind days (``3d 7:45:30``).
        what: The name of the argument, for the error: "delay" or "tolerance".

    Raises:
        InvalidDelay: Another form. ``1:30`` is refused because it could be minutes or hours.
    """
    bare = text.strip().lower() if text.isascii() else ""
    if _SECONDS.fullmatch(bare):
        return Fraction(Decimal(bare))
    if clock := _CLOCK.fullmatch(bare):
        days, hours, minutes, seconds = (Fraction(Decimal(part or 0)) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if bare and (units := _WITH_UNITS.fullmatch(bare)):
        numbers = (Fraction(Decimal(number or 0)) for number in units.groups())
        total_ms = sum(map(mul, numbers, _UNITS.values()), start=Fraction(0))
        return total_ms / 1000
    raise InvalidDelay(text, TAKES, what)


def duration_text(length_ms: int) -> str:
    """Return milliseconds as days and a time of day: ``3 days 7:45:30``, ``0:00:00.1``."""
    days, rest = divmod(length_ms, _UNITS["d"])
    whole, point, fraction = str(timedelta(milliseconds=rest)).partition(".")
    time_of_day = f"{whole}{point}{fraction.rstrip('0')}"
    if not days:
        return time_of_day
    shown = f"{days:,} day{'s' if days > 1 else ''}"
    return f"{shown} {time_of_day}" if rest else shown
