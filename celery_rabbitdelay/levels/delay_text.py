"""Delays as text: parses ``90``, ``3d7h45m30s`` and ``1:30:00``; writes ``3 days 7:45:30``."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

from celery_rabbitdelay.exceptions import InvalidDelay

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
_WITH_UNITS: Final = re.compile(rf"(?:{_NUMBER}\s*(?:ms|[wdhms])\s*)+")
_ONE_UNIT: Final = re.compile(rf"({_NUMBER})\s*(ms|[wdhms])")
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
    if _WITH_UNITS.fullmatch(bare):
        parts = _ONE_UNIT.findall(bare)
        places = [list(_UNITS).index(unit) for _, unit in parts]
        if places == sorted(set(places)):
            return sum(
                (Fraction(Decimal(number)) * _UNITS[unit] / 1000 for number, unit in parts),
                start=Fraction(0),
            )
    raise InvalidDelay(text, TAKES, what)


def written(length_ms: int) -> str:
    """Return milliseconds as days and a time of day: ``3 days 7:45:30``, ``0:00:00.1``."""
    days, rest = divmod(length_ms, _UNITS["d"])
    hours, rest = divmod(rest, _UNITS["h"])
    minutes, rest = divmod(rest, _UNITS["m"])
    seconds, rest = divmod(rest, 1000)
    fraction = f".{rest:03}".rstrip("0") if rest else ""
    time_of_day = f"{hours}:{minutes:02}:{seconds:02}{fraction}"
    if not days:
        return time_of_day
    whole = f"{days:,} day{'s' if days > 1 else ''}"
    return whole if not length_ms % _UNITS["d"] else f"{whole} {time_of_day}"
