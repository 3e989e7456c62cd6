"""Questions of the event loop about tasks without an option; loop, timer and Redis are fakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from celery_rabbitdelay.registry import plain_arrivals
from celery_rabbitdelay.registry.plain_arrivals import PlainArrivals

TIMEOUT = 5.0


class Asked:
    """What is asked about, and what becomes of it: a worker's loop and a connection to Redis."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.loop, self.asker = mock.Mock(), mock.Mock(file_descriptor=7)
        self.loop.hub.add_reader = self.readers.__setitem__
        self.loop.hub.remove_reader = self.readers.__delitem__
        self.asker.answer.return_value = False
        self.ran: list[str] = []
        self.decided: list[str] = []
        self.plain: PlainArrivals[str] = PlainArrivals(
            self.loop,
            str.upper,
            "what is paused",
            self.ran.append,
            self.decided.append,
            lambda first: 0.0,
            TIMEOUT,
        )
        self.plain.open(self.asker)

    @property
    def asked(self) -> list[Any]:
        return [call.args[0] for call in self.asker.ask.call_args_list]


def test_what_arrives_while_a_question_is_asked_is_the_next_question_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_arrivals, "MAX_ASKED", 2)
    asked = Asked()
    for task in "abcd":
        asked.plain.give(task)
    assert (len(asked.asked), asked.ran) == (1, [])
    for _ in range(3):
        asked.readers[7]()
    paused = "what is paused"
    assert [[*each] for each in asked.asked] == [[paused, "A"], [paused, "B", "C"], [paused, "D"]]
    # If something is noted or paused, the thread decides.
    asked.plain.give("e")
    asked.asker.answer.return_value = True
    asked.readers[7]()
    assert (asked.ran, asked.decided) == (["a", "b", "c", "d"], ["e"])
    assert asked.plain.is_open


@pytest.mark.parametrize("trouble", ["no answer", "an error", "a refusal", "the end"])
def test_in_trouble_the_thread_decides_about_each_task_once(trouble: str) -> None:
    asked = Asked()
    if trouble == "a refusal":
        asked.asker.ask.side_effect = ConnectionError
    asked.plain.give("a")
    if trouble != "a refusal":
        asked.plain.give("b")
    if trouble == "no answer":
        asked.plain._asked_at -= TIMEOUT
        (((seconds, look), _),) = asked.loop.timer.call_after.call_args_list
        assert seconds == TIMEOUT
        look()
    elif trouble == "an error":
        asked.asker.answer.side_effect = ConnectionError
        asked.readers[7]()
    elif trouble == "the end":
        asked.plain.close()
    assert (asked.ran, asked.decided) == ([], ["a"] if trouble == "a refusal" else ["a", "b"])
    asked.asker.close.assert_called_once_with()
    assert (asked.plain.is_open, asked.readers) == (False, {})
    # Another connection takes its place.
    another: Any = mock.Mock(file_descriptor=8)
    another.answer.return_value = False
    asked.plain.open(another)
    asked.plain.give("c")
    asked.readers[8]()
    assert asked.ran == ["c"]
