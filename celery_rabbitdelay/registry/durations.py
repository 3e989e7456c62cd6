"""Format lengths of time for sentences: ``2 h 5 min``, ``in 3 d``, ``5 s ago``."""

from __future__ import annotations

from datetime import datetime

from celery_rabbitdelay.levels import wall_clock


def left(instant: datetime) -> str:
    """Format the time until or since ``instant``: ``in 2 h 5 min``, ``3 s ago``, ``now``."""
    seconds = round((instant - wall_clock.now()).total_seconds())
    if not seconds:
        return "now"
    return f"in {brief(seconds)}" if seconds > 0 else f"{brief(-seconds)} ago"


def brief(seconds: float) -> str:
    """Format a length of time in its two largest units, without a zero: ``2 h 5 min``, ``3 d``."""
    rest, words = max(round(seconds), 0), list[str]()  # clocks may differ
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or words:
            words.append(f"{number:,} {unit}")
    return " ".join(each for each in words[:2] if not each.startswith("0 ")) or "0 s"
