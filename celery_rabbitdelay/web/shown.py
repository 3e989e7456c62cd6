"""Format untrusted strings and other values for pages and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Final
from urllib.parse import quote

#: The maximum length of a string on a page, and in JSON; longer strings are cut.
MOST_SHOWN, MOST_TOLD = 200, 10_000

#: The maximum length of an id in an address; browsers and servers accept some thousand characters.
MOST_IN_ADDRESS: Final = 1_000


def printable(value: object, most: int = MOST_SHOWN) -> str:
    """Escape unprintable characters, so that a string cannot hide or reorder what a reader sees.

    These are control and format characters, including bidirectional controls, and lone surrogates.

    Args:
        value: The text.
        most: The maximum number of characters to keep.
    """
    text = str(value)
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode()
        for each in text[:most]
    )
    return shown if len(text) <= most else f"{shown}… ({len(text):,} characters)"


def quoted(text: str) -> str:
    """Quote a string for an address, including lone surrogates."""
    return quote(text, safe="", errors="surrogatepass")


def fullness(messages: int) -> int:
    """Return the shade of a digit queue's cell, from 0 (empty) to 9 (100 million or more)."""
    return min(len(str(messages)), 9) if messages else 0


def plain(value: object) -> object:
    """Convert a value for JSON.

    Instants become ISO 8601 strings, lengths of time seconds, named tuples objects.
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
    """Quote a path for an address; also quote ``//``, which could name another server."""
    return quote(path, errors="surrogatepass").replace("//", "/%2F")
