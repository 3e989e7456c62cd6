"""Tasks that wait are cancelled, postponed and listed; keys, ``once`` and jobs. With one worker."""

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any, cast
from uuid import UUID, uuid4

import celery
import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from celery.states import REVOKED

from celery_rabbitdelay import InvalidDelay, JobClosed, Row, UnknownOption, signals
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.registry import rows as row_registration
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import shard_of
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests import json_schemas
from tests.kernel.integration.notes import Notes, listening
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.waited import assert_waited
from tests.kernel.integration.worker import Worker
from tests.registry.integration.registry_fixtures import (
    DELAY,
    module_settings,
    module_worker,
    redis_setup,
    shop,
)

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


CANCEL: tuple[str, dict[str, Any]] = ("cancel", {})
KNOWN = {"also_future": False}
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
    # Workers of Celery 5.5 mark a revoked task when it arrives, later ones when they are told.
    told = REVOKED if celery.VERSION >= (5, 6) else "PENDING"
    wait_for(lambda: results["superseded"].state == told, "the revoke", PATIENCE)
    # A result that was made of an id belongs to the same application.
    states = [shop.AsyncResult(results[each].id).state for each in DECIDED]
    assert states.pop(5) in ("DELAYED", "SUCCESS")  # it is due soon
    assert states == [REVOKED, told, "PENDING", "DELAYED", "PENDING", told]

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
    with pytest.raises(InvalidDelay, match="exceeds the maximum"):
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


def test_a_purge_cancels_the_tracked_tasks_that_wait(shop: Any, noted: Notes) -> None:
    tracked = [noted.send(number, delay=DELAY, track=True) for number in range(3)]
    noted.send("untracked", delay=DELAY)
    assert shop.control.purge() >= 3
    assert shop.rabbitdelay.count() == 0
    wait_for(lambda: noted() == ["untracked"], "the other task", PATIENCE)
    with pytest.raises(TaskRevokedError):
        tracked[0].get(timeout=PATIENCE)


def send_many(shop: Any, name: str, number: int, hours: int, **options: Any) -> None:
    """Send tracked tasks that are in one list of the registry."""
    eta = datetime.now(UTC) + timedelta(hours=hours)
    ids = (each for each in (uuid4().hex for _ in count()) if shard_of(each) == 0)
    rows = (Row(eta=eta + timedelta(seconds=each), task_id=next(ids)) for each in range(number))
    report = shop.rabbitdelay.send_many(name, rows, track=True, **options)
    assert report.confirmed == number


def test_all_of_a_filter_that_were_sent_before_are_cancelled_whatever_is_sent_and_moved_meanwhile(
    shop: Any, small_pages: list[int]
) -> None:
    delays, job, cancelled = shop.rabbitdelay, uuid4().hex, list[str]()
    delays.open_job(job, expires=3600)
    send_many(shop, "at", 60, 10, job=job)
    send_many(shop, "at", 20, 20)
    send_many(shop, "request", 10, 10)
    in_15_hours = datetime.now(UTC) + timedelta(hours=15)
    *_, last = delays.pending(job=job)

    def send_and_move(task_id: str, **_: Any) -> None:
        cancelled.append(task_id)
        if 10 < len(cancelled) <= 30:
            send_many(shop, "at", 1, 9 if len(cancelled) % 2 else 11)
        if len(cancelled) == 40:
            assert delays.postpone(last.task_id, delay=9.5 * 3600) is Outcome.DONE

    small_pages.clear()
    with listening(send_and_move, signals.cancelled):
        assert delays.cancel_pending(task="at", due_before=in_15_hours) == 60
    # All are in one list, which was not read as a whole.
    assert max(small_pages) < 40
    assert (len({*cancelled}), last.task_id in cancelled) == (60, True)
    assert [delays.count(task=each) for each in ("at", "request")] == [40, 10]
    assert delays.cancel_pending(key="none") == 0
    assert delays.cancel_pending(task="at", due_after=in_15_hours) == 20
    assert [delays.cancel_pending(task=each) for each in ("at", "request")] == [20, 10]


