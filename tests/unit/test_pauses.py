"""Pauses without Redis: names, instants, and how long a paused task waits."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from celery_rabbitdelay.app.pausing import _one
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.registry import pauses
from celery_rabbitdelay.registry.connection import ScriptCall, Store
from celery_rabbitdelay.registry.index import Names
from celery_rabbitdelay.registry.pauses import Pauses, Questions, paused_since
from celery_rabbitdelay.testing.shared_clock import going_by
from tests.unit.clock import Clock

TEN_MINUTES_MS = 600_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(pauses, "time", clock)
    return clock


def test_a_few_tasks_that_are_held_ask_again_soon_however_long_they_are(clock: Clock) -> None:
    questions = Questions()
    for held_ms in [0, 60_000, 315_360_000_000] * 50:
        clock.now += 0.5  # two a second
        assert 750 <= questions.after_ms(held_ms) <= 1_000


def test_in_a_travel_tasks_that_were_due_together_ask_again_together() -> None:
    with going_by(time.time_ns):
        questions = Questions()
        assert {questions.after_ms(0) for _ in range(20)} == {5_000}
        assert {questions.after_ms(100_000) for _ in range(20)} == {25_000}


@pytest.mark.parametrize(
    ("held_ms", "longest_ms"),
    [(-5, 5_000), (60_000, 15_000), (2_400_000, TEN_MINUTES_MS), (10**12, TEN_MINUTES_MS)],
)
def test_many_ask_again_after_a_quarter_of_the_time_that_they_were_held(
    held_ms: int, longest_ms: int, clock: Clock
) -> None:
    questions = Questions()
    found = [questions.after_ms(held_ms) for _ in range(60_000)][-200:]
    assert longest_ms * 0.75 <= min(found) < max(found) <= longest_ms
    clock.now += 600
    assert questions.after_ms(held_ms) <= 1_000


def test_those_between_ask_one_after_the_other(clock: Clock) -> None:
    questions = Questions()
    found = [questions.after_ms(10**9) for _ in range(1_000)]
    assert 15_000 - 20 <= found[-1] <= 20_000


def test_a_task_is_paused_by_its_name_or_by_its_queue() -> None:
    known = {"task:remind": 7, "queue:mails": 5}
    asked = [("remind", "other"), ("other", "mails"), ("remind", "mails"), ("mails", "remind")]
    assert [paused_since(known, *each) for each in asked] == [7, 5, 5, 0]


@pytest.mark.parametrize(
    ("task", "queue"), [(None, None), ("remind", "mails"), ("", None), (None, ""), (7, None)]
)
def test_one_name_is_taken(task: Any, queue: Any) -> None:
    with pytest.raises(TypeError, match="takes the name of a task or of a queue"):
        _one(task, queue)


class Answers:
    """Stands for Redis; what it says next, and how often it was asked."""

    def __init__(self, says: Any) -> None:
        self.says = says
        self.asked = 0

    def evaluate(self, calls: list[ScriptCall]) -> list[Any]:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return [json.loads(json.dumps(self.says))]


@pytest.fixture
def redis() -> Answers:
    return Answers(["task:remind", "7"])


@pytest.fixture
def paused(redis: Answers, monkeypatch: pytest.MonkeyPatch) -> Pauses:
    store = Store(lambda: None, "redis", (OSError,))
    monkeypatch.setattr(store, "call_each", redis.evaluate)
    return Pauses(store, Names("rabbitdelay"))


def test_redis_is_asked_once_a_second_and_what_it_said_last_counts_while_it_is_away(
    paused: Pauses, redis: Answers, clock: Clock
) -> None:
    redis.says, answer = RegistryUnavailable("away"), redis.says
    with pytest.raises(RegistryUnavailable):
        paused.known()
    redis.says = answer
    for _ in range(100):
        assert paused.known() == {"task:remind": 7}
    assert redis.asked == 2
    redis.says = RegistryUnavailable("away")
    clock.now += 1
    assert paused.known() == paused.known() == {"task:remind": 7}
    assert redis.asked == 3
    redis.says = {}
    clock.now += 1
    assert paused.known() == {}


def test_what_is_no_instant_is_long_ago(paused: Pauses, redis: Answers) -> None:
    says = {"queue:mails": "yesterday", "task:two": "\u00b2", "task:far": "9" * 15}
    redis.says = [text for each in {**says, "task:remind": "7"}.items() for text in each]
    assert paused.known() == {**dict.fromkeys(says, 1), "task:remind": 7}
    assert paused.oldest_ms() == 1
    queue, *_, task = paused.all()
    assert (queue.queue, queue.task, task.task, task.queue) == ("mails", None, "remind", None)
