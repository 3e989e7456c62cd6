"""Recorded sends: their fields, and how tests select and print them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Self, TypeAlias

import amqp
import celery
from kombu.transport.pyamqp import Message

from celery_rabbitdelay.app.celery_internals import eta_of
from celery_rabbitdelay.levels import delay, wall_clock
from celery_rabbitdelay.levels.headers import parse
from celery_rabbitdelay.registry.decision import Arrival
from celery_rabbitdelay.worker.restore import restore

#: How far a time may differ from the expected time, unless the delay was given as a number: code
#: takes some time between reading the clock and sending.
SLACK: Final = timedelta(seconds=5)

#: The maximum number of sends that a failed assertion lists, the closest matches first.
MAX_LISTED: Final = 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A recorded send.

    Attributes:
        task: The task's name.
        args: The positional arguments, as the worker receives them: JSON turns tuples into lists.
        kwargs: The keyword arguments, as the worker receives them.
        task_id: The task's id.
        due: When the task may start, an aware datetime.
        delay: The time from the send to ``due``.
        has_eta: Whether the task was sent with an ``eta``, so that ``delay`` was measured.
        tolerance: How much later than ``due`` the task may start.
        exchange: The exchange that the worker sees; empty for the default exchange.
        routing_key: The routing key that the worker sees.
        queue: The name of the queue that the task goes to; None if the exchange decides.
        priority: The priority; 0 if the send had none.
        expires: When the task expires, an aware datetime; None if it never expires.
        headers: The message's headers of Celery and of the user, without this package's.
        key: The key that the task was sent with; None without a key.
        job: The job that the task was sent with; None without a job.
        once: Whether only the first message with the task's id runs.
    """

    task: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    task_id: str
    due: datetime
    delay: timedelta
    has_eta: bool
    tolerance: timedelta
    exchange: str
    routing_key: str
    queue: str | None
    priority: int
    expires: datetime | None
    headers: Mapping[str, Any]
    key: str | None
    job: str | None
    once: bool

    def __str__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{self.task}({', '.join(arguments)}) {_after(self.delay)}"


class Address(NamedTuple):
    """The address of a message without a delay.

    Attributes:
        exchange: The exchange; empty for the default exchange.
        routing_key: The routing key.
        queue: The name of the queue; None if the exchange decides.
    """

    exchange: str = ""
    routing_key: str = ""
    queue: str | None = None


#: Called with a message, its address, and its due time. Messages in the levels have a due time, and
#: their address is in their headers; other messages have the given address, and no due time.
Take: TypeAlias = Callable[[amqp.Message, Address, delay.Due | None], None]


@dataclass(slots=True)
class Recorded:
    """A recorded task.

    Attributes:
        sent: The send, as tests see it.
        arrival: The arrival that the registry decides about.
        message: The task's message, as a worker receives it.
        at_ms: When the task arrives at a worker, in milliseconds since 1970-01-01 UTC.
        has_waited: Whether the task comes from the levels, so that the registry decides about it.
        waits: Whether the task has not arrived yet, or waits again.
        is_held: Whether the task was put back because its job is open or because it is paused.
    """

    sent: Sent
    arrival: Arrival
    message: Message
    at_ms: int
    has_waited: bool
    waits: bool = True
    is_held: bool = False

    @classmethod
    def of(cls, message: amqp.Message, address: Address, due: delay.Due | None) -> Self | None:
        """Return the task of a message; None if the message is not a task.

        Args:
            message: The message.
            address: As for :data:`Take`.
            due: As for :data:`Take`.
        """
        message.delivery_info = {"delivery_tag": 0}
        received = Message(message, accept=[message.properties.get("content_type")])
        parsed, _ = parse(received.headers)
        headers = parsed.others
        if "task" not in headers:
            return None
        if due is not None:
            address = Address(parsed.exchange or "", parsed.routing_key or "", parsed.queue)
        due_ms, delay_ms, has_eta = _times(due, headers.get("eta"))
        exchange, routing_key, queue = address
        received.delivery_info.update(exchange=exchange, routing_key=routing_key)
        restore(received)
        args, kwargs, _ = received.payload
        arrival = Arrival.of(parsed, due_ms, queue or "", redelivered=False)
        return cls(
            sent=Sent(
                task=headers["task"],
                args=args,
                kwargs=kwargs,
                task_id=headers["id"],
                due=delay.instant_of(due_ms),
                delay=timedelta(milliseconds=delay_ms),
                has_eta=has_eta,
                tolerance=timedelta(milliseconds=0 if due is None else due.tolerance_ms),
                exchange=exchange,
                routing_key=routing_key,
                queue=queue,
                priority=parsed.priority or message.properties.get("priority") or 0,
                expires=eta_of(headers.get("expires"), UTC),
                headers=headers,
                key=arrival.key or None,
                job=arrival.job or None,
                once=bool(arrival.once),
            ),
            arrival=arrival,
            message=received,
            at_ms=due_ms,
            has_waited=due is not None,
        )


