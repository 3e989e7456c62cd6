"""The question about a task that arrives, the registry's answer, and the rule behind it. Pure.

The rule is there twice: ``arrive.lua`` and its neighbours apply it in Redis, and the functions here
in memory, for tests of applications. In ``tests/registry``, ``integration/test_registry_rule.py``
compares the two, and ``unit/test_registry_rule.py`` explores what can happen to messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from random import getrandbits
from typing import NamedTuple, Self

from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.headers import DelayHeaders, Mark, is_digits, is_int, is_life


class Verdict(Enum):
    """What becomes of a task that has arrived."""

    #: It runs.
    RUN = "run"

    #: It does not run: it was cancelled.
    CANCELLED = "cancelled"

    #: It does not run: its job was aborted, or was not committed in time.
    EXPIRED = "expired"

    #: It does not run: a newer task was sent under its key.
    SUPERSEDED = "superseded"

    #: It does not run, because another message of the same task does.
    REPLACED = "replaced"

    #: It does not run: it has run, was sent with ``once``, and RabbitMQ has not redelivered it.
    DUPLICATE = "duplicate"

    #: It goes back into the levels, until a later due time, or because its job is still open or it
    #: is paused.
    LATER = "later"

    #: It is undeliverable: decisions about it, if there were any, are forgotten by now.
    FORGOTTEN = "forgotten"

    #: What Redis holds about this task, its key or its job cannot be read.
    UNREADABLE = "unreadable"


class Outcome(Enum):
    """The state in which ``cancel`` or ``postpone`` found a task, the least certain one first."""

    #: Too late: the task has arrived at a worker already. A cancel stops its retries, and a worker
    #: that has not started it may still revoke it, as Celery does; a postponement changes nothing.
    RELEASED = "released"

    #: Nothing is known of the task, or no task has the key; nothing was noted.
    UNKNOWN = "unknown"

    #: Nothing is known of the task, and the decision was noted: it will not run, or not before,
    #: unless it has arrived already.
    NOTED = "noted"

    #: The task was cancelled or superseded before; nothing was changed.
    CANCELLED = "cancelled"

    #: The task was waiting, and will not run, or not before.
    DONE = "done"


class Ticket(NamedTuple):
    """What the registry says of a task before it is sent, for its message to carry.

    Attributes:
        life: How often the task was sent anew under its id after it had run.
        order: Its order among the tasks under its key; 0 without one.
    """

    life: int = 0
    order: int = 0

    @classmethod
    def of(cls, words: Mapping[str, object]) -> Self:
        """Read it from what the headers say, which any sender may have written."""
        life, order = words.get(names.LIFE), words.get(names.ORDER)
        return cls(
            int(life) if is_life(life) else 0,
            int(order) if is_digits(order, names.MAX_EXACT) else 0,
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers in which a message carries it."""
        return {
            name: str(value)
            for name, value in ((names.LIFE, self.life), (names.ORDER, self.order))
            if value
        }


