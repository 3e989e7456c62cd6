"""Tasks that wait are cancelled, postponed and listed, with a worker of their own."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from celery import chain, group
from celery.canvas import StampingVisitor  # type: ignore[attr-defined]
from celery.exceptions import TaskRevokedError
from celery.states import REVOKED

from celery_rabbitdelay import InvalidDelay
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import free_port
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


#: What the registry has to know of a task, and what is the same for all of its messages.
SAID = ("KEY", "ORDER", "JOB", "JOB_ID", "TRACKED", "LIFE")


@pytest.mark.parametrize(
    "first", [{"countdown": 0}, {"eta": "2020-01-01T00:00:00+00:00"}, {"replace": {}}], ids=str
)
def test_what_a_task_has_said_goes_with_its_retries_without_a_delay(
    shop: Any, first: dict[str, Any]
) -> None:
    job = f"import-{uuid4().hex}"
    said = {"key": f"order:{uuid4().hex}", "job": job, "once": True, "track": True}
    with shop.rabbitdelay.job(job, expires=600):
        options = {**said, "delay": 0.2, "queue": named(shop, "second")}
        steps = [first, {"countdown": 0.2}]
        result = shop.tasks["continue"].apply_async(([], steps), **options)
    runs = [run["headers"] for run in result.get(timeout=PATIENCE)]
    assert all(run[headers.ONCE] for run in runs)
    seen = [{name: run.get(getattr(headers, name)) for name in SAID} for run in runs]
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]
    assert (seen[0]["KEY"], seen[0]["JOB"]) == (said["key"], job)
    assert seen[0]["TRACKED"]


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


CANCEL, KNOWN = ("cancel", {}), {"also_future": False}
LATER, EARLIER = ("postpone", {"delay": DELAY + 1}), ("postpone", {"delay": 1.5})
TRACKED = {"track": True}

#: What a task is sent with, the decisions about it while it waits, the outcome of the last one, and
#: after how many seconds it runs.
DECIDED: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], Outcome, float | None]] = {
    "cancelled": (TRACKED, [CANCEL], Outcome.DONE, None),
    "cancelled, untracked": ({}, [CANCEL], Outcome.NOTED, None),
    "cancelled if known": ({}, [("cancel", KNOWN)], Outcome.UNKNOWN, DELAY),
    "later": (TRACKED, [LATER], Outcome.DONE, DELAY + 1),
    "later, untracked": ({}, [LATER], Outcome.NOTED, DELAY + 1),
    "earlier, twice": (TRACKED, [("postpone", {"delay": DELAY - 2}), EARLIER], Outcome.DONE, 1.5),
    "superseded": ({**TRACKED, "key": "k"}, [LATER], Outcome.DONE, None),
}


def test_what_is_decided_about_a_task_that_waits_becomes_of_it(
    shop: Any, noted: Notes, module_worker: Worker
) -> None:
    delays, note, began = shop.rabbitdelay, shop.tasks["note"], time.time()
    results = {name: noted.send(name, delay=DELAY, **DECIDED[name][0]) for name in DECIDED}
    for name, (_, decisions, outcome, _) in DECIDED.items():
        found = [getattr(delays, what)(results[name].id, **more) for what, more in decisions]
        assert found[-1] is outcome, name
    # So are those of a group or a chain, and what is sent after its cancel.
    unsent = uuid4().hex
    assert delays.cancel(unsent) is Outcome.NOTED
    noted.send("cancelled", delay=0.5, task_id=unsent)
    make: Any
    for make in (group, chain):
        delays.cancel(make(note.si(each, key=noted.key) for each in "ab").apply_async(delay=DELAY))
    noted.send("newer", delay=DELAY - 1, key="k")
    for decide in (partial(delays.postpone, delay=DELAY + 5), delays.cancel):
        assert decide(results["superseded"]) is Outcome.CANCELLED
    # A result that was made of an id belongs to the same application.
    states = [shop.AsyncResult(results[each].id).state for each in DECIDED]
    assert states == [REVOKED, REVOKED, "PENDING", "DELAYED", "PENDING", "DELAYED", REVOKED]

    noted.until(DELAY + 1)
    ran = {each["given"][0]: each["at"] - began for each in noted.found()}
    due = {name: seconds for name, (*_, seconds) in DECIDED.items() if seconds is not None}
    assert sorted(noted()) == sorted([*due, "newer"])
    assert all(ran[name] >= seconds for name, seconds in due.items())
    # It has arrived.
    assert delays.postpone(results["earlier, twice"], delay=5) is Outcome.RELEASED
    assert delays.cancel(results["earlier, twice"]) is Outcome.RELEASED


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


def test_tasks_are_cancelled_in_any_form_also_while_rabbitmq_and_the_results_are_away(
    module_settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    job = f"import-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=60)
    results = [noted.send(number, delay=60, track=True, job=job) for number in range(6)]
    port = free_port()
    away = make_app(
        {
            **module_settings,
            "broker_url": f"amqp://127.0.0.1:{port}//",
            "broker_connection_timeout": 1,
            "result_backend": f"redis://127.0.0.1:{port}/0",
            "result_backend_transport_options": {"retry_policy": {"max_retries": 0}},
            "redis_retry_on_timeout": False,
        }
    )
    cancel = cast("Any", away).rabbitdelay.cancel
    assert cancel([results[0]]) is Outcome.DONE
    assert cancel({results[1].id}) is Outcome.DONE
    assert cancel(UUID(results[2].id)) is Outcome.DONE
    assert cancel(each for each in results[3:5]) is Outcome.DONE
    assert cancel(results[:5]) is Outcome.CANCELLED
    assert cancel([]) is Outcome.UNKNOWN
    for wrong in (7, b"bytes", {"id": results[5].id}):
        with pytest.raises(TypeError, match="takes the id or the result"):
            cancel(wrong)
    assert [each.task_id for each in shop.rabbitdelay.pending(job=job)] == [results[5].id]
    away.close()


@pytest.mark.parametrize("envelopes", [True, False])
def test_tracked_rows_are_listed_and_can_be_cancelled_and_run_earlier(
    shop: Any, noted: Notes, envelopes: bool
) -> None:
    delays, job, ids = shop.rabbitdelay, f"import-{uuid4().hex}", [uuid4().hex for _ in range(4)]
    rows = [noted.row(n, delay=30 + n, task_id=ids[n]) for n in range(4)]
    with delays.job(job, expires=60):
        delays.send_many(shop.tasks["note"], rows, envelopes=envelopes, track=True, job=job)
    assert [(each.task_id, each.task) for each in delays.pending(job=job)] == [
        (each, "note") for each in ids
    ]
    assert delays.cancel(ids[0]) is Outcome.DONE
    assert delays.postpone(ids[1], delay=0.2) is Outcome.DONE
    wait_for(lambda: noted() == [1], "the task", PATIENCE)
    assert [each.task_id for each in delays.pending(job=job)] == ids[2:]


def test_tracked_tasks_with_a_stamp_are_cancelled(shop: Any, noted: Notes) -> None:
    class Stamps(StampingVisitor):  # type: ignore[misc]
        def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
            return {"import": sig.args[0]}

    def stamped(name: str) -> Any:
        signature = shop.tasks["note"].s(name)
        signature.stamp(Stamps())
        return signature.apply_async(kwargs={"key": noted.key}, delay=DELAY, track=True)

    first, other, third = stamped("monday"), stamped("tuesday"), stamped("wednesday")
    # Celery's workers remember the stamps as well, but this one is told nothing.
    assert shop.rabbitdelay.cancel_stamped({"import": ["monday", "friday"]}) is Outcome.DONE
    assert shop.rabbitdelay.cancel_stamped(["import=friday"]) is Outcome.UNKNOWN
    # Celery's own revoke cancels them too.
    shop.control.revoke_by_stamped_headers({"import": "wednesday"}, destination=["nobody"])
    assert (first.state, other.state, third.state) == (REVOKED, "DELAYED", REVOKED)


def test_a_purge_cancels_the_tracked_tasks_that_wait(shop: Any, noted: Notes) -> None:
    tracked = [noted.send(number, delay=DELAY, track=True) for number in range(3)]
    noted.send("untracked", delay=DELAY)
    assert shop.control.purge() >= 3
    assert shop.rabbitdelay.count() == 0
    wait_for(lambda: noted() == ["untracked"], "the other task", PATIENCE)
    with pytest.raises(TaskRevokedError):
        tracked[0].get(timeout=PATIENCE)
