"""Edits, pauses, leases and wrong clocks of schedules, on real servers."""

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest
from kombu import Connection

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.exceptions import ConnectionLost, PublishError
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.publishing.publisher import Run
from celery_rabbitdelay.schedules import runs
from celery_rabbitdelay.schedules.recurrence import ALL, Occurrence, Recurrence
from celery_rabbitdelay.testing import wait_for
from tests.celery_process import CeleryProcess
from tests.chaos.preloads import off_by
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.trouble import suspended
from tests.kernel.integration.worker import Worker
from tests.kernel.unit.clock import frozen
from tests.registry.integration.registry_fixtures import redis_setup
from tests.schedules.integration.test_schedules import Stage, overlapped, settings, shop, stage

__all__ = ["redis_setup", "settings", "shop", "stage"]

SECOND: Final = timedelta(seconds=1)
HOUR: Final = timedelta(hours=1)


def assert_each_once(found: list[tuple[float, str, float]], gap: float = 1.0) -> None:
    """Assert that each instant ran once, from the first to the last."""
    assert {later[0] - earlier[0] for earlier, later in pairwise(found)} == {gap}


def between(first: datetime, last: float, gap: int = 1) -> set[float]:
    """Return the instants from the first to the last one."""
    begin = int(first.timestamp())
    return {*map(float, range(begin, int(last) + 1, gap))}


@pytest.mark.parametrize("jitter", [0, 1])
def test_an_edit_keeps_an_instant_that_is_due_and_has_not_come(
    stage: Stage, connection: Connection, jitter: int
) -> None:
    start = datetime.now(UTC).replace(microsecond=0)
    while (due := jittered("a", start, jitter)) - start < SECOND * jitter / 2:
        start += timedelta(milliseconds=1)
    options: dict[str, Any] = {"start": start, "jitter": jitter}
    with frozen(start.timestamp() - 1):
        assert stage.edit("former", HOUR, **options).next_at == due
    if not jitter:
        wait_until_waiting(connection, named(stage.shop, "default"), 1)
    with frozen(start.timestamp() + jitter / 4):
        edited = stage.edit("edited", HOUR, **options)
    assert (edited.next_at, edited.args) == (due, ("edited",))
    with Worker(stage.settings):
        stage.until_given("edited", 1)
        stage.until(1)
    assert [each[:2] for each in stage.runs()] == [(start.timestamp(), "edited")]


def jittered(name: str, instant: datetime, jitter: int) -> datetime:
    """Return when a schedule is due for an instant: up to ``jitter`` seconds after it."""
    hourly = Recurrence.of(HOUR, "UTC")
    made = Occurrence(name, milliseconds_of(instant), hourly, ALL, jitter * 1000)
    return instant_of(made.due_ms)


def test_what_waits_for_the_end_of_a_run_does_not_outlive_its_schedule(stage: Stage) -> None:
    hold: dict[str, Any] = {"task": "hold", "overlap": "queue-one"}
    with Worker(stage.settings, None, "-c", "4") as worker:
        for name in ("a", "deleted"):
            stage.edit("former", name=name, **hold)
        # Then the one that waits does so in the levels.
        for name in ("a", "deleted"):
            wait_for(partial(overlapped, worker, 3, name), "three that overlap", PATIENCE)
        assert stage.shop.rabbitdelay.schedules.delete("deleted")
        with suspended(worker), frozen() as clock:
            start = datetime.fromtimestamp(clock.now, UTC) + SECOND / 4
            made = stage.edit("edited", HOUR, start=start, **hold)
        order = stage.lease("hget", "order", kind="schedule")
        waits = partial(stage.lease, kind="queued", name=f"{order}:a")
        wait_for(lambda: waits() == made.next_id, "one that waits", PATIENCE)
        stage.let_end()
        stage.until_given("edited", 1)
        stage.until(4)
    assert sorted(stage()) == ["edited", "former", "former"]


def test_what_waits_of_an_earlier_edit_keeps_no_other_out(stage: Stage) -> None:
    registry, hourly = stage.shop.rabbitdelay.registry, Recurrence.of(HOUR, "UTC")
    old = Occurrence("a", 1000, hourly, ALL, overlap="queue-one", order=1)
    new = old._replace(instant_ms=2000, order=2)
    # The worker that has decided about the old one may ask for its place after the edit.
    assert [runs.queue(registry, each, 60_000) for each in (new, old, new)] == [True] * 3
    assert not runs.queue(registry, new._replace(instant_ms=3000), 60_000)