class Arrival(NamedTuple):
    """A delayed task that is due and has arrived.

    Attributes:
        task_id: Its id.
        due_ms: When it was due, in milliseconds since 1970-01-01 UTC.
        attempt: Which attempt it is, as :func:`attempt_of` writes it.
        copy: Its header :data:`COPY`; empty if it has none.
        ticket: Its headers :data:`LIFE` and :data:`ORDER`.
        key: Its header :data:`KEY`; empty if it has none.
        job: Its header :data:`JOB`; empty if it has none.
        job_id: Its header :data:`JOB_ID`; empty for the latest job of that name.
        once: The queue that it arrives at, if only one message of the attempt may run there; empty
            if each may.
        mark: Its header :data:`ONCE`.
        name: The name of this arrival, if only one message may run; see :meth:`named`.
        redelivered: Whether RabbitMQ has delivered this message before.
        in_doubt: Its header :data:`REDELIVERED`.
        put_back_ms: Until when it was put back last, because the registry had said so; 0 if never.
        paused_ms: Since when its name or its queue is paused; 0 if neither is.
        is_occurrence: Whether the record of a schedule decides about it, which forgets nothing.
    """

    task_id: str
    due_ms: int
    attempt: str = "0.0"
    copy: str = ""
    ticket: Ticket = Ticket()
    key: str = ""
    job: str = ""
    job_id: str = ""
    once: str = ""
    mark: Mark = Mark()
    name: str = ""
    redelivered: bool = False
    in_doubt: bool = False
    put_back_ms: int = 0
    paused_ms: int = 0
    is_occurrence: bool = False

    def named(self) -> Self:
        """Return it with a new name, if only one message may run; a former one goes to its mark."""
        if not self.once:
            return self
        mark = self.mark.after(self.name) if self.name else self.mark
        return self._replace(mark=mark, name=new_copy())

    @property
    def heir_of(self) -> int:
        """The latest generation from which it may take over any earlier arrival; -1 for none.

        The generation is how often the message was put back. It may take over even an arrival that
        it cannot name.

        A message that RabbitMQ redelivers, or that was put back then, cannot name its former
        arrivals. The copies of what was put back follow no arrival of one another.
        """
        if self.redelivered:
            return self.mark.generation
        return self.mark.generation - 1 if self.in_doubt else -1

    @property
    def has_options(self) -> bool:
        """Whether the task was sent with an option of the registry."""
        return bool(self.copy or self.job or self.once or self.key) and not self.is_occurrence

    @classmethod
    def of(cls, headers: DelayHeaders, due_ms: int, queue: str, redelivered: bool) -> Arrival:
        """Return the arrival of a message, which has no name, by what its headers say."""
        words, others = headers.registry, headers.others
        task_id = _text(others.get("id"))
        if not words:
            return cls(task_id, due_ms, redelivered=redelivered)
        once = words.get(names.ONCE) if task_id else None
        copy, key, job, job_id = (
            _text(words.get(name)) for name in (names.COPY, names.KEY, names.JOB, names.JOB_ID)
        )
        return cls(
            task_id,
            due_ms,
            attempt_of(others.get("retries"), others.get("replaced_task_nesting")),
            copy,
            Ticket.of(words),
            key,
            job,
            job_id,
            (queue or "-") if once is not None else "",
            Mark.of(once),
            redelivered=redelivered,
            in_doubt=names.REDELIVERED in words,
            put_back_ms=headers.early.until_ms,
            is_occurrence=names.SCHEDULE in words,
        )


class Registration(NamedTuple):
    """A message that was sent, to be registered.

    Attributes:
        task_id: The task's id.
        copy: The message's name; its header :data:`COPY`.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
        attempt: Which attempt it is; see :func:`.attempt_of`.
        ticket: What was asked before it was sent.
        key: The key that it was sent with; empty if it has none.
        name: The task's name, if the task is tracked; otherwise empty.
        job: The job that it was sent with, likewise.
        message: What it takes to send the task anew, likewise.
        queue: The queue that gets it when it is due, likewise; empty if its exchange routes it.
    """

    task_id: str
    copy: str
    due_ms: int
    attempt: str = "0.0"
    ticket: Ticket = Ticket()
    key: str = ""
    name: str = ""
    job: str = ""
    message: str = ""
    queue: str = ""

    @classmethod
    def of(cls, task_id: str, headers: DelayHeaders, name: str = "", message: str = "") -> Self:
        """Return that of a message by its headers; ``name`` and ``message`` of a tracked task."""
        sent = Arrival.of(headers, headers.due_ms or 0, "", redelivered=False)
        of_message = sent.copy, sent.due_ms, sent.attempt, sent.ticket, sent.key
        job, queue = (sent.job, headers.queue or "") if name else ("", "")
        return cls(task_id, *of_message, name, job, message, queue)