def _times(due: delay.Due | None, eta: Any) -> tuple[int, int, bool]:
    """Return a task's due time and delay, in milliseconds, and whether it has an eta."""
    now_ms = wall_clock.ms()
    if due is not None:
        delay_ms = max(due.at_ms - now_ms, 0) if due.is_instant else max(due.delay_ms, 0)
        return due.at_ms, delay_ms, due.is_instant
    # A worker would keep the task until its eta.
    instant = eta_of(eta, UTC)
    due_ms = now_ms if instant is None else max(delay.milliseconds_of(instant), now_ms)
    return due_ms, due_ms - now_ms, instant is not None


class Wanted:
    """The fields that a test expects.

    Args:
        task: The task, or its name; None for any.
        given: Fields of :class:`Sent`, with their expected values.

    Raises:
        TypeError: A field does not exist.
        InvalidDelay: A length of time is invalid.
    """

    def __init__(self, task: celery.Task[Any, Any] | str | None, given: Mapping[str, Any]) -> None:
        known = [each.name for each in fields(Sent)]
        for name in given:
            if name not in known:
                raise TypeError(f"a send has no field {name}; it has {', '.join(known)}")
        self._fields = dict(given)
        if task is not None:
            self._fields = {"task": task if isinstance(task, str) else str(task.name), **given}
        for name, value in given.items():
            if name in ("delay", "tolerance"):
                self._fields[name] = timedelta(milliseconds=delay.milliseconds(value))
            elif name in ("due", "expires"):
                self._fields[name] = delay.plain(value, name)

    def __str__(self) -> str:
        others = dict(self._fields)
        what = others.pop("task", "any task")
        words = [f"{name} = {_value(value)}" for name, value in others.items()]
        return f"{what} with {' and '.join(words)}" if words else str(what)

    def differing(self, sent: Sent) -> list[str]:
        """Return the names of the fields in which a send differs; empty if it matches."""
        return [name for name, value in self._fields.items() if not _is_equal(sent, name, value)]

    def listed(self, sends: Sequence[Sent]) -> str:
        """Return sends as lines of text, the closest match first, with the differences below."""
        if not sends:
            return "Nothing was sent."
        ranked = sorted(sends, key=lambda sent: len(self.differing(sent)))
        lines = [f"{len(sends)} sent, the closest match first:" if len(sends) > 1 else "Sent:"]
        for sent in ranked[:MAX_LISTED]:
            lines.append(f"  {sent}")
            for name in self.differing(sent):
                actual, wanted = getattr(sent, name), self._fields[name]
                if name == "headers":
                    actual = {each: actual[each] for each in wanted if each in actual}
                lines.append(f"    ! {name} is {_value(actual)}, not {_value(wanted)}")
        if len(ranked) > MAX_LISTED:
            lines.append(f"  and {len(ranked) - MAX_LISTED} more")
        return "\n".join(lines)


def _is_equal(sent: Sent, name: str, wanted: Any) -> bool:
    actual = getattr(sent, name)
    if name == "delay":
        # The delay is shorter than computed: time passes between computing and sending.
        return bool(actual == wanted or (sent.has_eta and actual <= wanted <= actual + SLACK))
    if name == "expires" and isinstance(wanted, timedelta | int | float) and actual is not None:
        wanted = sent.due - sent.delay + timedelta(milliseconds=delay.milliseconds(wanted))
    if isinstance(actual, datetime) and isinstance(wanted, datetime):
        return abs(actual - wanted) <= SLACK
    if name == "headers":
        return all(each in actual and actual[each] == wanted[each] for each in wanted)
    return bool(_with_lists(actual) == _with_lists(wanted))


def _with_lists(value: Any) -> Any:
    """Return a value with lists instead of tuples, as JSON returns them."""
    if isinstance(value, list | tuple):
        return [_with_lists(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _with_lists(each) for key, each in value.items()}
    return value


def _value(value: Any) -> str:
    if isinstance(value, timedelta):
        return delay.duration_text(delay.milliseconds(value))
    return value.isoformat(" ") if isinstance(value, datetime) else repr(value)


def _after(length: timedelta) -> str:
    return f"after {_value(length)}" if length else "without a delay"
