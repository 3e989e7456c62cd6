"""The verdict of the chaos scenarios: it notices what is lost, early, twice or late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.ledger import Ledger, Sent, Start, Trouble
from tests.chaos.verdict import REDELIVERED, RESOLUTION_MS, judge

#: Milliseconds between the call and the due time.
DELAY = 5000.0


def sent(identity: str = "a", **changed: Any) -> Sent:
    """A task that was confirmed, sent at 1 s and due at 6 s."""
    due_ms = 1000.0 + DELAY
    confirmed = Sent(identity, "sound", due_ms, 1000.0, "confirmed")
    return replace(confirmed, **changed)


def start(identity: str = "a", late_ms: float = 10.0, **more: Any) -> Start:
    return Start(identity, "work", 1000.0 + DELAY + late_ms, **more)


LIMIT = {"sound": 2.0}
UNDELIVERABLE = {"a": ["chaos.undeliverable"]}
RAISED = sent(outcome="raised", error="E", may_have_arrived=False)


@pytest.mark.parametrize(
    ("tasks", "starts", "found", "limits", "complaints"),
    [
        ([sent()], [start()], {}, LIMIT, []),
        ([sent("a"), sent("b")], [start("a")], {}, {}, ["1 lost"]),
        ([sent()], [], UNDELIVERABLE, {}, ["1 not started, in chaos.undeliverable"]),
        ([RAISED], [], {}, {}, []),
        ([sent(outcome="unknown")], [], {}, {}, []),
        ([RAISED], [start()], {}, {}, ["1 arrived although E said that none can have"]),
        ([replace(RAISED, may_have_arrived=True)], [start()], {}, {}, []),
        ([sent()], [start(late_ms=-RESOLUTION_MS)], {}, LIMIT, []),
        ([sent()], [start(), start(late_ms=20)], {}, {}, ["1 copies without a cause"]),
        (
            *([sent("a"), sent("b")], [start("a"), start("b", late_ms=2500)], {}, LIMIT),
            ["sound: 1 of 2 later than 2 s, up to 2.5 s"],
        ),
        (
            *([sent()], [], UNDELIVERABLE, LIMIT),
            ["1 not started, in chaos.undeliverable", "sound: none has started"],
        ),
        ([sent()], [start(), start("b")], {}, {}, ["b started, but nobody has sent it"]),
        ([], [], {}, {}, ["nothing was sent"]),
    ],
)
def test_what_is_wrong_is_said(
    tasks: Any, starts: Any, found: Any, limits: Any, complaints: list[str]
) -> None:
    assert judge(Ledger.of(tasks, starts), found, limits).complaints == complaints


def test_the_verdict_counts_what_it_complains_of() -> None:
    verdict = judge(
        Ledger.of([RAISED, sent("b"), sent("c", group="late")], [start(), start("c")]), {}
    )
    assert (verdict.lost, verdict.errors, verdict.arrived_nevertheless) == (
        ["b"],
        {"E": 1},
        {"E": 1},
    )
    assert {group: late.tasks for group, late in verdict.late.items()} == {"sound": 1, "late": 1}
    assert verdict.late["late"].max == pytest.approx(0.01)
    assert judge(Ledger.of([sent()], []), UNDELIVERABLE).where == {"chaos.undeliverable": 1}


@given(early_ms=st.floats(min_value=RESOLUTION_MS + 0.01, max_value=DELAY))
def test_a_start_before_the_due_time_is_early(early_ms: float) -> None:
    verdict = judge(Ledger.of([sent()], [start(late_ms=-early_ms)]))
    assert verdict.early == {"a": pytest.approx(early_ms / 1000)}
    assert len(verdict.complaints) == 1


def test_what_is_tolerated_is_told_and_is_no_complaint() -> None:
    ledger = Ledger.of([sent()], [start(late_ms=-900)])
    assert judge(ledger, tolerated_early=1.0).early == {"a": pytest.approx(0.9)}
    assert judge(ledger, tolerated_early=1.0).complaints == []
    assert judge(ledger, tolerated_early=0.8).complaints == ["1 early, by up to 0.900 s"]


def test_the_first_start_counts_whatever_the_order_of_the_notes() -> None:
    ledger = Ledger.of([sent()], [start(late_ms=50, redelivered=True), start(late_ms=-50)])
    assert judge(ledger).early == {"a": pytest.approx(0.05)}


def test_a_second_start_of_a_message_that_was_redelivered_has_a_cause() -> None:
    verdict = judge(Ledger.of([sent()], [start(), start(late_ms=20, redelivered=True)]))
    assert verdict.copies == {REDELIVERED: 1}
    assert verdict.complaints == []


def test_a_message_of_a_task_that_has_started_is_a_copy() -> None:
    found = {"a": ["chaos.undeliverable", "chaos.undeliverable"]}
    verdict = judge(Ledger.of([sent()], [start()]), found)
    assert verdict.copies == {"started, and in chaos.undeliverable besides": 2}
    assert verdict.where == {}


def test_a_trouble_explains_a_copy_that_was_on_its_way_meanwhile() -> None:
    killed = Trouble("node 1 killed", 2000.0, 3000.0)
    verdict = judge(Ledger.of([sent()], [start(), start(late_ms=20)], [killed]))
    assert [each.endswith("node 1 killed") for each in verdict.copies] == [True]
    assert verdict.complaints == []


def test_a_trouble_long_after_explains_nothing() -> None:
    killed = Trouble("node 1 killed", 900_000.0, 901_000.0)
    ledger = Ledger.of([sent()], [start(), start(late_ms=20)], [killed])
    assert judge(ledger).copies == {"no cause": 1}