def test_of_the_tasks_under_each_key_the_newest_runs_and_of_copies_one(
    shop: Any, noted: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_registration, "ASKED", 2)
    monkeypatch.setattr(row_registration, "BATCH", 2)
    for kind, last in (("delayed", {"delay": DELAY - 0.5}), ("at once", {})):
        for number in range(3):
            noted.send(number, delay=DELAY - 0.1 * number, key=f"{kind} {noted.key}")
        noted.send(f"newest {kind}", key=f"{kind} {noted.key}", **last)
    for envelopes in (True, False):
        keys = [f"{envelopes} {noted.key}:{at % 3}" if at != 4 else None for at in range(9)]
        rows = [noted.row(f"row {at}", delay=DELAY, key=key) for at, key in enumerate(keys)]
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, envelopes=envelopes)
    task_id = uuid4().hex
    for _ in range(3):
        noted.send("once", delay=DELAY, task_id=task_id, once=True)
    rows_run = [f"row {at}" for at in (4, 6, 7, 8)] * 2
    expected = ["newest at once", "newest delayed", "once", *rows_run]
    assert sorted(noted.until(DELAY)) == sorted(expected)


def test_show_says_why_a_task_does_not_run_before_and_after_it_was_due(
    shop: Any, noted: Notes, module_worker: Worker
) -> None:
    delays, job, key = shop.rabbitdelay, f"import-{uuid4().hex}", f"order:{uuid4().hex}"
    due = {"eta": datetime.now(UTC) + timedelta(seconds=DELAY)}
    delays.open_job(job, expires=600)
    in_envelope = [uuid4().hex for _ in range(2)]
    rows = [noted.row("in an envelope", task_id=each, **due) for each in in_envelope]
    delays.send_many("note", rows, job=job, track=True)
    older = noted.send("older", key=key, **due).id
    in_job = noted.send("in a job", job=job, track=True, **due).id
    cancelled = noted.send("cancelled", track=True, **due).id
    noted.send("newer", key=key, **due)
    delays.abort_job(job)
    delays.cancel(cancelled)
    ids = [older, cancelled, in_job, *in_envelope]

    def shown() -> list[tuple[str | None, ...]]:
        found = [delays.show(each) for each in ids]
        return [(each.state, each.key, each.job, each.job_state) for each in found]

    ended = [("superseded", key, None, None), ("cancelled", None, None, None)]
    assert shown() == [*ended, *[("waiting", None, job, "aborted")] * 3]
    expired = [*ended, *[("expired", None, job, "aborted")] * 3]
    wait_for(lambda: shown() == expired, "the end of all tasks", PATIENCE)
    wait_for(lambda: noted() == ["newer"], "the newest task of the key", PATIENCE)
    printed = [json_schemas.invoke(shop, ["show", each]).stdout.split() for each in (older, in_job)]
    assert printed[0][:5] == [f"{older}:", "superseded", "key", key, "why"]
    assert printed[1][:6] == [f"{in_job}:", "expired", "job", f"{job},", "aborted", "why"]
    why = {
        older: f"it is superseded by a newer task with the key '{key}'",
        in_job: f"its job '{job}' was aborted or has expired",
        cancelled: "it was cancelled",
    }
    lines = [f"Task note[{task_id}] does not run: {each}." for task_id, each in why.items()]
    wait_for(lambda: all(each in module_worker.log for each in lines), "the log", PATIENCE)


def test_a_key_names_one_task(shop: Any, noted: Notes) -> None:
    member = shop.tasks["note"].si("member", key=noted.key)
    for make in (group, chain, lambda *members: chord(members, member)):
        with pytest.raises(UnknownOption, match="give it to one of their tasks"):
            make(member, member).apply_async(delay=DELAY, key="order")


def test_the_tasks_of_a_job_wait_until_it_is_committed_and_never_run_if_its_block_fails(
    shop: Any, noted: Notes
) -> None:
    job, look, delays = f"import-{uuid4().hex}", shop.tasks["look"], shop.rabbitdelay
    rows = [noted.row(number, delay=0.5, task_id=uuid4().hex) for number in range(3)]
    with suppress(ZeroDivisionError), delays.job(f"failed {job}", expires=60):
        delays.send_many("note", rows, job=f"failed {job}", once=True, track=True)
        raise ZeroDivisionError
    with delays.job(job, expires=60):
        noted.send("at once", job=job)
        whole = chord([look.si(n) for n in range(2)], look.si("body"))
        result = whole.apply_async(delay=0.3, job=job)
        assert noted.until(0.5) == []
        # The same tasks may be sent again.
        delays.send_many("note", rows, job=job, once=True, track=True)
    assert result.get(timeout=PATIENCE)["given"] == ["body"]
    wait_for(lambda: {*noted()} == {"at once", 0, 1, 2}, "the job's tasks", PATIENCE)
    with pytest.raises(JobClosed, match="is committed"):
        noted.send("late", delay=1, job=job)
