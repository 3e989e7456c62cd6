"""Many tracked tasks are cancelled at once, by what they have in common."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay import Outcome, Row, signals
from celery_rabbitdelay.app import waiting_tasks
from celery_rabbitdelay.registry.index import shard_of
from celery_rabbitdelay.testing import RedisServer


@pytest.fixture
def configuration(configuration: dict[str, Any], redis: RedisServer) -> dict[str, Any]:
    own = {"rabbitdelay_registry_url": redis.url, "rabbitdelay_track": "all"}
    return {**configuration, **own, "rabbitdelay_registry_options": {"socket_timeout": 3}}


def send(shop: Any, name: str, number: int, hours: int, **options: Any) -> None:
    """Send tasks that are in one list of the registry."""
    eta = datetime.now(UTC) + timedelta(hours=hours)
    ids = (each for each in (uuid4().hex for _ in count()) if shard_of(each) == 0)
    rows = (Row(eta=eta + timedelta(seconds=each), task_id=next(ids)) for each in range(number))
    assert shop.rabbitdelay.send_many(name, rows, **options).confirmed == number


def test_all_of_a_filter_that_were_sent_before_are_cancelled_whatever_is_sent_and_moved_meanwhile(
    shop: Any, small_pages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_tasks, "CHUNK", 10)
    delays, cancelled = shop.rabbitdelay, list[str]()
    delays.open_job("import", expires=3600)
    send(shop, "look", 60, 10, job="import")
    send(shop, "look", 20, 20)
    send(shop, "note", 10, 10)
    in_15_hours = datetime.now(UTC) + timedelta(hours=15)
    *_, last = delays.pending(job="import")

    def send_and_move(task_id: str, **_: Any) -> None:
        cancelled.append(task_id)
        if 10 <= len(cancelled) < 30:
            send(shop, "look", 1, 9 if len(cancelled) % 2 else 11)
        if len(cancelled) == 40:
            assert delays.postpone(last.task_id, delay=9.5 * 3600) is Outcome.DONE

    signals.cancelled.connect(send_and_move)
    small_pages.clear()
    assert delays.cancel_pending(task="look", job="import", limit=10) == 10
    # All are in one list, which was not read as a whole.
    assert sum(small_pages) < 40
    assert delays.cancel_pending(task="look", due_before=in_15_hours) == 50
    signals.cancelled.disconnect(send_and_move)
    assert (len({*cancelled}), last.task_id in cancelled) == (60, True)
    assert [delays.count(task=each) for each in ("look", "note")] == [40, 10]
    assert delays.cancel_pending(key="none") == 0
    assert delays.cancel_pending(due_after=in_15_hours) == 20
    assert delays.cancel_pending() == 30
