"""What is known of one task: its record, its stored message, and where it waits."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.headers import parse
from celery_rabbitdelay.levels.layout import Layout, Level
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE
from celery_rabbitdelay.modules.envelope import DICTIONARY
from celery_rabbitdelay.publishing.declaration import Backlog
from celery_rabbitdelay.publishing.message import Content, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.index import Kind
from celery_rabbitdelay.registry.registry import Registry

#: A deflate stream without a header (RFC 1951); the dictionary is that of envelopes. The window is
#: of 4 KiB: allocating zlib's usual one takes ten times as long as compressing a small message.
RAW: Final = -12
MEMORY: Final = 4


def stored(delayed: Delayed, content: Content | None = None, tolerance_ms: int = 0) -> str:
    """Return a message as text.

    Args:
        delayed: The message, and where it goes.
        content: The message as bytes; None for that of ``delayed``.
        tolerance_ms: How many milliseconds later it may arrive.
    """
    properties, body = content or Content.of(delayed.message.amqp())
    queue = delayed.queue.name if delayed.queue is not None else None
    where = _where(delayed.destination, queue, tolerance_ms)
    encoder = zlib.compressobj(1, zlib.DEFLATED, RAW, MEMORY, zdict=DICTIONARY)
    compressed = encoder.compress(b"%s%d\n%s%s" % (where, len(properties), properties, body))
    return b64encode(compressed + encoder.flush()).decode()


def restored(text: str, task_id: str) -> Delayed:
    """Return the message of a text that :func:`stored` has returned.

    Its queue is the name alone: nothing is known about its arguments.

    Args:
        text: The text.
        task_id: The id of its task.
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
_FIELDS = ("cancelled", "ran", "waits", "due", "not_before", "order", "kind", "key", "job", "sent")


class TaskState(Enum):
    """The state of a task in the registry."""

    #: It waits, or should have arrived by now.
    WAITING = "waiting"

    #: It has arrived at a worker; a retry of it would wait.
    ARRIVED = "arrived"

    #: It was cancelled.
    CANCELLED = "cancelled"

    #: A newer task was sent under its key.
    SUPERSEDED = "superseded"

    #: It was postponed before anything else was known of it.
    NOTED = "noted"


class Record(NamedTuple):
    """The record of a task.

    Attributes:
        state: Its state.
        due_ms: When the first of its messages is due, in milliseconds since 1970-01-01 UTC; None if
            that is not known.
        postponed_ms: Until when it was postponed, likewise.
        name: Its name, if it is tracked and waits.
        key: The key that it was sent with, if it waits.
        job: The job that it was sent with, if it is tracked and waits.
        sent_ms: When it was sent, likewise, in milliseconds since 1970-01-01 UTC.
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
        """When it runs at the earliest, if it waits; in milliseconds since 1970-01-01 UTC."""
        return max(self.due_ms or 0, self.postponed_ms or 0)


def record_of(registry: Registry, task_id: str) -> Record | None:
    """Return what is noted about a task; None if that is nothing.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record cannot be read.
    """
    (found,) = registry.index.fields([task_id], *_FIELDS)
    *numbers, kind, key, job, sent = found
    if not any(numbers):
        return None
    cancelled, ran, waits, due, not_before, order = numbers
    newest = registry.newest_under(key)[0] if key else ""
    try:
        life = waits.partition(".")[0] if waits else ""  # "?" and more if its sender could not ask
        latest = max(int(ran or 0), int(life) if life.isdigit() else 0)
        if cancelled and latest <= int(cancelled):
            state = TaskState.CANCELLED
        elif waits and newest and int(order) < int(newest):
            state = TaskState.SUPERSEDED
        elif waits:
            state = TaskState.WAITING
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


#: Celery's headers that say how a task is shown.
SHOWN: Final = ("shadow", "argsrepr", "kwargsrepr")

#: Milliseconds that a message may take to the broker, or from one queue to the next.
SLACK_MS: Final = 2000


class Said(NamedTuple):
    """What the stored message of a tracked task says; None where it does not.

    Attributes:
        shadow: The name under which Celery shows the task, if that is another one than its own.
        args, kwargs, queue, exchange, routing_key, priority: See :class:`KnownTask`.
        tolerance_ms: How many milliseconds later it may arrive.
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
    def by(cls, message: str | None) -> Said:
        """Read a message as the registry has it; empty or None if it is not known."""
        if not message:
            return cls()
        try:
            waiting, tolerance_ms = restored(message, "").message, json.loads(_parts(message)[0])[2]
        except Exception:  # noqa: BLE001 - of a task whose message cannot be read the rest is shown
            return cls()
        headers, others = waiting.headers, waiting.headers.others
        shadow, args, kwargs = (others.get(each) or None for each in SHOWN)
        where = headers.queue, headers.exchange, headers.routing_key
        priority = headers.priority or waiting.properties.get("priority")
        return cls(shadow, args, kwargs, *where, priority, tolerance_ms)


