"""The message that a schedule sends, and the schedule's record in Redis.

Celery makes the message once, when the schedule is created or edited; every occurrence sends a copy
with its own id and due time.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import celery
from kombu import Message, serialization
from kombu.exceptions import EncodeError

from celery_rabbitdelay.app.copies import capture
from celery_rabbitdelay.app.delays import DelayingCelery, Delays
from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.exceptions import InvalidSchedule, RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due, instant_of
from celery_rabbitdelay.levels.headers import COPY, ONCE, SCHEDULE, TRACKED
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import RESENDS
from celery_rabbitdelay.publishing.signature import signed
from celery_rabbitdelay.registry.application import is_tracked as is_tracked_by_default
from celery_rabbitdelay.registry.application import register_sent, registry_of
from celery_rabbitdelay.registry.decision import Arrival, Registration, new_copy
from celery_rabbitdelay.registry.record import restored, stored
from celery_rabbitdelay.registry.registry import NOTE_MS, Registry
from celery_rabbitdelay.registry.store import ScriptCall, readable
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.worker.early_tasks import ToPublish, publish_each

logger = logging.getLogger(__name__)

#: How long the lease of the worker that repairs the schedules lasts, in milliseconds.
HEALING_MS: Final = 30_000

#: How late an occurrence may be, in milliseconds, before it is sent again; every repetition doubles
#: this time.
HEAL_AFTER_MS: Final = 60_000

#: The fate of an occurrence: it ran, was cancelled, was too late, was skipped because the schedule
#: was paused, or was skipped because the previous run had not ended.
Fate = Literal["ran", "cancelled", "late", "paused", "overlapped"]

#: The headers and properties whose change is an edit of the schedule. All other headers and
#: properties differ from one send to the next.
_OF_HEADERS: Final = ("shadow", "timelimit", "ignore_result", "compression")
_OF_PROPERTIES: Final = ("priority", "delivery_mode", "content_type", "content_encoding")


ItemT = TypeVar("ItemT")

#: A task, or its name.
AnyTask: TypeAlias = "celery.Task[Any, Any] | str"


def message_of(occurrence: Occurrence, message: str) -> Delayed:
    """Return the message of an occurrence.

    Args:
        occurrence: The occurrence.
        message: The schedule's message, as :func:`.stored` returns it.
    """
    pattern = restored(message, occurrence.task_id)
    registry = registry_headers(occurrence, is_tracked(pattern))
    return filled(pattern, occurrence.task_id, occurrence.due_ms, registry)


def filled(pattern: Delayed, task_id: str, due_ms: int, registry: Mapping[str, object]) -> Delayed:
    """Fill in the message of a schedule for one task; see :func:`of_task`."""
    return pattern._replace(
        message=of_task(pattern.message, task_id, due_ms, registry), task_id=task_id
    )


def of_task(
    pattern: WaitingMessage, task_id: str, due_ms: int, registry: Mapping[str, object]
) -> WaitingMessage:
    """Return the unsigned message of one task, made from the message of a schedule.

    Args:
        pattern: The message of the schedule.
        task_id: The id of the task.
        due_ms: When the task is due, in milliseconds since 1970-01-01 UTC.
        registry: The task's headers for the registry.
    """
    headers = pattern.headers.others
    # A task that is its own root stays its own root.
    ids = {name: task_id for name in ("id", "root_id") if headers.get(name) == headers.get("id")}
    others = {**headers, **ids, "expires": None}
    message = pattern.having(correlation_id=task_id)
    return message.saying(due_ms=due_ms, registry=registry, others=others)


def registry_headers(occurrence: Occurrence, is_tracked: bool) -> dict[str, object]:
    """Return the registry's headers for a new message of an occurrence.

    The registry treats all messages of an occurrence as the same message; the schedule's record
    decides which message runs.
    """
    text = occurrence._replace(message=new_copy()).text
    headers: dict[str, object] = {SCHEDULE: text, ONCE: True}
    return {**headers, COPY: str(occurrence.order), TRACKED: True} if is_tracked else headers


def is_tracked(delayed: Delayed) -> bool:
    """Return whether a message's task is tracked, that is, listed while it waits."""
    return TRACKED in delayed.message.headers.registry


