"""Tasks that wait are cancelled, postponed and listed, with a worker of their own."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, group
from celery.canvas import StampingVisitor  # type: ignore[attr-defined]
from celery.exceptions import TaskRevokedError
from celery.states import REVOKED

from celery_rabbitdelay import InvalidDelay
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.registry_fixtures import (
    DELAY,
    module_settings,
    module_worker,
    redis_setup,
    shop,
)
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.waited import assert_waited
from tests.integration.worker import Worker

__all__ = ["module_settings", "module_worker", "redis_setup", "shop"]


#: What says that a retry has no delay, or that its delay is over.
NO_DELAY: list[dict[str, Any]] = [
    {"countdown": 0},
    {"eta": datetime(2020, 1, 1, tzinfo=UTC)},
    {"countdown": 0, "headers": {"x-tenant": "acme"}},
    {"replace": {}},
    {"replace": {"countdown": 0.2}},
]

#: What the registry has to know of a task, and what is the same for all of its messages.
SAID = ("KEY", "ORDER", "JOB", "JOB_ID", "TRACKED", "LIFE")


@pytest.mark.parametrize("first", NO_DELAY, ids=str)
def test_what_a_task_has_said_goes_with_its_retries_without_a_delay(
    shop: Any, first: dict[str, Any]
) -> None:
    job, task_id = f"import-{uuid4().hex}", uuid4().hex
    said = {"key": f"order:{uuid4().hex}", "job": job, "once": True, "track": True}
    with shop.rabbitdelay.job(job, expires=600):
        options = {**said, "delay": 0.2, "task_id": task_id, "queue": named(shop, "second")}
        steps = [json.loads(json.dumps(first, default=str)), {"countdown": 0.2}]
        result = shop.tasks["continue"].apply_async(([], steps), **options)
    runs = result.get(timeout=PATIENCE)
    assert len(runs) == 3
    expected = {name: runs[0]["headers"].get(getattr(headers, name)) for name in SAID}
    assert expected["KEY"] == said["key"]
    assert expected["JOB"] == job
    assert expected["TRACKED"]
    for run in runs:
        assert {name: run["headers"].get(getattr(headers, name)) for name in SAID} == expected
        assert run["headers"][headers.ONCE]
    if "replace" not in first:
        assert {run["routing_key"] for run in runs} == {named(shop, "second")}


def test_a_retry_of_a_task_with_a_key_waits_in_the_levels_also_without_takeover(
    module_settings: dict[str, Any], module_worker: Worker
) -> None:
    app = make_app({**module_settings, "rabbitdelay_takeover": False})
    said = {headers.KEY: f"order:{uuid4().hex}", headers.COPY: "0" * 12}
    result = app.send_task("look", countdown=0.3, retries=1, headers=said)
    seen = result.get(timeout=PATIENCE)
    assert headers.DUE in seen["headers"]
    assert seen["headers"][headers.KEY] == said[headers.KEY]
    app.close()


def test_a_retry_after_a_retry_at_once_gives_way_to_a_newer_task(shop: Any, noted: Notes) -> None:
    key, word = f"order:{uuid4().hex}", uuid4().hex
    steps = [{"countdown": 0}, {"countdown": 0.3, "after": word}]
    result = shop.tasks["continue"].apply_async(([], steps), delay=0.1, key=key)
    redis = shop.backend.client
    wait_for(lambda: redis.get(word) == b"asked", "the second run", PATIENCE)
    noted.send("newer", delay=0.1, key=key)
    redis.set(word, "go on")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)
    assert noted.until(0) == ["newer"]


LATER, TWICE = ("postpone", {"delay": DELAY + 1}), ("postpone", {"delay": DELAY - 2})
EARLIER, KNOWN = ("postpone", {"delay": 1.5}), {"also_future": False}
CANCEL: tuple[str, dict[str, Any]] = ("cancel", {})

#: What a task is sent with, the decisions about it while it waits, the outcome of the last one, and
#: after how many seconds it runs.
DECIDED: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], Outcome, float | None]] = {
    "cancelled": ({"track": True}, [CANCEL], Outcome.DONE, None),
    "cancelled, untracked": ({}, [CANCEL], Outcome.NOTED, None),
    "cancelled if known": ({}, [("cancel", KNOWN)], Outcome.UNKNOWN, DELAY),
    "later if known": ({}, [("postpone", {"delay": 60, **KNOWN})], Outcome.UNKNOWN, DELAY),
    "later": ({"track": True}, [LATER], Outcome.DONE, DELAY + 1),
    "later, untracked": ({}, [LATER], Outcome.NOTED, DELAY + 1),
    "earlier": ({"track": True}, [EARLIER], Outcome.DONE, 1.5),
    "earlier, twice": ({"track": True}, [TWICE, EARLIER], Outcome.DONE, 1.5),
    "earlier, superseded": ({"track": True, "key": "k1"}, [TWICE], Outcome.DONE, None),
    "superseded": ({"key": "k2"}, [], Outcome.CANCELLED, None),
}


def test_what_is_decided_about_a_task_that_waits_becomes_of_it(
    shop: Any, noted: Notes, module_worker: Worker
) -> None:
    delays, note, began = shop.rabbitdelay, shop.tasks["note"], time.time()
    results = {name: noted.send(name, delay=DELAY, **DECIDED[name][0]) for name in DECIDED}
    for name, (_, decisions, outcome, _) in DECIDED.items():
        found = [getattr(delays, what)(results[name].id, **more) for what, more in decisions]
        assert found[-1:] in ([outcome], []), name
    # So are those of a group or a chain, and what is sent after its cancel.
    unsent = uuid4().hex
    assert delays.cancel(unsent) is Outcome.NOTED
    noted.send("cancelled", delay=0.5, task_id=unsent)
    make: Any
    for make in (group, chain):
        delays.cancel(make(note.si(each, key=noted.key) for each in "ab").apply_async(delay=DELAY))
    for key, superseded in (("k1", "earlier, superseded"), ("k2", "superseded")):
        noted.send("newer", delay=DELAY - 1, key=key)
        assert delays.postpone(results[superseded], delay=DELAY + 5) is Outcome.CANCELLED
        assert delays.cancel(results[superseded]) is Outcome.CANCELLED
    assert delays.cancel(key=f"nobody's {noted.key}") is Outcome.UNKNOWN
    assert delays.cancel(results["cancelled"]) is Outcome.CANCELLED
    assert results["cancelled"].state == REVOKED
    assert (results["later"].state, results["later, untracked"].state) == ("DELAYED", "PENDING")
    # A result that was pickled, or made of an id, belongs to the same application.
    assert shop.AsyncResult(results["later"].id).status == "DELAYED"

    noted.until(DELAY + 1)
    ran = {each["given"][0]: each["at"] - began for each in noted.found()}
    due = {name: seconds for name, (*_, seconds) in DECIDED.items() if seconds is not None}
    assert sorted(noted()) == sorted([*due, "newer", "newer"])
    assert all(ran[name] >= seconds for name, seconds in due.items())
    assert "left the delay levels" not in module_worker.log
    # It has arrived.
    assert delays.postpone(results["earlier"], delay=5) is Outcome.RELEASED
    assert delays.cancel(results["earlier"]) is Outcome.RELEASED
    assert results["earlier"].state == "SUCCESS"


def test_a_tracked_task_that_was_due_before_it_was_sent_is_not_late(shop: Any) -> None:
    for past in ({"delay": -40 * 86_400}, {"countdown": -5}, {"eta": datetime(2020, 1, 1)}):
        before = time.time()
        result = shop.tasks["look"].apply_async(track=True, **past)
        assert_waited(result.get(timeout=PATIENCE), before, 0)


def test_a_task_is_not_postponed_beyond_the_longest_delay(shop: Any, noted: Notes) -> None:
    result = noted.send("far", delay=60, track=True)
    with pytest.raises(InvalidDelay, match="longest delay"):
        shop.rabbitdelay.postpone(result, eta=datetime(2999, 1, 1, tzinfo=UTC))
    assert shop.rabbitdelay.show(result).postponed is None
    shop.rabbitdelay.cancel(result)


@pytest.mark.parametrize("envelopes", [True, False])
def test_tracked_rows_are_listed_and_can_be_cancelled_and_run_earlier(
    shop: Any, noted: Notes, envelopes: bool
) -> None:
    job = f"import-{uuid4().hex}"
    ids = [uuid4().hex for _ in range(4)]
    now = datetime.now(UTC)
    rows = [noted.row(n, delay=30 + n, task_id=ids[n]) for n in range(4)]
    with shop.rabbitdelay.job(job, expires=60):
        shop.rabbitdelay.send_many(
            shop.tasks["note"], rows, envelopes=envelopes, track=True, job=job
        )
    found = list(shop.rabbitdelay.pending(job=job))
    assert [each.task_id for each in found] == ids
    assert {each.task for each in found} == {"note"}
    assert found[0].due >= now + timedelta(seconds=30)
    assert shop.rabbitdelay.count(job=job) == 4
    assert sum(n for _, n in shop.rabbitdelay.forecast(60, job=job)) == 4

    assert shop.rabbitdelay.cancel(ids[0]) is Outcome.DONE
    assert shop.rabbitdelay.postpone(ids[1], delay=0.2) is Outcome.DONE
    wait_for(lambda: noted() == [1], "the task", PATIENCE)
    assert [each.task_id for each in shop.rabbitdelay.pending(job=job)] == ids[2:]


def test_celery_inspect_shows_tracked_tasks_that_wait(shop: Any, noted: Notes) -> None:
    first = noted.send("first", delay=60, track=True)
    untracked = noted.send("untracked", delay=50)
    inspect = shop.control.inspect(timeout=PATIENCE, limit=1)

    (scheduled,) = inspect.scheduled().values()
    (queried,) = inspect.query_task(first.id, untracked.id).values()

    shown = {each["request"]["id"]: each for each in scheduled}
    assert untracked.id not in shown
    assert shown[first.id]["request"]["name"] == "note"
    assert datetime.fromisoformat(shown[first.id]["eta"]) > datetime.now(UTC)
    assert [*queried] == [first.id]
    state, request = queried[first.id]
    assert (state, request["name"]) == ("scheduled", "note")


class Stamps(StampingVisitor):  # type: ignore[misc]
    """Stamps each signature with the name of an import."""

    def __init__(self, name: str) -> None:
        self._name = name

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        return {"import": self._name}


def test_tracked_tasks_with_a_stamp_are_cancelled(shop: Any, noted: Notes) -> None:
    def stamped(name: str) -> Any:
        signature = shop.tasks["note"].s(name)
        signature.stamp(Stamps(name))
        return signature.apply_async(kwargs={"key": noted.key}, delay=DELAY, track=True)

    first, other, third = stamped("monday"), stamped("tuesday"), stamped("wednesday")
    # Celery's workers remember the stamps as well, but this one is told nothing.
    assert shop.rabbitdelay.cancel_stamped({"import": ["monday", "friday"]}) is Outcome.DONE
    assert shop.rabbitdelay.cancel_stamped(["import=friday"]) is Outcome.UNKNOWN
    # Celery's own revoke cancels them too.
    shop.control.revoke_by_stamped_headers({"import": "wednesday"}, destination=["nobody"])
    assert (first.state, other.state, third.state) == (REVOKED, "DELAYED", REVOKED)


def test_a_purge_cancels_the_tracked_tasks_that_wait(shop: Any, noted: Notes) -> None:
    tracked = [noted.send(number, delay=60, track=True) for number in range(3)]
    noted.send("untracked", delay=DELAY)
    assert shop.control.purge() >= 3
    assert shop.rabbitdelay.count() == 0
    wait_for(lambda: noted() == ["untracked"], "the other task", PATIENCE)
    with pytest.raises(TaskRevokedError):
        tracked[0].get(timeout=PATIENCE)
