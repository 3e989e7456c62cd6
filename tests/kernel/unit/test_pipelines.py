"""Pipelines, without a broker: the chains of causes of their errors."""

from celery_rabbitdelay.app.pipelines import _chain, _with_last_cause
from celery_rabbitdelay.exceptions import ConnectionLost, TasksNotConfirmed


def test_a_cause_stands_at_the_end_and_never_makes_a_circle() -> None:
    shared = OSError("reset")
    first, second = (ConnectionLost("", "queue", "no connection") for _ in range(2))
    first.__cause__ = second.__cause__ = shared
    end = TasksNotConfirmed({"task": second})
    assert _with_last_cause(second, end) is second
    assert _chain(second) == [second, shared, end]
    # The next send fails with the same error of the socket.
    _with_last_cause(first, second)
    assert _chain(first) == [first, shared, end]
    _with_last_cause(end, end)
    assert _chain(first) == [first, shared, end]
    alone = ValueError("order")
    _with_last_cause(alone, first)
    assert _chain(alone) == [alone, first, shared, end]
    # A circle that somebody else has made is walked once.
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert _chain(one) == [one, other]
