"""What a schedule sends, and what is noted of it in Redis.

Celery makes the message of a schedule once, when it is put; it is filled in for each occurrence.
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
from celery_rabbitdelay.levels.headers import COPY, SCHEDULE, TRACKED
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.producer import Delayed, DelayedProducer
from celery_rabbitdelay.publishing.publish_loop import RESENDS
from celery_rabbitdelay.publishing.signature import signed
from celery_rabbitdelay.registry.application import is_tracked as is_tracked_by_default
from celery_rabbitdelay.registry.application import register_sent, registry_of
from celery_rabbitdelay.registry.decision import Registration, new_copy
from celery_rabbitdelay.registry.record import restored, stored
from celery_rabbitdelay.registry.registry import NOTE_MS, Registry
from celery_rabbitdelay.registry.store import ScriptCall, readable
from celery_rabbitdelay.schedules.recurrence import Occurrence
from celery_rabbitdelay.worker.early_tasks import ToPublish, publish_each

logger = logging.getLogger(__name__)

#: For how many milliseconds one worker looks after the schedules, before another one may.
HEALING_MS: Final = 30_000

#: Milliseconds that an occurrence may be late before it is sent again, at first; then twice as long
#: each time.
HEAL_AFTER_MS: Final = 60_000

#: What becomes of an occurrence: it runs; it was cancelled; it is too late; its schedule is paused;
#: another run still goes.
Fate = Literal["ran", "cancelled", "late", "paused", "overlapped"]

#: The headers and properties of a message that are part of a schedule; a change is an edit. All
#: others differ with each send.
_OF_HEADERS: Final = ("shadow", "timelimit", "ignore_result", "compression")
_OF_PROPERTIES: Final = ("priority", "delivery_mode", "content_type", "content_encoding")


ItemT = TypeVar("ItemT")

#: A task, or its name.
AnyTask: TypeAlias = celery.Task[Any, Any] | str


def message_of(occurrence: Occurrence, message: str) -> Delayed:
    """Return the message of an occurrence of what a schedule sends; see :func:`.stored`."""
    pattern = restored(message, occurrence.task_id)
    says = says_of(occurrence, is_tracked(pattern))
    return filled(pattern, occurrence.task_id, occurrence.due_ms, says)


def filled(pattern: Delayed, task_id: str, due_ms: int, says: Mapping[str, object]) -> Delayed:
    """Return what a schedule sends as the message of one task: see :func:`of_task`."""
    return pattern._replace(
        message=of_task(pattern.message, task_id, due_ms, says), task_id=task_id
    )


def of_task(
    pattern: WaitingMessage, task_id: str, due_ms: int, says: Mapping[str, object]
) -> WaitingMessage:
    """Return the message of one task, which is not signed, made of that of another one.

    Args:
        pattern: What the schedule sends.
        task_id: The id of the task.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        says: Its headers for the registry.
    """
    headers = pattern.headers.others
    # It stays the root, if it was that.
    ids = {each: task_id for each in ("id", "root_id") if headers.get(each) == headers.get("id")}
    others = {**headers, **ids, "expires": None}
    message = pattern.having(correlation_id=task_id)
    return message.saying(due_ms=due_ms, registry=says, others=others)


def says_of(occurrence: Occurrence, is_tracked: bool) -> dict[str, object]:
    """Return the headers for the registry of a new message of an occurrence.

    For the registry, all messages of an occurrence are the same: which of them runs is decided by
    the record of the schedule.
    """
    says: dict[str, object] = {SCHEDULE: occurrence._replace(message=new_copy()).text}
    return {**says, COPY: str(occurrence.order), TRACKED: True} if is_tracked else says


def is_tracked(delayed: Delayed) -> bool:
    """Return whether a message is listed while it waits."""
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
    """Return the message that Celery would send, and what stands for all of a schedule.

    Args:
        app: The application.
        made: An occurrence of the schedule.
        task: The task, or its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        InvalidSchedule: The arguments cannot be written, or the task goes not to one known queue.
    """
    name = task if isinstance(task, str) else str(task.name)
    known = app.tasks.get(name)
    options = {**made.options, "expires": None}
    # An eager task would run.
    sent = name if known is None or app.conf.task_always_eager else known
    is_listed = is_tracked_by_default(app.rabbitdelay, known)
    says = {TRACKED: True} if is_listed else {}
    call = Call(made.task_id, list(args), dict(kwargs), Due.until(made.due_ms))
    try:
        delayed = capture(app.rabbitdelay, sent, call, options, says).delayed
    except EncodeError as error:
        takes = f"takes arguments that can be written: {error}"
        raise InvalidSchedule((*call.args, call.kwargs), takes) from None
    said, properties = delayed.message.headers, delayed.message.properties
    if delayed.queue is None:
        where = said.exchange, said.routing_key
        raise InvalidSchedule(where, "takes a task that goes to one known queue")
    words = [
        *(name, call.args, call.kwargs, made.options, delayed.destination),
        *(said.exchange, said.routing_key, said.queue, said.priority, is_listed),
        *(said.others.get(each) for each in _OF_HEADERS),
        *(properties.get(each) for each in _OF_PROPERTIES),
        *(made.recurrence, made.catch_up_ms, made.jitter_ms, made.overlap),
    ]
    return delayed, hashlib.sha256(canonical(words).encode(errors="surrogatepass")).hexdigest()[:12]


def canonical(value: object) -> str:
    """Return a text that is the same for equal values in all processes, as far as can be."""
    if isinstance(value, Mapping):
        pairs = sorted((canonical(key), canonical(each)) for key, each in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, set | frozenset):
        return f"<{','.join(sorted(map(canonical, value)))}>"
    kind = type(value)
    if kind.__module__.partition(".")[0] in sys.stdlib_module_names:
        # The text of a function has its address.
        name = getattr(value, "__qualname__", None)
        return f"{value.__module__}.{name}" if name else repr(value)
    return f"{kind.__qualname__}{canonical(value.__reduce_ex__(2)[1:3])}"


def send_each(
    delays: Delays,
    items: Sequence[ItemT],
    made: Callable[[DelayedProducer, ItemT], Delayed],
    skew_ms: int = 0,
) -> list[tuple[ItemT, Delayed | Exception]]:
    """Publish a message for each item, and register those that are tracked. Raises nothing.

    Args:
        delays: The ``app.rabbitdelay``.
        items: What messages are made of.
        made: Makes the message of an item.
        skew_ms: How many milliseconds the clock of Redis is ahead, by which messages are due.

    Returns:
        Each item with its message, if that is confirmed, or with what is wrong.
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
    sent = [each for _, each in outcomes if isinstance(each, Delayed) and is_tracked(each)]
    if sent:
        register_sent(registry_of(delays), [*map(_registration, sent)])
    return outcomes


