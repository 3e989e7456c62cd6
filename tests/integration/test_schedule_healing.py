"""Occurrences that are sent again, or come late, and a Redis that forgets: each instant runs once.

What a test waits for takes minutes otherwise: its workers are hasty, or it travels in time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice, pairwise
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
from tests.integration.shop import PATIENCE, named
from tests.integration.test_schedules import (
    assert_each_once,
    let_end,
    put,
    settings,
    shop,
    wait_until_ran,
)
from tests.integration.travelling_shop import rabbitdelay_celery_app
from tests.integration.worker import Worker

__all__ = ["let_end", "put", "rabbitdelay_celery_app", "settings", "shop"]

HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)

#: The setting of a worker that looks after schedules twice a second.
HASTY: dict[str, Any] = {"imports": ["tests.integration.hasty"]}


@pytest.fixture
def redis_setup(redis: RedisServer) -> Iterator[RedisSetup]:
    """A Redis of this test's own, for the registry alone."""
    with Redis.from_url(redis.url, **TEXT) as client:
        yield RedisSetup(redis.url, {}, client)


@pytest.fixture
def put_soon(put: Callable[..., Any]) -> Callable[..., int]:
    """Puts a schedule that is due in some seconds and then each hour; returns when, in seconds."""

    def put_soon(name: str = "a", seconds: int = 3, **options: Any) -> int:
        start = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)
        assert put(name, HOUR, start=start, **options).next_at == start
        return int(start.timestamp())

    return put_soon


def follows(shop: Any, first: int) -> bool:
    """Return whether what waits of the schedule ``a`` is due an hour after the first."""
    found = shop.rabbitdelay.schedules.get("a")
    return found is not None and found.next_at.timestamp() == first + 3600


def wait_until_followed(shop: Any, first: int) -> None:
    wait_for(lambda: follows(shop, first), "the next occurrence", PATIENCE)


def is_over(instant: float) -> bool:
    return time.time() > instant


@pytest.mark.parametrize("begins", ["the original", "the copy"])
@pytest.mark.parametrize("catch_up", ["all", 170])
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
    healed: list[str] = []
    for late in (61, 107):
        travel(to=start + late * SECOND)
        healed += schedules.heal()
    assert healed == ["a"]
    travel(seconds=1)
    with rabbitdelay_app.connection_for_write() as connection:
        queue = rabbitdelay_app.amqp.queues[rabbitdelay_app.conf.task_default_queue]
        found = taken(connection, queue)
        assert len(found) == 2
        rabbitdelay_worker.start()
        for message in found if begins == "the original" else reversed(found):
            give(connection, queue, message)
            # The second one is too late for 170 seconds.
            travel(seconds=80)
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
    settings: dict[str, Any],
    shop: Any,
    put_soon: Callable[..., int],
    noted: Notes,
    connection: Connection,
) -> None:
    first = put_soon()
    # Another queue, and no tasks.
    mail = {**settings, "prefix": f"{settings['prefix']}-mail", "knows_tasks": False}
    with Worker({**mail, **HASTY}) as other:
        wait_for(lambda: count(connection, named(shop, "default")) == 2, "two messages", PATIENCE)
        assert "sent again: a" in other.log
        assert noted() == []
        with Worker(settings):
            wait_until_ran(noted, 1)
            wait_until_followed(shop, first)
            noted.until(1)
        assert "unregistered task" not in other.log
    assert instants(noted, "a") == [first]


def test_what_comes_later_than_the_next_one_is_due_runs(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    connection: Connection,
) -> None:
    settings.update(task_acks_late=True, worker_prefetch_multiplier=1)
    default, keys = named(shop, "default"), [f"{noted.key}:{number}" for number in range(4)]

    def hold(key: str) -> None:
        shop.tasks["hold"].apply_async(kwargs={"key": key}, ignore_result=True)

    hold(keys[0])
    with Worker(settings):
        wait_for(partial(noted.redis.llen, keys[0]), "a run", PATIENCE)
        put("a", catch_up="last")
        for now, then in pairwise(keys):
            wait_for(lambda: count(connection, default) == 1, "an occurrence", PATIENCE)
            hold(then)
            wait_for(partial(is_over, time.time() + 2.5), "more instants", PATIENCE)
            noted.redis.set(f"{now}:ends", "1")
            wait_for(partial(noted.redis.llen, then), "a run", PATIENCE)
        found = instants(noted, "a")
        noted.redis.set(f"{keys[-1]}:ends", "1")
    assert len(found) == len(set(found)) == 3
    noted.redis.delete(*noted.redis.keys(f"{noted.key}:*"))


def test_what_has_run_does_not_run_again_if_redis_goes_back_in_time(
    settings: dict[str, Any],
    shop: Any,
    put_soon: Callable[..., int],
    noted: Notes,
    redis_setup: RedisSetup,
) -> None:
    first = put_soon()
    with Redis.from_url(redis_setup.url) as client:
        snapshot = {key: client.dump(key) for key in client.scan_iter()}
        with Worker({**settings, **HASTY}), Worker({**settings, **HASTY}):
            wait_until_ran(noted, 1)
            wait_until_followed(shop, first)
            for key, value in snapshot.items():
                client.restore(key, 0, value, replace=True)
            for key in {*client.scan_iter()} - snapshot.keys():
                client.delete(key)
            assert not follows(shop, first)
            wait_until_followed(shop, first)
            noted.until(1)
    assert instants(noted, "a") == [first]


