"""Edits, pauses, leases, backfills and wrong clocks of schedules, on real servers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

import pytest
from kombu import Connection

from celery_rabbitdelay import Outcome
from celery_rabbitdelay.exceptions import ConnectionLost, PublishError
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.celery_process import REPOSITORY, CeleryProcess
from tests.chaos.clocks import off_by
from tests.integration.arrivals import take, wait_until_waiting
from tests.integration.management import node
from tests.integration.notes import Notes
from tests.integration.registry_fixtures import redis_setup
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.test_schedules import let_end, settings, shop
from tests.integration.worker import ShopProcess, Worker, run_command
from tests.json_schemas import checked

__all__ = ["let_end", "node", "redis_setup", "settings", "shop"]

SECOND: Final = timedelta(seconds=1)
HOUR: Final = timedelta(hours=1)


class Stage(Notes):
    """The schedule ``a`` of a shop, and the runs of its occurrences."""

    def put(self, given: str, when: Any = SECOND, task: str = "note", **options: Any) -> Any:
        """Put the schedule, whose task notes what it was given."""
        options = {"catch_up": "all", "overlap": "allow", **options}
        put = self.shop.rabbitdelay.schedules.put
        return put("a", task, when, (given,), {"key": self.key}, **options)

    def runs(self) -> list[tuple[float, str, float]]:
        """Return the runs by their instants, with what each was given, and when it ran."""
        found = [(each["correlation_id"].split(":"), each) for each in self.found()]
        return sorted(
            (int(words[1]) / 1000, each["given"][0], each["at"])
            for words, each in found
            if len(words) == 3
        )

    def until_given(self, given: str, number: int) -> None:
        """Wait until so many occurrences have run with that argument."""
        wait_for(lambda: self().count(given) >= number, f"{number} times {given}", PATIENCE)

    def lease(self) -> Any:
        """Return who has the lease of the schedule's run; None if nobody has."""
        registry = self.shop.rabbitdelay.registry
        (found,) = registry.store.commands(lambda pipe: pipe.get(registry.names.of("running", "a")))
        return found


@pytest.fixture
def stage(shop: Any, noted: Notes) -> Stage:
    """The schedule ``a``, not put yet; its notes are those of the fixtures."""
    stage = Stage(shop)
    stage.key = noted.key
    return stage


def wait_until(instant: datetime) -> None:
    wait_for(lambda: datetime.now(UTC) > instant, f"{instant}", PATIENCE)


def in_whole_seconds(seconds: int) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + seconds * SECOND


def assert_each_once(found: list[tuple[float, str, float]], gap: float = 1.0) -> None:
    """Assert that each instant ran once, from the first to the last."""
    assert {later[0] - earlier[0] for earlier, later in pairwise(found)} == {gap}


@pytest.mark.parametrize("catch_up", ["last", "all"])
@pytest.mark.parametrize("jitter", [0, 8])
def test_an_edit_keeps_an_instant_that_is_due_and_has_not_come(
    settings: dict[str, Any], stage: Stage, connection: Connection, jitter: int, catch_up: str
) -> None:
    start, made = in_whole_seconds(2), None
    options: dict[str, Any] = {"jitter": jitter, "catch_up": catch_up}
    # A jitter that is long enough for the edit.
    while made is None or made.next_at - start < SECOND * jitter / 2:
        start += timedelta(milliseconds=1)
        made = stage.put("former", HOUR, start=start, **options)
    if not jitter:
        wait_until_waiting(connection, named(stage.shop, "default"), 1)
    wait_until(start)
    edited = stage.put("edited", HOUR, start=start, **options)
    assert (edited.next_at, edited.args) == (made.next_at, ("edited",))
    with Worker(settings):
        stage.until_given("edited", 1)
        stage.until(1)
    assert [each[:2] for each in stage.runs()] == [(start.timestamp(), "edited")]


