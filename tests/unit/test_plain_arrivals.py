"""Questions of the event loop about tasks without an option; loop, timer and Redis are fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from celery_rabbitdelay.worker import plain_arrivals
from celery_rabbitdelay.worker.plain_arrivals import PlainArrivals

TIMEOUT = 5.0

PAUSED = "what is paused"


class Loop:
    """Stands for a worker's consumer, with its event loop and its timer."""

    def __init__(self) -> None:
        self.hub = self.timer = self
        self.readers: dict[int, Callable[[], None]] = {}
        self.calls: list[tuple[float, Callable[[], None]]] = []

    def add_reader(self, file_descriptor: int, callback: Callable[[], None]) -> None:
        self.readers[file_descriptor] = callback

    def remove_reader(self, file_descriptor: int) -> None:
        del self.readers[file_descriptor]

    def call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.calls.append((seconds, callback))


class Asker:
    """Stands for a connection to Redis."""

    def __init__(self, file_descriptor: int = 7, refuses: bool = False) -> None:
        self.file_descriptor = file_descriptor
        self.asked: list[list[str]] = []
        self.says: bool | Exception = False
        self.is_closed = False
        self._refuses = refuses

    def ask(self, keys: Sequence[str]) -> None:
        if self._refuses:
            raise ConnectionError
        assert keys[0] == PAUSED
        self.asked.append(list(keys[1:]))

    def answer(self) -> bool:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def close(self) -> None:
        self.is_closed = True


class Asked:
    """What is asked about, and what becomes of it."""

    def __init__(self, asker: Asker | None = None, gathers: float = 0.0) -> None:
        self.loop, self.asker = Loop(), asker or Asker()
        self.ran: list[str] = []
        self.decided: list[str] = []
        self.plain: PlainArrivals[str] = PlainArrivals(
            self.loop,
            "key of {}".format,
            PAUSED,
            self.ran.append,
            self.decided.append,
            lambda first: gathers,
            TIMEOUT,
        )
        self.open(self.asker)

    def open(self, asker: Any) -> None:
        self.plain.open(asker)

    def answers(self) -> None:
        self.loop.readers[self.asker.file_descriptor]()


def test_what_arrives_while_a_question_is_asked_is_the_next_question_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_arrivals, "MAX_ASKED", 2)
    asked = Asked()
    for task in "abcd":
        asked.plain.give(task)
    assert (asked.asker.asked, asked.ran) == ([["key of a"]], [])
    for _ in range(3):
        asked.answers()
    assert asked.asker.asked == [["key of a"], ["key of b", "key of c"], ["key of d"]]
    assert (asked.ran, asked.decided) == (["a", "b", "c", "d"], [])
    # If something is noted or paused, the thread decides.
    asked.plain.give("e")
    asked.asker.says = True
    asked.answers()
    assert (asked.ran, asked.decided) == (["a", "b", "c", "d"], ["e"])
    assert asked.plain.is_open


@pytest.mark.parametrize("trouble", ["no answer", "an error", "a refusal", "the end"])
def test_in_trouble_the_thread_decides_about_each_task_once(trouble: str) -> None:
    asked = Asked(Asker(refuses=trouble == "a refusal"))
    asked.plain.give("a")
    if trouble == "no answer":
        asked.plain.give("b")
        asked.plain._asked_at -= TIMEOUT
        [(seconds, look)] = asked.loop.calls
        assert seconds == TIMEOUT
        look()
    elif trouble == "an error":
        asked.asker.says = ConnectionError()
        asked.plain.give("b")
        asked.answers()
    elif trouble == "the end":
        asked.plain.give("b")
        asked.plain.close()
    expected = ["a"] if trouble == "a refusal" else ["a", "b"]
    assert (asked.ran, asked.decided) == ([], expected)
    assert asked.asker.is_closed
    assert not asked.plain.is_open
    assert asked.loop.readers == {}


def test_after_trouble_another_connection_is_used() -> None:
    asked, second = Asked(), Asker(8)
    asked.plain.close()
    asked.asker = second
    asked.open(second)
    asked.plain.give("a")
    asked.answers()
    assert asked.ran == ["a"]
