"""The state of one task: its record, its stored message, and where it waits."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, Self

from kombu import Queue

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.headers import parse
from celery_rabbitdelay.levels.layout import Layout, Level
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.modules.envelope import DICTIONARY
from celery_rabbitdelay.modules.forwarding import LONGEST_PAUSE
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.publishing.message import Content, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.index import Kind
from celery_rabbitdelay.registry.registry import Registry

#: The options of zlib: a deflate stream without a header (RFC 1951), and a window of 4 KiB.
#: Allocating zlib's default window takes ten times as long as compressing a small message.
RAW: Final = -12
MEMORY: Final = 4


def stored(delayed: Delayed, content: Content | None = None, tolerance_ms: int = 0) -> str:
    """Return the text form of a message and its destination.

    Args:
        delayed: The message and its destination.
        content: The message as bytes, if already encoded.
        tolerance_ms: How many milliseconds late the message may arrive.
    """
    properties, body = content or Content.of(delayed.message.amqp())
    queue = delayed.queue.name if delayed.queue is not None else None
    where = _where(delayed.destination, queue, tolerance_ms)
    encoder = zlib.compressobj(1, zlib.DEFLATED, RAW, MEMORY, zdict=DICTIONARY)
    compressed = encoder.compress(b"%s%d\n%s%s" % (where, len(properties), properties, body))
    return b64encode(compressed + encoder.flush()).decode()


def restored(text: str, task_id: str) -> Delayed:
    """Return the message and its destination from the text form; see :func:`stored`.

    The queue has a name only, because the text does not contain the queue's arguments.

    Args:
        text: The text.
        task_id: The id of the message's task.
    """
    where, size, content = _parts(text)
    destination, queue, _ = json.loads(where)
    message = Content(content[: int(size)], content[int(size) :]).message()
    headers, _ = parse(headers_of(message))
    known = None if queue is None else Queue(queue, no_declare=True)
    return Delayed(WaitingMessage.of(message, headers), destination, task_id, known)


def _parts(text: str) -> list[bytes]:
    decoder = zlib.decompressobj(RAW, zdict=DICTIONARY)
    return (decoder.decompress(b64decode(text)) + decoder.flush()).split(b"\n", 2)


@lru_cache(maxsize=256)
def _where(destination: str, queue: str | None, tolerance_ms: int) -> bytes:
    return json.dumps([destination, queue, tolerance_ms]).encode() + b"\n"


#: The fields of a record, as ``shared.lua`` names them.
_FIELDS: Final = (
    *("cancelled", "ran", "waits", "due", "not_before", "order", "dropped"),
    *("kind", "key", "job", "sent"),
)


class TaskState(Enum):
    """The state of a task in the registry."""

    #: The task waits, or is overdue.
    WAITING = "waiting"

    #: The task has arrived at a worker, and no retry waits.
    ARRIVED = "arrived"

    #: The task was cancelled.
    CANCELLED = "cancelled"

    #: A newer task was sent under the task's key.
    SUPERSEDED = "superseded"

    #: The task arrived, but its job was aborted or had expired.
    EXPIRED = "expired"

    #: The task was postponed, and is otherwise unknown.
    NOTED = "noted"


class Record(NamedTuple):
    """The record of a task.

    Attributes:
        state: The task's state.
        due_ms: The earliest due time of the task's messages, in milliseconds since 1970-01-01 UTC;
            None if unknown.
        postponed_ms: The due time that the task was postponed to; None if it was not postponed.
        name: The task's name, if it is tracked and waits.
        key: The task's key, if it waits or is superseded.
        job: The task's job, if it is tracked and waits, or has expired.
        sent_ms: When the task was sent, if it is tracked and waits.
    """

    state: TaskState
    due_ms: int | None
    postponed_ms: int | None
    name: str | None
    key: str | None
    job: str | None
    sent_ms: int | None

    @property
    def runs_ms(self) -> int:
        """When a waiting task runs at the earliest, in milliseconds since 1970-01-01 UTC."""
        return max(self.due_ms or 0, self.postponed_ms or 0)


def record_of(registry: Registry, task_id: str) -> Record | None:
    """Return the record of a task; None if Redis has no record.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record cannot be read.
    """
    (found,) = registry.index.fields([task_id], *_FIELDS)
    *noted, kind, key, job, sent = found
    if not any(noted):
        return None
    cancelled, ran, waits, due, not_before, order, dropped = noted
    newest = registry.newest_under(key)[0] if key else ""
    try:
        life = waits.partition(".")[0] if waits else ""  # "?..." if its sender could not ask Redis
        latest = max(int(ran or 0), int(life) if life.isdigit() else 0)
        if cancelled and latest <= int(cancelled):
            state = TaskState.CANCELLED
        elif waits and newest and int(order) < int(newest):
            state = TaskState.SUPERSEDED
        elif waits:
            state = TaskState.WAITING
        elif dropped:
            verdict, _, by = dropped.partition(" ")
            state = TaskState(verdict)
            key, job = (by, None) if state is TaskState.SUPERSEDED else (None, by)
        else:
            state = TaskState.ARRIVED if ran else TaskState.NOTED
        due_ms = int(due) if waits else None
        postponed_ms = int(not_before) if not_before else None
        sent_ms = int(sent) if sent else None
    except (TypeError, ValueError) as error:
        reason = f"the record of task {task_id} cannot be read: {error}"
        raise RegistryUnavailable(reason) from error
    name = Kind.of(kind).task if kind else None
    return Record(state, due_ms, postponed_ms, name, key, job, sent_ms)


#: Celery's headers that describe a task for display.
SHOWN: Final = ("shadow", "argsrepr", "kwargsrepr")

#: How long a due task may travel to a worker and still count as on time.
ON_ITS_WAY: Final = timedelta(seconds=5)

#: How long a message may take to reach the broker or the next queue, in milliseconds.
SLACK_MS: Final = 2000


class MessageFacts(NamedTuple):
    """Facts from the stored message of a tracked task; None where unknown.

    Attributes:
        shadow: The name under which Celery shows the task, if it differs from the task's own name.
        args, kwargs, queue, exchange, routing_key, priority: See :class:`.KnownTask`.
        tolerance_ms: How many milliseconds late the task may arrive.
    """

    shadow: str | None = None
    args: str | None = None
    kwargs: str | None = None
    queue: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    priority: int | None = None
    tolerance_ms: int | None = None

    @classmethod
    def of(cls, message: str | None) -> Self:
        """Parse the text form of a message, which is empty or None if unknown."""
        if not message:
            return cls()
        try:
            waiting, tolerance_ms = restored(message, "").message, json.loads(_parts(message)[0])[2]
        except Exception:  # noqa: BLE001 - an unreadable message must not hide the record
            return cls()
        headers, others = waiting.headers, waiting.headers.others
        shadow, args, kwargs = (others.get(name) or None for name in SHOWN)
        where = headers.queue, headers.exchange, headers.routing_key
        priority = headers.priority or waiting.properties.get("priority")
        return cls(shadow, args, kwargs, *where, priority, tolerance_ms)


def possible_queues(
    layout: Layout, record: Record, tolerance_ms: int | None, backlog: Backlog, is_put_back: bool
) -> Iterator[tuple[str, int]]:
    """Yield the queues in which a message may be, and their message counts.

    Args:
        layout: The layout of the levels.
        record: The record of the message's task.
        tolerance_ms: How many milliseconds late the message may arrive; None if unknown.
        backlog: The message counts.
        is_put_back: Whether an overdue message may have been put back: its job is open, or its
            queue did not take it.
    """
    sent_ms, due_ms, now_ms = record.sent_ms, record.due_ms or 0, wall_clock.ms()
    if record.runs_ms > due_ms <= now_ms:
        # At the first due time, the message was put back for the remaining time.
        sent_ms, due_ms, tolerance_ms = due_ms, record.runs_ms, 0
    others = [CHECK_IN, "meditation"]
    digits = may_wait_in(layout, due_ms - now_ms)
    if due_ms + (tolerance_ms or 0) + SLACK_MS < now_ms:
        back = (stop for stop in digits if stop[0].place_ms * stop[1] <= LONGEST_PAUSE * 1000)
        digits = back if is_put_back else iter(())
    if sent_ms is not None and tolerance_ms is not None:
        delay_ms, passed_ms = due_ms - sent_ms, now_ms - sent_ms
        if delay_ms <= layout.capacity_ms:
            others = []
            if passed_ms <= delay_ms + tolerance_ms + SLACK_MS:
                digits = waits_in(layout, delay_ms, passed_ms, tolerance_ms, SLACK_MS)
    if due_ms <= now_ms:
        others += [DISTRIBUTE, "undeliverable", "paused"]
    for name in others:
        if (counts := backlog.others.get(name)) and counts.messages:
            yield name, counts.messages
    for level, digit in digits:
        if messages := backlog.digits.get(level.name, {}).get(digit):
            yield level.queue_name(digit), messages


def may_wait_in(layout: Layout, remaining_ms: int) -> Iterator[tuple[Level, int]]:
    """Yield the digits whose queues may hold a message with this remaining time.

    The original delay is unknown. A message waits in its highest digit first, so a digit is
    possible if its wait, together with all lower digits, is at least the remaining time.
    """
    for level in layout.levels:
        for digit in range(max(remaining_ms // level.place_ms, 1), level.base):
            yield level, digit


def waits_in(
    layout: Layout, delay_ms: int, passed_ms: int, tolerance_ms: int, slack_ms: int
) -> Iterator[tuple[Level, int]]:
    """Yield the digits whose queues may hold a message, some time after it was sent.

    Yields one digit, or two while the message moves to the next queue, and a few more if a
    tolerance allowed a longer delay with fewer stops.

    Args:
        layout: The layout.
        delay_ms: The delay when the message was sent, at most the capacity.
        passed_ms: The time since the message was sent.
        tolerance_ms: The tolerance by which the delay may have been longer.
        slack_ms: The inaccuracy of both times, including the broker's time for moving a message.
    """
    found: dict[tuple[Level, int], None] = {}
    latest_ms = min(delay_ms + slack_ms, layout.capacity_ms)
    for about_ms in {*range(max(delay_ms - slack_ms, 1), latest_ms, layout.tick_ms), latest_ms}:
        multiples = {-(-about_ms // place_ms) * place_ms for place_ms in layout.places_ms}
        longest_ms = min(about_ms + tolerance_ms, layout.capacity_ms)
        for total_ms in {about_ms, *(ms for ms in multiples if ms <= longest_ms)}:
            until_ms = 0
            for level, digit in zip(layout.levels, layout.digits(total_ms), strict=True):
                since_ms, until_ms = until_ms, until_ms + digit * level.place_ms
                if digit and since_ms - slack_ms <= passed_ms <= until_ms + slack_ms:
                    found[level, digit] = None
    yield from sorted(found, key=lambda stop: -stop[0].place_ms * stop[1])
