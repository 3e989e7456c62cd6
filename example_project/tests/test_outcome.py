"""The counts at the end of a run."""

from dataclasses import replace

import pytest

from example_project.demonstration.journal import Dispatch, Start
from example_project.demonstration.outcome import Kill, Outcome

#: Order b was refused once; order c was running when the worker was killed, and ran again.
GOOD = Outcome(
    dispatch=Dispatch(orders=3, seconds=1.5, listed=3, messages=2),
    sent={"a": 1_000, "b": 2_000, "c": 4_000},
    starts=[
        Start("a", 0, True, 1_050, False),
        Start("b", 0, True, 2_080, False),
        Start("b", 1, True, 3_101, False),
        Start("c", 0, True, 4_020, False),
        Start("c", 0, True, 7_000, True),
    ],
    mails={"a": 1, "b": 1, "c": 1},
    refused=1,
    results=3,
    kill=Kill(killed_ms=4_030, waiting=1_000, in_levels=990),
)


def test_a_good_run_is_counted_and_has_no_failures() -> None:
    assert GOOD.failures() == []
    assert GOOD.lateness == [20, 50, 80], "of each order's first start"
    assert (GOOD.retried, GOOD.retries) == (1, 1)
    assert (GOOD.redelivered, GOOD.started_twice) == (1, 1)
    assert GOOD.back_ms - GOOD.kill.killed_ms == 2_970
    overdue = replace(GOOD, starts=[Start("a", 0, False, 1_050, False), *GOOD.starts[1:]])
    assert (overdue.overdue, overdue.lateness) == (1, [20, 80])


@pytest.mark.parametrize(
    ("bad", "failure"),
    [
        (replace(GOOD, mails={"a": 1, "b": 1}), "1 reminders are lost"),
        (replace(GOOD, mails={"a": 1, "b": 2, "c": 1}), "1 orders were mailed more than once"),
        (
            replace(GOOD, starts=[Start("a", 0, True, 999, False), *GOOD.starts]),
            "a reminder was early",
        ),
        (
            replace(GOOD, starts=[], mails={}, sent={}, dispatch=Dispatch(0, 1.0, 0, 0)),
            "no lateness was measured",
        ),
        (replace(GOOD, kill=Kill(4_030, 999, 999)), "only 999 reminders were waiting"),
    ],
)
def test_a_bad_run_says_what_is_wrong(bad: Outcome, failure: str) -> None:
    (found,) = bad.failures()
    assert found.startswith(failure)
