"""Schedules: each instant runs once, whatever is edited, paused, purged, lost or killed."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab
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
from celery_rabbitdelay.schedules import record, schedules
from celery_rabbitdelay.schedules.addition import SchedulesAddition
from celery_rabbitdelay.schedules.beat import BeatEntries
from celery_rabbitdelay.schedules.record import Records
from celery_rabbitdelay.testing import wait_for
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.notes import Notes, instants
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.worker import Beat, Worker
from tests.kernel.unit.clock import frozen
from tests.registry.integration.registering import TIMEOUT, RedisSetup
from tests.registry.integration.registry_fixtures import redis_setup

__all__ = ["redis_setup"]

SECOND = timedelta(seconds=1)


@pytest.fixture
def settings(redis_setup: RedisSetup, broker_url: str, redis_url: str) -> dict[str, Any]:
    return {
        **small_configuration(broker_url, redis_url),
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


class Stage(Notes):
    """A shop with schedules, and the runs of their occurrences.

    Attributes:
        settings: The settings of the shop, for its workers.
    """

    def __init__(self, settings: dict[str, Any], shop: Any) -> None:
        super().__init__(shop)
        self.settings = settings

    def put(self, name: str, when: Any = SECOND, task: str = "note", **options: Any) -> Any:
        """Put a schedule whose task notes its id; a slow machine leaves no occurrence out."""
        return self.edit(name, when, task, name, **options)

    def edit(
        self, given: str, when: Any = SECOND, task: str = "note", name: str = "a", **options: Any
    ) -> Any:
        """Put the schedule ``a``, whose task notes what it was given."""
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

    def lease(
        self, command: str = "get", *given: Any, kind: str = "running", name: str = "a"
    ) -> Any:
        """Give Redis a command about the lease of ``a``'s run: by default, who has it."""
        registry = self.shop.rabbitdelay.registry
        key = registry.names.of(kind, name)
        (found,) = registry.store.commands(lambda pipe: getattr(pipe, command)(key, *given))
        return found

    def instants(self, name: str = "a") -> list[int]:
        """Return when the occurrences of a schedule were due that ran, in seconds."""
        return instants(self, name)

    def until_ran(self, number: int, name: str = "a") -> None:
        """Wait until so many occurrences of a schedule have run."""
        wait_for(lambda: len(self.instants(name)) >= number, f"{number} of {name}", PATIENCE)

    def until_none_is_missing(self, name: str = "a", gap: int = 1) -> None:
        """Wait until each occurrence has run that was due before the latest that has.

        Of two workers, the one that ends first may leave an earlier one to the other.
        """
        begin, *_, end = self.instants(name)
        expected = {*range(begin, end + 1, gap)}
        wait_for(lambda: expected <= {*self.instants(name)}, "each occurrence", PATIENCE)

    def let_end(self) -> None:
        """Let the runs of the task ``hold`` end."""
        self.redis.set(f"{self.key}:ends", "1")

    def forget(self) -> None:
        """Delete the notes."""
        self.redis.delete(self.key, f"{self.key}:ends")


@pytest.fixture
def stage(settings: dict[str, Any], shop: Any) -> Iterator[Stage]:
    """The shop; its notes are deleted with the test."""
    stage = Stage(settings, shop)
    yield stage
    stage.forget()


def assert_each_once(found: list[int]) -> None:
    """Assert that each second ran once, from the first to the last."""
    assert found == [*range(found[0], found[0] + len(found))]


