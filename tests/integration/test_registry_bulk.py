"""Many tracked tasks are cancelled at once, by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay import Outcome, RegistryUnavailable, Row, signals
from celery_rabbitdelay.app import waiting_tasks
from celery_rabbitdelay.registry.index import shard_of
from celery_rabbitdelay.testing import RedisServer
from tests.integration.trouble import resumed


@pytest.fixture
def configuration(configuration: dict[str, Any], redis: RedisServer) -> dict[str, Any]:
    own = {"rabbitdelay_registry_url": redis.url, "rabbitdelay_track": "all"}
    return {**configuration, **own, "rabbitdelay_registry_options": {"socket_timeout": 3}}


@pytest.fixture
def small_batches(small_pages: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Look at ten tasks at once, reading four; return how many each page had."""
    monkeypatch.setattr(waiting_tasks, "CHUNK", 10)
    return small_pages


@pytest.fixture
def each_cancel() -> Iterator[list[Callable[[str], object]]]:
    """Functions that are called with the id of each task that is cancelled."""
    calls: list[Callable[[str], object]] = []

    def receive(task_id: str, **signal: Any) -> None:
        for call in calls:
            call(task_id)

    signals.cancelled.connect(receive)
    yield calls
    signals.cancelled.disconnect(receive)


def send(shop: Any, name: str, number: int, hours: int, **options: Any) -> None:
    """Send tasks that are in one list of the registry."""
    eta = datetime.now(UTC) + timedelta(hours=hours)
    ids = (each for each in (uuid4().hex for _ in count()) if shard_of(each) == 0)
    rows = (Row(eta=eta + timedelta(seconds=each), task_id=next(ids)) for each in range(number))
    assert shop.rabbitdelay.send_many(name, rows, **options).confirmed == number


def test_those_of_a_filter_are_cancelled_in_batches_and_no_others(
    shop: Any, small_batches: list[int]
) -> None:
    delays = shop.rabbitdelay
    delays.open_job("import", expires=3600)
    send(shop, "look", 60, 10, job="import")
    send(shop, "look", 20, 20)
    send(shop, "note", 10, 10)
    in_15_hours = datetime.now(UTC) + timedelta(hours=15)
    assert delays.cancel_pending(task="look", job="import", limit=25) == 25
    assert delays.cancel_pending(task="look", due_before=in_15_hours) == 35
    # All are in one list, which was never read as a whole.
    assert max(small_batches) < 40
    assert [delays.count(task=each) for each in ("look", "note")] == [20, 10]
    assert delays.cancel_pending(due_after=in_15_hours) == 20
    assert delays.cancel_pending(key="none") == 0
    assert delays.cancel_pending() == 10


def test_all_that_were_sent_before_are_cancelled_whatever_is_sent_and_moved_meanwhile(
    shop: Any, small_batches: list[int], each_cancel: list[Callable[[str], object]]
) -> None:
    delays, told = shop.rabbitdelay, list[str]()
    send(shop, "look", 60, 10)
    counted = sorted(each.task_id for each in delays.pending())
    *_, last = delays.pending()

    def send_and_move(task_id: str) -> None:
        told.append(task_id)
        if len(told) <= 20:
            send(shop, "look", 1, 9 if len(told) % 2 else 11)
        if len(told) == 30:
            assert delays.postpone(last.task_id, delay=9.5 * 3600) is Outcome.DONE

    each_cancel.append(send_and_move)
    assert delays.cancel_pending(task="look") == 60
    assert (sorted(told), delays.count()) == (counted, 20)


def test_what_is_left_when_redis_goes_away_is_cancelled_by_another_call(
    shop: Any,
    small_batches: list[int],
    redis: RedisServer,
    each_cancel: list[Callable[[str], object]],
) -> None:
    send(shop, "look", 50, 10)
    each_cancel.append(lambda _: redis.suspend())
    with resumed(redis), pytest.raises(RegistryUnavailable):
        shop.rabbitdelay.cancel_pending(task="look")
    each_cancel.clear()
    # Redis did what it was last asked, if it was asked to cancel ten more.
    assert shop.rabbitdelay.cancel_pending(task="look") in (30, 40)
    assert shop.rabbitdelay.count() == 0
