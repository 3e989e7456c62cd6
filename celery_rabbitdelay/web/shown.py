"""Texts that anybody may have written, and instants, as pages and JSON show them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, tzinfo
from fractions import Fraction
from typing import Final
from urllib.parse import quote

from celery_rabbitdelay.levels import wall_clock

#: Characters of a text on a page, and in JSON; longer ones are cut.
MOST_SHOWN, MOST_TOLD = 200, 10_000

#: Characters of an id in an address; browsers and servers take some thousands.
MOST_IN_ADDRESS: Final = 1_000


def printable(value: object, most: int = MOST_SHOWN) -> str:
    """Return a text in which nothing is hidden and nothing turns the direction of what follows.

    Control and format characters, among them those of bidirectional text, and halves of surrogate
    pairs stand as escapes.

    Args:
        value: The text.
        most: How many characters of it.
    """
    text = str(value)
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[:most]
    )
    return shown if len(text) <= most else f"{shown}… ({len(text):,} characters)"


def quoted(text: str) -> str:
    """Return a text as a part of an address, also half of a surrogate pair."""
    return quote(text, safe="", errors="surrogatepass")


def local(instant: datetime, zone: tzinfo) -> str:
    """Return an instant in a time zone, to the second."""
    return instant.astimezone(zone).strftime("%Y-%m-%d %H:%M:%S")


def left(instant: datetime) -> str:
    """Return how long it is until an instant, or since then, in its two largest units, or now."""
    seconds = round((instant - wall_clock.now()).total_seconds())
    if not seconds:
        return "now"
    return f"in {brief(seconds)}" if seconds > 0 else f"{brief(-seconds)} ago"


def brief(seconds: float) -> str:
    """Return a length of time in its two largest units, without the second one if that is 0."""
    rest, words = round(seconds), list[str]()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or words:
            words.append(f"{number:,} {unit}")
    return " ".join(each for each in words[:2] if not each.startswith("0 ")) or "0 s"


def fullness(messages: int) -> int:
    """Return how full a digit looks, from 0 (empty) to 9 (a hundred million or more)."""
    return min(len(str(messages)), 9) if messages else 0


def plain(value: object) -> object:
    """Return a value in values of JSON.

    Instants are written as in ISO 8601, lengths of time in seconds, named tuples as objects.
    """
    match value:
        case str():
            is_long = len(value) > MOST_TOLD
            return f"{value[:MOST_TOLD]}… ({len(value):,} characters)" if is_long else value
        case datetime():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Fraction():
            return float(value)
        case tuple() if hasattr(value, "_asdict"):
            return plain(value._asdict())
        case Mapping():
            return {str(plain(str(name))): plain(each) for name, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(each) for each in value]
        case None | bool() | int() | float():
            return value
    return plain(str(value))


def quoted_path(path: str) -> str:
    """Return a path as it stands in an address, never as the name of another server."""
    return quote(path, errors="surrogatepass").replace("//", "/%2F")
