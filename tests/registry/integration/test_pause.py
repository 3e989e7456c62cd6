"""Due tasks of a name or for a queue are paused and resumed: real servers, and a worker.

Pauses among all other decisions are in ``test_recorded_sequences.py``.
"""

import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import TaskRevokedError

from celery_rabbitdelay import Outcome, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.testing import RedisServer, Travel, wait_for
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import Worker
from tests.kernel.unit.clock import frozen
from tests.testing.integration.travelling_shop import rabbitdelay_celery_app

__all__ = ["rabbitdelay_celery_app"]

#: Seconds until the tasks are due.
DELAY = 1.0


@pytest.fixture
def configuration(configuration: dict[str, Any], redis: RedisServer) -> dict[str, Any]:
    """The same with a registry."""
    return {**configuration, "task_acks_late": True, "rabbitdelay_registry_url": redis.url}


@pytest.fixture
def passed(shop: Any) -> Any:
    """Waits until what is due in ``DELAY`` has been due for a while: another task has run."""

    def wait() -> None:
        # Each has passed the levels, and been put back, long before: it travels the same way.
        shop.tasks["look"].apply_async(delay=DELAY + 2).get(timeout=PATIENCE)

    return wait


def send_one_of_each_kind(noted: Notes, **options: Any) -> set[str]:
    """Send tasks with each option of the registry, and without any; return their arguments."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "tracked": {"track": True},
        "keyed": {"key": uuid4().hex},
        "once": {"once": True},
        "high": {"priority": 9},
        "expires": {"expires": 3600},
    }
    for kind, own in kinds.items():
        noted.send(kind, delay=DELAY, **own, **options)
    return set(kinds)


def waiting(shop: Any) -> int:
    """Return how many tasks stand in the queue of paused tasks."""
    paused = shop.rabbitdelay.topology.module_queues.paused
    with shop.connection_for_read() as connection:
        counts = queue_counts(connection, [paused])[paused.name]
    return 0 if counts is None else counts.messages


def test_paused_tasks_outlive_their_worker_and_keep_no_others_away(
    configuration: dict[str, Any], shop: Any, noted: Notes, passed: Any
) -> None:
    # With a prefetch count of 1, a task that waits in the worker would keep all others away.
    worker = Worker(configuration, None, "--prefetch-multiplier", "1")
    shop.rabbitdelay.pause(task="note")
    expected = send_one_of_each_kind(noted)
    rows = {str(number): noted.row(str(number), delay=DELAY) for number in range(50)}
    with worker:
        for track in (True, False):
            part = [row for number, row in rows.items() if int(number) % 2 == track]
            report = shop.rabbitdelay.send_many("note", part, envelopes=True, track=track)
            assert report.messages < 25
        passed()
        worker.kill()
        worker.start()
        passed()
        assert noted() == []
        worker.kill()
        # While no worker runs.
        shop.rabbitdelay.resume(task="note")
        worker.start()
        # What was put back, and not acknowledged when its worker was killed, has two messages.
        wait_for(lambda: {*noted()} == expected | rows.keys(), "the tasks", PATIENCE)


def test_a_resume_returns_what_was_held_at_once_and_that_is_not_late(
    shop: Any, worker: Worker, noted: Notes
) -> None:
    shop.rabbitdelay.pause(task="note")
    shop.rabbitdelay.pause(task="look")
    with frozen(time.time() - 2 * 3600):
        for number in range(60):
            noted.send(number, delay=DELAY, track=number % 2 == 0, priority=9 * (number % 3 == 0))
        shop.tasks["look"].apply_async(delay=DELAY)
    wait_for(lambda: waiting(shop) == 61, "the tasks in the queue of paused ones", PATIENCE)
    shop.rabbitdelay.resume(task="note")
    # If nothing returned them, each would ask again after ten minutes.
    wait_for(lambda: len(noted()) >= 60, "the tasks", PATIENCE)
    assert (sorted(noted()), waiting(shop)) == ([*range(60)], 1)
    # A worker of other tests would answer too.
    asked = {"destination": [worker.name], "reply": True, "limit": 1, "timeout": PATIENCE}
    (answer,) = shop.control.broadcast("rabbitdelay_status", **asked)
    (status,) = answer.values()
    assert status["tasks"]["received"] == 60
    assert status["tasks"]["latest"] < PATIENCE


def test_a_paused_task_waits_in_the_levels_if_nobody_declares_its_queue(
    shop: Any, serve: Any, noted: Notes
) -> None:
    paused = shop.rabbitdelay.topology.module_queues.paused
    with shop.connection_for_write() as connection:
        shop.rabbitdelay.declare(connection)
        worker = serve(rabbitdelay_declare="never").worker
        paused.exchange(connection.default_channel).delete()
    shop.rabbitdelay.pause(task="note")
    noted.send("held", delay=DELAY)
    wait_for(lambda: "returns to the delay levels" in worker.log, "the warning", PATIENCE)
    assert (noted(), waiting(shop)) == ([], 0)
    shop.rabbitdelay.resume(task="note")
    wait_for(lambda: noted() == ["held"], "the task", PATIENCE)


def test_while_redis_is_away_only_tasks_without_an_option_run_and_none_is_lost_with_it(
    shop: Any, serve: Any, noted: Notes, redis: RedisServer, passed: Any
) -> None:
    worker = serve(rabbitdelay_registry_options={"socket_timeout": 3}).worker
    shop.rabbitdelay.pause(task="note")
    expected = send_one_of_each_kind(noted)
    passed()
    assert noted() == []
    redis.suspend()
    noted.send("sent meanwhile", delay=DELAY)
    wait_for(lambda: "sent meanwhile" in noted(), "the task without an option", PATIENCE)
    wait_for(
        lambda: "go back into the delay levels" in worker.log, "the worker's warning", PATIENCE
    )
    redis.resume()
    passed()
    assert {*noted()} <= {"sent meanwhile", "plain", "high", "expires"}
    redis.kill()
    for call in (shop.rabbitdelay.pause, shop.rabbitdelay.resume):
        with pytest.raises(RegistryUnavailable):
            call(task="note")
    redis.start()  # it has saved nothing, so nothing is paused
    expected.add("sent meanwhile")
    wait_for(lambda: expected <= {*noted()}, "the tasks", PATIENCE)
    shop.tasks["look"].apply_async(delay=7).get(timeout=PATIENCE)
    assert Counter(noted()) == Counter(expected)
    assert shop.rabbitdelay.paused() == []


@pytest.fixture
def travelled(rabbitdelay_app: Any, rabbitdelay_worker: Any) -> Iterator[Notes]:
    """The notes of an application whose worker travels in time."""
    noted = Notes(rabbitdelay_app)
    yield noted
    noted.forget()


def test_what_is_cancelled_while_it_is_paused_does_not_wait_for_the_resume(
    travelled: Notes, travel: Travel
) -> None:
    delays, send = travelled.shop.rabbitdelay, partial(travelled.send, delay=DELAY)
    delays.pause(task="note")
    cancelled, revoked, kept = (send(name, track=True) for name in ("cancelled", "revoked", "kept"))
    untracked, older = send("untracked"), send("older", key="order")
    delays.open_job("import", expires=3600)
    aborted = send("aborted", job="import")
    travel(seconds=4)
    assert delays.cancel(cancelled) is Outcome.DONE
    revoked.revoke()
    assert delays.cancel(untracked) is Outcome.NOTED
    send("newer", key="order")
    delays.abort_job("import")
    travel(seconds=10)
    for result in (cancelled, revoked, untracked, older, aborted):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=PATIENCE)
    assert (travelled(), kept.state) == ([], "DELAYED")
    delays.resume(task="note")
    travel.until(travel.nothing_waits)
    assert Counter(travelled()) == Counter({"kept", "newer"})


def test_what_is_paused_until_an_instant_runs_then(travelled: Notes, travel: Travel) -> None:
    delays, now = travelled.shop.rabbitdelay, wall_clock.now()
    delays.pause(task="note", until=now + timedelta(hours=2))
    travelled.send("held", delay=DELAY)
    travel(hours=1.9)
    assert travelled() == []
    travel(hours=0.2)
    travel.until(travel.nothing_waits)
    assert (travelled(), delays.paused()) == (["held"], [])


def test_hours_past_a_pause_have_few_stops_and_what_is_resumed_runs_at_once(
    travelled: Notes, travel: Travel
) -> None:
    delays = travelled.shop.rabbitdelay
    delays.pause(task="note")
    travelled.send("held", delay=DELAY)
    delays.open_job("late", expires=14_000)
    expired = travelled.send("expired", delay=DELAY, job="late")
    travel(seconds=14_010)
    assert travelled() == []
    with pytest.raises(TaskRevokedError):
        expired.get(timeout=PATIENCE)
    assert delays.resume(task="note")
    travel(seconds=1)
    assert travelled() == ["held"]
