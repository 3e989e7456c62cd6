"""The ledger of the chaos scenarios, and its checker, which says what is lost, early or twice."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.checker import (
    ALONE,
    AROUND,
    FORGOTTEN,
    FORMER,
    NO_CAUSE,
    REDELIVERED,
    RESOLUTION_MS,
    SENT_AGAIN,
    judge,
    lines_of,
    missing,
    story_of,
)
from tests.chaos.faults import FAULTS, plan
from tests.chaos.ledger import Decision, Ledger, Notes, Sent, Start, Trouble

#: A task that was confirmed, sent at 1 s and due at 6 s; and one whose call raised.
A = Sent("a", "sound", 6000.0, 1000.0, 1010.0, "confirmed")
B = replace(A, id="b")
RAISED = replace(A, outcome="raised", error="E", may_have_arrived=False)

LIMIT = {"sound": 2.0}
UNDELIVERABLE = {"a": ["chaos.undeliverable"]}


def start(identity: str = "a", late_ms: float = 10.0, **more: Any) -> Start:
    return Start(identity, A.due_ms + late_ms, **more)


def ledger(
    sent: Iterable[Sent],
    starts: Iterable[Start] = (),
    troubles: Iterable[Trouble] = (),
    decisions: Iterable[Decision] = (),
    places: Any = {},  # noqa: B006
) -> Any:
    made = Ledger(troubles=[*troubles])
    for kind, notes in (("sent", sent), ("start", starts), ("decision", decisions)):
        for each in notes:
            made.add(kind, vars(each))
    made.places.update(places)
    return made


def decision(what: str, outcome: str | None = "DONE", of: str = "a", **more: Any) -> Decision:
    return Decision(of, what, 2000.0, 2010.0, outcome, **more)


@pytest.mark.parametrize(
    ("sent", "starts", "found", "limits", "complaints"),
    [
        ([A], [start()], {}, LIMIT, []),
        ([A, B], [start()], {}, {}, ["1 lost"]),
        ([A], [], UNDELIVERABLE, {}, ["1 not started, in chaos.undeliverable"]),
        ([RAISED], [], {}, {}, []),
        ([replace(A, outcome="unknown")], [], {}, {}, []),
        ([RAISED], [start()], {}, {}, ["1 arrived although E said that none can have"]),
        ([replace(RAISED, may_have_arrived=True)], [start()], {}, {}, []),
        ([A], [start(late_ms=-RESOLUTION_MS)], {}, LIMIT, []),
        ([A], [start(late_ms=50), start(late_ms=-50)], {}, {}, ["1 early", "1 copies without"]),
        ([A, B], [start(), start("b", 2500)], {}, LIMIT, ["sound: 1 of 2 later than 2 s"]),
        ([A], [], {}, LIMIT, ["1 lost", "sound: none has started"]),
        ([A], [start(), start("b")], {}, {}, ["b started, but nobody has sent it"]),
        ([], [], {}, {}, ["nothing was sent"]),
    ],
)
def test_what_is_wrong_is_said(
    sent: Any, starts: Any, found: Any, limits: Any, complaints: list[str]
) -> None:
    said = judge(ledger(sent, starts, places=found), limits).complaints
    assert len(said) == len(complaints)
    assert all(map(str.startswith, said, complaints)), said


def test_the_verdict_counts_what_the_table_shows() -> None:
    late = replace(A, id="c", group="late")
    verdict = judge(ledger([RAISED, B, late], [start(), start("c")]))
    assert verdict.lost == ["b"]
    assert verdict.errors == {"E": 1, "E (arrived)": 1}
    assert verdict.late == {"sound": [0.01], "late": [0.01]}
    assert judge(ledger([A], places=UNDELIVERABLE)).where == {"chaos.undeliverable": 1}


@given(early_ms=st.floats(min_value=RESOLUTION_MS + 0.01, max_value=5000))
def test_a_start_before_the_due_time_is_early_and_may_be_tolerated(early_ms: float) -> None:
    early = ledger([A], [start(late_ms=-early_ms)])
    assert judge(early).early == {"a": pytest.approx(early_ms / 1000)}
    assert len(judge(early).complaints) == 1
    assert judge(early, tolerated_early=5.0).complaints == []
    policy = [Trouble("policy", 0.0, 3000.0, early_ms=early_ms)]
    tolerated = judge(ledger([A], [start(late_ms=-early_ms + 1)], policy))
    assert (tolerated.complaints, tolerated.tolerated) == ([], int(early_ms > 2))
    by_clock = judge(ledger([A], [start(late_ms=-early_ms, ahead_ms=early_ms + 1)]))
    assert (by_clock.complaints, by_clock.tolerated) == ([], 1)


KILLED = Trouble("node killed", 2000.0, 3000.0)
LATER = replace(KILLED, begin_ms=900_000.0, end_ms=901_000.0)
RESTORED = Trouble("Redis restored", 5000.0, 6500.0, copies=False, forgets_ms=5000.0)


@pytest.mark.parametrize(
    ("sent", "again", "trouble", "cause"),
    [
        (A, {"redelivered": True}, [], REDELIVERED),
        (A, {}, [KILLED], f"{AROUND}node killed"),
        (A, {}, [replace(KILLED, copies=False)], NO_CAUSE),
        (A, {}, [LATER], NO_CAUSE),
        (replace(A, times=2), {}, [], SENT_AGAIN),
        (replace(A, times=2, once=True), {}, [KILLED], NO_CAUSE),
        (replace(A, once=True), {"redelivered": True}, [], REDELIVERED),
        (replace(A, once=True), {"former": True}, [KILLED], FORMER),
        (replace(A, once=True), {}, [RESTORED], FORGOTTEN),
        (A, {}, [RESTORED], NO_CAUSE),
    ],
)
def test_a_second_start_needs_a_cause(sent: Sent, again: Any, trouble: Any, cause: str) -> None:
    verdict = judge(ledger([replace(sent)], [start(), start(late_ms=20, **again)], trouble))
    assert verdict.copies == {cause: 1}
    assert bool(verdict.complaints) == (cause == NO_CAUSE)


JOB = replace(A, job="j")
OPEN, ABORT = replace(decision("open", of="j"), began_ms=1990.0), decision("abort", of="j")
NEWER = Sent("b", "sound", 9000.0, 3000.0, 3010.0, "confirmed", key="k")
OLDER = replace(A, key="k")


@pytest.mark.parametrize(
    ("sent", "decisions", "troubles", "ends"),
    [
        ([A], [decision("cancel")], [], "not"),
        ([A], [decision("cancel", "RELEASED")], [], "may"),
        ([A], [decision("cancel", None)], [], "may"),
        ([A], [decision("cancel")], [replace(RESTORED, forgets_ms=2005.0)], "may"),
        ([A], [decision("cancel")], [replace(RESTORED, forgets_ms=3000.0)], "not"),
        ([A], [decision("postpone", due_ms=9000.0)], [], "runs"),
        ([JOB], [OPEN], [], "not"),
        ([JOB], [OPEN, decision("commit", of="j")], [], "runs"),
        ([JOB], [OPEN, decision("commit", "RegistryUnavailable", "j")], [], "may"),
        ([JOB], [OPEN, decision("abort", of="j")], [], "not"),
        ([JOB], [OPEN, decision("abort", of="j")], [replace(RESTORED, forgets_ms=0.0)], "may"),
        ([JOB], [OPEN, replace(ABORT, began_ms=5500.0, ended_ms=5510.0)], [RESTORED], "not"),
        ([OLDER, NEWER], [], [], "not"),
        ([OLDER, replace(NEWER, ended_ms=7000.0)], [], [], "may"),
        ([OLDER, replace(NEWER, outcome="unknown")], [], [], "may"),
        ([OLDER, replace(NEWER, outcome="raised", may_have_arrived=False)], [], [], "runs"),
        ([OLDER, NEWER], [], [Trouble("Redis killed", 3000.0, 4000.0, registry=True)], "may"),
        ([replace(A, after=["x"]), Sent("x", "sound", 0.0, 0.0)], [], [], "not"),
    ],
)
def test_a_decision_says_whether_a_task_runs(
    sent: Any, decisions: Any, troubles: Any, ends: str
) -> None:
    def noted(*starts: Start) -> Any:
        return ledger(map(replace, sent), starts, troubles, decisions)

    # 50 s later, whatever was postponed.
    complaints = judge(noted(start(late_ms=50_000), start("b", 60_000))).complaints
    assert any("decision" in each or "early" in each for each in complaints) == (ends == "not")
    assert ("a" in missing(noted())) == (ends == "runs")
    assert ("a" in judge(noted()).lost) == (ends == "runs")
    assert ("a: sound, lost" in judge(noted()).examples) == (ends == "runs")
    assert len(story_of(noted(start()), "a")) > 2


def test_a_postponed_task_is_due_at_its_new_time_and_not_before() -> None:
    later, sooner = (decision("postpone", due_ms=due_ms) for due_ms in (8000.0, 3000.0))
    starts = [Start("a", 6500.0)]
    assert judge(ledger([replace(A)], starts, decisions=[later])).early == {"a": 1.5}
    assert judge(ledger([replace(A)], starts, decisions=[sooner])).late == {"sound": [3.5]}
    unsure = judge(ledger([replace(A)], starts, decisions=[replace(later, outcome="Error")]))
    assert (unsure.early, unsure.late) == ({}, {"sound": [-1.5]})


def test_the_body_of_a_chord_is_due_after_its_header() -> None:
    body = replace(A, id="body", after=["a"], after_ms=2000.0)
    assert judge(ledger([replace(A), body], [start(), Start("body", 7000.0)])).early
    late = judge(ledger([replace(A), body], [start(), Start("body", 8510.0)])).late
    assert late == {"sound": [0.01, 0.5]}
    for refuses, lost in ((True, []), (False, ["body"])):
        trouble = replace(KILLED, end_ms=6020.0, refuses=refuses)
        assert judge(ledger([replace(A), body], [start()], [trouble])).lost == lost


def test_a_decision_about_a_task_whose_start_the_registry_has_forgotten_ends_nothing() -> None:
    made = replace(decision("cancel"), began_ms=7000.0, ended_ms=7010.0)
    for troubles, wrong in (([RESTORED], {}), ([], {"a": "cancel: DONE"})):
        found = judge(ledger([replace(A)], [start()], troubles, [made]))
        assert found.after_decision == wrong


@pytest.mark.parametrize(("trouble", "reason"), [([KILLED], "node killed"), ([], ALONE)])
def test_a_late_start_has_a_reason(trouble: Any, reason: str) -> None:
    verdict = judge(ledger([replace(A)], [start(late_ms=7000)], trouble))
    assert verdict.reasons == {reason: [7.0]}
    assert any("7.0 s" in line for line in lines_of(verdict))


def test_the_checker_shares_no_code_with_the_package() -> None:
    program = "import sys, tests.chaos.checker; print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not [each for each in imported if "rabbitdelay" in each or each == "celery"]


def test_a_seed_draws_its_timeline_again_and_every_fault_comes() -> None:
    drawn = plan(7, 3600, [*FAULTS])
    assert drawn == plan(7, 3600, [*FAULTS]) != plan(8, 3600, [*FAULTS])
    assert {each.name for each in drawn} == {*FAULTS}
    for lane in {each.lane for each in FAULTS.values()}:
        times = [
            (each.at, each.at + each.seconds) for each in drawn if FAULTS[each.name].lane == lane
        ]
        assert all(end < begin for (_, end), (begin, _) in pairwise(times))


def test_a_message_of_a_task_that_has_started_is_a_copy() -> None:
    verdict = judge(ledger([replace(A)], [start()], places=UNDELIVERABLE))
    assert verdict.copies == {"started, and in chaos.undeliverable besides": 1}
    assert verdict.where == {}


def test_a_send_is_confirmed_only_once_its_end_is_noted_as_a_whole(tmp_path: Path) -> None:
    notes, read = Notes(str(tmp_path)), Ledger()
    notes.begin(replace(A, outcome="unknown", ended_ms=None))
    read.read(tmp_path)
    assert read.sent["a"].outcome == "unknown"
    notes.end("a")
    notes.write("start", start())
    (file,) = tmp_path.glob("*.notes")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    read.read(tmp_path)
    assert (read.sent["a"].outcome, missing(read)) == ("confirmed", ["a"])
    file.write_bytes(whole)
    read.read(tmp_path)
    assert (read.starts["a"], missing(read)) == ([start()], [])
