"""Tasks that wait are cancelled, postponed, superseded and listed, with a worker of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import chain, chord, group
from celery.canvas import StampingVisitor  # type: ignore[attr-defined]
from celery.exceptions import TaskRevokedError
from celery.states import REVOKED

from celery_rabbitdelay import InvalidDelay, JobClosed, NotTracked, UnknownOption
from celery_rabbitdelay.app.sending import task_sending
from celery_rabbitdelay.registry import registry
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.testing import wait_for
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.registering import KINDS, TIMEOUT, RedisSetup
from tests.integration.shop import PATIENCE, make_app
from tests.integration.waited import assert_waited
from tests.integration.worker import Worker

#: Seconds; long enough for a test to cancel a task before it is due.
DELAY = 10.0


@pytest.fixture(scope="module")
def redis_setup() -> Iterator[RedisSetup]:
    """A cluster, which takes the least; test_registry_worker.py has the other kinds."""
    with KINDS["cluster"]() as setup:
        yield setup


@pytest.fixture(scope="module")
def module_settings(
    redis_setup: RedisSetup, module_broker_url: str, redis_url: str
) -> Iterator[dict[str, Any]]:
    """A configuration with a registry, whose queues one worker serves for all tests."""
    with_registry = {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_registry_url": redis_setup.url,
        "rabbitdelay_registry_options": {"socket_timeout": TIMEOUT, **redis_setup.options},
    }
    with Worker(with_registry):
        yield with_registry


@pytest.fixture
def shop(module_settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(module_settings)
    yield app
    app.close()


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


def test_a_task_is_not_postponed_beyond_the_longest_delay(shop: Any, noted: Notes) -> None:
    result = noted.send("far", delay=60, track=True)
    with pytest.raises(InvalidDelay, match="longest delay"):
        shop.rabbitdelay.postpone(result, eta=datetime(2999, 1, 1, tzinfo=UTC))
    assert shop.rabbitdelay.show(result).postponed is None
    shop.rabbitdelay.cancel(result)


def test_a_task_with_a_key_cannot_run_earlier_unless_it_is_tracked(shop: Any, noted: Notes) -> None:
    key = f"order:{uuid4().hex}"
    result = noted.send("keyed", delay=60, key=key)
    with pytest.raises(NotTracked, match=result.id):
        shop.rabbitdelay.postpone(key=key, delay=1)
    assert shop.rabbitdelay.cancel(key=key) is Outcome.DONE


@pytest.mark.parametrize("last", [{"delay": DELAY - 0.5}, {}], ids=["delayed", "at once"])
def test_the_newest_task_under_a_key_runs(noted: Notes, last: dict[str, Any]) -> None:
    key = f"order:{uuid4().hex}"
    for number in range(4):
        noted.send(number, delay=DELAY - 0.1 * number, key=key)
    noted.send("newest", key=key, **last)
    assert noted.until(DELAY) == ["newest"]


def test_of_all_that_are_sent_at_once_the_first_under_a_key_is_sent_alone(noted: Notes) -> None:
    key = f"order:{uuid4().hex}"

    def send(number: int) -> Any:
        return noted.send(number, delay=DELAY, key=key, unique="first")

    with ThreadPoolExecutor(12) as threads:
        sent = list(threads.map(send, range(24)))
    assert len({each.id for each in sent}) == 1
    assert len(noted.until(DELAY)) == 1


def test_the_first_under_a_key_leaves_others_out_while_it_waits(shop: Any, noted: Notes) -> None:
    key = f"order:{uuid4().hex}"
    first = noted.send("cancelled", delay=DELAY, key=key, unique="first")
    assert noted.send("left out", key=key, unique="first").id == first.id
    assert shop.rabbitdelay.cancel(key=key) is Outcome.DONE
    second = noted.send("second", delay=60, key=key, unique="first", track=True)
    assert second.id != first.id
    assert noted.send("left out", delay=9, key=key, unique="first", unique_for=9).id == second.id
    assert shop.rabbitdelay.postpone(key=key, delay=0.5) is Outcome.DONE
    second.get(timeout=PATIENCE)
    assert (
        noted.send("left out", key=key, unique="first", unique_for=timedelta(hours=1)).id
        == second.id
    )
    # Without a time, it may be sent again as soon as it has arrived; the newest always may.
    noted.send("third", delay=DELAY, key=key, unique="first")
    noted.send("newest", delay=0.5, key=key, unique="newest")
    assert noted.until(DELAY) == ["second", "newest"]


def test_of_two_that_are_sent_as_the_first_the_newest_runs(
    shop: Any, noted: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = f"order:{uuid4().hex}"
    monkeypatch.setattr(registry, "SENDING_LEASE", 0.2)
    # As if its sender had died before it could register it.
    with shop.rabbitdelay.registry.alone_under(key), monkeypatch.context() as patch:
        patch.setattr(task_sending, "register_sent", lambda *given: [])
        first = noted.send("first", delay=DELAY, key=key, unique="first")
    second = noted.send("second", delay=DELAY - 1, key=key, unique="first")
    assert first.id != second.id
    assert noted.until(DELAY) == ["second"]


def test_retries_of_the_first_under_a_key_are_sent(shop: Any) -> None:
    key = f"order:{uuid4().hex}"
    given: Any = ([], 2, {"delay": 0.2})
    retried = shop.tasks["retry"].apply_async(given, delay=0.2, key=key, unique="first")
    assert len(retried.get(timeout=PATIENCE)) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"unique": "first"}, "needs a key"),
        ({"key": "order:7", "unique": "last"}, "takes 'first' or 'newest'"),
        ({"key": "order:7", "unique_for": 60}, "needs unique='first'"),
        ({"key": "order:7", "unique": "first", "unique_for": True}, "takes seconds"),
    ],
)
def test_a_unique_that_says_nothing_is_refused(
    noted: Notes, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnknownOption, match=reason):
        noted.send("refused", delay=DELAY, **options)


@pytest.mark.parametrize("make", [group, chain, chord], ids=["group", "chain", "chord"])
def test_what_others_wait_for_cannot_be_left_out(shop: Any, noted: Notes, make: Any) -> None:
    member = shop.tasks["note"].si("member", key=noted.key).set(key="order:7", unique="first")
    canvas = make(member, member) if make is not chord else chord([member], member)
    with pytest.raises(UnknownOption, match="others would wait"):
        canvas.apply_async(delay=DELAY)


def test_nor_can_a_retry_or_a_task_of_a_job(shop: Any, noted: Notes) -> None:
    noted.send("first", delay=DELAY, key="order:8", unique="first")
    given: Any = ([], 1, {"delay": 0.2, "key": "order:8", "unique": "first"})
    with pytest.raises(UnknownOption, match="others would wait"):
        shop.tasks["retry"].apply_async(given).get(timeout=PATIENCE)
    job = f"job-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=60)
    with pytest.raises(UnknownOption, match="combined with job"):
        noted.send("in a job", delay=DELAY, key="order:8", unique="first", job=job)
    with pytest.raises(UnknownOption, match="rabbitdelay_registry_keep"):
        noted.send(delay=DELAY, key="order:8", unique="first", unique_for=timedelta(days=99))


def test_a_task_that_was_sent_twice_with_once_runs_once(noted: Notes) -> None:
    task_id = uuid4().hex
    for _ in range(3):
        noted.send("once", delay=0.5, task_id=task_id, once=True)
    assert noted.until(0.5) == ["once"]


def test_the_tasks_of_a_job_wait_until_it_is_committed(shop: Any, noted: Notes) -> None:
    job = f"import-{uuid4().hex}"
    with shop.rabbitdelay.job(job, expires=60):
        for number in range(3):
            noted.send(number, delay=0.2, job=job)
        noted.send(3, job=job)
        assert noted.until(0.5) == []
    wait_for(lambda: sorted(noted()) == [0, 1, 2, 3], "the job's tasks", PATIENCE)
    with pytest.raises(JobClosed, match="is committed"):
        noted.send(4, delay=1, job=job)


def test_the_tasks_of_an_aborted_job_do_not_run(shop: Any, noted: Notes) -> None:
    job = f"import-{uuid4().hex}"
    rows = [noted.row("aborted", delay=0.5)] * 20

    def broken_off() -> None:
        with shop.rabbitdelay.job(job, expires=60):
            shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert noted.until(0.5) == []


def test_tasks_of_an_aborted_job_run_when_they_are_sent_again(shop: Any, noted: Notes) -> None:
    rows = [noted.row(number, delay=0.5, task_id=uuid4().hex) for number in range(3)]

    def send_as(job: str) -> None:
        shop.rabbitdelay.send_many(shop.tasks["note"], rows, job=job, once=True, track=True)

    failed, again = uuid4().hex, uuid4().hex
    shop.rabbitdelay.open_job(failed, expires=60)
    send_as(failed)
    shop.rabbitdelay.abort_job(failed)
    assert noted.until(0.5) == []
    with shop.rabbitdelay.job(again, expires=60):
        send_as(again)
    wait_for(lambda: sorted(noted()) == [0, 1, 2], "the tasks", PATIENCE)


@pytest.mark.parametrize("envelopes", [True, False])
def test_rows_with_keys_supersede_each_other(shop: Any, noted: Notes, envelopes: bool) -> None:
    key = f"order:{uuid4().hex}"
    rows = [noted.row(number, delay=DELAY, key=f"{key}:{number % 3}") for number in range(9)]
    shop.rabbitdelay.send_many(shop.tasks["note"], rows, envelopes=envelopes)
    assert sorted(noted.until(DELAY)) == [6, 7, 8]


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
