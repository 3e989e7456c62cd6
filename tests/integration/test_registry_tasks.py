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
    {"countdown": -5},
    {"delay": 0},
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


def test_a_tracked_task_is_revoked_at_once_when_it_is_cancelled(shop: Any, noted: Notes) -> None:
    result = noted.send("cancelled", delay=DELAY, track=True)
    assert shop.rabbitdelay.cancel(result.id) is Outcome.DONE
    assert result.state == REVOKED
    assert shop.rabbitdelay.cancel(result.id) is Outcome.CANCELLED
    assert noted.until(DELAY) == []


def test_an_untracked_task_is_cancelled_by_its_id_unless_only_known_ones_are_meant(
    shop: Any, noted: Notes
) -> None:
    cancelled, runs = (noted.send(each, delay=DELAY) for each in ("cancelled", "runs"))
    assert shop.rabbitdelay.cancel(cancelled.id) is Outcome.NOTED
    assert shop.rabbitdelay.cancel(runs.id, also_future=False) is Outcome.UNKNOWN
    assert shop.rabbitdelay.postpone(runs.id, delay=60, also_future=False) is Outcome.UNKNOWN
    assert shop.rabbitdelay.cancel(key=f"nobody's {uuid4().hex}") is Outcome.UNKNOWN
    assert noted.until(DELAY) == ["runs"]


def test_a_task_that_is_sent_after_its_cancel_does_not_run(shop: Any, noted: Notes) -> None:
    task_id = uuid4().hex
    assert shop.rabbitdelay.cancel(task_id) is Outcome.NOTED
    noted.send("cancelled", delay=0.5, task_id=task_id)
    assert noted.until(0.5) == []


def test_a_task_that_has_arrived_is_released(shop: Any, noted: Notes) -> None:
    result = noted.send("runs", delay=0.2, track=True)
    wait_for(lambda: noted() == ["runs"], "the task")
    assert shop.rabbitdelay.postpone(result.id, delay=5) is Outcome.RELEASED
    assert shop.rabbitdelay.cancel(result.id) is Outcome.RELEASED


def test_a_task_that_is_superseded_is_found_as_cancelled_by_each_call(
    shop: Any, noted: Notes
) -> None:
    older, newer = (noted.send(name, delay=DELAY, key="order:9") for name in ("older", "newer"))
    assert shop.rabbitdelay.postpone(older, delay=DELAY + 5) is Outcome.CANCELLED
    assert shop.rabbitdelay.cancel(older) is Outcome.CANCELLED
    assert shop.rabbitdelay.cancel(older) is Outcome.CANCELLED
    assert shop.rabbitdelay.cancel([newer, older]) is Outcome.CANCELLED
    assert shop.rabbitdelay.show(newer).state == "cancelled"


@pytest.mark.parametrize(
    "past", [{"delay": -40 * 86_400}, {"countdown": -5}, {"eta": datetime(2020, 1, 1)}], ids=str
)
def test_a_tracked_task_that_was_due_before_it_was_sent_is_not_late(shop: Any, past: Any) -> None:
    before = time.time()
    result = shop.tasks["look"].apply_async(track=True, **past)
    assert_waited(result.get(timeout=PATIENCE), before, 0)


@pytest.mark.parametrize("track", [True, False])
def test_a_postponed_task_runs_later_and_once(shop: Any, noted: Notes, track: bool) -> None:
    result = noted.send("postponed", delay=DELAY, track=track)
    due = time.time() + DELAY + 1
    outcome = shop.rabbitdelay.postpone(result, delay=DELAY + 1)
    assert outcome is (Outcome.DONE if track else Outcome.NOTED)
    wait_for(noted, "the task", PATIENCE)
    assert time.time() >= due
    assert noted.until(0) == ["postponed"]


def test_a_tracked_task_runs_earlier_if_it_is_postponed_to_earlier(shop: Any, noted: Notes) -> None:
    result = noted.send("earlier", delay=DELAY, track=True)
    late = time.time() + DELAY
    assert shop.rabbitdelay.postpone(result, delay=0.5) is Outcome.DONE
    wait_for(noted, "the task", PATIENCE)
    assert noted.until(late - time.time()) == ["earlier"]


def test_a_task_that_is_moved_to_earlier_twice_runs_once_and_redis_answers(
    shop: Any, noted: Notes
) -> None:
    result = noted.send("moved", delay=DELAY, track=True)
    for seconds in (DELAY - 2, 1.5):
        assert shop.rabbitdelay.postpone(result, delay=seconds) is Outcome.DONE
    assert noted.until(DELAY) == ["moved"]
    assert shop.rabbitdelay.cancel(result) is Outcome.RELEASED
    assert result.state == "SUCCESS"


def test_a_task_that_is_moved_to_earlier_is_superseded_at_the_worker(
    shop: Any, noted: Notes
) -> None:
    key = f"order:{uuid4().hex}"
    older = noted.send("older", delay=15, key=key, track=True)
    assert shop.rabbitdelay.postpone(older, delay=10) is Outcome.DONE
    noted.send("newer", delay=1, key=key)
    assert noted.until(15) == ["newer"]


def test_a_task_may_be_postponed_by_more_than_the_levels_take_at_once(
    shop: Any, module_worker: Worker, noted: Notes
) -> None:
    capacity = shop.rabbitdelay.topology.layout.capacity_ms / 1000
    result = noted.send("postponed", delay=DELAY)
    due = time.time() + capacity + 2
    shop.rabbitdelay.postpone(result, delay=capacity + 2)
    wait_for(noted, "the task", PATIENCE)
    assert time.time() >= due
    assert "left the delay levels" not in module_worker.log


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


def test_the_result_of_a_group_or_a_chain_stands_for_all_its_tasks(shop: Any, noted: Notes) -> None:
    note = shop.tasks["note"]
    both = group(note.si("a", key=noted.key), note.si("b", key=noted.key)).apply_async(delay=DELAY)
    last = chain(note.si("c", key=noted.key), note.si("d", key=noted.key)).apply_async(delay=DELAY)
    shop.rabbitdelay.cancel(both)
    shop.rabbitdelay.cancel(last)
    assert noted.until(DELAY) == []


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


def test_the_state_of_a_tracked_task_that_waits_is_delayed(shop: Any, noted: Notes) -> None:
    tracked = noted.send("tracked", delay=DELAY, track=True)
    untracked = noted.send("untracked", delay=DELAY)
    assert (tracked.state, untracked.state) == ("DELAYED", "PENDING")
    assert not tracked.ready()
    # A result that was pickled, or made of an id, belongs to the same application.
    assert shop.AsyncResult(tracked.id).status == "DELAYED"
    tracked.get(timeout=PATIENCE)
    assert tracked.state == "SUCCESS"


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
    assert noted.until(DELAY) == ["tuesday"]


def test_a_purge_cancels_the_tracked_tasks_that_wait(shop: Any, noted: Notes) -> None:
    tracked = [noted.send(number, delay=DELAY, track=True) for number in range(3)]
    noted.send("untracked", delay=DELAY)
    assert shop.control.purge() >= 3
    assert shop.rabbitdelay.count() == 0
    assert noted.until(DELAY) == ["untracked"]
    with pytest.raises(TaskRevokedError):
        tracked[0].get(timeout=PATIENCE)
