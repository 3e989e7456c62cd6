"""Delays as digits: rounding, and numbers in a system of mixed bases. Pure arithmetic.

A delay is a number of ticks, written like a clock: with the bases ``(24, 60, 60)`` the number
27,930 is ``(7, 45, 30)``. Durations are whole milliseconds throughout, since that is what RabbitMQ
counts in (https://www.rabbitmq.com/docs/ttl).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache
from math import ceil, isfinite, prod
from numbers import Rational, Real
from typing import Any, Final, TypeAlias

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidDelayType

__all__ = [
    "Delay",
    "digits",
    "fewest_digits",
    "milliseconds",
    "milliseconds_until",
    "place_values",
    "roundest",
    "tolerated",
]

#: How long to wait: seconds as a number, or a timedelta.
Delay: TypeAlias = "float | Decimal | Rational | timedelta"


#: A float prints as at most 17 digits; no rounding, whatever the caller's own context is.
_EXACT: Final = Context(prec=50)


#: Nearer to a whole number than this part of it, a product of floats may stand on its wrong side.
_ROUNDED: Final = 1e-15


def milliseconds(delay: Delay) -> int:
    """Return a delay in milliseconds, rounded up: never early.

    A float means the decimal number that it prints as, so 1.1 is 1,100 ms and not 1,101.

    Args:
        delay: Seconds, as any real number, or a timedelta. May be negative.

    Raises:
        InvalidDelayType: Not a number and not a timedelta; also a bool, a string or a datetime.
        InvalidDelay: Not a number (NaN) or infinite.
    """
    if type(delay) is int:
        return delay * 1000
    if type(delay) is float and isfinite(delay):
        product = delay * 1000
        if isfinite(product) and abs(product - round(product)) > abs(product) * _ROUNDED:
            return ceil(product)
        return ceil(_EXACT.scaleb(Decimal(repr(delay)), 3))
    if isinstance(delay, timedelta):
        microseconds = (delay.days * 86_400 + delay.seconds) * 1_000_000 + delay.microseconds
        return -(-microseconds // 1000)
    if isinstance(delay, bool) or not isinstance(delay, Real | Decimal):
        raise InvalidDelayType(delay, "takes seconds as a number, or a timedelta")
    # A fraction is finite, and may be more than a float can hold.
    if not isinstance(delay, Rational) and not isfinite(delay):
        raise InvalidDelay(delay, "takes a finite number of seconds")
    if isinstance(delay, Decimal | Rational):
        return ceil(Fraction(delay) * 1000)
    return milliseconds(float(delay))


def tolerated(tolerance: Delay) -> int:
    """Return a tolerance in milliseconds, rounded down: never later than was said.

    Args:
        tolerance: Seconds, as any real number, or a timedelta; not negative.

    Raises:
        InvalidDelayType: Not a number and not a timedelta.
        InvalidDelay: Negative, not a number (NaN) or infinite.
    """
    try:
        if milliseconds(tolerance) < 0:
            raise InvalidDelay(tolerance, "takes a length of time that is not negative")
    except InvalidDelay as invalid:
        raise type(invalid)(tolerance, invalid.reason, "tolerance") from None
    negative: Any = -tolerance
    return -milliseconds(negative)


def milliseconds_until(instant: datetime, now: datetime) -> int:
    """Return the milliseconds from ``now`` to ``instant``, rounded up; negative when it is past.

    Args:
        instant: An aware datetime.
        now: An aware datetime.

    Raises:
        InvalidDelayType: ``instant`` is not a datetime.
        InvalidDelay: ``instant`` is naive, so that nobody can tell which instant it means.
    """
    if not isinstance(instant, datetime):
        raise InvalidDelayType(instant, "takes an aware datetime", "eta")
    if instant.utcoffset() is None:
        raise InvalidDelay(
            instant,
            "takes an aware datetime; a naive one names no instant. Use datetime.now(UTC), or set "
            "Celery's timezone to say what it means",
            "eta",
        )
    return milliseconds(instant - now)


def place_values(bases: Sequence[int]) -> tuple[int, ...]:
    """Return what one unit of each digit is worth, highest first.

    With the bases ``(24, 60, 60)``: ``(3600, 60, 1)``.
    """
    return _place_values(tuple(bases))


@cache
def _place_values(bases: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(bases[index + 1 :]) for index in range(len(bases)))


def roundest(lowest: int, highest: int, bases: Sequence[int]) -> int:
    """Return the number in a range that ends in the most zeros; the lowest of those.

    None in the range has fewer non-zero digits: it is the lowest number rounded up to a multiple of
    what one of the digits is worth, and the digit that is raised costs no more than the digits
    behind it that vanish.

    Args:
        lowest: The least that it may be.
        highest: The most that it may be.
        bases: The number of values that each digit can take, highest digit first.
    """
    places = place_values(bases)
    most = min(highest, places[0] * bases[0] - 1)
    for place in places:
        rounded = -(-lowest // place) * place
        if rounded <= most:
            return rounded
    return lowest


def fewest_digits(lowest: int, highest: int, bases: Sequence[int]) -> int:
    """Return the number in a range that has the fewest non-zero digits; the lowest of those.

    Takes what :func:`roundest` takes. A lower number of as many digits is one that becomes the
    roundest by raising a zero.
    """
    best = roundest(lowest, highest, bases)
    places = place_values(bases)
    for above, place in enumerate(places[1:]):
        number = -(-lowest // place) * place
        if number < best:
            if number // places[above] % bases[above]:
                break
            best = number
    return best


def digits(value: int, bases: Sequence[int]) -> tuple[int, ...]:
    """Write a number in a system of mixed bases, highest digit first.

    Args:
        value: From 0 to the product of the bases, less one.
        bases: The number of values that each digit can take, highest digit first.

    Raises:
        OverflowError: The number is negative or has more digits than there are bases.
    """
    rest = value
    reversed_digits = []
    for base in reversed(bases):
        rest, digit = divmod(rest, base)
        reversed_digits.append(digit)
    if rest:
        raise OverflowError(f"{value} does not fit in {len(bases)} digits of the bases {bases}")
    return tuple(reversed(reversed_digits))