def test_edits_around_many_instants_lose_none_and_repeat_none(
    settings: dict[str, Any], stage: Stage
) -> None:
    times: list[tuple[float, float]] = []

    def edit() -> None:
        began = time.time()
        stage.put(f"{len(times)}")
        times.append((began, time.time()))

    edit()
    around = random.Random(7)
    with Worker(settings), Worker(settings):
        stage.until_given("0", 1)
        for _ in range(20):
            instant = int(time.time()) + 1
            # What keeps the workers busy when the instant has come.
            with stage.shop.rabbitdelay.pipeline():
                for _ in range(30):
                    stage.shop.tasks["at"].apply_async(eta=datetime.fromtimestamp(instant, UTC))
            for seconds in sorted(around.uniform(-0.1, 0.1) for _ in range(3)):
                time.sleep(max(0, instant + seconds - time.time()))
                edit()
        wait_for(lambda: stage.runs()[-1][0] > times[-1][1] + 1, "later ones", PATIENCE)
    assert_each_once(stage.runs())
    for due, given, at in stage.runs():
        # The first put declares the levels, and may return later than the first instant.
        before = [number for number, (_, returned) in enumerate(times) if returned < due]
        assert int(given) >= max(before, default=0)
        assert times[int(given)][0] <= at


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "edited"])
def test_what_waits_for_the_end_of_a_run_does_not_outlive_its_schedule(
    settings: dict[str, Any], stage: Stage, let_end: Callable[[], Any], is_deleted: bool
) -> None:
    with Worker(settings, None, "-c", "3") as worker:
        stage.put("former", task="hold", overlap="queue-one")
        overlap = "another run of its schedule still goes"
        # Then the one that waits does so in the levels.
        wait_for(lambda: worker.log.count(overlap) >= 3, "three that overlap", PATIENCE)
        start = datetime.now(UTC) + SECOND / 4
        if is_deleted:
            assert stage.shop.rabbitdelay.schedules.delete("a")
        else:
            stage.put("edited", HOUR, task="hold", overlap="queue-one", start=start)
        wait_until(start + SECOND / 2)
        let_end()
        if not is_deleted:
            stage.until_given("edited", 1)
        stage.until(4)
    assert stage() == ["former", *([] if is_deleted else ["edited"])]


@pytest.mark.parametrize("what", ["route", "priority", "time_limit"])
def test_another_route_or_option_of_the_task_is_an_edit(
    settings: dict[str, Any], shop: Any, connection: Connection, what: str
) -> None:
    queues = [shop.amqp.queues[named(shop, name)] for name in ("default", "second")]
    for queue in queues:
        queue(connection.default_channel).declare()
    changes = {
        "route": {"task_routes": {"note": {"queue": queues[1].name}}},
        "priority": {"task_annotations": {"note": {"priority": 3}}},
        "time_limit": {"task_annotations": {"note": {"time_limit": 77}}},
    }
    changed = make_app({**settings, **changes[what]})
    start = datetime.now(UTC) + 2 * SECOND
    puts: list[Any] = [
        each.rabbitdelay.schedules.put("a", "note", HOUR, ("a",), {"key": "none"}, start=start)
        for each in (shop, shop, changed, changed)
    ]
    first, same, edited, same_again = (each.next_id for each in puts)
    changed.close()
    assert first == same != edited == same_again
    arrivals = take(connection, queues, 2)
    (arrived,) = (each for each in arrivals if each.message.headers["id"] == edited)
    assert (arrived.queue == queues[1].name) is (what == "route")
    assert (arrived.message.properties.get("priority") == 3) is (what == "priority")
    assert (arrived.message.headers["timelimit"][0] == 77) is (what == "time_limit")


class Order:
    """Something that only pickle can write."""

    def __init__(self) -> None:
        self.tags = {"red", "green", "blue", "white", "black"}


def put_pickled(shop: Any) -> str:
    """Put a schedule with arguments that have another order in each process; return its id."""
    args = ({"one", "two", "three", "four"}, frozenset({"x", "y", "z"}), [Order()], {"b": 1})
    put: Any = shop.rabbitdelay.schedules.put("a", "look", "@daily", args, serializer="pickle")
    return str(put.next_id)


