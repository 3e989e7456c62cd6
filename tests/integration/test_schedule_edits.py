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
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.schedules.occurrence import ALL, Occurrence
from celery_rabbitdelay.schedules.recurrence import Recurrence
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.celery_process import REPOSITORY, CeleryProcess
from tests.chaos.clocks import off_by
from tests.integration.arrivals import take, wait_until_waiting
from tests.integration.management import node
from tests.integration.notes import Notes
from tests.integration.registry_fixtures import redis_setup
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.test_schedules import let_end, settings, shop
from tests.integration.trouble import suspended
from tests.integration.worker import ShopProcess, Worker, run_command
from tests.json_schemas import checked
from tests.unit.clock import frozen

__all__ = ["let_end", "node", "redis_setup", "settings", "shop"]

SECOND: Final = timedelta(seconds=1)
HOUR: Final = timedelta(hours=1)


class Stage(Notes):
    """The schedule ``a`` of a shop, and the runs of its occurrences."""

    def put(
        self, given: str, when: Any = SECOND, task: str = "note", name: str = "a", **options: Any
    ) -> Any:
        """Put the schedule, whose task notes what it was given."""
        options = {"catch_up": "all", "overlap": "allow", **options}
        put = self.shop.rabbitdelay.schedules.put
        return put(name, task, when, (given,), {"key": self.key}, **options)

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

    def lease(self, command: str = "get", *given: str, kind: str = "running") -> Any:
        """Give Redis a command about the lease of the schedule's run: by default, who has it."""
        registry = self.shop.rabbitdelay.registry
        key = registry.names.of(kind, "a")
        (found,) = registry.store.commands(lambda pipe: getattr(pipe, command)(key, *given))
        return found


@pytest.fixture
def stage(shop: Any, noted: Notes) -> Stage:
    """The schedule ``a``, not put yet; its notes are those of the fixtures."""
    stage = Stage(shop)
    stage.key = noted.key
    return stage


def wait_until(instant: datetime) -> None:
    wait_for(lambda: datetime.now(UTC) > instant, f"{instant}", PATIENCE)


def assert_each_once(found: list[tuple[float, str, float]], gap: float = 1.0) -> None:
    """Assert that each instant ran once, from the first to the last."""
    assert {later[0] - earlier[0] for earlier, later in pairwise(found)} == {gap}


def between(first: datetime, last: float, gap: int = 1) -> set[float]:
    """Return the instants from the first to the last one."""
    begin = int(first.timestamp())
    return {*map(float, range(begin, int(last) + 1, gap))}


@pytest.mark.parametrize("catch_up", ["last", "all"])
@pytest.mark.parametrize("jitter", [0, 1])
def test_an_edit_keeps_an_instant_that_is_due_and_has_not_come(
    settings: dict[str, Any], stage: Stage, connection: Connection, jitter: int, catch_up: str
) -> None:
    start = datetime.now(UTC).replace(microsecond=0)
    while (due := jittered(start, jitter)) - start < SECOND * jitter / 2:
        start += timedelta(milliseconds=1)
    options: dict[str, Any] = {"start": start, "jitter": jitter, "catch_up": catch_up}
    with frozen(start.timestamp() - 1):
        assert stage.put("former", HOUR, **options).next_at == due
    if not jitter:
        wait_until_waiting(connection, named(stage.shop, "default"), 1)
    with frozen(start.timestamp() + jitter / 4):
        edited = stage.put("edited", HOUR, **options)
    assert (edited.next_at, edited.args) == (due, ("edited",))
    with Worker(settings):
        stage.until_given("edited", 1)
        stage.until(1)
    assert [each[:2] for each in stage.runs()] == [(start.timestamp(), "edited")]


def jittered(instant: datetime, jitter: int) -> datetime:
    """Return when the schedule ``a`` is due for an instant: up to ``jitter`` seconds after it."""
    hourly = Recurrence.of(HOUR, "UTC")
    made = Occurrence("a", milliseconds_of(instant), hourly, ALL, jitter * 1000)
    return instant_of(made.due_ms)


