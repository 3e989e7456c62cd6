"""What one message may cost: bytes, nesting, delay. Pure.

Anybody who may publish to check-in writes what a worker reads, in the main process of Celery. A
message beyond a bound is refused at once, with a reason, and lies in ``undeliverable``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import shortened

#: Bytes of received messages that a module holds, and bytes that it has in flight, unless a single
#: message has more.
MAX_HELD_BYTES: Final = 64 * 2**20

#: Tables and arrays within each other in the headers of a message. py-amqp reads and writes them by
#: recursion: some 300 raise a RecursionError in a worker.
MAX_DEPTH: Final = 32

#: How many times their bytes the headers of a message take at most, once Python has read them
#: (measured with tracemalloc: a table of names of two characters, without values, takes 22 times).
HEADER_EXPANSION: Final = 25

#: Messages over which the largest one is remembered.
REMEMBERED: Final = 100

_MS_PER_S: Final = 1000

#: What AMQP's tables and arrays are in Python.
_CONTAINERS: Final = (dict, list, tuple)


def check_delay(what: str, value: object, delay_ms: int) -> None:
    """Refuse a delay that is too long.

    Args:
        what: Where the delay comes from, such as the name of a header.
        value: Its value, which the error shows.
        delay_ms: The delay, in milliseconds.

    Raises:
        UnprocessableMessage: It is longer than :data:`.MAX_DELAY`.
    """
    if delay_ms > MAX_DELAY * _MS_PER_S:
        raise UnprocessableMessage(
            f"{what} is {shortened(value)}, which is more than the longest delay ahead, "
            f"{MAX_DELAY:,.0f} s"
        )


def check_depth(headers: Mapping[str, Any]) -> None:
    """Refuse headers that are nested too deep.

    Raises:
        UnprocessableMessage: More than :data:`MAX_DEPTH` tables or arrays are within each other.
    """
    layer: list[Any] = [headers]
    for _ in range(MAX_DEPTH + 1):
        layer = [
            inner
            for each in layer
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, _CONTAINERS)
        ]
        if not layer:
            return
    raise UnprocessableMessage(
        f"its headers have more than {MAX_DEPTH} tables and arrays within each other"
    )


class HeldBytes:
    """The bytes of the messages that a consumer has taken and not finished.

    RabbitMQ has no prefetch in bytes (https://www.rabbitmq.com/docs/specification). So a prefetch
    count is derived from the largest of the latest messages.

    Args:
        budget: The bytes that may be held.

    Attributes:
        held: The bytes that are held.
    """

    def __init__(self, budget: int = MAX_HELD_BYTES) -> None:
        self.held = 0
        self._budget = budget
        self._seen = 0
        self._largest = self._largest_before = 0

    def take(self, cost: int) -> bool:
        """Return whether a message that has arrived is held; a single one always is."""
        self._largest = max(self._largest, cost)
        self._seen += 1
        if self._seen == REMEMBERED:
            self._largest_before, self._largest, self._seen = self._largest, 0, 0
        has_room = not self.held or self.held + cost <= self._budget
        if has_room:
            self.held += cost
        return has_room

    @property
    def may_go_on(self) -> bool:
        """Whether half of the budget is free again."""
        return self.held * 2 <= self._budget

    @property
    def fitting(self) -> int:
        """How many messages of the largest size lately seen fit into half of the budget."""
        largest = max(self._largest, self._largest_before, 1)
        return max(self._budget // 2 // largest, 1)
