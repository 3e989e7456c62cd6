"""Whether a task waited in the levels, told from what it saw."""

from __future__ import annotations

from typing import Any

from celery_rabbitdelay.levels import headers

#: Seconds that a delayed task may be late on a slow machine.
SLACK = 60


def assert_waited(seen: dict[str, Any], since: float, delay: float) -> None:
    """Assert that a task waited in the levels for ``delay`` seconds from ``since`` on."""
    assert headers.DUE in seen["headers"], "it did not wait in the levels"
    due = seen["headers"][headers.DUE] / 1000
    # The header has whole milliseconds, rounded down.
    assert since + delay - 0.001 <= due <= seen["at"]
    assert since + delay <= seen["at"] < since + delay + SLACK
    assert seen["eta"] is None


def assert_not_delayed(seen: dict[str, Any]) -> None:
    """Assert that a task had no delay, neither in the levels nor in the worker."""
    assert headers.DUE not in seen["headers"]
    assert seen["eta"] is None
