"""Occurrences that are sent again, or come late, and a Redis that forgets: each instant runs once.

What a test waits for takes minutes otherwise: its workers are hasty, or it travels in time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from kombu import Connection, Queue
from redis import Redis

from celery_rabbitdelay.publishing.message import kept_properties
from celery_rabbitdelay.testing import RedisServer, Travel, wait_for
from celery_rabbitdelay.testing.session import Worker as TravellingWorker
from tests.integration.arrivals import count
from tests.integration.notes import Notes, instants
from tests.integration.registering import TEXT, RedisSetup
from tests.integration.shop import PATIENCE, QUEUES, named
from tests.integration.test_schedules import Stage, assert_each_once, settings, shop, stage
from tests.integration.travelling_shop import rabbitdelay_celery_app
from tests.integration.worker import Worker
from tests.unit.clock import frozen

__all__ = ["rabbitdelay_celery_app", "settings", "shop", "stage"]

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)

#: The setting of a worker that looks after schedules twice a second.
HASTY: dict[str, Any] = {"imports": ["tests.integration.hasty"]}


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


@pytest.mark.parametrize(("catch_up", "begins"), [("all", "the original"), (900, "the copy")])
def test_of_an_occurrence_that_is_late_and_was_sent_again_one_runs(
    rabbitdelay_app: Any,
    rabbitdelay_worker: TravellingWorker,
    travel: Travel,
    catch_up: Any,
    begins: str,
) -> None:
    noted, schedules = Notes(rabbitdelay_app), rabbitdelay_app.rabbitdelay.schedules
    start = travel.now.replace(microsecond=0) + HOUR
    kwargs = {"key": noted.key}
    schedules.put("a", "note", HOUR, ("a",), kwargs, start=start, catch_up=catch_up)
    rabbitdelay_worker.kill()
    travel(to=start + 61 * SECOND)
    assert schedules.heal() == []
    travel(seconds=46)
    assert schedules.heal() == ["a"]
    travel(seconds=1)
    with rabbitdelay_app.connection_for_write() as connection:
        queue = rabbitdelay_app.amqp.queues[rabbitdelay_app.conf.task_default_queue]
        found = taken(connection, queue)
        assert len(found) == 2
        rabbitdelay_worker.start()
        for message in found if begins == "the original" else reversed(found):
            give(connection, queue, message)
            # The second one is too late for 900 seconds.
            travel(seconds=900)
    assert instants(noted, "a") == [int(start.timestamp())]
    travel(to=start + 3.5 * HOUR)
    assert [each - start.timestamp() for each in instants(noted, "a")] == [0, 3600, 7200, 10800]
    noted.forget()


def taken(connection: Connection, queue: Queue) -> list[Any]:
    """Take all messages out of a queue."""
    bound = queue(connection.default_channel)
    return [*iter(lambda: bound.get(no_ack=True), None)]


def give(connection: Connection, queue: Queue, message: Any) -> None:
    """Put a message into a queue as it was."""
    connection.Producer().publish(
        message.body,
        routing_key=queue.name,
        headers=message.headers,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        **kept_properties(message.properties),
    )


def test_a_worker_of_another_application_sends_again_to_the_queue_of_the_task(
    stage: Stage, put_soon: Callable[..., int], connection: Connection
) -> None:
    first = put_soon()
    # Another queue, and no tasks.
    mail = {**stage.settings, "prefix": f"{stage.settings['prefix']}-mail", "knows_tasks": False}
    with Worker({**mail, **HASTY}) as other:
        wait_for(
            lambda: count(connection, named(stage.shop, "default")) >= 2, "two messages", PATIENCE
        )
        assert "sent again: a" in other.log
        assert stage() == []
        with Worker(stage.settings):
            stage.until_ran(1)
            wait_until_followed(stage.shop, first)
            stage.until(1)
        assert "unregistered task" not in other.log
    assert stage.instants() == [first]


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
        wait_for(lambda: "are sent again" in worker.log, "healing", PATIENCE)
        assert "sent again: c" in worker.log
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
    away = "It is not known which occurrences of schedules have run"
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
    late = {"imports": ["tests.integration.late_confirm"], "worker_prefetch_multiplier": 1}
    with Worker({**stage.settings, "task_acks_late": True, **late}) as waits:
        first = int(time.time()) + 5
        stage.put("a", start=datetime.fromtimestamp(first, UTC))
        records = stage.shop.rabbitdelay.schedules._records
        wait_for(lambda: records.get(["a"])[0].done_ms > 0, "the first decision", PATIENCE)
        with Worker(stage.settings):
            stage.until_ran(10)
            wait_for(lambda: "waits, as the next is not published" in waits.log, "it", PATIENCE)
            wait_for(lambda: first in stage.instants(), "the first occurrence", PATIENCE)
            stage.until_none_is_missing()
    assert_each_once(stage.instants())
    assert stage.instants()[0] == first
