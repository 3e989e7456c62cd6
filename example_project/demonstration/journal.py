"""What the worker and the Spark job did in a run, as they write it into Redis."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from redis import Redis


class Start(NamedTuple):
    """A worker began to execute a reminder.

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
    """The Spark job has ended.

    Attributes:
        orders: How many orders it read.
        seconds: How long writing their reminders took.
        listed: How many of these the registry listed as waiting then.
        messages: In how many messages they waited, as RabbitMQ counted the delay queues.
    """

    orders: int
    seconds: float
    listed: int
    messages: int


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

    def write_sent(self, due_ms: Mapping[str, int]) -> None:
        """RabbitMQ has confirmed the reminders of some orders.

        Args:
            due_ms: When each of them is due, in milliseconds since 1970-01-01 UTC, by order.
        """
        if due_ms:
            self._redis.hset(self._sent, mapping={order: str(due) for order, due in due_ms.items()})

    def write_start(self, start: Start) -> None:
        """Note that a worker has begun."""
        self._redis.rpush(self._starts, json.dumps(start))

    def write_dispatch(self, dispatch: Dispatch) -> None:
        """Every reminder is sent."""
        self._redis.set(self._dispatch, json.dumps(dispatch))

    def sent_count(self) -> int:
        """How many reminders RabbitMQ has confirmed."""
        return self._redis.hlen(self._sent)

    def sent(self) -> dict[str, int]:
        """Return the orders whose reminders RabbitMQ has confirmed, with their due times."""
        sent = self._redis.hgetall(self._sent)
        return {str(order_id): int(due_ms) for order_id, due_ms in sent.items()}

    def starts(self) -> list[Start]:
        """Every start, in order."""
        return [Start(*json.loads(entry)) for entry in self._redis.lrange(self._starts, 0, -1)]

    def dispatch(self) -> Dispatch | None:
        """Return the end of the Spark job; None until then."""
        entry = self._redis.get(self._dispatch)
        return None if entry is None else Dispatch(*json.loads(entry))
