"""Times that come in from users, as values of the standard library.

Subclasses of datetime, date and timedelta (those of pendulum, pandas and freezegun, or an
application's own) override operators, comparisons, ``isoformat`` and pickling. So each is read
once, where it comes in, by the methods of the base class.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, timedelta
from typing import Any, Final

from celery_rabbitdelay.exceptions import InvalidDelay

MICROSECOND: Final = timedelta(microseconds=1)

_PLAIN: Final = frozenset((datetime, date, timedelta, int, float, str, type(None)))


def plain(given: Any, what: str) -> Any:
    """Return a datetime, a date or a timedelta as one of the standard library.

    Another value that has an ``isoformat``, such as one of arrow, is the datetime that this writes:
    so Celery takes an eta. All else is returned as it is. Nanoseconds are rounded up: never early.

    Args:
        given: The value.
        what: The name of the argument, for the error.

    Raises:
        InvalidDelay: The standard library has no such value: pandas' NaT, or the year 10000.
    """
    if type(given) in _PLAIN:
        return given
    made: Any
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
