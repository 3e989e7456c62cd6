"""Delays and due times in whole milliseconds, the unit of RabbitMQ's TTLs."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Context, Decimal
from fractions import Fraction
from math import ceil, floor, isfinite
from numbers import Rational, Real
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType
from celery_rabbitdelay.levels import wall_clock

#: A delay: seconds as a number, or a timedelta.
Delay: TypeAlias = "float | Decimal | Rational | timedelta"

#: The latest due time that AMQP can carry as an integer, in milliseconds since 1970.
MAX_DUE_MS: Final = 2**63 - 1

#: The longest delay, in seconds: 100 years of 365 days.
MAX_DELAY: Final = 3_153_600_000.0

#: If no more than 1/1000 of a relative delay has passed, a message waits for the full delay:
#: otherwise, an hour would become 59:59.9 and take three stops instead of one.
NEGLIGIBLE_DIVISOR: Final = 1000

NS_PER_MS: Final = wall_clock.NS_PER_MS

MICROSECOND: Final = timedelta(microseconds=1)

_PLAIN: Final = frozenset((datetime, date, timedelta, int, float, str, type(None)))

#: Enough precision for a float's 17 digits; the caller's decimal context does not apply.
_EXACT: Final = Context(prec=50)


def milliseconds(delay: Delay) -> int:
    """Return a delay in milliseconds, rounded up so that nothing is early; 0 if it is negative.

    A float is read as its shortest decimal representation, so 1.1 is 1,100 ms and not 1,101.

    Raises:
        InvalidDelayType: The delay is neither a real number nor a timedelta, or it is a bool.
        InvalidDelay: The delay is NaN or infinite.
    """
    return max(ceil(_exact_milliseconds(delay)), 0)


def _exact_milliseconds(delay: Delay, what: str = "delay") -> int | Decimal | Fraction:
    if type(delay) is int:
        return delay * 1000
    if type(delay) is float and isfinite(delay):
        return _EXACT.scaleb(Decimal(repr(delay)), 3)
    if isinstance(delay, timedelta):
        return _EXACT.scaleb(Decimal(plain(delay, what) // MICROSECOND), -3)
    # NumPy's timedelta64 counts as an integer.
    is_duration = type(delay).__name__ == "timedelta64"
    if isinstance(delay, bool) or is_duration or not isinstance(delay, Real | Decimal):
        raise InvalidDelayType(delay, "takes seconds, such as 90, or timedelta(days=3)", what)
    if isinstance(delay, Rational):
        # NumPy's integers overflow.
        return Fraction(int(delay.numerator), int(delay.denominator)) * 1000
    is_signaling = isinstance(delay, Decimal) and delay.is_snan()
    if is_signaling or not isfinite(delay):
        raise InvalidDelay(delay, "takes a finite number of seconds, such as 90", what)
    exact = Fraction(delay) if isinstance(delay, Decimal) else float(delay)
    return _exact_milliseconds(exact, what)


def tolerance_milliseconds(tolerance: Delay) -> int:
    """Return a tolerance in milliseconds, rounded down so that it is never exceeded.

    Raises:
        InvalidDelay: The tolerance is negative, NaN, or infinite.
    """
    exact = _exact_milliseconds(tolerance, "tolerance")
    # A float that should be zero may be slightly negative, such as 0.3 - 3 * 0.1.
    if exact <= -1:
        raise InvalidDelay(tolerance, "must not be negative", "tolerance")
    return max(floor(exact), 0)


def plain(given: Any, what: str) -> Any:
    """Convert a datetime, a date or a timedelta to the class of the standard library.

    A value of another class with an ``isoformat``, such as arrow's, becomes the datetime that
    ``isoformat`` writes, as Celery itself reads an eta. Other values are returned unchanged.
    Nanoseconds are rounded up, so that nothing is early.

    Subclasses (of pendulum, pandas, freezegun, or an application) override operators, comparisons,
    ``isoformat`` and pickling. So the package converts each value once, on entry, with the methods
    of the base class.

    Args:
        given: The value.
        what: The name of the argument, for the error.

    Raises:
        InvalidDelay: The standard library cannot hold the value: pandas' NaT, or the year 10000.
    """
    if type(given) in _PLAIN:
        return given
    made: object
    match given:
        case datetime():
            made = datetime.combine(datetime.date(given), datetime.timetz(given))
            is_same, finer = made.year == given.year, getattr(given, "nanosecond", 0)
        case timedelta():
            made = timedelta.__pos__(given)
            is_same, finer = made.days == given.days, getattr(given, "nanoseconds", 0)
        case date():
            return date.fromordinal(date.toordinal(given))
        case _:
            with suppress(AttributeError, TypeError, ValueError):
                return datetime.fromisoformat(given.isoformat())
            return given
    if not is_same:
        raise InvalidDelay(given, "takes a time that Python's datetime or timedelta can hold", what)
    return made + MICROSECOND if finer else made


class Due(NamedTuple):
    """The due time of a message, computed at the call.

    Attributes:
        at_ns: The instant, in nanoseconds since 1970-01-01 UTC.
        delay_ms: The delay at the time of the call, in milliseconds, rounded up.
        is_instant: Whether the caller gave an instant, not a relative delay.
        tolerance_ms: The milliseconds by which the message may be late.
    """

    at_ns: int
    delay_ms: int
    is_instant: bool = False
    tolerance_ms: int = 0

    @classmethod
    def after(cls, delay: Delay, tolerance_ms: int = 0) -> Due:
        """Make the due time after a delay (seconds or a timedelta); a negative delay means now.

        Raises:
            InvalidDelay: The delay is invalid, or its due time does not fit in 64 bits.
        """
        delay_ms = milliseconds(delay)
        at_ns = wall_clock.ns() + delay_ms * NS_PER_MS
        if at_ns // NS_PER_MS > MAX_DUE_MS:
            raise InvalidDelay(delay, "is too long: the due time in ms since 1970 exceeds 64 bits")
        return cls(at_ns, delay_ms, tolerance_ms=tolerance_ms)

    @classmethod
    def at(cls, instant: datetime, tolerance_ms: int = 0) -> Due:
        """Make the due time at an aware datetime; a datetime that has passed means now.

        Raises:
            InvalidDelay: The datetime is naive, so its instant is ambiguous.
            InvalidDelayType: The value is not a datetime.
        """
        now_ns = wall_clock.ns()
        at_ns = max(_microseconds_of(instant, "eta") * 1000, now_ns)
        return cls(at_ns, -((now_ns - at_ns) // NS_PER_MS), True, tolerance_ms)

    @classmethod
    def until(cls, at_ms: int) -> Due:
        """Make the due time at an instant in milliseconds since 1970-01-01 UTC, past or future."""
        return cls(at_ms * NS_PER_MS, max(at_ms - wall_clock.ms(), 0), is_instant=True)

    @property
    def at_ms(self) -> int:
        """The due time in milliseconds since 1970-01-01 UTC, as in the header."""
        return self.at_ns // NS_PER_MS

    @property
    def is_past(self) -> bool:
        """Whether the message was already due at the time of the call."""
        return self.delay_ms <= 0

    def remaining_ms(self) -> int:
        """Return the milliseconds from now until the message is due, rounded up."""
        remaining = -((wall_clock.ns() - self.at_ns) // NS_PER_MS)
        passed = self.delay_ms - remaining
        if not self.is_instant and passed * NEGLIGIBLE_DIVISOR <= self.delay_ms:
            return self.delay_ms
        return remaining


def check_max_delay(due: Due) -> None:
    """Refuse a delay above :data:`MAX_DELAY`.

    Raises:
        InvalidDelay: The delay exceeds the maximum.
    """
    if due.delay_ms > MAX_DELAY * 1000:
        reason = f"exceeds the maximum of {MAX_DELAY:,.0f} s"
        raise InvalidDelay(due.delay_ms / 1000, reason)


def instant_of(epoch_ms: int) -> datetime:
    """Return an instant in milliseconds since 1970-01-01 UTC as an aware datetime.

    Raises:
        OverflowError: The instant is after the year 9999, or before the year 1.
    """
    return wall_clock.EPOCH + timedelta(milliseconds=epoch_ms)


#: The forms of an instant, for errors.
TAKES_INSTANT: Final = "takes a datetime or ISO 8601, such as 2030-01-31T09:00:00+01:00"


def milliseconds_of(instant: datetime) -> int:
    """Return an aware datetime in milliseconds since 1970-01-01 UTC, rounded down.

    Raises:
        InvalidDelay: The datetime is naive.
        InvalidDelayType: The value is not a datetime.
    """
    return _microseconds_of(instant, "instant") // 1000


def _microseconds_of(instant: datetime, what: str) -> int:
    made = plain(instant, what)
    if not isinstance(made, datetime):
        raise InvalidDelayType(instant, TAKES_INSTANT, what)
    if made.utcoffset() is None:
        raise InvalidDelay(instant, "is naive: use an aware one, such as datetime.now(UTC)", what)
    return (made - wall_clock.EPOCH) // MICROSECOND


#: The forms that :func:`parse_delay` accepts, for errors and help.
TAKES: Final = "takes seconds (90, 0.5), units (1h30m, 1.5d, 250ms) or hours:minutes:seconds"

#: The milliseconds of every unit, the longest first.
UNITS: Final = {
    "w": 604_800_000,
    "d": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
    "ms": 1,
}

_NUMBER: Final = r"\d+(?:\.\d+)?"
_SECONDS: Final = re.compile(_NUMBER)
_WITH_UNITS: Final = re.compile("".join(rf"(?:({_NUMBER})\s*{unit}\s*)?" for unit in UNITS))
_CLOCK: Final = re.compile(r"(?:(\d+)\s*d(?:ays?)?,?\s+)?(\d+):([0-5]?\d):([0-5]?\d(?:\.\d+)?)")


def parse_delay(text: str, what: str = "delay") -> Fraction:
    """Parse a delay that is written as text; return its seconds.

    Args:
        text: A number of seconds; numbers with the units w, d, h, m, s and ms, the longest unit
            first and no unit twice; or ``hours:minutes:seconds``, optionally after days (``3d
            7:45:30``). A leading minus makes the delay negative.
        what: The name of the argument, for the error: "delay" or "tolerance".

    Raises:
        InvalidDelay: The text is not in one of these forms. ``1:30`` is refused, because it may
            mean minutes or hours.
    """
    bare = text.strip().lower() if text.isascii() else ""
    sign, bare = -1 if bare.startswith("-") else 1, bare.removeprefix("-")
    if _SECONDS.fullmatch(bare):
        return sign * Fraction(Decimal(bare))
    if clock := _CLOCK.fullmatch(bare):
        days, hours, minutes, seconds = (Fraction(Decimal(part or 0)) for part in clock.groups())
        return sign * (((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    if bare and (units := _WITH_UNITS.fullmatch(bare)):
        numbers = (Fraction(Decimal(number or 0)) for number in units.groups())
        total_ms = sum(map(mul, numbers, UNITS.values()), start=Fraction(0))
        return sign * total_ms / 1000
    raise InvalidDelay(text, TAKES, what)


#: The values that :func:`parse_duration` accepts, for errors.
TAKES_DURATION: Final = "takes a duration from 0 to 100 years, such as 90, 1h30m or 1.5d"


def parse_duration(text: str, what: str = "duration") -> timedelta:
    """Parse a duration that is written as a delay, from 0 to :data:`MAX_DELAY`.

    Args:
        text: As for :func:`parse_delay`.
        what: The name of the argument, for the error.

    Raises:
        InvalidDelay: The text does not have the form of a delay, or the duration is out of range.
    """
    seconds = parse_delay(text, what)
    if not 0 <= seconds <= MAX_DELAY:
        raise InvalidDelay(text, TAKES_DURATION, what)
    return timedelta(seconds=float(seconds))


def duration_text(length_ms: int) -> str:
    """Write milliseconds as days, hours, minutes and seconds: ``3 days 7:45:30``, ``0:00:00.1``."""
    days, rest = divmod(length_ms, UNITS["d"])
    whole, point, fraction = str(timedelta(milliseconds=rest)).partition(".")
    time_of_day = f"{whole}{point}{fraction.rstrip('0')}"
    if not days:
        return time_of_day
    shown = f"{days:,} day{'s' if days > 1 else ''}"
    return f"{shown} {time_of_day}" if rest else shown
