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


def test_what_needs_a_registry_says_so(broker_url: str) -> None:
    small = small_configuration(broker_url, "redis://127.0.0.1:1", "test")
    app = make_app(small)
    with pytest.raises(RegistryRequired):
        app.rabbitdelay.schedules.put("a", "note", SECOND)
    app.close()
    app = make_app({**small, "rabbitdelay_beat": True})
    with pytest.raises(InvalidSetting, match="rabbitdelay_registry_url"):
        app.rabbitdelay.check_settings()
    app.close()
    app = make_app({**small, "rabbitdelay_registry_url": "redis://127.0.0.1:1"})
    ((code, _, _),) = check_schedules(Records(app.rabbitdelay.registry), 0)
    assert code == "registry-unavailable"
    app.close()


def test_workers_that_are_killed_lose_no_occurrence_and_run_none_twice(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes
) -> None:
    first = int(put("a", task="late-note", catch_up="all").next_at.timestamp())
    for seen in (3, 6):
        with Worker(settings) as worker:
            wait_until_ran(noted, seen)
            worker.kill()
    with Worker(settings):
        wait_until_ran(noted, 9)
    found = Counter(instants(noted, "a"))
    assert sorted(found) == [*range(first, first + len(found))]
    # Whatever has begun when its worker is killed may begin again, as any task may.
    assert sum(found.values()) - len(found) <= 2


def test_what_cannot_be_a_schedule_is_refused(
    settings: dict[str, Any], shop: Any, put: Callable[..., Any]
) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"when": "61 * * * *"}, "minute"),
        *[({"name": each}, "1 to 222 bytes") for each in ("", "ü" * 120, "\ud800")],
        ({"when": ["0 0 * * *" + ",0" * 900] * 9}, "too long"),
        ({"quue": "second"}, r"takes the options .* not \['quue'\]"),
        ({"args": [object()]}, "JSON"),
        ({"exchange": "amq.fanout", "routing_key": "x"}, "one known queue"),
        ({"jitter": timedelta(days=2)}, "takes a jitter of at most a day"),
        ({"overlap": "maybe"}, "takes a jitter of at most a day"),
        ({"when": ["@hourly", "10 * * * *"], "jitter": 601}, "a jitter of at most 600 s"),
        # What no header can say.
        ({"start": datetime(1960, 1, 1, tzinfo=UTC)}, ""),
        ({"catch_up": 1e17}, ""),
    ]
    for given, reason in refused:
        options = {"name": "a", "task": "note", "when": SECOND, "kwargs": {"key": "x"}, **given}
        with pytest.raises((InvalidSchedule, InvalidDelay, DelayTooLong)) as raised:
            shop.rabbitdelay.schedules.put(**options)
        assert re.search(reason, str(raised.value)), given
    nameless = import_module("dateutil.tz").gettz("Europe/Berlin")
    app = make_app({**settings, "timezone": nameless})
    with pytest.raises(InvalidSchedule, match="time zone"):
        app.rabbitdelay.schedules.put("a", "look", crontab(30, 7))
    app.close()
    assert shop.rabbitdelay.schedules.all() == []
    # If each is to run, however long it takes, they may overtake each other.
    put("a", timedelta(hours=1), catch_up="all", jitter=7200)


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
    [None, ZoneInfo("Asia/Kolkata"), timezone(-timedelta(minutes=210))],
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


def entry(noted: Notes, what: str, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """An entry of beat, as a process gets it."""
    given = {"task": "note", "schedule": seconds, "args": [what], "kwargs": {"key": noted.key}}
    return {**given, **more}


def test_workers_that_start_at_once_put_one_chain_of_each_entry_of_beat_and_need_no_beat(
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
    with ExitStack() as stack, ThreadPoolExecutor(4) as threads:
        beat, workers = Beat(own), [Worker(own, None, "-P", "solo") for _ in range(3)]
        [*threads.map(stack.enter_context, [beat, *workers])]
        wait_for(lambda: len(set(noted())) == 2 and len(noted()) >= 8, "occurrences", PATIENCE)
        wait_for(lambda: "Beat sends nothing, and is not needed" in beat.log, "beat", PATIENCE)
        assert "Sending due task" not in beat.log
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


def overlapped(worker: Worker, number: int, name: str = "a") -> bool:
    left_out = rf"Occurrence {name}:\S+ does not run: another run of its schedule still goes"
    return len(re.findall(left_out, worker.log)) >= number


def test_while_a_run_goes_others_are_left_out_or_one_waits_that_is_not_too_late_then(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    let_end: Callable[[], Any],
) -> None:
    registry = shop.rabbitdelay.registry
    client, lease = registry.store.connect(), registry.names.of("running", "a")
    with Worker(settings, None, "-c", "4") as worker:
        put("a", task="hold", overlap="skip")
        put("b", task="hold", overlap="queue-one", catch_up=5)
        wait_until_ran(noted, 1)
        # As if a minute were nearly over: the worker says that it still runs.
        client.pexpire(lease, 50_000)
        wait_for(lambda: client.pttl(lease) > 51_000, "a renewal", PATIENCE)
        wait_for(partial(overlapped, worker, 3), "three that overlap", PATIENCE)
        # Longer than it may be late.
        wait_for(partial(overlapped, worker, 8, "b"), "eight that overlap", PATIENCE)
        assert shop.rabbitdelay.schedules.get("a").last[2] == "overlapped"
        assert [len(instants(noted, name)) for name in "ab"] == [1, 1]
        client.persist(lease)  # it ends with the run, or never
        let_end()
        wait_until_ran(noted, 3)
        wait_for(lambda: len(instants(noted, "b")) >= 3, "those of the other one", PATIENCE)
        log = worker.log
    client.close()
    found, (held, waited, *_) = instants(noted, "a"), instants(noted, "b")
    assert found[1] > found[0] + 3
    assert len(set(found)) == len(found)
    left_out = re.findall(r"Occurrence b:(\d+):\d+ does not run: another", log)
    assert held < waited < int(left_out[0]) // 1000


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
