"""The verdict of the chaos scenarios: it notices what is lost, early, twice or late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.ledger import Ledger, Sent, Start, Trouble, Whereabouts
from tests.chaos.verdict import RESOLUTION_MS, judge

#: Milliseconds between the call and the due time.
DELAY = 5000.0

NOWHERE = Whereabouts()


def sent(identity: str = "a", **changed: Any) -> Sent:
    """A task that was confirmed, sent at 1 s and due at 6 s, for the queue ``work``."""
    confirmed = Sent(
        id=identity,
        group="sound",
        places=("work",),
        due_ms=1000.0 + DELAY,
        began_ms=1000.0,
        outcome="confirmed",
        attempts=1,
    )
    return replace(confirmed, **changed)


def start(identity: str = "a", late_ms: float = 10.0, place: str = "work", **more: Any) -> Start:
    return Start(identity, place, 1000.0 + DELAY + late_ms, **more)


def test_what_started_once_and_in_time_is_good() -> None:
    verdict = judge(Ledger.of([sent()], [start()]), NOWHERE, {"sound": 2.0})
    assert verdict.complaints == []
    assert verdict.late["sound"].max == pytest.approx(0.01)


def test_a_confirmed_task_that_is_nowhere_is_lost() -> None:
    verdict = judge(Ledger.of([sent("a"), sent("b")], [start("a")]), NOWHERE)
    assert verdict.lost == ["b"]
    assert verdict.complaints == ["1 lost"]


def test_a_task_that_is_found_in_a_queue_is_not_lost_but_not_good_either() -> None:
    found = Whereabouts({"a": ("chaos.undeliverable",)})
    verdict = judge(Ledger.of([sent()], []), found)
    assert verdict.lost == []
    assert verdict.where == {"chaos.undeliverable": 1}
    assert verdict.complaints == ["1 not started, in chaos.undeliverable"]


def test_as_many_as_the_broker_holds_are_not_lost() -> None:
    tasks = [sent(str(number)) for number in range(5)]
    verdict = judge(
        Ledger.of(tasks, []), Whereabouts(held={"dead-letter worker": 2, "consumer": 1})
    )
    assert len(verdict.lost) == 2
    assert sum(verdict.where.values()) == 3


def test_a_task_that_raised_may_be_missing() -> None:
    verdict = judge(Ledger.of([sent(outcome="raised", error="ConnectionLost")], []), NOWHERE)
    assert verdict.lost == []
    assert verdict.errors == {"ConnectionLost": 1}
    assert verdict.complaints == []


def test_a_task_that_was_cut_off_while_it_was_sent_may_be_missing() -> None:
    assert judge(Ledger.of([sent(outcome="unknown")], []), NOWHERE).complaints == []


def test_an_error_that_denies_an_arrival_is_found_out() -> None:
    lie = sent(outcome="raised", error="MessageNacked", may_have_arrived=False)
    verdict = judge(Ledger.of([lie], [start()]), NOWHERE)
    assert verdict.arrived_nevertheless == {"MessageNacked": 1}
    assert len(verdict.complaints) == 1


def test_an_error_that_admits_an_arrival_is_fine() -> None:
    honest = sent(outcome="raised", error="ConfirmTimeout", may_have_arrived=True)
    assert judge(Ledger.of([honest], [start()]), NOWHERE).complaints == []


@given(early_ms=st.floats(min_value=RESOLUTION_MS + 0.01, max_value=DELAY))
def test_a_start_before_the_due_time_is_early(early_ms: float) -> None:
    verdict = judge(Ledger.of([sent()], [start(late_ms=-early_ms)]), NOWHERE)
    assert verdict.early == {"a": pytest.approx(early_ms / 1000)}
    assert len(verdict.complaints) == 1


def test_what_is_tolerated_is_told_and_is_no_complaint() -> None:
    ledger = Ledger.of([sent()], [start(late_ms=-900)])
    assert judge(ledger, NOWHERE, tolerated_early=1.0).early == {"a": pytest.approx(0.9)}
    assert judge(ledger, NOWHERE, tolerated_early=1.0).complaints == []
    assert judge(ledger, NOWHERE, tolerated_early=0.8).complaints == ["1 early, by up to 0.900 s"]


def test_the_clocks_resolution_is_not_early() -> None:
    assert judge(Ledger.of([sent()], [start(late_ms=-RESOLUTION_MS)]), NOWHERE).early == {}


def test_the_first_start_counts_whatever_the_order_of_the_notes() -> None:
    ledger = Ledger.of([sent()], [start(late_ms=50, redelivered=True), start(late_ms=-50)])
    assert judge(ledger, NOWHERE).early == {"a": pytest.approx(0.05)}


def test_a_second_start_without_a_cause_is_not_good() -> None:
    verdict = judge(Ledger.of([sent()], [start(), start(late_ms=20)]), NOWHERE)
    assert verdict.copies == {"no cause": 1}
    assert verdict.complaints == ["1 copies without a cause"]


@pytest.mark.parametrize(
    ("task", "second", "cause"),
    [
        (sent(), start(late_ms=20, redelivered=True), "ended before the ack"),
        (sent(attempts=2), start(late_ms=20), "sent again by the producer"),
        (sent(), start(late_ms=20, marks={"rabbitdelay-attempts": 2}), "by the modules"),
        (sent(distributed=True), start(late_ms=20), "by distribution"),
    ],
)
def test_a_second_start_with_a_cause_is_counted(task: Sent, second: Start, cause: str) -> None:
    verdict = judge(Ledger.of([task], [start(), second]), NOWHERE)
    assert [cause in each for each in verdict.copies.elements()] == [True]
    assert verdict.complaints == []


def test_a_message_of_a_task_that_has_started_is_a_copy() -> None:
    found = Whereabouts({"a": ("chaos.undeliverable", "chaos.undeliverable")})
    verdict = judge(Ledger.of([sent()], [start()]), found)
    assert verdict.copies == {"started, and in chaos.undeliverable besides": 2}
    assert verdict.where == {}


def test_a_trouble_explains_a_copy_that_was_on_its_way_meanwhile() -> None:
    ledger = Ledger.of([sent()], [start(), start(late_ms=20)])
    ledger.troubles = [Trouble("node 1 killed", 2000.0, 3000.0)]
    verdict = judge(ledger, NOWHERE)
    assert [each.endswith("node 1 killed") for each in verdict.copies] == [True]
    assert verdict.complaints == []


def test_a_trouble_long_after_explains_nothing() -> None:
    ledger = Ledger.of([sent()], [start(), start(late_ms=20)])
    ledger.troubles = [Trouble("node 1 killed", 900_000.0, 901_000.0)]
    assert judge(ledger, NOWHERE).copies == {"no cause": 1}


def test_a_task_for_two_queues_has_to_arrive_in_both_and_once_in_each() -> None:
    both = sent(places=("work", "mirror"))
    once = judge(Ledger.of([both], [start(), start(place="mirror")]), NOWHERE)
    assert once.complaints == []
    assert once.late["sound"].tasks == 2
    assert judge(Ledger.of([both], [start()]), NOWHERE).lost == ["a"]


def test_a_group_that_is_later_than_its_limit_is_not_good() -> None:
    tasks = [sent("a"), sent("b"), sent("c", group="trouble")]
    starts = [start("a"), start("b", late_ms=2500), start("c", late_ms=360_000)]
    verdict = judge(Ledger.of(tasks, starts), NOWHERE, {"sound": 2.0})
    assert verdict.complaints == ["sound: 1 of 2 later than 2 s, up to 2.5 s"]
    assert verdict.late["trouble"].p50 == pytest.approx(360)


def test_a_group_with_a_limit_of_which_nothing_started_is_not_good() -> None:
    found = Whereabouts({"a": ("work",)})
    verdict = judge(Ledger.of([sent()], []), found, {"sound": 2.0})
    assert "sound: none has started" in verdict.complaints


def test_a_start_that_nobody_has_sent_is_not_good() -> None:
    assert judge(Ledger.of([sent()], [start(), start("b")]), NOWHERE).complaints != []


def test_a_scenario_that_sends_nothing_is_not_good() -> None:
    assert judge(Ledger(), NOWHERE).complaints == ["nothing was sent"]
