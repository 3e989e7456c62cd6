"""What the status computes from the depths of the queues, and how it shows them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from celery_rabbitdelay.command.status import status_lines
from celery_rabbitdelay.kombu import Layout, Topology, clock, custom
from celery_rabbitdelay.operations.status import Status, _printable, due_within, rates_between
from celery_rabbitdelay.publishing.backlog import Backlog
from celery_rabbitdelay.publishing.declaration import Counts

LAYOUT = custom([("hours", 6, 3600), ("minutes", 60, 60)])


def backlog(topology: Topology, waiting: dict[str, dict[int, int]], **others: int) -> Backlog:
    zero = 0 if topology.layout.zeros == "queue" else 1
    digits = {
        level.name: {
            digit: waiting.get(level.name, {}).get(digit, 0) for digit in range(zero, level.base)
        }
        for level in topology.layout.levels
    }
    levels = {name: sum(counts.values()) for name, counts in digits.items()}
    return Backlog(levels, digits, {name: Counts(n, 0) for name, n in others.items()}, ())


@pytest.mark.parametrize(
    ("layout", "waiting", "bound"),
    [
        (LAYOUT, {}, None),
        # Three hours, and at most 59 minutes behind them.
        (LAYOUT, {"hours.x1": {3: 1}}, timedelta(hours=3, minutes=59)),
        (LAYOUT, {"hours.x1": {3: 1, 1: 1}}, timedelta(hours=1, minutes=59)),
        (LAYOUT, {"hours.x1": {1: 1}, "minutes.x1": {5: 9}}, timedelta(minutes=5)),
        (clock(), {"days.x1000": {1: 1}}, timedelta(days=2000) - timedelta(milliseconds=100)),
    ],
)
def test_the_shortest_long_wait_counts(
    layout: Layout, waiting: Any, bound: timedelta | None
) -> None:
    topology = Topology(layout=layout)
    found = due_within(topology, backlog(topology, waiting))
    assert found == (None if bound is None else bound // timedelta(milliseconds=1))


def test_what_meditates_is_due_after_the_loop_and_the_levels_at_the_latest() -> None:
    topology = Topology(layout=LAYOUT)
    capacity_ms = LAYOUT.capacity_ms
    found = due_within(topology, backlog(topology, {}, meditation=1, undeliverable=5))
    assert found == 2 * capacity_ms


def look(
    taken_at: float, waiting: dict[str, dict[int, int]], received: dict[str, int], **others: int
) -> Status:
    workers = {name: {"tasks": {"received": n, "latest": 0.0}} for name, n in received.items()}
    counts = backlog(Topology(layout=LAYOUT), waiting, **others)
    return Status(taken_at, counts, workers)


def test_rates_are_what_changed_between_two_looks_in_a_second() -> None:
    before = look(10.0, {"hours.x1": {1: 50}}, {"a": 100, "b": 5, "gone": 9}, meditation=4)
    after = look(12.0, {"hours.x1": {1: 40}, "minutes.x1": {7: 3}}, {"a": 120, "b": 0, "new": 8})
    assert rates_between(before, after) == {"hours.x1": -5.0, "minutes.x1": 1.5, "tasks": 10.0}

    rates = rates_between(before, after)
    lines = list(status_lines(Topology(layout=LAYOUT), after, with_digits=True, rates=rates))
    assert f"    {'hours.1':14} {40:10,}" in lines
    assert not any(line.strip().startswith("hours.2 ") for line in lines)
    assert f"  {'hours.x1':16} {40:10,} waiting       -5.0/s" in lines
    assert "delayed tasks that workers received: 10.0/s" in lines


def test_many_reasons_are_shown_in_part_and_none_can_write_to_the_terminal() -> None:
    reasons = {f"reason {number}": 2 for number in range(30)}
    found = look(0.0, {}, {})._replace(reasons=reasons)
    lines = list(status_lines(Topology(layout=LAYOUT), found))
    assert "undeliverable, 60 messages read:" in lines
    assert "  and 10 other reasons; see --json" in lines
    assert _printable("a\x1b[2Jb\n") == "a?[2Jb?"
    assert len(_printable("x" * 5000)) < 300
