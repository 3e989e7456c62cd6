"""The verdicts of the chaos scenarios notice what is lost, early, twice, late or overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.instants import EMPTY, Edit, Instants, Planned
from tests.chaos.ledger import Ledger, Sent, Start, Trouble
from tests.chaos.verdict import REDELIVERED, RESOLUTION_MS, judge

#: A task that was confirmed, sent at 1 s and due at 6 s.
A = Sent("a", "sound", 6000.0, 1000.0, "confirmed")
B = replace(A, id="b")
RAISED = replace(A, outcome="raised", error="E", may_have_arrived=False)


def start(identity: str = "a", late_ms: float = 10.0, **more: Any) -> Start:
    return Start(identity, "work", 6000.0 + late_ms, **more)


LIMIT = {"sound": 2.0}
UNDELIVERABLE = {"a": ["chaos.undeliverable"]}


@pytest.mark.parametrize(
    ("tasks", "starts", "found", "limits", "complaints"),
    [
        ([A], [start()], {}, LIMIT, []),
        ([A, B], [start("a")], {}, {}, ["1 lost"]),
        ([A], [], UNDELIVERABLE, {}, ["1 not started, in chaos.undeliverable"]),
        ([RAISED], [], {}, {}, []),
        ([RAISED], [start()], {}, {}, ["1 arrived although E said that none can have"]),
        ([A], [start(late_ms=-RESOLUTION_MS)], {}, LIMIT, []),
        # The first start counts, whatever the order of the notes.
        (
            [A],
            [start(redelivered=True), start(late_ms=-900)],
            {},
            {},
            ["1 early, by up to 0.900 s"],
        ),
        ([A], [start(), start(late_ms=20)], {}, {}, ["1 copies without a cause"]),
        ([A], [start(), start(late_ms=20, redelivered=True)], {}, {}, []),
        (
            *([A, B], [start("a"), start("b", late_ms=2500)], {}, LIMIT),
            ["sound: 1 of 2 later than 2 s, up to 2.5 s"],
        ),
        ([A], [start(), start("b")], {}, {}, ["b started, but nobody has sent it"]),
    ],
)
def test_what_is_wrong_with_tasks_is_said(
    tasks: Any, starts: Any, found: Any, limits: Any, complaints: list[str]
) -> None:
    assert judge(Ledger.of(tasks, starts), found, limits).complaints == complaints


def test_a_trouble_explains_only_a_copy_that_was_on_its_way_meanwhile() -> None:
    twice = [start(), start(late_ms=20)]
    for begin_ms, is_cause in ((2000.0, True), (900_000.0, False)):
        killed = Trouble("node 1 killed", begin_ms, begin_ms + 1000)
        (copies,) = judge(Ledger.of([A], twice, [killed])).copies
        assert copies.endswith("node 1 killed") == is_cause
        assert (copies == "no cause") != is_cause
    again = [start(), start(late_ms=20, redelivered=True)]
    assert judge(Ledger.of([A], again)).copies == {REDELIVERED: 1}
    early = Ledger.of([A], [start(late_ms=-900)])
    assert judge(early, tolerated_early=1.0).complaints == []


def ran(second: int, late: float = 0.1, revision: int = 0, **more: Any) -> Start:
    """An instant of a schedule that has one every ten seconds, at 100, 110, 120 and 130 s."""
    where = {"args": ("work", revision), "taken_from": "work", **more}
    return Start(f"s:{second * 1000:015d}:7", "work", (second + late) * 1000, **where)


ALL = [ran(second) for second in (100, 110, 120, 130)]
BUT_120 = [*ALL[:2], ALL[3]]
KILLED, LOST = Trouble("worker killed", 105_000.0, 105_100.0), Trouble(EMPTY, 118_000.0, 121_000.0)
EDITED = [Edit("s", 0, 50_000.0), Edit("s", 1, 108_000.0)]


@pytest.mark.parametrize(
    ("starts", "troubles", "how", "complaint"),
    [
        (ALL, [], {}, None),
        (BUT_120, [], {}, "1 instants did not run"),
        (BUT_120, [], {"catch_up": 5.0}, "1 instants were left out without a reason"),
        ([*ALL, ran(120, 4)], [], {}, "1 ran twice without a cause"),
        ([*BUT_120, ran(120, 220)], [], {}, "1 gaps in the chain of s"),
        ([*BUT_120, ran(120, taken_from="other")], [], {}, "1 runs in the queue of another"),
        ([*BUT_120, ran(120, 10)], [], {"overlap": "skip", "lasts": 0.2}, "1 runs overlapped"),
        (
            *([ran(100), ran(110, 1), ran(120, 0.1, 1), ran(130)], [], {"edits": EDITED}),
            "1 runs had arguments that were replaced before",
        ),
        # A cause is no fault.
        ([*ALL, ran(120, 4, redelivered=True)], [], {}, None),
        ([ran(100), ran(110, 11), ran(130)], [], {"catch_up": "last"}, None),
        (BUT_120, [LOST], {"catch_up": "last"}, None),
        (BUT_120, [KILLED], {"catch_up": 5.0}, None),
        ([*ALL, ran(140)], [], {"is_open": True}, None),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(
    starts: Sequence[Start], troubles: Any, how: dict[str, Any], complaint: str | None
) -> None:
    how = {"catch_up": "all", "overlap": "allow", "lasts": 0.0, "is_open": False, **how}
    edits = how.pop("edits", ())
    planned = Planned("s", "group", "work", 10, begin_ms=100_000, end_ms=130_000, **how)
    found = Instants([planned], edits, starts, troubles, 0.0, 130_000).judge()
    assert [each[: len(complaint or "")] for each in found.complaints] == [complaint] * bool(
        complaint
    )
