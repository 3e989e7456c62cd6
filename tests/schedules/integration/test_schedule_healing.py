"""Occurrences that are sent again, or come late, and a Redis that forgets: each instant runs once.

What a test waits for takes minutes otherwise: its workers are hasty. Others travel in time, in
``test_schedules_travel.py``.
"""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from redis import Redis

from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.kernel.integration.shop import PATIENCE, QUEUES, named
from tests.kernel.integration.worker import Worker
from tests.kernel.unit.clock import frozen
from tests.registry.integration.registering import TEXT, RedisSetup
from tests.schedules.integration.test_schedules import (
    Stage,
    assert_each_once,
    settings,
    shop,
    stage,
)

__all__ = ["settings", "shop", "stage"]

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)

#: The setting of a worker that looks after schedules twice a second.
HASTY: dict[str, Any] = {"imports": ["tests.schedules.integration.hasty"]}


@pytest.fixture
def redis_setup(redis: RedisServer) -> Iterator[RedisSetup]:
    """A Redis of this test's own, for the registry alone."""
    with Redis.from_url(redis.url, **TEXT) as client:
        yield RedisSetup(redis.url, {}, client)


@pytest.fixture
def put_soon(stage: Stage) -> Callable[..., int]:
    """Puts a schedule that is due in some seconds and then each hour; returns when, in seconds."""

    def put_soon(name: str = "a", seconds: int = 1, **options: Any) -> int:
        with frozen() as clock:
            due = int(clock.now) + seconds
            start = datetime.fromtimestamp(due, UTC)
            assert stage.put(name, HOUR, start=start, **options).next_at == start
        return due

    return put_soon


def follows(shop: Any, first: int, name: str = "a") -> bool:
    """Return whether what waits of a schedule is due an hour after the first."""
    found = shop.rabbitdelay.schedules.get(name)
    return found is not None and found.next_at.timestamp() == first + 3600


def wait_until_followed(shop: Any, first: int) -> None:
    wait_for(lambda: follows(shop, first), "the next occurrence", PATIENCE)


def is_over(instant: float) -> bool:
    return time.time() > instant


def test_what_has_run_does_not_run_again_if_redis_goes_back_in_time(
    stage: Stage, put_soon: Callable[..., int], redis_setup: RedisSetup
) -> None:
    first = put_soon()
    with Redis.from_url(redis_setup.url) as client:
        snapshot = {key: client.dump(key) for key in client.scan_iter()}
        assert not follows(stage.shop, first)
        with Worker({**stage.settings, **HASTY}), Worker({**stage.settings, **HASTY}):
            stage.until_ran(1)
            wait_until_followed(stage.shop, first)
            with client.pipeline() as back:
                for key in client.scan_iter():
                    back.delete(key)
                for key, value in snapshot.items():
                    back.restore(key, 0, value)
                # Nobody sends again what is missed: on a busy machine, the other worker may be
                # slower to note it than a hasty one is to send it.
                back.set(stage.shop.rabbitdelay.registry.names.only("healing"), "1")
                back.execute()
            wait_until_followed(stage.shop, first)
            stage.until(1)
    assert stage.instants() == [first]


def test_a_redis_that_has_lost_everything_knows_a_schedule_again(
    stage: Stage, redis_setup: RedisSetup
) -> None:
    def known_again() -> bool:
        found = stage.shop.rabbitdelay.schedules.get("a")
        return found is not None and found.args == ("a",) and found.exported() == before

    before = stage.put("a", priority=2).exported()
    with Worker(stage.settings):
        stage.until_ran(3)
        redis_setup.client.flushall()
        wait_for(known_again, "the whole of it", PATIENCE)
        stage.until_ran(len(stage()) + 3)
    assert_each_once(stage.instants())


def test_what_waits_for_a_resume_is_not_sent_again(
    stage: Stage, put_soon: Callable[..., int]
) -> None:
    default, second, reports = (named(stage.shop, name) for name in QUEUES[:3])
    paused = [{"task": "note"}, {"queue": reports}]
    for each in paused:
        stage.shop.rabbitdelay.pause(**each)
    first = {"a": put_soon("a"), "b": put_soon("b", task="late-note", queue=reports)}
    # Nobody serves its queue: when it is sent again, the other ones would have been.
    put_soon("c", 2, task="late-note", queue=second)
    with Worker({**stage.settings, **HASTY}, [default, reports]) as worker:
        wait_for(lambda: "Resending missing occ" in worker.log, "healing", PATIENCE)
        assert "occurrences of schedules: c" in worker.log
        assert not any(follows(stage.shop, first[name], name) for name in first)
        for each in paused:
            stage.shop.rabbitdelay.resume(**each)
        for name in first:
            wait_for(
                partial(follows, stage.shop, first[name], name), "the next occurrence", PATIENCE
            )
        stage.until(1)
    assert {name: stage.instants(name) for name in first} == {
        name: [due] for name, due in first.items()
    }


@pytest.mark.parametrize(("mode", "is_emptied"), [("hold", False), ("run", True)])
def test_nothing_is_lost_and_nothing_runs_twice_while_redis_is_away(
    stage: Stage, redis: RedisServer, mode: str, is_emptied: bool
) -> None:
    away = "Redis did not decide on occurrences"
    stage.settings["rabbitdelay_registry_options"] = {"socket_timeout": 1}
    stage.settings["rabbitdelay_registry_down"] = mode
    stage.put("a")
    with Worker({**stage.settings, **HASTY}) as worker:
        stage.until_ran(3)
        (redis.kill if is_emptied else redis.suspend)()
        wait_for(lambda: away in worker.log, "silence", PATIENCE)
        ran = len(stage.wait(3))
        if mode == "run":
            stage.until_ran(ran + 5)
        else:
            wait_for(lambda: worker.log.count(away) >= 2, "one held again", PATIENCE)
            assert len(stage.wait(3)) == ran
        (redis.start if is_emptied else redis.resume)()
        stage.until_ran(ran + 10)
        wait_for(lambda: stage.shop.rabbitdelay.schedules.get("a"), "a record", PATIENCE)
    assert_each_once(stage.instants())


def test_an_occurrence_runs_although_its_confirm_comes_after_ten_others(stage: Stage) -> None:
    late = {
        "imports": ["tests.schedules.integration.late_confirm"],
        "worker_prefetch_multiplier": 1,
    }
    with Worker({**stage.settings, "task_acks_late": True, **late}) as waits:
        first = int(time.time()) + 5
        stage.put("a", start=datetime.fromtimestamp(first, UTC))
        records = stage.shop.rabbitdelay.schedules._records
        wait_for(lambda: records.get(["a"])[0].done_ms > 0, "the first decision", PATIENCE)
        with Worker(stage.settings):
            stage.until_ran(10)
            wait_for(
                lambda: "waits, because the next occurrence cannot be published" in waits.log,
                "it",
                PATIENCE,
            )
            wait_for(lambda: first in stage.instants(), "the first occurrence", PATIENCE)
            stage.until_none_is_missing()
    assert_each_once(stage.instants())
    assert stage.instants()[0] == first