def send_all(delays: Delays, messages: Sequence[Delayed]) -> None:
    """Sign and send messages, and register those that are tracked.

    Raises:
        PublishError: One of them was not confirmed; the others were sent.
    """

    def sign(producer: DelayedProducer, delayed: Delayed) -> Delayed:
        return delayed._replace(message=signed(delayed.message, producer.signing_keys))

    for _, outcome in send_each(delays, messages, sign):
        if isinstance(outcome, Exception):
            raise outcome


def _registration(delayed: Delayed) -> Registration:
    copy = str(delayed.message.headers.registry[COPY])
    made = Registration(delayed.task_id, copy, _due_ms(delayed))
    queue = delayed.message.headers.queue or ""
    return made._replace(name=task_of(delayed), message=stored(delayed), queue=queue)


def _due_ms(delayed: Delayed) -> int:
    return delayed.message.headers.due_ms or 0


def read(
    message: str, accept: Iterable[str]
) -> tuple[str, tuple[object, ...] | None, dict[str, object] | None]:
    """Return the task that a schedule sends, and its arguments; None if they cannot be read.

    Args:
        message: What it sends; see :func:`.stored`; empty if Redis has lost it.
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
        order: Grows with each edit, and with the deletion.
        ahead_ms: The instant whose message waits, in milliseconds since 1970-01-01 UTC; None if
            none follows.
        done_ms: The instant that was decided last; -1 if none was.
        occurrence: What that message says; None if the schedule was deleted or has ended, or Redis
            has lost it.
        message: What is sent: see :func:`.stored`; empty likewise.
        is_deleted: Whether it was deleted.
        is_paused: Whether occurrences do not run.
        is_sent: Whether whoever has put it knows that its first occurrence was sent.
        missed_ms: When a worker saw that the occurrence has not come; 0: it has not.
        healed_ms: When it was sent again last; 0: never.
        last: When the last occurrence was due that has come, when it came, and what became of it;
            None if none is known.
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
        """Read it; None if nothing is noted, or it cannot be read."""
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
        """Return the instant behind which an edit begins: what is due and has not come, comes."""
        is_due = not self.is_deleted and self.ahead_ms is not None and self.ahead_ms <= now_ms
        return max(self.ahead_ms - 1 if is_due and self.ahead_ms else now_ms, self.done_ms)

    def heals(self, now_ms: int) -> Literal["now", "soon", "no"]:
        """Return whether its occurrence is sent again, because it has not come.

        First it is noted that it is missed. Within half as long again as between two looks, each
        worker that has decided it has noted that again, if Redis had forgotten it.
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
    """What becomes of a message; see ``lua/decide.lua``.

    Attributes:
        goes_on: Whether it goes on; otherwise it is dropped.
        following_ms: The instant whose message is to be published before that; None if none is.
        is_paused: Whether the schedule is paused.
        order: The order of that message.
        is_lost: Whether Redis has lost what the schedule sends.
    """

    goes_on: bool
    following_ms: int | None
    is_paused: bool = False
    order: int = 0
    is_lost: bool = False