PUT: Final = """
from tests.integration import shop, test_schedule_edits
print(test_schedule_edits.put_pickled(shop.app))
"""


def test_an_unchanged_put_of_another_process_is_no_edit(
    settings: dict[str, Any], make_shop: Callable[..., Any], shop: Any
) -> None:
    settings["accept_content"] = ["json", "pickle"]
    ids = {put_pickled(make_shop(**settings))}
    for seed in "123":
        variables = {**ShopProcess.environment(settings), "PYTHONHASHSEED": seed}
        # No fork, which would have the seed of this process.
        told = subprocess.run(
            [sys.executable, "-c", PUT],
            env={**os.environ, **variables},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        ids.add(told.stdout.strip())
    assert len(ids) == 1


@pytest.fixture
def managed(node: RabbitMQServer, settings: dict[str, Any]) -> Iterator[Stage]:
    """The same on a broker with its management API."""
    settings["broker_url"] = node.url
    shop = make_app(settings)
    yield Stage(shop)
    shop.rabbitdelay.schedules.delete("a")
    shop.close()


def test_a_put_whose_send_fails_stands_and_a_pause_meanwhile_is_kept(
    settings: dict[str, Any],
    managed: Stage,
    node: RabbitMQServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedules = managed.shop.rabbitdelay.schedules
    managed.put("former", HOUR)

    def fail(*_: Any, **__: Any) -> None:
        assert schedules.pause("a")
        raise ConnectionLost("", "", "RabbitMQ is away")

    def verify() -> list[str]:
        told = run_command(settings, f"verify --json --management {node.management_url}")
        found = [each["code"] for each in checked("verify", told.stdout)["findings"]]
        return [code for code in found if "schedule" in code]

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "publish_all", fail)
        with pytest.raises(PublishError):
            managed.put("edited")
    found = schedules.get("a")
    assert (found.args, found.is_paused) == (("edited",), True)
    assert verify() == ["schedule-unsent"]
    assert managed.put("edited").next_id == found.next_id
    assert verify() == []
    with Worker(settings) as worker:
        wait_for(lambda: "its schedule is paused" in worker.log, "a pause", PATIENCE)
        assert schedules.resume("a")
        managed.until_given("edited", 2)
    assert_each_once(managed.runs())
    assert "former" not in managed()


@pytest.mark.parametrize("pool", ["threads", "prefork", "solo"])
def test_a_worker_that_stops_gives_the_lease_back(
    settings: dict[str, Any], stage: Stage, let_end: Callable[[], Any], pool: str
) -> None:
    stage.put("held", task="hold", overlap="skip")
    with Worker(settings, None, "-P", pool) as worker:
        stage.until_given("held", 1)
        assert stage.lease()
        os.kill(worker.pid, signal.SIGTERM)
        wait_for(lambda: "Warm shutdown" in worker.log, "a warm stop", PATIENCE)
        let_end()
        wait_for(lambda: not worker.running, "its end", PATIENCE)
        assert not stage.lease()
    with Worker(settings):
        stage.until_given("held", 2)


def test_a_run_that_is_delivered_again_takes_its_lease_over(
    settings: dict[str, Any], stage: Stage, let_end: Callable[[], Any]
) -> None:
    settings["task_acks_late"] = True
    stage.put("held", task="hold", overlap="skip", catch_up="last")
    with Worker(settings) as worker:
        stage.until_given("held", 1)
        lease = stage.lease()
        worker.kill()
    with Worker(settings):
        stage.until_given("held", 2)
        assert stage.lease() not in (None, lease)
        let_end()
    first, second, *_ = stage.runs()
    assert first[0] == second[0]
    # Long before the lease would have ended.
    assert second[2] - first[2] < 45


def test_the_end_of_a_run_gives_the_lease_back_soon(settings: dict[str, Any], stage: Stage) -> None:
    stage.put("short", overlap="skip")
    lasted: list[float] = []
    with Worker(settings) as worker:
        for number in range(1, 8):
            stage.until_given("short", number)
            ended = time.monotonic()
            wait_for(lambda: not stage.lease(), "its end", PATIENCE, 0.01)
            lasted.append(time.monotonic() - ended)
        worker.kill()
    # A busy machine may be slow now and then.
    assert sorted(lasted)[2] < 0.3


def test_a_backfill_after_an_edit_repeats_neither_what_ran_nor_what_waits(
    settings: dict[str, Any], stage: Stage
) -> None:
    backfill = stage.shop.rabbitdelay.schedules.backfill
    # Long enough for the worker to stop before the next one comes.
    gap = 5 * SECOND
    begin = stage.put("former", gap).next_at
    with Worker(settings):
        stage.until_given("former", 2)
    ran = [each[0] for each in stage.runs()]
    wait_until(begin + 2 * gap)
    stage.put("edited", gap)
    assert backfill("a", begin, datetime.now(UTC)) == 0
    for _ in range(2):
        assert backfill("a", begin - 3 * gap, datetime.now(UTC)) == 3
    with Worker(settings):
        stage.until_given("edited", 5)
        stage.until(0)
    found = stage.runs()
    assert_each_once(found, 5)
    assert found[0][0] == (begin - 3 * gap).timestamp()
    assert [each[0] for each in found if each[1] == "former"] == ran


class FastWorker(Worker):
    """A worker whose clock is half a minute ahead."""

    def _spawn(self, command: list[str]) -> Any:
        # No fork: what is preloaded is loaded when a program begins.
        return CeleryProcess._spawn(self, command)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **off_by(30)}


