"""What happened in a run, written down in Redis by whoever did it."""

from __future__ import annotations

import json
from typing import NamedTuple

from redis import Redis

__all__ = ["Dispatch", "Journal", "Start"]


class Start(NamedTuple):
    """A worker began to execute a reminder.

    Attributes:
        order_id: The order.
        attempt: 0 for the first, 1 for the first retry.
        due_ms: When it was due, in milliseconds since 1970-01-01 UTC; None without a delay.
        started_ms: When it started.
        redelivered: Whether the broker had handed the message to a worker before.
    """

    order_id: str
    attempt: int
    due_ms: int | None
    started_ms: int
    redelivered: bool


class Dispatch(NamedTuple):
    """The Spark job has ended.

    Attributes:
        orders: How many orders it read.
        seconds: How long sending their reminders took.
    """

    orders: int
    seconds: float


class Journal:
    """The journal of one run.

    Args:
        redis: Where; a client that answers in text.
        prefix: The beginning of its keys.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._sent = f"{prefix}:journal:sent"
        self._starts = f"{prefix}:journal:starts"
        self._dispatch = f"{prefix}:journal:dispatch"

    def write_sent(self, order_id: str) -> None:
        """The broker has confirmed the reminder of this order."""
        self._redis.sadd(self._sent, order_id)

    def write_start(self, start: Start) -> None:
        """A worker has begun."""
        self._redis.rpush(self._starts, json.dumps(start))

    def write_dispatch(self, dispatch: Dispatch) -> None:
        """Every reminder is sent."""
        self._redis.set(self._dispatch, json.dumps(dispatch))

    def sent_count(self) -> int:
        """How many reminders the broker has confirmed."""
        return self._redis.scard(self._sent)

    def sent(self) -> set[str]:
        """The orders whose reminders the broker has confirmed."""
        return {str(order_id) for order_id in self._redis.smembers(self._sent)}

    def starts(self) -> list[Start]:
        """Every start, in order."""
        return [Start(*json.loads(entry)) for entry in self._redis.lrange(self._starts, 0, -1)]

    def dispatch(self) -> Dispatch | None:
        """The end of the Spark job; None until then."""
        entry = self._redis.get(self._dispatch)
        return None if entry is None else Dispatch(*json.loads(entry))