class Arriving(NamedTuple):
    """A message that has arrived.

    Attributes:
        occurrence: What it says.
        arrival: The name of the arrival; the same if the question is asked again.
        redelivered: Whether RabbitMQ has delivered it before.
        following_ms: The instant that follows it; None if none does.
    """

    occurrence: Occurrence
    arrival: str
    redelivered: bool = False
    following_ms: int | None = None


class Records:
    """The records of the schedules under one prefix.

    All methods raise :class:`.RegistryUnavailable` if Redis does not answer in time, or refuses.

    Args:
        registry: The registry of the application.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._store = registry.store
        self._names = registry.names
        self._all = registry.names.only("schedules")

    def get(self, names: Sequence[str]) -> list[NotedSchedule | None]:
        """Return what is noted about schedules, None for each of which nothing is."""
        keys = [self._names.of("schedule", name) for name in names]
        found = self._store.commands(lambda pipe: [*map(pipe.hgetall, keys)]) if keys else []
        return [*map(NotedSchedule.of, found)]

    def all(self) -> list[str]:
        """Return the names of all schedules."""
        return sorted(self.overdue("+inf"))

    def overdue(self, until_ms: int | str) -> dict[str, int]:
        """Return the schedules whose next occurrence was due by then, and when it was."""
        (found,) = self._store.commands(
            lambda pipe: pipe.zrangebyscore(self._all, "-inf", until_ms, withscores=True)
        )
        return {name: int(score) for name, score in found}

    def note_due(self, due: Mapping[str, int | None]) -> None:
        """Note when schedules are due next; None: they are none any more."""
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
        """Note what a schedule sends, or that it was deleted.

        Args:
            name: Its name.
            before: What was noted.
            order: The order of the edit.
            put: The occurrence whose message is sent now; None: it is deleted.
            message: What is sent.
            paused: Whether it is paused; None for as it is.

        Returns:
            Whether it was noted: its record is as it was before.
        """
        said: Sequence[str | int] = "", "", ""
        if put is not None:
            # If the edit is not noted, the look at overdue schedules drops the name again.
            self.note_due({name: put.due_ms})
            said = put.instant_ms, put.revision, put.text
        was = (before.order, before.ahead_ms) if before is not None else ("", "")
        is_paused = None if paused is None else int(paused)
        fields = [list(map(_text, (*was, order, *said, message, is_paused)))]
        call = self._call("schedules/edit", [name], fields, NOTE_MS)
        ((is_noted,),) = self._store.of_each(call)
        if isinstance(is_noted, str):
            raise RegistryUnavailable(f"the schedule {name!r} cannot be noted: {is_noted}")
        if is_noted and put is None:
            self.note_due({name: None})
        return bool(is_noted)

    def _call(
        self, script: str, names: Sequence[str], fields: Sequence[Sequence[str | int]], shared: int
    ) -> ScriptCall:
        keys = [self._names.of("schedule", name) for name in names]
        return ScriptCall(script, keys, fields, self.registry.keep_ms, (shared,))

    def decide(
        self, arriving: Sequence[Arriving], *, notes_again: bool = False
    ) -> list[Decided | None]:
        """Decide what becomes of messages, in one round trip to each server.

        Args:
            arriving: The messages.
            notes_again: They were decided before: note that, as far as Redis has forgotten it.

        Returns:
            What becomes of each; None if its record cannot be read.
        """
        fields = [
            (
                *(str(said.instant_ms), str(said.order), said.revision, said.message),
                *(said.turns, arrival, is_redelivered, _text(following_ms)),
            )
            for said, arrival, is_redelivered, following_ms in arriving
        ]
        names = [each.occurrence.name for each in arriving]
        call = self._call("schedules/decide", names, fields, int(notes_again))
        (answers,) = self._store.of_each(call)
        decided: list[Decided | None] = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                logger.error("The record of the schedule %r cannot be read: %s", name, answer)
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
        """Note what became of occurrences that have come now.

        Args:
            came: Occurrences, with what became of them.
            due: When their schedules are due next, as for :meth:`note_due`.
            lost: What waits of schedules that Redis has lost, and what these send.
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
        """Write fields of a record, and nothing else; an empty text takes one away."""
        words = [word for field in fields.items() for word in field]
        call = ScriptCall("schedules/note", [self._names.of("schedule", name)], [words])
        ((answer,),) = self._store.of_each(call)
        readable(f"the record of the schedule {name!r}", answer)

    def may_heal(self) -> bool:
        """Return whether the caller is the one that looks after the schedules now."""
        return self._store.lease(self._names.only("healing"), new_copy(), HEALING_MS)

    def taken_over(self, application: str) -> dict[str, str]:
        """Return which entries of beat an application has: "current", and when others ended."""
        key = self._names.only(f"beat:{application}")
        (found,) = self._store.commands(lambda pipe: pipe.hgetall(key))
        return dict(found)

    def take_over(self, application: str, former: str | None, current: str) -> None:
        """Note which entries of beat an application has from now on; see :meth:`taken_over`."""
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
