"""What the chaos scenario of schedules finds wrong: instants left out, twice, overlapped, old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.chaos.instants import BACK, EMPTY, Edit, Found, Instants, Planned
from tests.chaos.ledger import Start, Trouble

#: One every ten seconds, at 100, 110, 120 and 130 s; the clocks agree.
BEGIN, END, EVERY = 100_000, 130_000, 10

KILLED = Trouble("worker killed", 105_000.0, 105_100.0)


def judged(
    starts: Sequence[Start], troubles: Sequence[Trouble] = (), edits: Any = (), **how: Any
) -> Found:
    plan = {"catch_up": "all", "overlap": "allow", "lasts": 0.0, "is_open": False, **how}
    planned = Planned("s", "group", "work", EVERY, begin_ms=BEGIN, end_ms=END, **plan)
    return Instants([planned], edits, starts, troubles, 0.0, END).judge()


def ran(second: int, late: float = 0.1, revision: int = 0, **more: Any) -> Start:
    where = {"args": ("work", revision), "taken_from": "work", **more}
    return Start(f"s:{second * 1000:015d}:7", "work", (second + late) * 1000, **where)


ALL = [ran(second) for second in (100, 110, 120, 130)]
BUT_120 = [each for each in ALL if ":000000000120000:" not in each.id]


def test_nothing_is_wrong_if_each_instant_runs_once() -> None:
    assert judged(ALL).complaints == []


@pytest.mark.parametrize(
    ("starts", "how", "complaint"),
    [
        (BUT_120, {}, "1 instants did not run"),
        (BUT_120, {"catch_up": "last"}, "1 instants were left out without a reason"),
        (BUT_120, {"catch_up": 5.0}, "1 instants were left out without a reason"),
        ([*ALL, ran(120, 4)], {}, "1 ran twice without a cause"),
        ([*ALL, ran(125)], {}, "1 instants of s were never due"),
        ([*ALL, ran(140)], {}, "1 instants of s were never due"),
        ([*BUT_120, ran(120, 220)], {}, "1 gaps in the chain of s"),
        ([*BUT_120, ran(120, taken_from="other")], {}, "1 runs in the queue of another"),
        ([*BUT_120, ran(120, 10)], {"overlap": "skip", "lasts": 0.2}, "1 runs overlapped"),
    ],
)
def test_it_is_said_what_is_wrong(starts: Any, how: Any, complaint: str) -> None:
    (found,) = judged(starts, **how).complaints
    assert found.startswith(complaint)


@pytest.mark.parametrize(
    ("starts", "troubles", "how"),
    [
        ([*ALL, ran(120, 4, redelivered=True)], [], {}),
        ([*ALL, ran(120, 4)], [Trouble(BACK, 121_000.0, 122_000.0)], {}),
        ([ran(100), ran(110, 11), ran(130)], [], {"catch_up": "last"}),
        (BUT_120, [Trouble(EMPTY, 118_000.0, 121_000.0)], {"catch_up": "last"}),
        (BUT_120, [KILLED], {"catch_up": 5.0}),
        (BUT_120, [KILLED], {"catch_up": "last", "overlap": "skip", "lasts": 0.2}),
        ([*ALL, ran(140)], [], {"is_open": True}),
    ],
)
def test_a_cause_is_no_fault(starts: Any, troubles: Any, how: Any) -> None:
    assert judged(starts, troubles, **how).complaints == []


def test_what_redis_has_lost_is_replaced_by_an_edit() -> None:
    lost, edit = Trouble(EMPTY, 118_000.0, 121_000.0), Edit("s", 1, 125_000.0)
    starts = [ran(100), ran(110), ran(130, revision=1)]
    assert judged(starts, [lost], [edit]).complaints == []
    assert judged(starts, [], [edit]).complaints != []


def test_arguments_that_were_replaced_run_only_if_that_was_decided_before() -> None:
    starts = [ran(100), ran(110, 1), ran(120, 0.1, 1), ran(130)]
    edits = [Edit("s", 0, 50_000.0), Edit("s", 1, 108_000.0)]
    (found,) = judged(starts, edits=edits).complaints
    assert found.startswith("1 runs had arguments that were replaced before")
    assert "000130000" in found