def task_of(delayed: Delayed) -> str:
    """Return the name of a message's task."""
    return str(delayed.message.headers.others.get("task", ""))


def captured(
    app: DelayingCelery,
    made: Occurrence,
    task: AnyTask,
    args: Iterable[object],
    kwargs: Mapping[str, object],
) -> tuple[Delayed, str]:
    """Return the message that Celery would send, and a fingerprint of the whole schedule.

    Args:
        app: The application.
        made: An occurrence of the schedule.
        task: The task, or its name.
        args: The task's positional arguments.
        kwargs: The task's keyword arguments.

    Raises:
        InvalidSchedule: The arguments cannot be serialized, or the task does not go to exactly one
            known queue.
    """
    name = task if isinstance(task, str) else str(task.name)
    known = app.tasks.get(name)
    options = {**made.options, "expires": None}
    # An eager task would run at once.
    sent = name if known is None or app.conf.task_always_eager else known
    is_listed = is_tracked_by_default(app.rabbitdelay, known)
    registry = {TRACKED: True} if is_listed else {}
    call = Call(made.task_id, list(args), dict(kwargs), Due.until(made.due_ms))
    try:
        delayed = capture(app.rabbitdelay, sent, call, options, registry).delayed
    except EncodeError as error:
        takes = f"its arguments cannot be serialized: {error}"
        raise InvalidSchedule((*call.args, call.kwargs), takes) from None
    headers, properties = delayed.message.headers, delayed.message.properties
    if delayed.queue is None:
        where = headers.exchange, headers.routing_key
        raise InvalidSchedule(where, "its task must go to exactly one known queue")
    words = [
        *(name, call.args, call.kwargs, made.options, delayed.destination),
        *(headers.exchange, headers.routing_key, headers.queue, headers.priority, is_listed),
        *(headers.others.get(name) for name in _OF_HEADERS),
        *(properties.get(name) for name in _OF_PROPERTIES),
        *(made.recurrence, made.catch_up_ms, made.jitter_ms, made.overlap),
    ]
    return delayed, hashlib.sha256(canonical(words).encode(errors="surrogatepass")).hexdigest()[:12]


def canonical(value: object) -> str:
    """Return a string that all processes compute alike for equal values, as far as possible."""
    if isinstance(value, Mapping):
        pairs = sorted((canonical(key), canonical(item)) for key, item in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, set | frozenset):
        return f"<{','.join(sorted(map(canonical, value)))}>"
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        # The repr of a function contains its address.
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if name else repr(value)
    return f"{kind.__qualname__}{canonical(value.__reduce_ex__(2)[1:3])}"


def send_each(
    delays: Delays,
    items: Sequence[ItemT],
    made: Callable[[DelayedProducer, ItemT], Delayed],
    skew_ms: int = 0,
) -> list[tuple[ItemT, Delayed | Exception]]:
    """Publish and, if tracked, register a message per item; return errors instead of raising.

    Args:
        delays: The application's ``app.rabbitdelay``.
        items: The items.
        made: Makes the message of an item.
        skew_ms: How many milliseconds the clock of Redis is ahead; the due times follow the clock
            of Redis.

    Returns:
        Every item with its confirmed message or with the error.
    """
    messages: dict[int, Delayed] = {}
    outcomes: list[tuple[ItemT, Delayed | Exception]] = []

    def make(producer: DelayedProducer, item: ItemT) -> ToPublish:
        delayed = messages[id(item)] = made(producer, item)
        queue = delayed.queue and delays.app.amqp.queues.get(delayed.queue.name, delayed.queue)
        due = Due.until(_due_ms(delayed) - skew_ms)
        return queue, delayed.message.amqp(), partial(producer.address, delayed, due)

    def settle(item: ItemT, error: Exception | None) -> None:
        outcomes.append((item, error or messages[id(item)]))

    if items:
        publish_each(delays, items, make, settle, RESENDS)
    sent = [found for _, found in outcomes if isinstance(found, Delayed) and is_tracked(found)]
    if sent:
        register_sent(registry_of(delays), [*map(_registration, sent)])
    return outcomes