def test_a_redis_that_has_lost_everything_knows_a_schedule_again(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    redis_setup: RedisSetup,
) -> None:
    before = put("a", priority=2).exported()
    with Worker(settings):
        wait_until_ran(noted, 3)
        redis_setup.client.flushall()
        wait_for(lambda: known_again(shop, before), "the whole of it", PATIENCE)
        wait_until_ran(noted, len(noted()) + 3)
    assert_each_once(instants(noted, "a"))


def known_again(shop: Any, before: dict[str, Any]) -> bool:
    found = shop.rabbitdelay.schedules.get("a")
    return found is not None and found.args == ("a",) and found.exported() == before


@pytest.mark.parametrize("has_come", [False, True], ids=["is-ahead", "has-come"])
def test_what_is_put_again_after_redis_has_lost_everything_leaves_no_instant_out(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    connection: Connection,
    redis_setup: RedisSetup,
    has_come: bool,
) -> None:
    default = named(shop, "default")
    before = put("a").exported()
    with Worker(settings):
        wait_until_ran(noted, 3)
    # What the worker had received and not begun is in the queue again, too.
    wait_for(lambda: count(connection, default), "a message that is due", PATIENCE)
    wait_for(partial(is_over, time.time() + 5), "a backlog", PATIENCE)
    redis_setup.client.flushall()
    backlog = count(connection, default)
    put("a")
    if has_come:
        wait_for(lambda: count(connection, default) > backlog, "the one put again", PATIENCE)
    with Worker(settings):
        wait_until_ran(noted, 15)
        wait_for(lambda: known_again(shop, before), "the whole of it", PATIENCE)
    assert_each_once(instants(noted, "a"))


@pytest.mark.parametrize("what", ["task", "queue"])
def test_what_waits_for_a_resume_is_not_sent_again(
    settings: dict[str, Any],
    shop: Any,
    put_soon: Callable[..., int],
    noted: Notes,
    what: str,
) -> None:
    default, second = named(shop, "default"), named(shop, "second")
    paused = {"task": "note"} if what == "task" else {"queue": default}
    shop.rabbitdelay.pause(**paused)
    first = put_soon()
    # Nobody serves its queue: when it is sent again, the first one would have been.
    put_soon("b", 5, task="late-note", queue=second)
    with Worker({**settings, **HASTY}, [default]) as worker:
        wait_for(lambda: "are sent again" in worker.log, "healing", PATIENCE)
        assert "sent again: b" in worker.log
        assert not follows(shop, first)
        shop.rabbitdelay.resume(**paused)
        wait_until_ran(noted, 1)
        wait_until_followed(shop, first)
        noted.until(1)
    assert instants(noted, "a") == [first]


def test_a_redelivered_run_runs_again_although_the_next_instant_was_decided(
    settings: dict[str, Any], put: Callable[..., Any], noted: Notes, let_end: Callable[[], Any]
) -> None:
    settings["task_acks_late"] = True
    alone = {**settings, "worker_prefetch_multiplier": 1}
    with Worker(alone) as killed:
        put("a", 3 * SECOND, task="hold")
        wait_until_ran(noted, 1)
        (first,) = instants(noted, "a")
        with Worker(settings, None, "-P", "threads", "-c", "20"):
            wait_until_ran(noted, 2)
            killed.kill()
            wait_for(lambda: instants(noted, "a").count(first) == 2, "another run", PATIENCE)
            let_end()
            wait_for(lambda: len({*instants(noted, "a")}) >= 5, "what follows", PATIENCE)
    found = Counter(instants(noted, "a"))
    assert sorted(found) == [*range(first, first + 3 * len(found), 3)]
    assert [*islice(found.elements(), 3)] == [first, first, first + 3]
    assert sum(found.values()) == len(found) + 1


@pytest.mark.parametrize("is_emptied", [False, True], ids=["silent", "emptied"])
@pytest.mark.parametrize("mode", ["hold", "run"])
def test_nothing_is_lost_and_nothing_runs_twice_while_redis_is_away(
    settings: dict[str, Any],
    shop: Any,
    put: Callable[..., Any],
    noted: Notes,
    redis: RedisServer,
    mode: str,
    is_emptied: bool,
) -> None:
    away = "It is not known which occurrences of schedules have run"
    settings["rabbitdelay_registry_options"] = {"socket_timeout": 1}
    settings["rabbitdelay_registry_down"] = mode
    put("a")
    with Worker({**settings, **HASTY}) as worker:
        wait_until_ran(noted, 3)
        (redis.kill if is_emptied else redis.suspend)()
        wait_for(lambda: away in worker.log, "silence", PATIENCE)
        ran = len(noted.wait(3))
        if mode == "run":
            wait_until_ran(noted, ran + 5)
        else:
            wait_for(lambda: worker.log.count(away) >= 3, "two that are held", PATIENCE)
            assert len(noted.wait(3)) == ran
        (redis.start if is_emptied else redis.resume)()
        wait_until_ran(noted, ran + 10)
        wait_for(lambda: shop.rabbitdelay.schedules.get("a"), "a record", PATIENCE)
    assert_each_once(instants(noted, "a"))
