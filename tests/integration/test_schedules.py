"""Schedules: each instant runs once, whatever is edited, paused, purged, lost or killed."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
import tzlocal
from celery import Celery
from celery.schedules import crontab
from celery.utils.time import timezone as celerys_zone
from kombu import Connection
from kombu.utils import json

from celery_rabbitdelay import (
    DelayTooLong,
    InvalidDelay,
    InvalidSchedule,
    InvalidSetting,
    RegistryRequired,
)
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.operations.verify.checks import check_schedules
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.schedules import record, schedules
from celery_rabbitdelay.schedules.beat import end_beat, put_beat
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes, instants
from tests.integration.registering import TIMEOUT, RedisSetup
from tests.integration.registry_fixtures import redis_setup
from tests.integration.shop import PATIENCE, make_app, named
from tests.integration.worker import Beat, Worker
from tests.unit.clock import frozen

__all__ = ["redis_setup"]

SECOND = timedelta(seconds=1)


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
        kwargs = {"key": noted.key}
        options = {"catch_up": "all", "overlap": "allow", **options}
        return shop.rabbitdelay.schedules.put(name, task, when, (name,), kwargs, **options)

    return put


def wait_until_ran(noted: Notes, number: int) -> None:
    """Wait until so many occurrences of the schedule ``a`` have run."""
    wait_for(lambda: len(instants(noted, "a")) >= number, f"{number} occurrences", PATIENCE)


def wait_until_none_is_missing(noted: Notes, name: str = "a", gap: int = 1) -> None:
    """Wait until each occurrence has run that was due before the latest that has.

    Of two workers, the one that ends first may leave an earlier one to the other.
    """
    begin, *_, end = instants(noted, name)
    expected = {*range(begin, end + 1, gap)}
    wait_for(lambda: expected <= {*instants(noted, name)}, "each occurrence", PATIENCE)


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


def test_an_occurrence_that_was_lost_is_sent_again(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    due_ms = milliseconds_of(put("a").next_at)
    put("b", timedelta(hours=1), start=datetime.now(UTC) + timedelta(days=1))
    default = shop.amqp.queues[shop.conf.task_default_queue].name
    wait_for(lambda: count(connection, default) == 1, "the occurrence", PATIENCE)
    channel: Any = connection.default_channel
    channel.queue_purge(default)

    def healed(late_ms: int) -> list[str]:
        clock = SimpleNamespace(ms=lambda: due_ms + late_ms)
        monkeypatch.setattr(schedules, "wall_clock", clock)
        found: list[str] = shop.rabbitdelay.schedules.heal()
        return found

    late_ms = record.HEAL_AFTER_MS
    # First it is noted that it is missed, and until the next look workers may contradict.
    for more_ms in (0, 1, record.HEALING_MS * 3 // 2):
        assert healed(late_ms + more_ms) == []
    late_ms += record.HEALING_MS * 3 // 2 + 1
    assert healed(late_ms) == ["a"]
    # It is given twice as long each time.
    assert healed(2 * late_ms) == healed(2 * late_ms + 1) == []
    assert healed(2 * late_ms + record.HEALING_MS * 3 // 2 + 1) == ["a"]
    monkeypatch.undo()
    with Worker(settings):
        wait_until_ran(noted, 2)
    found = instants(noted, "a")
    assert len(set(found)) == len(found)


def test_verify_finds_schedules_that_stand_still_and_those_that_cannot_be_sent_again(
    shop: Any, put: Callable[..., Any]
) -> None:
    due_ms = milliseconds_of(put("a").next_at)
    put("b", timedelta(days=1), start=datetime.now(UTC) + timedelta(days=1))
    known = Records(shop.rabbitdelay.registry)

    def found(now_ms: int) -> list[tuple[str, str]]:
        return [(code, subject) for code, subject, _ in check_schedules(known, now_ms)]

    # Until then, a worker may send it again.
    assert found(due_ms + 89_999) == []
    assert found(due_ms + 90_000) == [("schedule-overdue", "schedule a")]
    known.note("b", unsent="1")
    assert found(due_ms) == [("schedule-unsent", "schedule b")]
    known.note("b", unsent="", message="")
    assert found(due_ms) == [("schedule-lost", "schedule b")]


def test_verify_says_that_it_cannot_check_schedules_without_redis(broker_url: str) -> None:
    app = make_app(
        {
            **small_configuration(broker_url, "redis://127.0.0.1:1", "test"),
            "rabbitdelay_registry_url": "redis://127.0.0.1:1",
        }
    )
    ((code, _, _),) = check_schedules(Records(app.rabbitdelay.registry), 0)
    assert code == "registry-unavailable"
    app.close()


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


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"when": "61 * * * *"}, "minute"),
        ({"name": ""}, "1 to 222 bytes"),
        ({"name": "ü" * 120}, "1 to 222 bytes"),
        ({"name": "\ud800"}, "1 to 222 bytes"),
        ({"when": ["0 0 * * *" + ",0" * 900] * 9, "kwargs": {"key": "x"}}, "too long"),
        ({"quue": "second"}, r"takes the options .* not \['quue'\]"),
        ({"args": [object()], "kwargs": {"key": "x"}}, "JSON"),
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
    app.rabbitdelay.schedules.put("b", "look", "@daily", queue=app.amqp.queues[queue])
    assert app.rabbitdelay.schedules.get("b").options == {"queue": queue}
    app.rabbitdelay.schedules.delete("b")


@pytest.fixture
def _tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be in a time zone."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        patch.delitem(vars(celerys_zone), "local", raising=False)
        time.tzset()
        tzlocal.reload_localzone()
        yield
        vars(celerys_zone).pop("local", None)
    time.tzset()
    tzlocal.reload_localzone()


@pytest.mark.usefixtures("_tokyo")
@pytest.mark.parametrize(
    "zone",
    [None, "America/New_York", ZoneInfo("Asia/Kolkata"), timezone(-timedelta(minutes=210))],
    ids=str,
)
@pytest.mark.parametrize("enable_utc", [True, False])
def test_the_time_zone_is_that_of_celerys_own_crontab(
    settings: dict[str, Any], enable_utc: bool, zone: Any
) -> None:
    conf = {"timezone": zone, "enable_utc": enable_utc}
    plain, app = Celery("plain", set_as_current=False), make_app({**settings, **conf})
    plain.conf.update(conf)
    try:
        put: Any = app.rabbitdelay.schedules.put("a", "look", crontab(30, 7))
    finally:
        app.rabbitdelay.schedules.delete("a")
        app.close()
    before = put.next_at - SECOND
    when = crontab(30, 7, app=plain, nowfun=lambda: before)
    assert when.remaining_estimate(before) == SECOND


def test_a_time_zone_without_a_name_is_refused(settings: dict[str, Any]) -> None:
    app = make_app({**settings, "timezone": import_module("dateutil.tz").gettz("Europe/Berlin")})
    with pytest.raises(InvalidSchedule, match="time zone"):
        app.rabbitdelay.schedules.put("a", "look", crontab(30, 7))
    app.close()


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
    found = [each["correlation_id"] for each in noted.found()]
    assert len(found) == len(set(found))
    names = [each.name for each in shop.rabbitdelay.schedules.all()]
    assert names == [f"beat:{shop.main}:{name}" for name in "ab"]


def test_five_workers_that_start_at_once_put_one_chain_of_each_entry(
    settings: dict[str, Any], make_shop: Callable[..., Any], noted: Notes
) -> None:
    # The next instant of an interval that began in 1970.
    in_an_hour = int(time.time()) + 3600
    every = {"options": {"catch_up": "all"}}
    far = {f"far-{each}": entry(noted, "far", in_an_hour + each) for each in range(5)}
    near = {name: entry(noted, name, seconds, **every) for name, seconds in (("a", 1), ("b", 2))}
    settings["rabbitdelay_layout"] = [("minutes", 10, 600), ("seconds", 600, 1)]
    settings["rabbitdelay_tick"] = 1
    own = {**settings, "beat_schedule": {**far, **near}, "rabbitdelay_beat": True}
    shop = make_shop(**settings)
    hours, _ = shop.rabbitdelay.topology.level_queues.values()
    with ExitStack() as stack, ThreadPoolExecutor(5) as threads:
        workers = [Worker(own, None, "-P", "solo") for _ in range(5)]
        [*threads.map(stack.enter_context, workers)]
        wait_for(lambda: len(set(noted())) == 2 and len(noted()) >= 12, "occurrences", PATIENCE)
        with shop.connection_for_write() as connection:
            counts = queue_counts(connection, hours).values()
        assert sum(each.messages for each in counts if each is not None) == len(far)
        # A second chain of one would bring each occurrence twice.
        assert not any(each.log.count("is dropped: another one has come first") for each in workers)
        for name, seconds in (("a", 1), ("b", 2)):
            wait_until_none_is_missing(noted, f"beat:{shop.main}:{name}", seconds)
    ids = Counter(each["correlation_id"] for each in noted.found())
    assert set(ids.values()) == {1}
    end_beat(make_shop(**own).rabbitdelay.schedules)


def test_two_versions_of_the_code_do_not_undo_each_other(
    make_shop: Callable[..., Any], settings: dict[str, Any], noted: Notes
) -> None:
    def version(**entries: Any) -> Any:
        given = {**settings, "beat_schedule": entries, "rabbitdelay_beat": True}
        return make_shop(**given).rabbitdelay.schedules

    first, kept = entry(noted, "first", 3600), entry(noted, "kept", 3600)
    before, after = version(first=first, kept=kept), version(kept=kept, more=first)
    assert put_beat(before)
    for _ in range(2):
        assert put_beat(after)
        assert not put_beat(before)
    names = [each.name.rpartition(":")[2] for each in after.all()]
    assert names == ["kept", "more"]
    # The code is rolled back.
    assert put_beat(before, is_forced=True)
    assert not put_beat(after)
    assert [each.name.rpartition(":")[2] for each in after.all()] == ["first", "kept"]
    end_beat(after)
    assert after.all() == []


def test_an_entry_that_cannot_be_a_schedule_is_said_and_keeps_no_other_from_it(
    make_shop: Callable[..., Any],
    settings: dict[str, Any],
    noted: Notes,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = {"a": entry(noted, "a", 0.5), "b": entry(noted, "b", 3600)}
    app = make_shop(**settings, beat_schedule=entries, rabbitdelay_beat=True)
    assert put_beat(app.rabbitdelay.schedules)
    (made,) = app.rabbitdelay.schedules.all()
    assert made.name.endswith(":b")
    assert "'beat:shop:a' of beat cannot be a schedule" in caplog.text
    app.rabbitdelay.schedules.delete(made.name)


@pytest.fixture
def let_end(noted: Notes) -> Iterator[Callable[[], Any]]:
    """Lets the runs of the task ``hold`` end."""
    yield partial(noted.redis.set, f"{noted.key}:ends", "1")
    noted.redis.delete(f"{noted.key}:ends")


def overlapped(worker: Worker, number: int) -> bool:
    return worker.log.count("another run of its schedule still goes") >= number


def test_an_occurrence_is_left_out_while_another_run_still_goes(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    let_end: Callable[[], Any],
) -> None:
    put("a", task="hold", overlap="skip")
    registry = shop.rabbitdelay.registry
    with Worker(settings, None, "-c", "3") as worker:
        wait_for(partial(overlapped, worker, 3), "three that overlap", PATIENCE)
        (held,) = instants(noted, "a")
        # As if a minute were nearly over: the worker says that it still runs.
        client = registry.store.connect()
        client.pexpire(registry.names.of("running", "a"), 50_000)
        longer = 51_000
        wait_for(
            lambda: client.pttl(registry.names.of("running", "a")) > longer, "a renewal", PATIENCE
        )
        assert shop.rabbitdelay.schedules.get("a").last[2] == "overlapped"
        let_end()
        wait_until_ran(noted, 3)
        client.close()
    found = instants(noted, "a")
    assert found[0] == held
    assert found[1] > held + 3
    assert len(set(found)) == len(found)


def test_an_occurrence_that_waits_for_its_rate_limit_runs_already(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes
) -> None:
    settings["task_annotations"] = {"note": {"rate_limit": "10/m"}}
    put("a", overlap="skip")

    def left_out() -> bool:
        return any(later > earlier + 3 for earlier, later in pairwise(instants(noted, "a")))

    with Worker(settings) as worker:
        # One waits for six seconds, in which the others are left out.
        wait_for(left_out, "occurrences that were left out", PATIENCE)
        assert overlapped(worker, 3)


def test_one_occurrence_waits_for_the_end_of_another_run_and_others_are_left_out(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    let_end: Callable[[], Any],
) -> None:
    first = int(put("a", task="hold", overlap="queue-one").next_at.timestamp())
    with Worker(settings, None, "-c", "3") as worker:
        wait_for(partial(overlapped, worker, 8), "eight that overlap", PATIENCE)
        assert instants(noted, "a") == [first]
        let_end()
        wait_until_ran(noted, 3)
    found = instants(noted, "a")
    # The one that waited has run, and those after it have not.
    assert found[:2] == [first, first + 1]
    assert found[2] > first + 9
    assert len(set(found)) == len(found)


def test_one_that_has_waited_for_the_end_of_a_run_is_not_too_late(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes, let_end: Callable[[], Any]
) -> None:
    put("a", task="hold", overlap="queue-one", catch_up="last")
    with Worker(settings, None, "-c", "3") as worker:
        wait_for(partial(overlapped, worker, 4), "four that overlap", PATIENCE)
        let_end()
        wait_until_ran(noted, 2)
        log = worker.log
    held, waited = instants(noted, "a")[:2]
    left_out = re.findall(r"Occurrence a:(\d+):\d+ does not run", log)
    assert held < waited < int(left_out[0]) // 1000


def test_a_run_whose_worker_was_killed_holds_up_others_for_a_minute(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    let_end: Callable[[], Any],
) -> None:
    put("a", task="hold", overlap="skip")
    registry = shop.rabbitdelay.registry
    with Worker(settings) as worker:
        wait_until_ran(noted, 1)
        worker.kill()
    let_end()
    client = registry.store.connect()
    lease = registry.names.of("running", "a")
    assert 0 < client.pttl(lease) <= 60_000
    # As if the minute were longer than the next worker takes to start.
    client.persist(lease)
    with Worker(settings) as worker:
        wait_for(partial(overlapped, worker, 1), "one that overlaps", PATIENCE)
        # As if the minute were over.
        client.pexpire(lease, 1)
        wait_until_ran(noted, 3)
    client.close()


def test_jitter_is_part_of_when_an_occurrence_is_due(shop: Any, put: Callable[..., Any]) -> None:
    when, jitter = timedelta(days=3), timedelta(hours=5)
    plain = put("a", when)
    due = {put(f"a{each}", when, jitter=jitter).next_at - plain.next_at for each in range(5)}
    assert len(due) == 5
    assert all(timedelta() <= each <= jitter for each in due)
    assert {shop.rabbitdelay.schedules.next(f"a{each}", 1)[0] for each in range(5)} == {
        plain.next_at
    }


def test_a_jitter_is_shorter_than_the_time_between_two(put: Callable[..., Any]) -> None:
    put("a", timedelta(hours=1), catch_up="all", jitter=7200)
    with pytest.raises(InvalidSchedule, match="a jitter of at most 600 s"):
        put("a", ["@hourly", "10 * * * *"], catch_up="last", jitter=601)


@pytest.mark.parametrize("wrong", [{"start": datetime(1960, 1, 1, tzinfo=UTC)}, {"catch_up": 1e17}])
def test_what_no_header_can_say_is_refused(put: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises((InvalidSchedule, InvalidDelay, DelayTooLong)):
        put("a", **wrong)


@pytest.mark.parametrize("wrong", [{"jitter": timedelta(days=2)}, {"overlap": "maybe"}])
def test_a_wrong_jitter_or_overlap_is_refused(put: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(InvalidSchedule, match="takes a jitter of at most a day"):
        put("a", **wrong)


def test_the_order_of_arguments_is_kept_and_no_part_of_the_revision(shop: Any) -> None:
    schedules = shop.rabbitdelay.schedules
    schedules.put("a", "x", "@daily", ({"b": 1, "a": 2},), {"d": 3, "c": 4})
    records = Records(shop.rabbitdelay.registry)
    before = records.get(["a"])
    schedules.put("a", "x", "@daily", ({"a": 2, "b": 1},), {"c": 4, "d": 3})
    assert records.get(["a"]) == before
    found = schedules.get("a")
    assert (list(found.args[0]), list(found.kwargs)) == (["b", "a"], ["d", "c"])


def test_what_is_exported_is_imported_as_it_was(shop: Any, put: Callable[..., Any]) -> None:
    schedules = shop.rabbitdelay.schedules
    end = datetime.now(UTC) + timedelta(days=400)

    def as_before() -> list[Any]:
        # An edit is part of the id.
        new = schedules.all()
        return [each._replace(next_id=id_) for each, (*_, id_) in zip(new, ids, strict=True)]

    # So that nothing falls due in between.
    with frozen():
        put("a", ["0 9 * * *", crontab(0, 9, "mon", day_of_month="1-7")], timezone="Europe/Berlin")
        put("b", timedelta(hours=1), end=end, jitter=5, overlap="skip", catch_up=90, paused=True)
        put("c", "@daily", exclude=["2030-12-25", "* * 1 1 *"], priority=2)
        schedules.put("d", "note", "@daily", (date(2030, 1, 2), uuid4()), {"key": b"\xff"})
        before = schedules.all()
        ids = [(each.next_id,) for each in before]
        text = json.dumps([each.exported() for each in before])
        for each in before:
            schedules.delete(each.name)
        for _ in range(2):
            for each in json.loads(text):
                schedules.put_exported(each)
            assert as_before() == before