@dataclass(frozen=True)
class KnownTask:
    """A task as the registry and the broker know it now; None where they know nothing.

    Attributes:
        task_id: Its id.
        state: ``waiting``, ``arrived`` (at a worker), ``cancelled``, ``superseded``, or ``noted``
            (it was postponed before anything else was known of it).
        due: When it is due, if it waits.
        postponed: Until when it was postponed.
        sent: When it was sent, if it is tracked and waits.
        key: The key that it was sent with, if it waits.
        job: The job that it was sent with. This, and what follows, is known of tracked tasks that
            wait.
        job_state: ``open``, ``committed`` or ``aborted``; None if there is no such job any more.
        task: Its name.
        args: Its positional arguments as text: Celery's ``argsrepr``.
        kwargs: Its keyword arguments, likewise.
        queue: The queue that gets it when it is due; None if the exchange routes it.
        exchange: The exchange that it would have been published to without a delay.
        routing_key: The routing key that it would have been published with.
        priority: Its priority.
        may_be_in: If it waits, the queues in which its message may be, as ``status`` names them,
            and how many messages each has, without those that are empty. Of a tracked task it is
            one, or two when it goes from one to the next, by when it was sent, its due time and
            the layout; of others, all that last so long. Once it is due, it may have left them.
        missing: If it waits, the queues of the levels and modules that the broker does not have.
    """

    task_id: str
    state: str
    due: datetime | None
    postponed: datetime | None
    sent: datetime | None
    key: str | None
    job: str | None
    job_state: str | None
    task: str | None
    args: str | None
    kwargs: str | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    priority: int | None
    may_be_in: Mapping[str, int]
    missing: tuple[str, ...]


def known_task(
    registry: Registry, task_id: str, layout: Layout, backlog: Callable[[], Backlog]
) -> KnownTask | None:
    """Return what is known of a task; None if that is nothing.

    Args:
        registry: The registry.
        task_id: Its id.
        layout: The levels in which it waits.
        backlog: Asks the broker what waits in them; called if the task waits.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record of the task or of its job cannot be
            read.
    """
    record = record_of(registry, task_id)
    if record is None:
        return None
    said = Said.by(registry.index.messages([task_id])[0])
    job = registry.jobs.state(record.job) if record.job else None
    waits = record.state is TaskState.WAITING
    found = backlog() if waits else None
    return KnownTask(
        task_id,
        record.state.value,
        instant_of(record.runs_ms) if waits else None,
        _instant(record.postponed_ms),
        _instant(record.sent_ms),
        record.key,
        record.job,
        None if job is None else job.value,
        said.shadow or record.name,
        said.args,
        said.kwargs,
        said.queue,
        said.exchange,
        said.routing_key,
        said.priority,
        {} if found is None else dict(_may_be_in(layout, record, said.tolerance_ms, found)),
        () if found is None else found.missing,
    )


def _instant(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else instant_of(at_ms)


def _may_be_in(
    layout: Layout, record: Record, tolerance_ms: int | None, backlog: Backlog
) -> Iterator[tuple[str, int]]:
    """Yield the queues in which a message may be, and their messages; see :class:`KnownTask`."""
    sent_ms, due_ms, now_ms = record.sent_ms, record.due_ms or 0, wall_clock.ms()
    if record.runs_ms > due_ms <= now_ms:
        # Its message was put back for the rest when the first due time came.
        sent_ms, due_ms, tolerance_ms = due_ms, record.runs_ms, 0
    others = [CHECK_IN, "meditation"]
    digits = may_wait_in(layout, due_ms - now_ms)
    if sent_ms is not None and tolerance_ms is not None:
        delay_ms, passed_ms = due_ms - sent_ms, now_ms - sent_ms
        # If it is late, something has put it back.
        if delay_ms <= layout.capacity_ms and passed_ms <= delay_ms + tolerance_ms + SLACK_MS:
            others, digits = [], waits_in(layout, delay_ms, passed_ms, tolerance_ms, SLACK_MS)
    if due_ms <= now_ms:
        others += [DISTRIBUTE, "undeliverable", "paused"]
    for name in others:
        if (counts := backlog.others.get(name)) and counts.messages:
            yield name, counts.messages
    for level, digit in digits:
        if messages := backlog.digits[level.name].get(digit):
            yield level.queue_name(digit), messages


def may_wait_in(layout: Layout, remaining_ms: int) -> Iterator[tuple[Level, int]]:
    """Yield the digits in whose queues a message may be that is due in so many milliseconds.

    It waits the longest digits first. Its delay when it was sent is not known, so these are all
    digits that last so long, together with the lower ones behind them; see :func:`waits_in`.
    """
    for level in layout.levels:
        for digit in range(max(remaining_ms // level.place_ms, 1), level.base):
            yield level, digit


def waits_in(
    layout: Layout, delay_ms: int, passed_ms: int, tolerance_ms: int, slack_ms: int
) -> Iterator[tuple[Level, int]]:
    """Yield the digits in whose queues a message may be, some time after it was sent.

    One, or two around the moment when it goes from one to the next; a few more if its
    tolerance allowed a longer delay with fewer stops.

    Args:
        layout: The layout.
        delay_ms: Its delay when it was sent, at most the capacity.
        passed_ms: How long ago that was.
        tolerance_ms: By how much its delay may have been longer.
        slack_ms: How exact both times are, and how long the broker takes to pass it on.
    """
    found: dict[tuple[Level, int], None] = {}
    latest_ms = min(delay_ms + slack_ms, layout.capacity_ms)
    for about_ms in {*range(max(delay_ms - slack_ms, 1), latest_ms, layout.tick_ms), latest_ms}:
        multiples = {-(-about_ms // place_ms) * place_ms for place_ms in layout.places_ms}
        longest_ms = min(about_ms + tolerance_ms, layout.capacity_ms)
        for each_ms in {about_ms, *(each for each in multiples if each <= longest_ms)}:
            until_ms = 0
            for level, digit in zip(layout.levels, layout.digits(each_ms), strict=True):
                since_ms, until_ms = until_ms, until_ms + digit * level.place_ms
                if digit and since_ms - slack_ms <= passed_ms <= until_ms + slack_ms:
                    found[level, digit] = None
    yield from sorted(found, key=lambda each: -each[0].place_ms * each[1])
