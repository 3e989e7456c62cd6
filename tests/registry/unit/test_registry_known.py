"""The reasons why a task has not run."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import pytest

from celery_rabbitdelay import KnownTask
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.durations import brief, left
from celery_rabbitdelay.registry.known import Reason, are_returning, reasons
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.record import ON_ITS_WAY

NOW = datetime.fromisoformat("2026-11-30T12:00:00+00:00")
HOUR = timedelta(hours=1)
UNSERVED = {"distribution": Counts(messages=2, consumers=0)}
EXCHANGE = {"queue": None, "exchange": "events"}


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wall_clock, "now", lambda: NOW)


def in_queue(messages: int, consumers: int) -> dict[str, Any]:
    return {"in_queue": {"messages": messages, "consumers": consumers}}


def why(others: Mapping[str, Counts] | None = None, **facts: Any) -> list[Reason]:
    """Return why a task that was due an hour ago, or as given, has not run."""
    known: dict[str, Any] = dict.fromkeys(each.name for each in fields(KnownTask))
    known |= {"state": "waiting", "queue": "mail", "exchange": "", "due": NOW - HOUR}
    known |= {"may_be_in": {}, "missing": (), "pauses": ()}
    return reasons(KnownTask(**{**known, **facts}), others or {})


@pytest.mark.parametrize(
    ("facts", "others", "about", "words"),
    [
        (in_queue(0, 0), {}, "lost", "and its queue is empty: its message was lost. Running it"),
        (in_queue(0, 1), {}, "lost", "queue is empty: a worker has prefetched it, or its message"),
        (in_queue(3, 0), {}, "consumers", "but no worker consumes its queue. Messages in the"),
        (in_queue(3, 1), {}, "workers", "the workers of its queue are busy. Messages in the queue"),
        ({"in_queue": {}}, {}, "queue", "its queue does not exist: distribution tries again."),
        ({"in_queue": {}}, UNSERVED, "queue", "does not exist: no worker serves distribution,"),
        (EXCHANGE, UNSERVED, "distribution", "no worker serves distribution, which publishes it"),
        (EXCHANGE, {}, "workers", "and no worker has received it yet."),
        # Its queue is unknown, because it is not tracked, or its broker does not answer.
        ({"queue": None, "exchange": None}, UNSERVED, "workers", "no worker has received it yet."),
        ({}, UNSERVED, "workers", "no worker has received it yet."),
    ],
)
def test_an_overdue_task_has_one_reason(
    facts: dict[str, Any], others: dict[str, Counts], about: str, words: str
) -> None:
    (found,) = why(others, **facts)
    assert found.words.startswith("The task is due, ")
    assert (found.about, words in found.words) == (about, True), found.words


def test_a_task_may_be_elsewhere_and_at_first_it_is_on_its_way() -> None:
    (early,) = why(due=NOW - ON_ITS_WAY, **in_queue(0, 0))
    assert early.words == "The task is due now, and on its way to a worker."
    (late,) = why(may_be_in={"undeliverable": 3, "rabbitdelay.seconds.4": 1}, **in_queue(0, 0))
    where = "its message is in undeliverable, rabbitdelay.seconds.4, or its message was lost."
    assert where in late.words


@pytest.mark.parametrize("counts", [in_queue(0, 1), in_queue(3, 0), in_queue(3, 1)])
def test_a_task_that_is_not_in_its_queue_may_be_on_its_way_back(counts: dict[str, Any]) -> None:
    (plain,) = why(**counts)
    (resumed,) = why(may_be_in={"paused": 4}, **counts)
    (committed,) = why(job="import", job_state="committed", **counts)
    assert "Held tasks are returning to their queues" in resumed.words
    assert "within ten minutes after the commit" in committed.words
    (both,) = why(job="import", may_be_in={"paused": 4}, **counts)
    assert both.words.count("returning") == both.words.count("commit.") == 1
    assert "returning" not in plain.words
    assert "commit" not in plain.words


def test_held_tasks_return_once_nothing_is_paused() -> None:
    pauses, held = [Paused("pay", None, NOW)], {"paused": Counts(messages=2, consumers=0)}
    assert are_returning([], held)
    assert not are_returning(pauses, held), "the pause may hold them"
    assert not are_returning([], {"paused": Counts(messages=0, consumers=0)})
    assert not are_returning([], {})


def test_a_task_that_is_held_has_a_reason_for_each_hold_before_and_after_its_due_time() -> None:
    holds: dict[str, Any] = {
        "job_state": "open",
        "pauses": (Paused("pay", None, NOW - HOUR), Paused(None, "mail", NOW, NOW + 2 * HOUR)),
        "missing": ("rabbitdelay.hours.1", "rabbitdelay.hours.2", "rabbitdelay.hours.3"),
        **in_queue(3, 0),
    }
    due = why(**holds)
    assert due == [
        Reason("Its job is open: the task runs only after the job is committed.", "job"),
        Reason(
            "All tasks with this name have been paused for 1 h; the pause has no end time.", "pause"
        ),
        Reason("Its queue has been paused for 0 s; the pause ends in 2 h.", "pause"),
        Reason("Missing on the broker: rabbitdelay.hours.1 and 2 more.", "levels"),
    ]
    first, *others = why(due=NOW + HOUR, **holds)
    assert first == Reason("Due in 1 h.")
    assert set(others) == {*due, Reason("No worker consumes its queue now.", "consumers")}


def test_missing_queues_are_a_reason_beside_that_of_an_overdue_task() -> None:
    lost, missing = why(missing=("rabbitdelay.hours.1",), **in_queue(0, 0))
    assert lost.about == "lost"
    assert missing == Reason("Missing on the broker: rabbitdelay.hours.1.", "levels")


def test_a_task_that_is_not_due_has_its_due_time_as_the_first_reason() -> None:
    later: dict[str, Any] = {"due": NOW + HOUR, "postponed": NOW + HOUR}
    assert why(**later, **in_queue(0, 1)) == [Reason("Due in 1 h, because it was postponed.")]
    absent = why(due=NOW + HOUR, in_queue={})[1]
    assert absent == Reason("Its queue does not exist now.", "queue")
    aborted = why(due=NOW + HOUR, job_state="aborted")[1]
    assert aborted == Reason("Its job was aborted: the task will not run.", "aborted")


@pytest.mark.parametrize(
    ("state", "about"),
    [
        ("superseded", "key"),
        ("expired", "aborted"),
        ("cancelled", ""),
        ("arrived", ""),
        ("noted", ""),
    ],
)
def test_a_task_that_no_longer_waits_has_its_outcome(state: str, about: str) -> None:
    (outcome,) = why(state=state, due=None, **in_queue(0, 0))
    assert (outcome.about, outcome.words[-1]) == (about, ".")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (59.6, "1 min"), (7500, "2 h 5 min"), (7201, "2 h"), (864_000, "10 d")],
)
def test_a_length_of_time_has_its_two_largest_units(seconds: float, expected: str) -> None:
    assert brief(seconds) == expected
    if seconds:
        assert left(NOW + timedelta(seconds=seconds)) == f"in {expected}"
        assert left(NOW - timedelta(seconds=seconds)) == f"{expected} ago"
    else:
        assert left(NOW) == "now"