def send_all(delays: Delays, messages: Sequence[Delayed]) -> None:
    """Sign and send messages, and register the tracked messages.

    Raises:
        PublishError: A message was not confirmed. The other messages were sent.
    """

    def sign(producer: DelayedProducer, delayed: Delayed) -> Delayed:
        return delayed._replace(message=signed(delayed.message, producer.signing_keys))

    for _, outcome in send_each(delays, messages, sign):
        if isinstance(outcome, Exception):
            raise outcome


def _registration(delayed: Delayed) -> Registration:
    headers = delayed.message.headers
    return Registration.of(delayed.task_id, headers, task_of(delayed), stored(delayed))


def _due_ms(delayed: Delayed) -> int:
    return delayed.message.headers.due_ms or 0


def read(
    message: str, accept: Iterable[str]
) -> tuple[str, tuple[object, ...] | None, dict[str, object] | None]:
    """Return the task that a schedule sends, and its arguments; None if they cannot be read.

    Args:
        message: The schedule's message, as :func:`.stored` returns it; empty if Redis has lost it.
        accept: Celery's ``accept_content``.
    """
    if not message:
        return "", None, None
    pattern = restored(message, "")
    waits = pattern.message
    content: Any = {
        "body": waits.body,
        "headers": waits.headers.others,
        "content_type": waits.properties.get("content_type"),
        "content_encoding": waits.properties.get("content_encoding"),
        "accept": serialization.prepare_accept_content(accept),
    }
    try:
        args, kwargs, _ = Message(**content).decode()
        return task_of(pattern), tuple(args), dict(kwargs)
    except Exception:  # noqa: BLE001 - decoders of any type
        return task_of(pattern), None, None


class NotedSchedule(NamedTuple):
    """The record of a schedule; ``lua/decide.lua`` describes it.

    Attributes:
        order: A number that grows with every edit and with the deletion.
        ahead_ms: The instant whose message waits, in milliseconds since 1970-01-01 UTC; None if the
            schedule has no more instants.
        done_ms: The instant decided last; -1 if no instant was decided.
        occurrence: The waiting occurrence; None if the schedule was deleted or has ended, or Redis
            has lost the occurrence.
        message: The message that occurrences send, as :func:`.stored` returns it; empty if
            ``occurrence`` is None.
        is_deleted: Whether the schedule was deleted.
        is_paused: Whether the schedule is paused.
        is_sent: Whether ``put`` got the confirm of the first occurrence.
        missed_ms: When a worker noticed that the occurrence is missing; 0 if no worker did.
        healed_ms: When the occurrence was last sent again; 0 if it was never sent again.
        last: The due time, the arrival and the fate of the last occurrence that arrived; None if
            unknown.
    """

    order: int
    ahead_ms: int | None
    done_ms: int
    occurrence: Occurrence | None
    message: str
    is_deleted: bool
    is_paused: bool
    is_sent: bool
    missed_ms: int
    healed_ms: int
    last: tuple[datetime, datetime, Fate] | None

    @classmethod
    def of(cls, found: Mapping[str, str]) -> Self | None:
        """Parse a record; return None if it is empty or unreadable."""
        try:
            order, ahead = int(found["order"]), int(found["ahead"]) if found["ahead"] else None
            occurrence, last = None, None
            if ahead is not None and (put := Occurrence.of(found.get("occurrence"))):
                occurrence = put._replace(instant_ms=ahead, order=order, revision=found["revision"])
            if "last" in found:
                due, came, fate = found["last"].split()
                last = instant_of(int(due)), instant_of(int(came)), cast("Fate", fate)
            return cls(
                order,
                ahead,
                int(found.get("done", -1)),
                occurrence,
                found.get("message", ""),
                bool(found.get("deleted")),
                found.get("paused") == "1",
                not found.get("unsent"),
                int(found.get("missed", 0)),
                int(found.get("healed", 0)),
                last,
            )
        except (LookupError, ValueError):
            return None

    def since(self, now_ms: int) -> int:
        """Return the instant from which an edit applies; a due occurrence still runs unedited."""
        is_due = not self.is_deleted and self.ahead_ms is not None and self.ahead_ms <= now_ms
        return max(self.ahead_ms - 1 if is_due and self.ahead_ms else now_ms, self.done_ms)

    def heals(self, now_ms: int) -> Literal["now", "soon", "no"]:
        """Return whether to send the missing occurrence again.

        The occurrence is first recorded as missing, and sent one and a half repair intervals later.
        In the meantime, a worker that has decided about the occurrence restores the decision if
        Redis lost it.
        """
        if self.occurrence is None:
            return "no"
        due_ms, healed_ms = self.occurrence.due_ms, self.healed_ms
        if now_ms - max(due_ms, healed_ms) <= max(HEAL_AFTER_MS, healed_ms - due_ms):
            return "no"
        since_ms = now_ms - self.missed_ms
        if since_ms < HEALING_MS * 3 // 2:
            return "no"
        return "now" if since_ms <= 4 * HEALING_MS else "soon"