def test_a_put_whose_send_fails_stands_and_a_pause_meanwhile_is_kept(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = stage.shop.rabbitdelay.schedules
    stage.edit("former", HOUR)
    in_an_hour = datetime.now(UTC) + HOUR

    def fail(*_: Any, **__: Any) -> None:
        assert schedules.pause("a")
        raise ConnectionLost("", "", "RabbitMQ is away")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "go_on", fail)
        with pytest.raises(PublishError):
            stage.edit("edited", start=in_an_hour)
    found = schedules.get("a")
    assert (found.args, found.is_paused) == (("edited",), True)
    assert stage.edit("edited", start=in_an_hour).next_id == found.next_id
    stage.edit("later")
    with Worker(stage.settings) as worker:
        wait_for(lambda: "does not run: paused" in worker.log, "a pause", PATIENCE)
        assert schedules.resume("a")
        stage.until_given("later", 2)
    assert_each_once(stage.runs())
    assert {*stage()} == {"later"}


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_a_worker_that_stops_gives_the_lease_back(stage: Stage, pool: str) -> None:
    stage.settings["imports"] = ["tests.schedules.integration.no_poll"]
    stage.edit("held", task="hold", overlap="skip")
    with Worker(stage.settings, None, "-P", pool) as worker:
        stage.until_given("held", 1)
        assert stage.lease()
        os.kill(worker.pid, signal.SIGTERM)
        wait_for(lambda: "Warm shutdown" in worker.log, "a warm stop", PATIENCE)
        stage.let_end()
        wait_for(lambda: not worker.running, "its end", PATIENCE)
        assert not stage.lease()


def test_a_run_that_is_delivered_again_takes_its_lease_over(stage: Stage) -> None:
    stage.settings["task_acks_late"] = True
    stage.edit("held", task="hold", overlap="skip", catch_up="last")
    with Worker(stage.settings) as worker:
        stage.until_given("held", 1)
        lease = stage.lease()
        worker.kill()
    # It does not end by itself, however long the next worker takes to start.
    stage.lease("set", lease)
    with Worker(stage.settings):
        stage.until_given("held", 2)
        assert stage.lease() not in (None, lease)
        stage.let_end()
    first, second, *_ = stage.runs()
    assert first[0] == second[0]


class FastWorker(Worker):
    """A worker whose clock is half a minute ahead."""

    def _spawn(self, command: list[str]) -> Any:
        # No fork: what is preloaded is loaded when a program begins.
        return CeleryProcess._spawn(self, command)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **off_by(30)}


def test_a_worker_whose_clock_is_wrong_loses_and_repeats_nothing_and_is_not_early(
    stage: Stage,
) -> None:
    seen: dict[tuple[str, float], float] = {}
    expected: set[tuple[str, float]] = set()

    def came() -> bool:
        for instant, given, _ in stage.runs():
            seen.setdefault((given, instant), time.time())
        return expected <= seen.keys()

    with Worker(stage.settings), FastWorker(stage.settings) as fast:
        for catch_up in ("all", "last"):
            first = stage.edit(catch_up, 2 * SECOND, name=catch_up, catch_up=catch_up).next_at
            instants = between(first, first.timestamp() + 10, 2)
            expected |= {(catch_up, each) for each in instants}
        wait_for(came, "six instants of each", PATIENCE)
        wait_for(lambda: " succeeded in " in fast.log, "a run on the fast worker", PATIENCE)
    found = [(given, instant) for instant, given, _ in stage.runs()]
    # Of two workers, the one that ends first may leave a later instant to the other.
    assert sorted(each for each in found if each in expected) == sorted(expected)
    assert min(at - instant for (_, instant), at in seen.items()) > -2.5


def test_an_occurrence_is_listed_as_long_as_it_waits(shop: Any, stage: Stage) -> None:
    start = datetime.now(UTC) + HOUR
    former = stage.edit("former", HOUR, "tracked-note", start=start).next_id
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [former]
    shown = shop.rabbitdelay.show(former)
    assert (shown.state, shown.task, "former" in shown.args) == ("waiting", "tracked-note", True)
    edited = stage.edit("edited", HOUR, "tracked-note", start=start).next_id
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [edited] != [former]
    assert shop.rabbitdelay.show(former).state == "cancelled"
    assert shop.rabbitdelay.schedules.delete("a")
    assert [*shop.rabbitdelay.pending()] == []
    assert shop.rabbitdelay.show(edited).state == "cancelled"


def test_one_occurrence_is_cancelled_or_postponed_by_its_id(stage: Stage) -> None:
    delays = stage.shop.rabbitdelay
    tasks = {"note": Outcome.NOTED, "tracked-note": Outcome.DONE}
    with Worker(stage.settings) as worker:
        with suspended(worker):
            eta = datetime.now(UTC) + 8 * SECOND
            made = {
                (word, task): stage.edit(f"{word} {task}", SECOND, task, name=f"{word} {task}")
                for word in ("cancelled", "postponed")
                for task in tasks
            }
            for task, outcome in tasks.items():
                assert delays.cancel(made["cancelled", task].next_id) is outcome
                assert delays.postpone(made["postponed", task].next_id, eta=eta) is outcome
        for word, task in made:
            stage.until_given(f"{word} {task}", 2 if word == "cancelled" else 6)
    for (word, task), schedule in made.items():
        runs = [each for each in stage.runs() if each[1] == f"{word} {task}"]
        assert_each_once(runs)
        assert runs[0][0] == schedule.next_at.timestamp() + (word == "cancelled")
        assert word == "cancelled" or runs[0][2] >= eta.timestamp()
