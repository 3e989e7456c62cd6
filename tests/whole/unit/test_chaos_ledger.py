"""The ledger of the chaos scenarios: what is noted, and what is lost, early, twice or late."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.ledger import (
    AROUND,
    NO_CAUSE,
    REDELIVERED,
    RESOLUTION_MS,
    Ledger,
    Notes,
    Sent,
    Start,
    Trouble,
    judge,
)

#: A task that was confirmed, sent at 1 s and due at 6 s; and one whose call raised.
A = Sent("a", "sound", 6000.0, 1000.0, "confirmed")
B = replace(A, id="b")
RAISED = replace(A, outcome="raised", error="E", may_have_arrived=False)

LIMIT = {"sound": 2.0}
UNDELIVERABLE = {"a": ["chaos.undeliverable"]}


def start(identity: str = "a", late_ms: float = 10.0, **more: Any) -> Start:
    return Start(identity, A.due_ms + late_ms, **more)


def ledger(sent: Iterable[Sent], starts: Iterable[Start], troubles: Iterable[Trouble] = ()) -> Any:
    made = Ledger({each.id: each for each in sent}, troubles=[*troubles])
    for each in starts:
        made.add("start", vars(each))
    return made


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
    said = judge(ledger(sent, starts), found, limits).complaints
    assert len(said) == len(complaints)
    assert all(map(str.startswith, said, complaints)), said


def test_the_verdict_counts_what_the_table_shows() -> None:
    late = replace(A, id="c", group="late")
    verdict = judge(ledger([RAISED, B, late], [start(), start("c")]))
    assert verdict.lost == ["b"]
    assert verdict.errors == {"E": 1, "E (arrived)": 1}
    assert verdict.late == {"sound": [0.01], "late": [0.01]}
    assert judge(ledger([A], []), UNDELIVERABLE).where == {"chaos.undeliverable": 1}


@given(early_ms=st.floats(min_value=RESOLUTION_MS + 0.01, max_value=5000))
def test_a_start_before_the_due_time_is_early_and_may_be_tolerated(early_ms: float) -> None:
    early = ledger([A], [start(late_ms=-early_ms)])
    assert judge(early).early == {"a": pytest.approx(early_ms / 1000)}
    assert len(judge(early).complaints) == 1
    assert judge(early, tolerated_early=5.0).complaints == []


@pytest.mark.parametrize(
    ("again", "trouble", "cause"),
    [
        ({"redelivered": True}, [], REDELIVERED),
        ({}, [Trouble("node killed", 2000.0, 3000.0)], f"{AROUND}node killed"),
        ({}, [Trouble("node killed", 900_000.0, 901_000.0)], NO_CAUSE),
    ],
)
def test_a_second_start_needs_a_cause(again: Any, trouble: Any, cause: str) -> None:
    verdict = judge(ledger([A], [start(), start(late_ms=20, **again)], trouble))
    assert verdict.copies == {cause: 1}
    assert bool(verdict.complaints) == (cause == NO_CAUSE)


def test_a_message_of_a_task_that_has_started_is_a_copy() -> None:
    verdict = judge(ledger([A], [start()]), UNDELIVERABLE)
    assert verdict.copies == {"started, and in chaos.undeliverable besides": 1}
    assert verdict.where == {}


def test_a_send_is_confirmed_only_once_its_end_is_noted_as_a_whole(tmp_path: Path) -> None:
    notes, read = Notes(str(tmp_path)), Ledger()
    notes.begin(replace(A, outcome="unknown"))
    read.read(tmp_path)
    assert read.sent["a"].outcome == "unknown"
    notes.end("a")
    notes.start(start())
    (file,) = tmp_path.glob("*.notes")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    read.read(tmp_path)
    assert (read.sent["a"], read.missing()) == (A, ["a"])
    file.write_bytes(whole)
    read.read(tmp_path)
    assert (read.starts["a"], read.missing()) == ([start()], [])
