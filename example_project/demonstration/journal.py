"""The journal of a run, which the worker and the Spark job write into Redis."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from redis import Redis


class Start(NamedTuple):
    """The start of a reminder in a worker.

    Attributes:
        order_id: The order.
        attempt: 0 for the first, 1 for the first retry.
        is_delayed: Whether the message was sent with a delay.
        started_ms: When it started, in milliseconds since 1970-01-01 UTC.
        redelivered: Whether the broker had delivered the message to a worker before.
    """

    order_id: str
    attempt: int
    is_delayed: bool
    started_ms: int
    redelivered: bool


class Dispatch(NamedTuple):
    """The report of the Spark job at its end.

    Attributes:
        orders: The number of orders that it read.
        seconds: The seconds that it took to write their reminders.
        listed: The number of reminders that the registry then listed as waiting.
        messages: The number of messages in the delay queues then.
    """

    orders: int
    seconds: float
    listed: int
    messages: int


class Journal:
    """The journal of one run.

    Args:
        redis: A client that returns text.
        prefix: The beginning of its keys.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._sent = f"{prefix}:journal:sent"
        self._starts = f"{prefix}:journal:starts"
        self._dispatch = f"{prefix}:journal:dispatch"

    def write_sent(self, due_ms: Mapping[str, int]) -> None:
        """Record that RabbitMQ has confirmed the reminders of some orders.

        Args:
            due_ms: When each of them is due, in milliseconds since 1970-01-01 UTC, by order.
        """
        if due_ms:
            self._redis.hset(self._sent, mapping={order: str(due) for order, due in due_ms.items()})

    def write_start(self, start: Start) -> None:
        """Record the start of a reminder."""
        self._redis.rpush(self._starts, json.dumps(start))

    def write_dispatch(self, dispatch: Dispatch) -> None:
        """Record the end of the Spark job."""
        self._redis.set(self._dispatch, json.dumps(dispatch))

    def sent_count(self) -> int:
        """Return the number of reminders that RabbitMQ has confirmed."""
        return self._redis.hlen(self._sent)

    def sent(self) -> dict[str, int]:
        """Return the orders whose reminders RabbitMQ has confirmed, with their due times."""
        sent = self._redis.hgetall(self._sent)
        return {str(order_id): int(due_ms) for order_id, due_ms in sent.items()}

    def starts(self) -> list[Start]:
        """Return all starts, in order."""
        return [Start(*json.loads(entry)) for entry in self._redis.lrange(self._starts, 0, -1)]

    def dispatch(self) -> Dispatch | None:
        """Return the report of the Spark job; None until it has ended."""
        entry = self._redis.get(self._dispatch)
        return None if entry is None else Dispatch(*json.loads(entry))