class Decided(NamedTuple):
    """The decision on an arrived message; see ``lua/decide.lua``.

    Attributes:
        goes_on: Whether the message is processed; otherwise it is dropped.
        following_ms: The instant of the message that must be published first; None if no message
            must be published.
        is_paused: Whether the schedule is paused.
        order: The order of the following message.
        is_lost: Whether Redis has lost the schedule's message.
    """

    goes_on: bool
    following_ms: int | None
    is_paused: bool = False
    order: int = 0
    is_lost: bool = False


class Arriving(NamedTuple):
    """An arrived message of a schedule.

    Attributes:
        occurrence: The occurrence in the message's header.
        arrival: The arrival, named and marked; the same when the call is repeated.
        following_ms: The instant after the occurrence; None after the last instant.
    """

    occurrence: Occurrence
    arrival: Arrival
    following_ms: int | None = None


class Records:
    """The records of the schedules under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis refuses a command or answers too late.

    Args:
        registry: The registry of the application.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._store = registry.store
        self._names = registry.names
        self._all = registry.names.only("schedules")

    def get(self, names: Sequence[str]) -> list[NotedSchedule | None]:
        """Return the records of schedules; None for an unknown schedule."""
        keys = self._names.each("schedule", names)
        found = self._store.commands(lambda pipe: [*map(pipe.hgetall, keys)]) if keys else []
        return [*map(NotedSchedule.of, found)]

    def all(self) -> list[str]:
        """Return the names of all schedules."""
        return sorted(self.overdue("+inf"))

    def overdue(self, until_ms: int | str) -> dict[str, int]:
        """Return the schedules with an occurrence due by ``until_ms``, and its due time."""
        (found,) = self._store.commands(
            lambda pipe: pipe.zrangebyscore(self._all, "-inf", until_ms, withscores=True)
        )
        return {name: int(score) for name, score in found}

    def note_due(self, due: Mapping[str, int | None]) -> None:
        """Store the next due times of schedules; None removes a schedule from the list."""
        self.came([], due, [])

    def edit(
        self,
        name: str,
        before: NotedSchedule | None,
        order: int,
        put: Occurrence | None = None,
        message: str = "",
        paused: bool | None = None,
    ) -> bool:
        """Store an edit or the deletion of a schedule, unless another edit came first.

        Args:
            name: The name of the schedule.
            before: The schedule's record, as read before the edit.
            order: The order of the edit.
            put: The occurrence that is sent now; None deletes the schedule.
            message: The message that occurrences send.
            paused: Whether the schedule is paused; None to keep its state.

        Returns:
            Whether the edit was stored; False if the record has changed since it was read.
        """
        next_one: Sequence[str | int] = "", "", ""
        if put is not None:
            # If the edit is not stored, the check of overdue schedules removes the name again.
            self.note_due({name: put.due_ms})
            next_one = put.instant_ms, put.revision, put.text
        was = (before.order, before.ahead_ms) if before is not None else ("", "")
        is_paused = None if paused is None else int(paused)
        fields = [list(map(_text, (*was, order, *next_one, message, is_paused)))]
        call = self._call("schedules/edit", [name], fields, NOTE_MS)
        ((is_noted,),) = self._store.of_each(call)
        if isinstance(is_noted, str):
            raise RegistryUnavailable(f"the schedule {name!r} cannot be stored: {is_noted}")
        if is_noted and put is None:
            self.note_due({name: None})
        return bool(is_noted)

    def _call(
        self, script: str, names: Sequence[str], fields: Sequence[Sequence[str | int]], shared: int
    ) -> ScriptCall:
        keys = self._names.each("schedule", names)
        return ScriptCall(script, keys, fields, self.registry.keep_ms, (shared,))

    def decide(
        self, arriving: Sequence[Arriving], *, notes_again: bool = False
    ) -> list[Decided | None]:
        """Decide whether messages are processed or dropped, in one round trip per server.

        Args:
            arriving: The messages.
            notes_again: Whether the messages were decided before; decisions that Redis has lost are
                restored.

        Returns:
            The decision per message; None if its record cannot be read.
        """
        fields = [
            (
                *(str(occurrence.instant_ms), str(occurrence.order), occurrence.revision),
                *(*arrival.identity, _text(following_ms)),
            )
            for occurrence, arrival, following_ms in arriving
        ]
        names = [each.occurrence.name for each in arriving]
        call = self._call("schedules/decide", names, fields, int(notes_again))
        (answers,) = self._store.of_each(call)
        decided: list[Decided | None] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                logger.error("Cannot read the record of schedule %r: %s", name, answer)
                decided.append(None)
                continue
            goes_on, following, is_paused, order, is_lost = answer
            following_ms = int(following) if following else None
            decided.append(Decided(goes_on, following_ms, is_paused, int(order), is_lost))
        return decided

    def came(
        self,
        came: Sequence[tuple[Occurrence, Fate]],
        due: Mapping[str, int | None],
        lost: Sequence[tuple[Occurrence, str]],
    ) -> None:
        """Record the fates of occurrences that have just arrived.

        Args:
            came: The occurrences and their fates.
            due: The next due times of their schedules, as for :meth:`note_due`.
            lost: The waiting occurrence and the message, for schedules whose message Redis has
                lost.
        """

        def add(pipeline: Any) -> None:
            for each, fate in came:
                record = self._names.of("schedule", each.name)
                pipeline.hset(record, "last", f"{each.due_ms} {wall_clock.ms()} {fate}")
            for each, message in lost:
                record = self._names.of("schedule", each.name)
                pipeline.hsetnx(record, "occurrence", each.text)
                pipeline.hsetnx(record, "message", message)
            for name, due_ms in due.items():
                if due_ms is None:
                    pipeline.zrem(self._all, name)
                else:
                    pipeline.zadd(self._all, {name: due_ms})

        if came or due or lost:
            self._store.commands(add)

    def note(self, name: str, **fields: str | int) -> None:
        """Write fields of a record; an empty string deletes a field."""
        words = [word for field in fields.items() for word in field]
        call = ScriptCall("schedules/note", [self._names.of("schedule", name)], [words])
        ((answer,),) = self._store.of_each(call)
        readable(f"the record of the schedule {name!r}", answer)

    def may_heal(self) -> bool:
        """Take or renew the lease to repair schedules; return whether the caller holds it."""
        return self._store.lease(self._names.only("healing"), new_copy(), HEALING_MS)

    def taken_over(self, application: str) -> dict[str, str]:
        """Return an application's set of beat entries ("current"), and when earlier sets ended."""
        key = self._names.only(f"beat:{application}")
        (found,) = self._store.commands(lambda pipe: pipe.hgetall(key))
        return dict(found)

    def take_over(self, application: str, former: str | None, current: str) -> None:
        """Store an application's new set of beat entries; see :meth:`taken_over`."""
        key = self._names.only(f"beat:{application}")
        fields = {former: wall_clock.ms()} if former is not None else {}
        self._store.commands(
            lambda pipe: (
                pipe.hset(key, mapping={**fields, "current": current}),
                pipe.hdel(key, current),
            )
        )


def _text(number: str | int | None) -> str:
    return "" if number is None else str(number)
