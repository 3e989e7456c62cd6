"""The rows of ``send_many``, its report, and the grouping of rows into envelopes.

Rows that are due in the same tick travel in one envelope. With a tolerance, a delay is rounded up
within [delay, delay + tolerance] to a multiple of the largest possible place value, so that many
rows share a due time. This due time is fixed, and does not move while rows wait for their group.
This file opens no connection.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

from kombu.utils.json import loads

from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.exceptions import InvalidRow
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Delay, Due, instant_of
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.modules.envelope import blocks_of, length_prefixed


class Row(NamedTuple):
    """One call of the task.

    Attributes:
        args: The task's positional arguments.
        kwargs: The task's keyword arguments.
        delay: Seconds, or a timedelta, until the task may start, counted from the moment when the
            row is read.
        eta: The instant at which the task may start, instead of ``delay``.
        task_id: The task's id; random by default.
        key: The task's key: only the newest task under a key runs; needs the registry.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, object] = {}
    delay: Delay | None = None
    eta: datetime | str | None = None
    task_id: str | None = None
    key: str | None = None


@dataclass
class Report:
    """The progress of a ``send_many``, and its result.

    Attributes:
        sent: The number of rows that were published, with a confirm or without.
        confirmed: The number of these rows that the broker has confirmed.
        resent: How often a message was published again.
        messages: The number of confirmed messages, including envelopes.
        envelopes: The number of confirmed messages that hold several rows.
        seconds: The duration so far, in seconds.
        errors: The number of unconfirmed rows per error name.
    """

    sent: int = 0
    confirmed: int = 0
    resent: int = 0
    messages: int = 0
    envelopes: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Confirmed rows per second."""
        return self.confirmed / self.seconds if self.seconds else 0.0


def row_of(given: Mapping[str, object]) -> Row:
    """Make a row from a mapping of its fields.

    Raises:
        InvalidRow: The row is not a mapping, or has an unknown field.
    """
    if not isinstance(given, Mapping):
        takes = 'a celery_rabbitdelay.Row, or its fields, such as {"args": [7], "delay": 3600}'
        raise InvalidRow(given, f"takes {takes}")
    try:
        return Row(**given)  # type: ignore[arg-type]
    except TypeError as wrong:
        unknown = ", ".join(sorted(map(str, given.keys() - set(Row._fields))))
        takes = ", ".join(Row._fields)
        raise InvalidRow(given, f"does not take {unknown}; takes {takes}") from wrong


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that are due in the same tick, as :meth:`.Template.item` writes them.

    ``send_many`` writes the first row again as a check. If the bytes differ, because the
    application has another serializer for example, ``send_many`` writes all rows again.

    Attributes:
        items: The bytes of all rows.
        count: The number of rows; at least one.
        due_ms: When the rows are due, in milliseconds since 1970-01-01 UTC.
    """

    items: bytes
    count: int
    due_ms: int

    @property
    def due(self) -> Due:
        """When the rows are due."""
        now_ms = wall_clock.ms()
        return Due(self.due_ms * NS_PER_MS, self.due_ms - now_ms, is_instant=True)

    def read(self) -> Iterator[tuple[Call, bytes]]:
        """Yield the call of each row, and the bytes that it was read from."""
        blocks, due = blocks_of(self.items), self.due
        for own in blocks:
            body = next(blocks)
            headers = json.loads(own)["headers"]
            args, kwargs, _ = loads(body)
            if headers.get("argsrepr", "").startswith("("):
                args = tuple(args)  # JSON has lists only
            item = length_prefixed(own) + length_prefixed(body)
            yield Call(headers["id"], args, kwargs, due), item


#: The input of a send: one row, or many rows in their written form.
Given: TypeAlias = "Row | Mapping[str, object] | WrittenRows"


def one_by_one(rows: Iterable[Given]) -> Iterator[Row | Mapping[str, object]]:
    """Yield single rows, unpacking :class:`WrittenRows`."""
    for given in rows:
        if isinstance(given, WrittenRows):
            eta = instant_of(given.due_ms)
            for call, _ in given.read():
                yield Row(call.args, call.kwargs, eta=eta, task_id=call.task_id)
        else:
            yield given


#: Maximum messages in one group. A larger group would save little, and distribution publishes the
#: messages of a group one after the other.
MAX_GROUP_MESSAGES: Final = 1000

#: Maximum bytes in one group.
MAX_GROUP_BYTES: Final = 2**20

#: Maximum bytes in all groups together.
MAX_TOTAL_BYTES: Final = 80 * 2**20

#: The bytes of memory that a grouped message takes in addition to its encoded bytes.
MESSAGE_OVERHEAD: Final = 64

#: A message waits for its group for at most MAX_WAIT_MS, or for its delay divided by WAIT_DIVISOR
#: if that is less.
MAX_WAIT_MS: Final = 10_000
WAIT_DIVISOR: Final = 10


@dataclass(slots=True)
class Group:
    """Messages that are due in the same tick.

    Attributes:
        due: When the messages are due.
        first: The first call.
        items: The bytes of all messages, as items of an envelope.
        rows: The numbers of their rows.
    """

    due: Due
    first: Call
    items: bytearray = field(default_factory=bytearray)
    rows: MutableSequence[int] = field(default_factory=lambda: array("Q"))


class Grouper:
    """Puts messages into groups.

    Args:
        layout: The levels that they wait in.
        write: Returns the message of a call as an item of an envelope.
        max_bytes: The bytes at which a group is complete; at most :data:`MAX_GROUP_BYTES`.
    """

    def __init__(
        self,
        layout: Layout,
        write: Callable[[Call], bytes],
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

    def add(self, row: int, call: Call) -> list[Group]:
        """Put the message of a call into its group; return the groups that are complete.

        Args:
            row: The number of its row.
            call: The call.
        """
        item, due = self._write(call), call.due
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
            # A message of this size gets a separate group, because an envelope may not hold more.
            ready.append(self._take(ticks))
            group = None
        if group is None:
            delay_ms = ticks * self._tick_ms
            at_ns = self._reference_ns + delay_ms * NS_PER_MS
            group = self._groups[ticks] = Group(Due(at_ns, delay_ms, is_instant), call)
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
        """Yield and drop all groups."""
        groups, self._groups, self._total_bytes = self._groups, {}, 0
        while groups:
            yield groups.popitem()[1]