def test_each_instant_runs_once_and_edits_and_deletes_end_what_waits(stage: Stage) -> None:
    before = datetime.now(UTC)
    made = stage.put("a")
    assert (made.name, made.task, made.is_paused) == ("a", "note", False)
    assert made.next_at > before
    with Worker(stage.settings), Worker(stage.settings):
        stage.until_ran(4)
        stage.put("a")
        stage.put("b", timedelta(hours=1))
        stage.until_ran(6)
        edited = stage.put("a", timedelta(seconds=2))
        begin = int(edited.next_at.timestamp())
        wait_for(lambda: stage.instants()[-1] >= begin + 4, "after the edit", PATIENCE)
        assert [each.name for each in stage.shop.rabbitdelay.schedules.all()] == ["a", "b"]
        assert stage.shop.rabbitdelay.schedules.delete("a")
        assert not stage.shop.rabbitdelay.schedules.delete("a")
        deleted = time.time()
        stage.until(4)
        assert stage.instants()[-1] <= deleted + 1
        assert stage.shop.rabbitdelay.schedules.get("a") is None
        following = stage.shop.rabbitdelay.schedules.next("b", 3)
        assert [later - earlier for earlier, later in pairwise(following)] == [
            timedelta(hours=1)
        ] * 2
    # Not before: of two workers, one may be slower.
    found = stage.instants()
    assert_each_once([each for each in found if each < begin])
    edits = [each for each in found if each >= begin]
    assert edits == [*range(begin, begin + 2 * len(edits), 2)]