def test_edits_around_many_instants_lose_none_and_repeat_none(
    settings: dict[str, Any], stage: Stage
) -> None:
    times: list[tuple[float, float]] = []

    def edit() -> Any:
        began = time.time()
        made = stage.put(f"{len(times)}")
        times.append((began, time.time()))
        return made.next_at

    first = edit()
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
        expected = between(first, times[-1][1] + 2)
        wait_for(lambda: expected <= {each[0] for each in stage.runs()}, "each instant", PATIENCE)
    found = stage.runs()
    # Of two workers, the one that ends first may leave a later instant to the other.
    assert [each[0] for each in found if each[0] in expected] == sorted(expected)
    for due, given, at in found:
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
        if is_deleted:
            assert stage.shop.rabbitdelay.schedules.delete("a")
        else:
            with suspended(worker), frozen() as clock:
                start = datetime.fromtimestamp(clock.now, UTC) + SECOND / 4
                made = stage.put("edited", HOUR, task="hold", overlap="queue-one", start=start)
            wait_for(lambda: stage.lease(kind="queued") == made.next_id, "one that waits", PATIENCE)
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
    puts: list[Any] = [
        each.rabbitdelay.schedules.put("a", "note", SECOND, ("a",), {"key": "none"})
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
    in_an_hour = datetime.now(UTC) + HOUR

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
            managed.put("edited", start=in_an_hour)
    found = schedules.get("a")
    assert (found.args, found.is_paused) == (("edited",), True)
    assert verify() == ["schedule-unsent"]
    assert managed.put("edited", start=in_an_hour).next_id == found.next_id
    assert verify() == []
    managed.put("later")
    with Worker(settings) as worker:
        wait_for(lambda: "its schedule is paused" in worker.log, "a pause", PATIENCE)
        assert schedules.resume("a")
        managed.until_given("later", 2)
    assert_each_once(managed.runs())
    assert {*managed()} == {"later"}


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
    # It does not end by itself, however long the next worker takes to start.
    stage.lease("set", lease)
    with Worker(settings):
        stage.until_given("held", 2)
        assert stage.lease() not in (None, lease)
        let_end()
    first, second, *_ = stage.runs()
    assert first[0] == second[0]


def test_the_end_of_a_run_gives_the_lease_back_soon(settings: dict[str, Any], stage: Stage) -> None:
    stage.put("short", overlap="skip")
    lasted: list[float] = []

    def three_ended_soon() -> bool:
        stage.until_given("short", len(stage()) + 1)
        ended = time.monotonic()
        wait_for(lambda: not stage.lease(), "its end", PATIENCE, 0.01)
        lasted.append(time.monotonic() - ended)
        return sum(each < 0.3 for each in lasted) == 3

    with Worker(settings) as worker:
        # A busy machine may be slow at any time, but not always.
        wait_for(three_ended_soon, "three leases given back soon", PATIENCE)
        worker.kill()


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


def test_a_worker_whose_clock_is_wrong_loses_and_repeats_nothing_and_is_not_early(
    settings: dict[str, Any], stage: Stage
) -> None:
    seen: dict[tuple[str, float], float] = {}
    expected: set[tuple[str, float]] = set()

    def came() -> bool:
        for instant, given, _ in stage.runs():
            seen.setdefault((given, instant), time.time())
        return expected <= seen.keys()

    with Worker(settings), FastWorker(settings) as fast:
        for catch_up in ("all", "last"):
            first = stage.put(catch_up, 2 * SECOND, name=catch_up, catch_up=catch_up).next_at
            instants = between(first, first.timestamp() + 20, 2)
            expected |= {(catch_up, each) for each in instants}
        wait_for(came, "ten instants of each", PATIENCE)
        wait_for(lambda: " succeeded in " in fast.log, "a run on the fast worker", PATIENCE)
    found = [(given, instant) for instant, given, _ in stage.runs()]
    # Of two workers, the one that ends first may leave a later instant to the other.
    assert sorted(each for each in found if each in expected) == sorted(expected)
    assert min(at - instant for (_, instant), at in seen.items()) > -2.5


def test_an_occurrence_is_listed_as_long_as_it_waits(shop: Any, stage: Stage) -> None:
    start = datetime.now(UTC) + HOUR
    former = stage.put("former", HOUR, "tracked-note", start=start).next_id
    assert [each.task_id for each in shop.rabbitdelay.pending()] == [former]
    shown = shop.rabbitdelay.show(former)
    assert (shown.state, shown.task, "former" in shown.args) == ("waiting", "tracked-note", True)
    edited = stage.put("edited", HOUR, "tracked-note", start=start).next_id
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
    with Worker(settings) as worker:
        with suspended(worker):
            made = stage.put("cancelled", SECOND, task)
            assert shop.rabbitdelay.cancel(made.next_id) is outcome
        stage.until_given("cancelled", 2)
        found = stage.runs()
        assert found[0][0] == made.next_at.timestamp() + 1
        assert_each_once(found)
        with suspended(worker):
            made = stage.put("postponed", SECOND, task)
            eta = datetime.now(UTC) + 4 * SECOND
            assert shop.rabbitdelay.postpone(made.next_id, eta=eta) is outcome
        stage.until_given("postponed", 6)
    found = [each for each in stage.runs() if each[1] == "postponed"]
    assert_each_once(found)
    assert found[0][0] == made.next_at.timestamp()
    assert found[0][2] >= eta.timestamp()
