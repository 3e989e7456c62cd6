"""A layout as the value of ``rabbitdelay_layout``; the lowest levels of a layout as one of its own.

Two layouts of the same levels and different names have different fingerprints, so the setting has
to name the layout as it was named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from celery_rabbitdelay.exceptions import InvalidLayout
from celery_rabbitdelay.levels.delay import Delay, milliseconds
from celery_rabbitdelay.levels.layout import Layout, binary, clock, custom, geometric

_LAYOUTS: Final[Mapping[str, Callable[..., Layout]]] = {
    "clock": clock,
    "binary": binary,
    "geometric": geometric,
    "custom": custom,
}


def as_setting(layout: Layout) -> dict[str, Any] | None:
    """Return the value of ``rabbitdelay_layout`` that makes a layout, as JSON can express it.

    Returns:
        A mapping; None if only Python can make this layout.
    """
    if layout.name not in _LAYOUTS:
        return None
    options = _options(layout)
    try:
        found = _LAYOUTS[layout.name](**options)
    except (InvalidLayout, TypeError):
        return None
    return {"name": layout.name, **options} if found == layout else None


def cut(layout: Layout, max_delay: Delay) -> Layout:
    """Return the fewest of the lowest levels of a layout that hold a delay.

    The result is another layout with other routing keys: applications need it as their setting
    ``rabbitdelay_layout``, see :func:`as_setting`.

    Args:
        layout: The layout.
        max_delay: The longest delay that the levels have to hold: seconds, or a timedelta.

    Raises:
        DelayTooLong: The whole layout does not hold it.
        InvalidDelay: It is invalid.
    """
    max_ms = milliseconds(max_delay)
    layout.check_capacity(max_ms)
    for first in range(len(layout.levels) - 1, 0, -1):
        lowest = custom(_levels(layout, first), layout.zeros)
        if lowest.capacity_ms >= max_ms:
            return lowest
    return layout


def _options(layout: Layout) -> dict[str, Any]:
    tick = _seconds(layout.tick_ms)
    match layout.name:
        case "clock":
            options: dict[str, Any] = {"tick": tick}
        case "binary":
            options = {"tick": tick, "levels": len(layout.levels)}
        case "geometric":
            options = {"tick": tick, "factor": layout.bases[0], "levels": len(layout.levels)}
        case _:
            options = {"levels": [list(level) for level in _levels(layout)]}
    return {**options, "zeros": layout.zeros}


def _levels(layout: Layout, first: int = 0) -> list[tuple[str, int, float]]:
    return [(each.unit, each.base, _seconds(each.place_ms)) for each in layout.levels[first:]]


def _seconds(length_ms: int) -> float:
    return length_ms // 1000 if length_ms % 1000 == 0 else length_ms / 1000
