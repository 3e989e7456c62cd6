"""The thread beside the worker's event loop works on batches."""

import math
import time
from collections.abc import Iterator
from queue import Queue
from threading import Event

import pytest

from celery_rabbitdelay.worker import batch_thread
from celery_rabbitdelay.worker.batch_thread import MAX_BATCH, BatchThread
from tests.kernel.unit.clock import Clock


class FakeConsumer:
    """A fake: a worker's consumer without an event loop."""

    hub = None


class Recorded(BatchThread[int]):
    """Records each batch, and works on it until it is let go."""

    name = "recorded"

    def __init__(self) -> None:
        super().__init__(FakeConsumer())
        self.batches: Queue[list[int]] = Queue()
        self.go_on = Event()
        self.own_work = math.inf

    def own_work_in(self) -> float:
        return self.own_work

    def work(self, batch: list[int]) -> None:
        self.own_work = math.inf
        self.batches.put(batch)
        self.go_on.wait(30)


@pytest.fixture
def thread() -> Iterator[Recorded]:
    thread = Recorded()
    yield thread
    thread.go_on.set()
    thread.stop()


def next_batch(thread: Recorded) -> list[int]:
    return thread.batches.get(timeout=30)


def test_what_is_given_while_a_batch_is_worked_on_makes_up_the_next_one(thread: Recorded) -> None:
    thread.start()
    thread.give(1)
    assert next_batch(thread) == [1]
    for number in range(MAX_BATCH + 1):
        thread.give(number)
    thread.go_on.set()
    assert (next_batch(thread), next_batch(thread)) == ([*range(MAX_BATCH)], [MAX_BATCH])


def test_work_of_its_own_is_done_when_it_is_due(thread: Recorded) -> None:
    thread.give(1, 3600)
    due = time.monotonic() + 0.05
    monotonic = time.monotonic
    thread.own_work_in = lambda: due - monotonic()  # type: ignore[method-assign]
    thread.start()
    assert next_batch(thread) == []


def test_what_is_given_for_later_lets_others_pass(
    thread: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1000)
    monkeypatch.setattr(batch_thread, "time", clock)
    thread.go_on.set()
    thread.give(1, 60)
    thread.give(2)
    thread.start()
    assert next_batch(thread) == [2]
    clock.now += 59
    thread.give(3)
    assert next_batch(thread) == [3]
    clock.now += 1
    thread.give(4)
    assert next_batch(thread) == [1, 4]
