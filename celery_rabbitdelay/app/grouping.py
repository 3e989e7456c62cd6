"""Sorting messages into bags: those that are due in the same tick can travel in one envelope. Pure.

With a tolerance, that is the tick within it that is written with the fewest digits, which others
choose as well. It is an instant: while messages wait for others, it comes no later.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.layout import Layout

__all__ = ["Bag", "Sorter"]

#: The most messages in one bag: more would save little, and each waits for those before it.
MAX_MESSAGES: Final = 1000

#: The most bytes in one bag.
MAX_BYTES: Final = 2**20

#: The most bytes in all bags together.
MAX_HELD: Final = 80 * 2**20

#: What a message in a bag takes besides its own bytes.
OVERHEAD: Final = 64

#: The most milliseconds that a message waits for others, and which part of its delay at the most.
MAX_WAIT: Final = 10_000
PART: Final = 10

_NS_PER_MS: Final = 1_000_000


class Bag:
    """Messages that are due in the same tick.

    Attributes:
        due: When all of them are due.
        first: The first of them, as it was added.
        items: All of them, written.
        rows: Their numbers.
    """

    __slots__ = ("due", "first", "items", "rows")

    def __init__(self, due: Due, first: Any) -> None:
        self.first = first
        self.items = bytearray()
        self.rows = array("Q")
        self.due = due


class Sorter:
    """Sorts messages into bags.

    Args:
        layout: The levels that they wait in.
        write: Returns a message as it stands in an envelope.
        now_ns: The time, in nanoseconds since 1970.
    """

    def __init__(
        self,
        layout: Layout,
        write: Callable[[Any], bytes],
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._layout = layout
        self._tick_ms = layout.tick_ms
        self._write = write
        self._now_ns = now_ns
        self._bags: dict[int, Bag] = {}
        self._held = 0
        self._reference_ns = 0
        self._until_ns = 0

    def add(self, row: int, message: Any, due: Due) -> list[Bag]:
        """Put a message into its bag; return the bags that wait no longer.

        Args:
            row: Its number.
            message: The message, as ``write`` takes it.
            due: When it is due.
        """
        item = self._write(message)
        waited_enough: list[Bag] = []
        now_ns = self._now_ns()
        if now_ns >= self._until_ns or self._held >= MAX_HELD:
            waited_enough = list(self.flush())
        if not self._bags:
            self._reference_ns, self._until_ns = now_ns, now_ns + 2**63
        tick_ms = wait_ms = self._tick_ms
        # A length of time may keep its digits where little of it is lost while it waits. But where
        # there is a tolerance, the choice of the tick has used that.
        is_instant = due.is_instant or due.tolerance_ms > 0
        if is_instant:
            wait_ms = max(wait_ms, min(due.delay_ms // PART, MAX_WAIT))
        self._until_ns = min(self._until_ns, now_ns + wait_ms * _NS_PER_MS)
        ahead_ms = max(-((self._reference_ns - due.at_ns) // _NS_PER_MS), 0)
        shared_ms = self._layout.with_fewest_stops(ahead_ms, due.tolerance_ms, coarsest=True)
        ticks = -(-shared_ms // tick_ms)
        if len(item) >= MAX_BYTES and ticks in self._bags:
            # What fills a bag by itself shares none: it may be more than an envelope may hold.
            waited_enough.append(self._bags.pop(ticks))
        bag = self._bags.get(ticks)
        if bag is None:
            delay_ms = ticks * tick_ms
            at_ns = self._reference_ns + delay_ms * _NS_PER_MS
            bag = self._bags[ticks] = Bag(Due(at_ns, delay_ms, is_instant), message)
        elif is_instant and not bag.due.is_instant:
            bag.due = bag.due._replace(is_instant=True)
        bag.rows.append(row)
        bag.items += item
        self._held += len(item) + OVERHEAD
        if len(bag.rows) >= MAX_MESSAGES or len(bag.items) >= MAX_BYTES:
            waited_enough.append(self._bags.pop(ticks))
        return waited_enough

    def flush(self) -> Iterator[Bag]:
        """Return all bags, and begin anew."""
        bags, self._bags, self._held = self._bags, {}, 0
        while bags:
            yield bags.popitem()[1]
