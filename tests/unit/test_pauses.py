"""Pauses without Redis: names, instants, and how long a paused task waits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from celery_rabbitdelay.app.pausing import _one
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry import pauses
from celery_rabbitdelay.registry.connection import Store
from celery_rabbitdelay.registry.index import Names
from celery_rabbitdelay.registry.pauses import Pauses, Questions, paused_since
from tests.unit.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(pauses, "time", clock)
    return clock


def test_a_few_tasks_ask_again_soon_and_many_after_a_quarter_of_the_time_that_they_were_held(
    clock: Clock,
) -> None:
    questions = Questions()
    for held_ms in [0, 60_000, 315_360_000_000] * 50:
        clock.now += 0.5  # two a second
        assert 750 <= questions.after_ms(held_ms) <= 1_000
    for held_ms, longest_ms in ((-5, 5_000), (60_000, 15_000), (10**12, 600_000)):
        found = [questions.after_ms(held_ms) for _ in range(60_000)][-200:]
        assert longest_ms * 0.75 <= min(found) < max(found) <= longest_ms
    clock.now += 600
    assert questions.after_ms(10**12) <= 1_000


def test_a_task_is_paused_by_its_name_or_by_its_queue() -> None:
    known = {"task:remind": 7, "queue:mails": 5}
    asked = [("remind", "other"), ("other", "mails"), ("remind", "mails"), ("mails", "remind")]
    assert [paused_since(known, *each) for each in asked] == [7, 5, 5, 0]
    names: list[Any] = [(None, None), ("remind", "mails"), ("", None), (None, ""), (7, None)]
    for task, queue in names:
        with pytest.raises(TypeError, match="takes the name of a task or of a queue"):
            _one(task, queue)


def test_redis_is_asked_once_a_second_and_what_it_said_last_counts_while_it_is_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = RegistryUnavailable("away")
    store = Store(lambda: None, "redis", (OSError,))
    strange = ["queue:mails", "yesterday", "task:two", "\u00b2", "task:far", "9" * 15]
    redis = mock.Mock(side_effect=[away, [["task:remind", "7", *strange]], away, [{}]])
    monkeypatch.setattr(store, "call_each", redis)
    paused = Pauses(store, Names("rabbitdelay"))
    with pytest.raises(RegistryUnavailable):
        paused.known()
    # What is no instant is long ago.
    known = {"task:remind": 7, "queue:mails": 1, "task:two": 1, "task:far": 1}
    for _ in range(100):
        assert paused.known() == known
    assert (redis.call_count, paused.oldest_ms()) == (2, 1)
    clock.now += 1
    assert paused.known() == paused.known() == known
    assert redis.call_count == 3
    clock.now += 1
    assert paused.known() == {}