class Decision(NamedTuple):
    """What becomes of an arrival.

    Attributes:
        verdict: What becomes of it.
        until_ms: With ``LATER``: until when, in milliseconds since 1970-01-01 UTC.
        is_new_due: With ``LATER``: whether ``until_ms`` is its new due time, because it was
            postponed; otherwise the task only asks again then.
        why: With ``UNREADABLE``: what Redis says.
        is_paused: With ``LATER``: whether it waits for a resume, and until ``until_ms`` only if it
            cannot stand in the queue of paused tasks.
        is_answer: Whether Redis has answered; otherwise it may have noted something else.
    """

    verdict: Verdict
    until_ms: int = 0
    is_new_due: bool = False
    why: str = ""
    is_paused: bool = False
    is_answer: bool = True


def new_copy() -> str:
    """Return a name for a message: 48 random bits distinguish the messages of one task."""
    return f"{getrandbits(48):012x}"  # it is no secret


def attempt_of(retries: object, nesting: object) -> str:
    """Return which attempt of its task a message is.

    A retry and a replacement (``Task.replace``) keep the task's id.

    Args:
        retries: How often the task was retried: Celery's header ``retries``.
        nesting: How often it was replaced: Celery's header ``replaced_task_nesting``.
    """
    counts = (each if is_int(each, 0, names.MAX_EXACT) else 0 for each in (retries, nesting))
    return ".".join(map(str, counts))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class Record(NamedTuple):
    """What is noted about a task.

    Attributes:
        cancelled: The life up to which it is cancelled; None if it is not. If the task had already
            run, its next life is cancelled too, because a message of it may be on its way.
        not_before: Until when it was postponed; None if it was not.
        won: For each attempt the name of the message that was let run.
        marks: With ``once``, for each attempt the mark of what was let run last, and the name of
            its arrival.
        ran: The latest life that a message was let run of; None if none was.
        waits: The attempt that is registered and waits; None if none does.
        copy: The name of its message that was registered last.
        due: When the first of its messages is due.
        order: Its order under its key.
    """

    cancelled: int | None = None
    not_before: int | None = None
    won: frozenset[tuple[tuple[str, str], str]] = frozenset()
    marks: frozenset[tuple[str, tuple[Mark, str]]] = frozenset()
    ran: int | None = None
    waits: tuple[str, str] | None = None
    copy: str = ""
    due: int = 0
    order: int = 0

    @property
    def life(self) -> int:
        """The latest life of which anything is known."""
        waiting = int(self.waits[0]) if self.waits and self.waits[0].isdigit() else 0
        return max(self.ran or 0, waiting)

    def is_cancelled(self, life: int) -> bool:
        """Return whether messages of a life do not run."""
        return self.cancelled is not None and life <= self.cancelled

    def settled(self) -> Record:
        """Return it without the attempt that waits."""
        return self._replace(waits=None, copy="", due=0, order=0)

    def marked(self, arrival: Arrival) -> Record:
        """Return it with the mark of an arrival, instead of a former one."""
        ran = arrival.mark._replace(former=()), arrival.name
        return self._replace(marks=frozenset({**dict(self.marks), arrival.attempt: ran}.items()))


EMPTY = Record()


