"""Times as applications have them: of the standard library, of other libraries, of their own."""

from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Any, Final, NamedTuple

import arrow
import pandas as pd
import pendulum
from freezegun.api import FakeDate, FakeDatetime

#: What a class cannot do without; data descriptors such as ``year`` and ``days`` stay as well.
_KEPT: Final = {"__new__", "__getattribute__", "__init__", "__class__", "__repr__", "__doc__"}


def _that_raises(base: type) -> Any:
    """Return a subclass all of whose methods raise: operators, comparisons, pickling."""

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"{base.__name__}.{name} of the given value was called")

        return refuse

    named = {name for each in base.__mro__ for name in vars(each) if callable(vars(each)[name])}
    return type(f"Own{base.__name__}", (base,), {name: refusal(name) for name in named - _KEPT})


OwnDate, OwnDatetime, OwnTimedelta = map(_that_raises, (date, datetime, timedelta))


class Kind(NamedTuple):
    """How a library makes times.

    Attributes:
        at: Makes an instant from one of the standard library.
        length: Makes a length of time, likewise.
        day: Makes a date, likewise.
    """

    at: Callable[[datetime], Any]
    length: Callable[[timedelta], Any]
    day: Callable[[date], Any]


def _fields(instant: datetime) -> tuple[Any, ...]:
    return (*instant.timetuple()[:6], instant.microsecond, instant.tzinfo)


_EPOCH: Final = pendulum.datetime(1970, 1, 1)

PLAIN: Final = Kind(lambda instant: instant, lambda length: length, lambda day: day)

KINDS: Final[dict[str, Kind]] = {
    "own": Kind(
        lambda instant: OwnDatetime(*_fields(instant)),
        lambda length: OwnTimedelta(length.days, length.seconds, length.microseconds),
        lambda day: OwnDate(day.year, day.month, day.day),
    ),
    "pendulum": Kind(
        pendulum.instance,
        lambda length: pendulum.duration(seconds=length.total_seconds()),
        lambda day: pendulum.date(day.year, day.month, day.day),
    ),
    "pendulum's interval": Kind(
        pendulum.instance,
        lambda length: pendulum.interval(_EPOCH, _EPOCH + length),
        lambda day: pendulum.datetime(day.year, day.month, day.day),
    ),
    "pandas": Kind(pd.Timestamp, pd.Timedelta, pd.Timestamp),
    "freezegun": Kind(
        lambda instant: FakeDatetime(*_fields(instant)),
        lambda length: length,
        lambda day: FakeDate(day.year, day.month, day.day),
    ),
    "arrow": Kind(arrow.get, lambda length: length, lambda day: day),
}