@pytest.mark.parametrize("catch_up", ["all", "last"])
def test_a_worker_whose_clock_is_wrong_loses_and_repeats_nothing_and_is_not_early(
    settings: dict[str, Any], stage: Stage, catch_up: str
) -> None:
    seen: dict[float, float] = {}

    def look() -> bool:
        for instant, *_ in stage.runs():
            seen.setdefault(instant, time.time())
        return max(seen, default=0) - min(seen, default=0) >= 40

    with Worker(settings), FastWorker(settings) as fast:
        stage.put("given", 2 * SECOND, catch_up=catch_up)
        wait_for(look, "the time of 20 instants", PATIENCE)
        assert " succeeded in " in fast.log
    assert_each_once(stage.runs(), 2)
    assert min(at - instant for instant, at in seen.items()) > -2.5


def test_an_occurrence_is_listed_as_long_as_it_waits(shop: Any, stage: Stage) -> None:
    former = stage.put("former", HOUR, "tracked-note").next_id
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [former]
    shown = shop.rabbitdelay.show(former)
    assert (shown.state, shown.task, "former" in shown.args) == ("waiting", "tracked-note", True)
    edited = stage.put("edited", HOUR, "tracked-note").next_id
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [edited] != [former]
    assert shop.rabbitdelay.show(former).state == "cancelled"
    assert shop.rabbitdelay.schedules.delete("a")
    assert [*shop.rabbitdelay.pending()] == []
    assert shop.rabbitdelay.show(edited).state == "cancelled"


@pytest.mark.parametrize("task", ["note", "tracked-note"])
def test_one_occurrence_is_cancelled_or_postponed_by_its_id(
    settings: dict[str, Any], shop: Any, stage: Stage, task: str
) -> None:
    outcome = Outcome.DONE if task == "tracked-note" else Outcome.NOTED
    first = in_whole_seconds(5)
    made = stage.put("cancelled", SECOND, task, start=first)
    assert shop.rabbitdelay.cancel(made.next_id) is outcome
    with Worker(settings):
        stage.until_given("cancelled", 2)
    found = stage.runs()
    assert found[0][0] == first.timestamp() + 1
    assert_each_once(found)
    second = in_whole_seconds(5)
    made = stage.put("postponed", SECOND, task, start=second)
    assert shop.rabbitdelay.postpone(made.next_id, eta=second + 4 * SECOND) is outcome
    with Worker(settings):
        stage.until_given("postponed", 6)
    found = [each for each in stage.runs() if each[1] == "postponed"]
    assert_each_once(found)
    assert found[0][0] == second.timestamp()
    assert found[0][2] >= second.timestamp() + 4