def test_an_occurrence_that_was_lost_is_sent_again(
    stage: Stage, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_ms = milliseconds_of(stage.put("a").next_at)
    stage.put("b", timedelta(hours=1), start=datetime.now(UTC) + timedelta(days=1))
    default = stage.shop.amqp.queues[stage.shop.conf.task_default_queue].name
    wait_for(lambda: count(connection, default) == 1, "the occurrence", PATIENCE)
    channel: Any = connection.default_channel
    channel.queue_purge(default)

    def healed(late_ms: int) -> list[str]:
        clock = SimpleNamespace(ms=lambda: due_ms + late_ms)
        monkeypatch.setattr(schedules, "wall_clock", clock)
        found: list[str] = stage.shop.rabbitdelay.schedules.heal()
        return found

    late_ms = record.HEAL_AFTER_MS
    # First it is stage that it is missed, and until the next look workers may contradict.
    for more_ms in (0, 1, record.HEALING_MS * 3 // 2):
        assert healed(late_ms + more_ms) == []
    late_ms += record.HEALING_MS * 3 // 2 + 1
    assert healed(late_ms) == ["a"]
    # It is given twice as long each time.
    assert healed(2 * late_ms) == healed(2 * late_ms + 1) == []
    assert healed(2 * late_ms + record.HEALING_MS * 3 // 2 + 1) == ["a"]
    monkeypatch.undo()
    with Worker(stage.settings):
        stage.until_ran(2)
    found = stage.instants()
    assert len(set(found)) == len(found)


def test_verify_finds_schedules_that_stand_still_and_those_that_cannot_be_sent_again(
    stage: Stage,
) -> None:
    due_ms = milliseconds_of(stage.put("a").next_at)
    stage.put("b", timedelta(days=1), start=datetime.now(UTC) + timedelta(days=1))
    known = Records(stage.shop.rabbitdelay.registry)

    def found(now_ms: int) -> list[tuple[str, str]]:
        with frozen(now_ms / 1000):
            rows = [*SchedulesAddition(stage.shop.rabbitdelay).problems()]
        return [(code, subject) for code, subject, _ in rows]

    # Until then, a worker may send it again.
    assert found(due_ms + 89_999) == []
    assert found(due_ms + 90_000) == [("schedule-overdue", "schedule a")]
    known.note("b", message="")
    assert found(due_ms) == [("schedule-lost", "schedule b")]


def test_what_needs_a_registry_says_so(broker_url: str) -> None:
    small = small_configuration(broker_url, "redis://127.0.0.1:1", "test")
    with closing(make_app(small)) as app, pytest.raises(RegistryRequired):
        app.rabbitdelay.schedules.put("a", "note", SECOND)
    with (
        closing(make_app({**small, "rabbitdelay_beat": True})) as app,
        pytest.raises(InvalidSetting, match="rabbitdelay_registry_url"),
    ):
        app.rabbitdelay.settings  # noqa: B018 - read, and so checked


def test_workers_that_are_killed_lose_no_occurrence_and_run_none_twice(stage: Stage) -> None:
    first = int(stage.put("a", task="late-note", catch_up="all").next_at.timestamp())
    for seen in (3, 6):
        with Worker(stage.settings) as worker:
            stage.until_ran(seen)
            worker.kill()
    with Worker(stage.settings):
        stage.until_ran(9)
    found = Counter(stage.instants())
    assert sorted(found) == [*range(first, first + len(found))]
    # Whatever has begun when its worker is killed may begin again, as any task may.
    assert sum(found.values()) - len(found) <= 2


def test_what_cannot_be_a_schedule_is_refused(stage: Stage) -> None:
    refused: list[tuple[dict[str, Any], str | None]] = [
        ({"when": "61 * * * *"}, "minute"),
        *[({"name": each}, "1 to 222 bytes") for each in ("", "ü" * 120, "\ud800")],
        ({"when": ["0 0 * * *" + ",0" * 900] * 9}, "too long"),
        ({"quue": "second"}, r"takes the options .* not \['quue'\]"),
        ({"overlap": "maybe"}, "a jitter of at most a day"),
        ({"jitter": 86_401}, "a jitter of at most a day"),
        ({"when": ["@hourly", "10 * * * *"], "jitter": 601}, "the jitter may be at most 600 s"),
        ({"start": datetime(1960, 1, 1, tzinfo=UTC)}, "times from 1970 on"),
        ({"catch_up": 1e17}, None),
    ]
    for given, reason in refused:
        options = {"name": "a", "task": "note", "when": SECOND, "kwargs": {"key": "x"}, **given}
        with pytest.raises((InvalidSchedule, InvalidDelay, DelayTooLong), match=reason):
            stage.shop.rabbitdelay.schedules.put(**options)
    assert stage.shop.rabbitdelay.schedules.all() == []


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


@pytest.mark.parametrize(
    "zone", [None, ZoneInfo("Asia/Kolkata"), timezone(-timedelta(minutes=210))], ids=str
)
def test_the_time_zone_is_that_of_celerys_own_crontab(settings: dict[str, Any], zone: Any) -> None:
    conf = {"timezone": zone, "enable_utc": False}
    plain = Celery("plain", set_as_current=False)
    plain.conf.update(conf)
    with closing(make_app({**settings, **conf})) as app:
        put: Any = app.rabbitdelay.schedules.put("a", "look", crontab(30, 7))
        app.rabbitdelay.schedules.delete("a")
    before = put.next_at - SECOND
    when = crontab(30, 7, app=plain, nowfun=lambda: before)
    assert when.remaining_estimate(before) == SECOND


def entry(noted: Notes, what: str, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """An entry of beat, as a process gets it."""
    given = {"task": "note", "schedule": seconds, "args": [what], "kwargs": {"key": noted.key}}
    return {**given, **more}


def test_workers_that_start_at_once_put_one_chain_of_each_entry_of_beat_and_need_no_beat(
    stage: Stage, make_shop: Callable[..., Any]
) -> None:
    every = {"options": {"catch_up": "all"}}
    near = {name: entry(stage, name, seconds, **every) for name, seconds in (("a", 1), ("b", 2))}
    own = {**stage.settings, "beat_schedule": near, "rabbitdelay_beat": True}
    with ExitStack() as stack, ThreadPoolExecutor(3) as threads:
        beat, workers = Beat(own), [Worker(own, None, "-P", "solo") for _ in range(2)]
        [*threads.map(stack.enter_context, [beat, *workers])]
        wait_for(lambda: len(set(stage())) == 2 and len(stage()) >= 8, "occurrences", PATIENCE)
        wait_for(lambda: "beat sends nothing; workers send" in beat.log, "beat", PATIENCE)
        assert "Sending due task" not in beat.log
        # A second chain of one would bring each occurrence twice.
        assert "a message is dropped" not in "".join(each.log for each in workers)
        for name, seconds in (("a", 1), ("b", 2)):
            stage.until_none_is_missing(f"beat:{stage.shop.main}:{name}", seconds)
    ids = Counter(each["correlation_id"] for each in stage.found())
    assert set(ids.values()) == {1}
    BeatEntries(make_shop(**own).rabbitdelay.schedules).end()


def test_two_versions_of_the_code_do_not_undo_each_other(
    stage: Stage, make_shop: Callable[..., Any]
) -> None:
    def version(*names: str) -> Any:
        entries = {name: entry(stage, name, 3600) for name in names}
        given = {**stage.settings, "beat_schedule": entries, "rabbitdelay_beat": True}
        return make_shop(**given).rabbitdelay.schedules

    def names(schedules: Any) -> list[str]:
        return [each.name.rpartition(":")[2] for each in schedules.all()]

    before, after = version("first", "kept"), version("kept", "more")
    assert BeatEntries(before).put()
    for _ in range(2):
        assert BeatEntries(after).put()
        assert not BeatEntries(before).put()
    assert names(after) == ["kept", "more"]
    # The code is rolled back.
    assert BeatEntries(before).put(is_forced=True)
    assert not BeatEntries(after).put()
    assert names(after) == ["first", "kept"]
    BeatEntries(after).end()
    assert names(after) == []


def test_an_entry_that_cannot_be_a_schedule_is_said_and_keeps_no_other_from_it(
    stage: Stage, make_shop: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    entries = {"a": entry(stage, "a", 0.5), "b": entry(stage, "b", 3600)}
    app = make_shop(**stage.settings, beat_schedule=entries, rabbitdelay_beat=True)
    assert BeatEntries(app.rabbitdelay.schedules).put()
    (made,) = app.rabbitdelay.schedules.all()
    assert made.name.endswith(":b")
    assert "Beat entry 'beat:shop:a' is invalid" in caplog.text
    app.rabbitdelay.schedules.delete(made.name)


def overlapped(worker: Worker, number: int, name: str = "a") -> bool:
    left_out = rf"Occurrence {name}:\S+ does not run: overlapped"
    return len(re.findall(left_out, worker.log)) >= number


def test_while_a_run_goes_others_are_left_out_or_one_waits_that_is_not_too_late_then(
    stage: Stage,
) -> None:
    with Worker(stage.settings, None, "-c", "4") as worker:
        stage.put("a", task="hold", overlap="skip")
        stage.put("b", task="hold", overlap="queue-one", catch_up=5)
        stage.until_ran(1)
        # As if a minute were nearly over: the worker says that it still runs.
        stage.lease("pexpire", 50_000)
        wait_for(lambda: stage.lease("pttl") > 51_000, "a renewal", PATIENCE)
        wait_for(partial(overlapped, worker, 3), "three that overlap", PATIENCE)
        # Longer than it may be late.
        wait_for(partial(overlapped, worker, 8, "b"), "eight that overlap", PATIENCE)
        assert stage.shop.rabbitdelay.schedules.get("a").last[2] == "overlapped"
        assert [len(stage.instants(name)) for name in "ab"] == [1, 1]
        stage.lease("persist")  # it ends with the run, or never
        stage.let_end()
        stage.until_ran(3)
        stage.until_ran(3, "b")
        log = worker.log
    found, (held, waited, *_) = stage.instants(), stage.instants("b")
    assert found[1] > found[0] + 3
    assert len(set(found)) == len(found)
    left_out = re.findall(r"Occurrence b:(\d+):\d+ does not run: overlapped", log)
    assert held < waited < int(left_out[0]) // 1000


def test_what_is_exported_is_imported_as_it_was(stage: Stage) -> None:
    schedules = stage.shop.rabbitdelay.schedules
    first, end = crontab(0, 9, "mon", day_of_month="1-7"), datetime.now(UTC) + timedelta(days=400)
    # So that nothing falls due in between.
    with frozen():
        stage.put("a", ["0 9 * * *", first], timezone="Europe/Berlin")
        some: dict[str, Any] = {"jitter": 5, "overlap": "skip", "catch_up": 90, "paused": True}
        stage.put("b", timedelta(hours=1), end=end, **some)
        stage.put("c", "@daily", exclude=["2030-12-25", "2031-01-01"], priority=2)
        schedules.put("d", "note", "@daily", (date(2030, 1, 2), uuid4()), {"key": b"\xff"})
        before = schedules.all()
        text = json.dumps([each.exported() for each in before])
        for each in before:
            schedules.delete(each.name)
        for _ in range(2):
            for each in json.loads(text):
                schedules.put_exported(each)
            # An edit is part of the id.
            found = zip(schedules.all(), before, strict=True)
            assert [new._replace(next_id=was.next_id) for new, was in found] == before
