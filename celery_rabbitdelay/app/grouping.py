"""Grouping messages that are due in the same tick, so that they travel in one envelope.

With a tolerance, the delay is rounded up to a multiple of the largest place value that has one in
[delay, delay + tolerance], so that many messages share it. The due time is then an instant, which
does not move while messages wait for others.
Opens no connection.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, Final

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.layout import Layout

#: Maximum messages in one group: more would save little, and each waits for those before it.
MAX_GROUP_MESSAGES: Final = 1000

#: Maximum bytes in one group.
MAX_GROUP_BYTES: Final = 2**20

#: Maximum bytes in all groups together.
MAX_TOTAL_BYTES: Final = 80 * 2**20

#: The bytes that a message in a group takes in addition to its own.
MESSAGE_OVERHEAD: Final = 64

#: A message waits for others for at most this many milliseconds, and at most its delay divided by
#: this number.
MAX_WAIT_MS: Final = 10_000
WAIT_DIVISOR: Final = 10


@dataclass(slots=True)
class Group:
    """Messages that are due in the same tick.

    Attributes:
        due: When all of them are due.
        first: The first message, as it was added.
        items: The bytes of all messages, as they stand in an envelope.
        rows: The numbers of their rows.
    """

    due: Due
    first: Any
    items: bytearray = field(default_factory=bytearray)
    rows: MutableSequence[int] = field(default_factory=lambda: array("Q"))


class Grouper:
    """Puts messages into groups.

    Args:
        layout: The levels that they wait in.
        write: Returns the bytes of a message as they stand in an envelope.
        max_bytes: Bytes of messages that complete a group; :data:`MAX_GROUP_BYTES` do in any case.
    """

    def __init__(
        self,
        layout: Layout,
        write: Callable[[Any], bytes],
        max_bytes: int = MAX_GROUP_BYTES,
    ) -> None:
        self._max_bytes = min(max_bytes, MAX_GROUP_BYTES)
        self._layout = layout
        self._tick_ms = layout.tick_ms
        self._write = write
        self._groups: dict[int, Group] = {}
        self._total_bytes = 0
        self._reference_ns = 0
        self._until_ns = 0

    def add(self, row: int, message: Any, due: Due) -> list[Group]:
        """Put a message into its group; return the groups that wait no longer.

        Args:
            row: The number of its row.
            message: The message, as ``write`` takes it.
            due: When it is due.
        """
        item = self._write(message)
        ready: list[Group] = []
        now_ns = wall_clock.ns()
        if now_ns >= self._until_ns or self._total_bytes >= MAX_TOTAL_BYTES:
            ready = list(self.flush())
        if not self._groups:
            self._reference_ns, self._until_ns = now_ns, now_ns + 2**63
        # Due.remaining_ms leaves a relative delay as it is while little of it has passed. A rounded
        # due time must be exact, so it is an instant.
        is_instant = due.is_instant or due.tolerance_ms > 0
        wait_ms = min(due.delay_ms // WAIT_DIVISOR, MAX_WAIT_MS) if is_instant else 0
        self._until_ns = min(self._until_ns, now_ns + max(wait_ms, self._tick_ms) * NS_PER_MS)
        # The group's delay, in ticks from the reference time.
        ahead_ms = max(-((self._reference_ns - due.at_ns) // NS_PER_MS), 0)
        shared_ms = self._layout.round_to_fewest_stops(ahead_ms, due.tolerance_ms, coarsest=True)
        ticks = -(-shared_ms // self._tick_ms)
        group = self._groups.get(ticks)
        if group is not None and len(item) >= self._max_bytes:
            # A message of this size has a group of its own: an envelope may not hold more.
            ready.append(self._take(ticks))
            group = None
        if group is None:
            delay_ms = ticks * self._tick_ms
            at_ns = self._reference_ns + delay_ms * NS_PER_MS
            group = self._groups[ticks] = Group(Due(at_ns, delay_ms, is_instant), message)
        elif is_instant and not group.due.is_instant:
            group.due = group.due._replace(is_instant=True)
        group.rows.append(row)
        group.items += item
        self._total_bytes += len(item) + MESSAGE_OVERHEAD
        if len(group.rows) >= MAX_GROUP_MESSAGES or len(group.items) >= self._max_bytes:
            ready.append(self._take(ticks))
        return ready

    def _take(self, ticks: int) -> Group:
        group = self._groups.pop(ticks)
        self._total_bytes -= len(group.items) + MESSAGE_OVERHEAD * len(group.rows)
        return group

    def flush(self) -> Iterator[Group]:
        """Yield all groups, and start with none."""
        groups, self._groups, self._total_bytes = self._groups, {}, 0
        while groups:
            yield groups.popitem()[1]
