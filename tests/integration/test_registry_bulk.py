"""Many tracked tasks are cancelled at once, by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.integration.worker import answer, run_command


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


@pytest.fixture
def small_batches(small_pages: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Look at ten tasks at once, reading four; return how many each page had."""
    monkeypatch.setattr(waiting_tasks, "CHUNK", 10)
    return small_pages


@contextmanager
def at_each_cancel(call: Callable[[str], None]) -> Iterator[None]:
    """Call something with the id of each task that is cancelled."""

    def receive(task_id: str, **signal: Any) -> None:
        call(task_id)

    signals.cancelled.connect(receive)
    yield
    signals.cancelled.disconnect(receive)


def test_those_of_a_filter_are_cancelled_in_batches_and_no_others(
    shop: Any, small_batches: list[int]
) -> None:
    delays, told = shop.rabbitdelay, list[str]()
    delays.open_job("import", expires=3600)
    send(shop, "look", 100, 10, job="import")
    send(shop, "look", 40, 20)
    send(shop, "note", 30, 10)
    in_15_hours = datetime.now(UTC) + timedelta(hours=15)
    with at_each_cancel(told.append):
        assert delays.cancel_pending(task="look", job="import", limit=25) == 25
        assert delays.cancel_pending(task="look", due_before=in_15_hours) == 75
    assert len({*told}) == 100
    # All are in one list, which was never read as a whole.
    assert max(small_batches) < 60
    assert [delays.count(task=each) for each in ("look", "note")] == [40, 30]
    assert delays.cancel_pending(due_after=in_15_hours) == 40
    assert delays.cancel_pending(key="none") == 0
    assert delays.cancel_pending() == 30


def test_all_that_were_sent_before_are_cancelled_whatever_is_sent_and_moved_meanwhile(
    shop: Any, small_batches: list[int]
) -> None:
    delays, told = shop.rabbitdelay, list[str]()
    send(shop, "look", 100, 10)
    counted = {each.task_id for each in delays.pending()}
    *_, last = delays.pending()

    def send_and_move(task_id: str) -> None:
        told.append(task_id)
        if len(told) <= 30:
            send(shop, "look", 1, 9 if len(told) % 2 else 11)
        if len(told) == 40:
            assert delays.postpone(last.task_id, delay=9.5 * 3600) is Outcome.DONE

    with at_each_cancel(send_and_move):
        assert delays.cancel_pending(task="look") == 100
    assert (len(told), {*told}) == (100, counted)
    assert delays.count() == 30


def test_what_is_left_when_redis_goes_away_is_cancelled_by_another_call(
    shop: Any, small_batches: list[int], redis: RedisServer
) -> None:
    send(shop, "look", 50, 10)
    told: list[str] = []

    def freeze(task_id: str) -> None:
        if not told:
            redis.suspend()
        told.append(task_id)

    with resumed(redis), at_each_cancel(freeze), pytest.raises(RegistryUnavailable):
        shop.rabbitdelay.cancel_pending(task="look")
    assert len(told) == 10
    # Redis did what it was last asked, if it was asked to cancel ten more.
    assert shop.rabbitdelay.cancel_pending(task="look") in (30, 40)
    assert shop.rabbitdelay.count() == 0


def test_the_command_asks_before_it_cancels_those_of_a_filter(
    configuration: dict[str, Any], shop: Any
) -> None:
    send(shop, "look", 3, 10)
    send(shop, "note", 2, 10)
    refused = run_command(configuration, "cancel --task look", given="n\n")
    assert "Cancel 3 tracked tasks that wait?" in refused.stdout
    assert (refused.returncode, shop.rabbitdelay.count()) == (1, 5)
    agreed = run_command(configuration, "cancel --task look", given="y\n")
    assert agreed.stdout.endswith("3 cancelled\n")
    before = datetime.now(UTC).isoformat()
    told = answer(configuration, f"cancel --due-after {before} --dry-run", "cancel")
    assert told == {"count": 2, "cancelled": 0, "dry_run": True}
    told = answer(configuration, f"cancel --due-before {before} --yes", "cancel")
    assert told == {"count": 0, "cancelled": 0, "dry_run": False}
    for options, why in (
        ("--dry-run", "--dry-run takes --task, --job, --due-before or --due-after"),
        ("x --task look", "a filter takes neither ids nor --key"),
        ("--key x --task look", "a filter takes neither ids nor --key"),
        ("--task look --also-future", "a filter takes neither ids nor --key"),
        ("--task look --json", "--json does not ask: give --yes or --dry-run"),
        ("--yes", "give the ids of tasks, or --key"),
    ):
        wrong = run_command(configuration, f"cancel {options}")
        assert wrong.returncode == 2
        assert why in " ".join(wrong.stderr.split())
    assert shop.rabbitdelay.count() == 2
