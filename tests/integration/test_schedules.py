"""Schedules: each instant runs once, whatever is edited, paused, purged, lost or killed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection

from celery_rabbitdelay import InvalidSchedule, InvalidSetting, Outcome, RegistryRequired
from celery_rabbitdelay.app import schedules
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.registering import KINDS, TIMEOUT, RedisSetup
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.worker import Beat, Worker

SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def redis_setup() -> Iterator[RedisSetup]:
    """A cluster, which takes the least."""
    with KINDS["cluster"]() as setup:
        yield setup


@pytest.fixture
def settings(redis_setup: RedisSetup, broker_url: str, redis_url: str) -> dict[str, Any]:
    return {
        **small_configuration(broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_registry_url": redis_setup.url,
        "rabbitdelay_registry_options": {"socket_timeout": TIMEOUT, **redis_setup.options},
        "rabbitdelay_signing_key": "schedules" * 4,
    }


@pytest.fixture
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(settings)
    yield app
    for each in app.rabbitdelay.schedules.all():
        app.rabbitdelay.schedules.delete(each.name)
    app.close()


@pytest.fixture
def put(shop: Any, noted: Notes) -> Callable[..., Any]:
    """Puts a schedule whose task notes its id; a slow machine leaves no occurrence out."""

    def put(name: str, when: Any = SECOND, task: str = "note", **options: Any) -> Any:
        kwargs, options = {"key": noted.key}, {"catch_up": "all", **options}
        return shop.rabbitdelay.schedules.put(name, task, when, (name,), kwargs, **options)

    return put


def instants(noted: Notes, name: str) -> list[int]:
    """When the occurrences of a schedule were due that ran, in seconds."""
    split = [
        each["correlation_id"].split(":")
        for each in noted.found()
        if each["correlation_id"].count(":") == 2
    ]
    return sorted(int(instant) // 1000 for given, instant, _ in split if given == name)


def wait_until_ran(noted: Notes, number: int) -> None:
    """Wait until so many occurrences of the schedule ``a`` have run."""
    wait_for(lambda: len(instants(noted, "a")) >= number, f"{number} occurrences", PATIENCE)


def assert_each_once(found: list[int]) -> None:
    """Assert that each second ran once, from the first to the last."""
    assert found == [*range(found[0], found[0] + len(found))]


def test_each_instant_runs_once_and_edits_and_deletes_end_what_waits(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    before = datetime.now(UTC)
    made = put("a")
    assert (made.name, made.task, made.is_paused) == ("a", "note", False)
    assert made.next_at > before
    with Worker(settings), Worker(settings):
        wait_until_ran(noted, 4)
        put("a")
        put("b", timedelta(hours=1))
        wait_until_ran(noted, 6)
        edited = put("a", timedelta(seconds=2))
        begin = int(edited.next_at.timestamp())
        wait_for(lambda: instants(noted, "a")[-1] >= begin + 4, "after the edit", PATIENCE)
        assert [each.name for each in shop.rabbitdelay.schedules.all()] == ["a", "b"]
        assert shop.rabbitdelay.schedules.delete("a")
        assert not shop.rabbitdelay.schedules.delete("a")
        deleted = time.time()
        noted.until(4)
        assert instants(noted, "a")[-1] <= deleted + 1
        assert shop.rabbitdelay.schedules.get("a") is None
        following = shop.rabbitdelay.schedules.next("b", 3)
        assert [later - earlier for earlier, later in pairwise(following)] == [
            timedelta(hours=1)
        ] * 2
    # Not before: of two workers, one may be slower.
    found = instants(noted, "a")
    assert_each_once([each for each in found if each < begin])
    edits = [each for each in found if each >= begin]
    assert edits == [*range(begin, begin + 2 * len(edits), 2)]


def test_a_paused_schedule_comes_and_does_not_run(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    put("a", paused=True)
    with Worker(settings) as worker:
        wait_for(lambda: worker.log.count("its schedule is paused") >= 3, "pauses", PATIENCE)
        assert not instants(noted, "a")
        assert shop.rabbitdelay.schedules.trigger("a") is not None
        assert shop.rabbitdelay.schedules.resume("a")
        wait_until_ran(noted, 3)
        ran = [each["correlation_id"] for each in noted.found()]
        assert sum(each.count(":") != 2 for each in ran) == 1
    assert not shop.rabbitdelay.schedules.pause("b")


def test_of_an_occurrence_that_is_cancelled_the_next_one_runs(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    first = put("a", timedelta(seconds=2))
    order, task_id = shop.rabbitdelay.registry.newest_under("schedule:a")
    assert order
    assert shop.rabbitdelay.cancel(task_id) is Outcome.DONE
    with Worker(settings):
        wait_for(lambda: instants(noted, "a"), "the next occurrence", PATIENCE)
    assert instants(noted, "a")[0] > int(first.next_at.timestamp())
    assert shop.AsyncResult(task_id).state == "REVOKED"


def test_retries_of_an_occurrence_are_no_occurrences(
    settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    given: Any = ([], 2, {"delay": 0.2})
    with Worker(settings):
        start = datetime.now(UTC) + timedelta(seconds=5)
        options: Any = {"start": start, "catch_up": "all"}
        shop.rabbitdelay.schedules.put("a", "retry", timedelta(seconds=5), given, **options)
        ids = [f"a:{milliseconds_of(start + timedelta(seconds=each)):015d}:" for each in (0, 5)]
        occurrence = shop.rabbitdelay.schedules.get("a")
        assert occurrence is not None
        revision = shop.rabbitdelay.registry.newest_under("schedule:a")[1].rpartition(":")[2]
        for each in ids:
            result = shop.AsyncResult(each + revision).get(timeout=PATIENCE)
            assert [seen["retries"] for seen in result] == [0, 1, 2]


@pytest.mark.parametrize(
    ("catch_up", "runs"), [("last", 1), ("all", 6), (timedelta(seconds=2.5), 0)]
)
def test_what_was_missed_runs_as_it_says(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes, catch_up: Any, runs: int
) -> None:
    first = int(put("a", timedelta(seconds=3), catch_up=catch_up).next_at.timestamp())
    # As if all workers had been away.
    wait_for(lambda: time.time() > first + 17, "the outage", PATIENCE)
    began = time.time()
    with Worker(settings):
        wait_for(lambda: instants(noted, "a")[-1:] > [int(began)], "the next occurrence", PATIENCE)
    found = instants(noted, "a")
    missed = [each for each in found if each <= began]
    if catch_up == "all":
        assert found == [*range(first, found[-1] + 1, 3)]
        assert len(missed) >= runs
    else:
        # A worker takes some seconds to start, in which another instant may pass.
        assert len(missed) <= runs + 1
        assert first not in found


def test_an_occurrence_that_was_lost_is_sent_again(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due_ms = milliseconds_of(put("a").next_at)
    put("b", timedelta(hours=1))
    default = shop.amqp.queues[shop.conf.task_default_queue].name
    wait_for(lambda: count(connection, default) == 1, "the occurrence", PATIENCE)
    channel: Any = connection.default_channel
    channel.queue_purge(default)
    monkeypatch.setattr(schedules, "_now_ms", lambda: due_ms + schedules.HEAL_AFTER_MS)
    assert shop.rabbitdelay.schedules.heal() == []
    monkeypatch.setattr(schedules, "_now_ms", lambda: due_ms + schedules.HEAL_AFTER_MS + 1)
    assert shop.rabbitdelay.schedules.heal() == ["a"]
    # It is given twice as long each time.
    assert shop.rabbitdelay.schedules.heal() == []
    with Worker(settings):
        wait_until_ran(noted, 2)
    found = instants(noted, "a")
    assert len(set(found)) == len(found)


def test_an_occurrence_that_ran_and_is_sent_again_ends_no_chain_and_makes_no_second_one(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedules, "HEAL_AFTER_MS", 0)
    put("a", timedelta(seconds=3))
    known = shop.rabbitdelay.registry.schedules
    with Worker(settings) as worker:
        for number in (1, 2, 3):
            wait_until_ran(noted, number)
            (found,) = known.get(["a"])
            ran = found.occurrence._replace(instant_ms=instants(noted, "a")[-1] * 1000)
            # As if Redis had been away when the next one was to be noted.
            known.follow(ran)
            # The next one may be late on a slow machine, and is not lost.
            monkeypatch.setattr(schedules, "_now_ms", partial(int, ran.instant_ms + 1))
            assert shop.rabbitdelay.schedules.heal() == []
            (healed,) = known.get(["a"])
            assert healed.occurrence.instant_ms > ran.instant_ms
            # As if it had not even been registered.
            shop.rabbitdelay.schedules._send(found._replace(occurrence=ran))
            wait_for(partial(has_dropped, worker, number), "it", PATIENCE)
        wait_until_ran(noted, 6)
        found = instants(noted, "a")
        assert found == [*range(found[0], found[-1] + 1, 3)]
        refused = worker.log.count("does not run twice")
        wait_until_ran(noted, 8)
        assert worker.log.count("does not run twice") <= refused + 1


def has_dropped(worker: Worker, number: int) -> bool:
    """Whether a worker has dropped so many copies."""
    return worker.log.count("does not run twice") >= number


def test_workers_that_are_killed_lose_no_occurrence_and_run_none_twice(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes
) -> None:
    first = int(put("a", task="late-note", catch_up="all").next_at.timestamp())
    for seen in (3, 6, 9):
        with Worker(settings) as worker:
            wait_until_ran(noted, seen)
            worker.kill()
    with Worker(settings):
        wait_until_ran(noted, 12)
    found = Counter(instants(noted, "a"))
    assert sorted(found) == [*range(first, first + len(found))]
    # Whatever has begun when its worker is killed may begin again, as any task may.
    assert sum(found.values()) - len(found) <= 3


def test_a_chain_goes_on_although_redis_has_lost_everything(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    put("a")
    with Worker(settings):
        wait_until_ran(noted, 2)
        client = shop.rabbitdelay.registry.store.connect()
        client.flushall()
        client.close()
        before = len(instants(noted, "a"))
        wait_for(lambda: len(instants(noted, "a")) >= before + 4, "more of them", PATIENCE)
        assert_each_once(instants(noted, "a"))
        assert [each.name for each in shop.rabbitdelay.schedules.all()] == ["a"]
        # Its code puts it again.
        assert put("a").task == "note"


def test_processes_that_put_the_same_schedule_at_once_put_one(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes
) -> None:
    start = datetime.now(UTC) + timedelta(seconds=12)
    with ThreadPoolExecutor(8) as threads:
        made = {*threads.map(lambda _: put("a", start=start).next_at, range(24))}
    assert made == {start.replace(microsecond=start.microsecond // 1000 * 1000)}
    with Worker(settings):
        wait_until_ran(noted, 3)
    found = instants(noted, "a")
    assert found == [*range(milliseconds_of(start) // 1000, found[-1] + 1)]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"when": "61 * * * *"}, "minute"),
        ({"name": ""}, "1 to 226 bytes"),
        ({"name": "ü" * 120}, "1 to 226 bytes"),
        ({"when": ["0 0 * * *" + ",0" * 300] * 9}, "too long|takes"),
        ({"countdown": 3}, r"takes the options .* not \['countdown'\]"),
        ({"args": [object()]}, "JSON"),
        (
            {"exchange": "amq.fanout", "routing_key": "x", "kwargs": {"key": "x"}},
            "one known queue",
        ),
    ],
)
def test_what_cannot_be_a_schedule_is_refused(
    shop: Any, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidSchedule, match=reason):
        shop.rabbitdelay.schedules.put(**{"name": "a", "task": "note", "when": SECOND, **given})
    assert shop.rabbitdelay.schedules.all() == []


def test_a_schedule_ends(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any], noted: Notes
) -> None:
    end = datetime.now(UTC) + timedelta(seconds=12)
    first = int(put("a", end=end).next_at.timestamp())
    with Worker(settings):
        wait_for(lambda: shop.rabbitdelay.schedules.get("a") is None, "its end", PATIENCE)
        wait_for(lambda: instants(noted, "a")[-1] == int(end.timestamp()), "the last", PATIENCE)
    assert instants(noted, "a") == [*range(first, int(end.timestamp()) + 1)]
    # Its code puts it again.
    assert put("a", end=end) is None
    assert shop.rabbitdelay.schedules.all() == []


def test_the_options_of_a_task_are_those_of_its_occurrences(
    settings: dict[str, Any], make_shop: Callable[..., Any]
) -> None:
    app = make_shop(**settings)
    queue = named(app, "second")

    @app.task(name="of-its-own", queue=queue, priority=2, expires=1, shared=False)
    def of_its_own() -> None: ...

    app.rabbitdelay.schedules.put("a", of_its_own, SECOND)
    with Connection(settings["broker_url"]) as connection:
        (found,) = take(connection, [app.amqp.queues[queue]], 1)
    assert found.message.headers["expires"] is None
    assert found.message.properties["priority"] == 2
    app.rabbitdelay.schedules.delete("a")


def test_beat_needs_a_registry(broker_url: str) -> None:
    app = make_app({"broker_url": broker_url, "rabbitdelay_beat": True, "prefix": "test"})
    with pytest.raises(InvalidSetting, match="rabbitdelay_registry_url"):
        app.rabbitdelay.check_settings()
    app.close()


def test_schedules_need_a_registry(broker_url: str) -> None:
    app = make_app(small_configuration(broker_url, "redis://127.0.0.1:1", "test"))
    with pytest.raises(RegistryRequired):
        app.rabbitdelay.schedules.put("a", "note", SECOND)
    app.close()


def entry(noted: Notes, what: str, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """An entry of beat, as a process gets it."""
    given = {"task": "note", "schedule": seconds, "args": [what], "kwargs": {"key": noted.key}}
    return {**given, **more}


def test_the_entries_of_beat_need_no_beat(
    settings: dict[str, Any], shop: Any, noted: Notes
) -> None:
    entries = {"a": entry(noted, "a"), "b": entry(noted, "b", 3600, options={"expires": 60})}
    own = {**settings, "beat_schedule": entries, "rabbitdelay_beat": True}
    with Worker(own), Worker(own), Beat(own) as beat:
        wait_for(lambda: noted().count("a") >= 4, "occurrences", PATIENCE)
        wait_for(lambda: "Beat sends nothing, and is not needed" in beat.log, "beat", PATIENCE)
        assert "Sending due task" not in beat.log
    found = instants_of_beat(noted)
    assert len(found) == len(set(found)) == len(noted())
    names = [each.name for each in shop.rabbitdelay.schedules.all()]
    assert names == [f"beat:{shop.main}:{name}" for name in "ab"]


def instants_of_beat(noted: Notes) -> list[int]:
    return sorted(int(each["correlation_id"].split(":")[-2]) // 1000 for each in noted.found())


def test_two_versions_of_the_code_do_not_undo_each_other(
    make_shop: Callable[..., Any], settings: dict[str, Any], noted: Notes
) -> None:
    def version(**entries: Any) -> Any:
        given = {**settings, "beat_schedule": entries, "rabbitdelay_beat": True}
        return make_shop(**given).rabbitdelay.schedules

    first, kept = entry(noted, "first", 3600), entry(noted, "kept", 3600)
    before, after = version(first=first, kept=kept), version(kept=kept, more=first)
    assert before.put_beat()
    for _ in range(2):
        assert after.put_beat()
        assert not before.put_beat()
    names = [each.name.rpartition(":")[2] for each in after.all()]
    assert names == ["kept", "more"]
    # The code is rolled back.
    assert before.put_beat(is_forced=True)
    assert not after.put_beat()
    assert [each.name.rpartition(":")[2] for each in after.all()] == ["first", "kept"]
    for each in after.all():
        after.delete(each.name)


def test_an_entry_that_cannot_be_a_schedule_is_said_and_keeps_no_other_from_it(
    make_shop: Callable[..., Any],
    settings: dict[str, Any],
    noted: Notes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = {"a": entry(noted, "a", options={"link": "x"}), "b": entry(noted, "b", 3600)}
    app = make_shop(**settings, beat_schedule=entries, rabbitdelay_beat=True)
    assert app.rabbitdelay.schedules.put_beat()
    (made,) = app.rabbitdelay.schedules.all()
    assert made.name.endswith(":b")
    assert "not ['link']" in caplog.text
    app.rabbitdelay.schedules.delete(made.name)