def arrive(record: Record, message: Arrival, word: str, is_old: bool = False) -> tuple[Record, str]:
    """Return what is noted when a message arrives, and what becomes of it.

    Args:
        record: The record of the task.
        message: The message.
        word: What its key and its job say: ``run``, ``later``, ``expired``, ``superseded`` or
            ``replaced``.
        is_old: Whether it was due, and put back last, so long ago that decisions about it may be
            forgotten.
    """
    full, is_paused = _full(message), bool(message.paused_ms)
    winner = dict(record.won).get(full) if message.copy else None
    first = dict(record.marks).get(message.attempt) if message.once else None
    if record.is_cancelled(message.ticket.life):
        return record, "cancelled"
    if winner not in (None, message.copy):
        return record, "replaced"
    if first is not None:
        if not _follows(message, *first):
            return record, "duplicate"
        return record.marked(message), "paused" if is_paused else "run"
    waits = record.waits == full
    if winner is None:
        if word in ("superseded", "replaced", "expired"):
            is_latest = waits and record.copy == message.copy
            return (record.settled() if is_latest else record), word
        if word == "later":
            return record, word
        is_known = waits and record.due <= message.due_ms
        if is_old and message.has_options and not is_known:
            return record, "forgotten"
        if record.not_before is not None and record.not_before > message.due_ms:
            changed = record._replace(due=record.not_before) if waits else record
            return changed, str(record.not_before)
    if is_paused:
        return record, "paused"
    if message.copy and winner is None:
        won = record.won | {(full, message.copy)}
        record = record._replace(won=won, ran=max(record.ran or 0, message.ticket.life, 0))
        record = record.settled() if waits else record
    if message.once:
        record = record.marked(message)
    return record, "run"


def _full(message: Arrival | Registration) -> tuple[str, str]:
    """Return the attempt of a message, with the life that it belongs to."""
    life = message.ticket.life
    return (f"?{message.copy}" if life < 0 else str(life)), message.attempt


def _follows(message: Arrival, mark: Mark, arrival: str) -> bool:
    """Return whether an arrival may take the place of the one that was let run."""
    is_known = arrival in (*message.mark.former, message.name)
    is_heir = is_known or mark.generation <= message.heir_of
    return mark.name == message.mark.name and is_heir


def register(record: Record, message: Registration) -> tuple[Record, str]:
    """Return what is noted when a message was sent, and what that finds."""
    full, (life, order) = _full(message), message.ticket
    winner = dict(record.won).get(full)
    if record.is_cancelled(life):
        return record, "cancelled"
    if winner is not None:
        return record, "arrived" if winner == message.copy else "released"
    waits, due = record.waits, message.due_ms
    if waits is not None and _number(full) < _number(waits):
        return record, "waiting"
    if waits == full:
        due = min(due, record.due)
    return record._replace(waits=full, copy=message.copy, due=due, order=order), "waiting"


def cancel(record: Record, newest: int = 0, also_future: bool = True) -> tuple[Record, str]:
    """Return what is noted when a task is cancelled, and what that finds.

    Args:
        record: The record of the task.
        newest: The order of the newest task under the key of this one.
        also_future: Whether to note it if nothing is known of the task.
    """
    life, is_known = record.life, record.waits is not None or record.ran is not None
    found = "done" if record.waits else "released" if is_known else "noted"
    if record.is_cancelled(life) or (record.order and record.order < newest):
        found = "cancelled"
    if not is_known and not also_future:
        return record, found.replace("noted", "unknown")
    if record.ran is not None:
        life = max(life, next_life(record))
    return record._replace(cancelled=life).settled(), found


def postpone(record: Record, due: int, newest: int, also_future: bool = True) -> tuple[Record, str]:
    """Return what is noted when a task is postponed, and what that finds.

    Args:
        record: The record of the task.
        due: The new due time; with ``earlier``, a second message has to be sent.
        newest: The order of the newest task under the key of this one.
        also_future: As for :func:`cancel`.
    """
    if record.is_cancelled(record.life) or (record.order and record.order < newest):
        return record, "cancelled"
    if record.waits is None and record.ran is not None:
        return record, "released"
    if record.waits is None and not also_future:
        return record, "unknown"
    changed = record._replace(not_before=due)
    if record.waits is None:
        return changed, "noted"
    return changed, "earlier" if due < record.due else "done"


def next_life(record: Record) -> int:
    """Return the life of what is sent under a task's id."""
    return 0 if record.ran is None else max(record.ran, record.cancelled or 0) + 1


def _number(full: tuple[str, str]) -> int:
    return int(full[0]) if full[0].isdigit() else -1
