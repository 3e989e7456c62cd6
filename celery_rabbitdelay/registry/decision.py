"""The registry's rule in pure Python, with its input and output types.

The rule exists twice: ``arrive.lua`` and the other scripts apply it in Redis, and the functions
here apply it in memory, for tests of applications. In ``tests/registry``,
``integration/test_registry_rule.py`` compares the two, and ``unit/test_registry_rule.py`` explores
sequences of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from random import getrandbits
from typing import Any, NamedTuple, Self

from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.headers import DelayHeaders, Mark, is_digits, is_int, is_life


class Verdict(Enum):
    """The verdict on an arrived task."""

    #: The task runs.
    RUN = "run"

    #: The task does not run: it was cancelled.
    CANCELLED = "cancelled"

    #: The task does not run: its job was aborted, or was not committed in time.
    EXPIRED = "expired"

    #: The task does not run: a newer task was sent under its key.
    SUPERSEDED = "superseded"

    #: This message does not run: another message of the same task does.
    REPLACED = "replaced"

    #: The task does not run: it was sent with ``once``, has run, and the message is not
    #: redelivered.
    DUPLICATE = "duplicate"

    #: The task goes back into the levels: it was postponed or paused, or its job is still open.
    LATER = "later"

    #: The task is undeliverable: it is so late that decisions about it may have expired.
    FORGOTTEN = "forgotten"

    #: The record of the task, of its key or of its job cannot be read.
    UNREADABLE = "unreadable"


class Outcome(Enum):
    """The outcomes of ``cancel`` and ``postpone``, the least certain outcome first."""

    #: Too late: the task has arrived at a worker already. A cancellation stops its retries, and a
    #: worker that has not started the task may still revoke it. A postponement changes nothing.
    RELEASED = "released"

    #: The registry does not know the task or the key; no decision was recorded.
    UNKNOWN = "unknown"

    #: The registry does not know the task, and recorded the decision: if the task arrives later, it
    #: will not run, or not before its new due time.
    NOTED = "noted"

    #: The task was already cancelled or superseded; nothing was changed.
    CANCELLED = "cancelled"

    #: The task was waiting. The task will not run, or will not run before its new due time.
    DONE = "done"


class Ticket(NamedTuple):
    """Counters that the registry assigns to a task before it is sent; its message carries them.

    Attributes:
        life: How often the task was sent again under its id after it had run.
        order: The task's position among the tasks with its key; 0 without a key.
    """

    life: int = 0
    order: int = 0

    @classmethod
    def of(cls, words: Mapping[str, object]) -> Self:
        """Parse the headers, which any sender may have written."""
        life, order = words.get(names.LIFE), words.get(names.ORDER)
        return cls(
            int(life) if is_life(life) else 0,
            int(order) if is_digits(order, names.MAX_EXACT) else 0,
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers in which a message carries the ticket."""
        return {
            name: str(value)
            for name, value in ((names.LIFE, self.life), (names.ORDER, self.order))
            if value
        }


class Arrival(NamedTuple):
    """A delayed task that is due and has arrived.

    Attributes:
        task_id: The task's id.
        due_ms: When the task was due, in milliseconds since 1970-01-01 UTC.
        attempt: The attempt, as :func:`attempt_of` writes it.
        copy: The message's header :data:`COPY`; empty without the header.
        ticket: The message's headers :data:`LIFE` and :data:`ORDER`.
        key: The message's header :data:`KEY`; empty without the header.
        job: The message's header :data:`JOB`; empty without the header.
        job_id: The message's header :data:`JOB_ID`; empty for the latest job of that name.
        once: The queue at which the task arrives, if only one message of the attempt may run there;
            empty if all messages may run, and for an occurrence of a schedule.
        mark: The message's header :data:`ONCE`.
        name: The name of this arrival, if only one message may run; see :meth:`named`.
        redelivered: Whether RabbitMQ has delivered this message before.
        in_doubt: Whether the message has the header :data:`REDELIVERED`.
        put_back_ms: The time until which the registry last put the task back; 0 if it never did.
        paused_ms: The start of the pause of the task's name or queue; 0 if neither is paused.
        is_occurrence: Whether the task belongs to a schedule; the schedule's record then decides,
            and never expires.
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
        """Rename the arrival if only one message may run; the arrival's mark keeps the old name."""
        if not self.once and not self.is_occurrence:
            return self
        mark = self.mark.after(self.name) if self.name else self.mark
        return self._replace(mark=mark, name=new_copy())

    def put_back(self, is_answer: bool) -> dict[str, Any]:
        """Return headers that name this arrival, for a message that is put back.

        Redis may have recorded this arrival although the answer was lost. With these headers, the
        next arrival of the message does not count as a duplicate of this arrival.

        Args:
            is_answer: Whether Redis has answered.
        """
        headers: dict[str, Any] = {names.ONCE: self.mark.after(self.name).text}
        if not is_answer and len(self.mark.former) == names.MAX_FORMER:
            headers[names.REDELIVERED] = True
        return headers

    def follows(self, mark: Mark, arrival: str) -> bool:
        """Return whether this arrival may replace the arrival that was allowed to run.

        Args:
            mark: The mark of the arrival that was allowed to run.
            arrival: The name of the arrival that was allowed to run.
        """
        name, generation, former = self.mark
        is_same = (mark.generation, arrival) == (generation, self.name)
        is_heir = is_same or arrival in former or mark.generation <= self.heir_of
        return mark.name == name and is_heir

    @property
    def identity(self) -> tuple[str, str, int]:
        """The arguments of ``follows`` in ``shared.lua``."""
        name, generation, former = self.mark
        return f"{name}.{generation}.{self.name}", f".{'.'.join(former)}.", self.heir_of

    @property
    def heir_of(self) -> int:
        """The latest generation whose arrivals this arrival may replace without naming them, or -1.

        A message's generation is the number of times that the message was put back. A message that
        RabbitMQ redelivers, or that was put back after a redelivery, cannot name its former
        arrivals. The copies of a message that was put back do not replace one another's arrivals.
        """
        if self.redelivered:
            return self.mark.generation
        return self.mark.generation - 1 if self.in_doubt else -1

    def dropped_by(self, word: str) -> str:
        """Return why the task was dropped: the verdict, and the key or job; empty if unknown."""
        by = {"superseded": self.key, "expired": self.job}.get(word)
        return "" if by is None else f"{word} {by}"

    @property
    def has_options(self) -> bool:
        """Whether the task was sent with an option of the registry."""
        return bool(self.copy or self.job or self.once or self.key) and not self.is_occurrence

    @classmethod
    def of(cls, headers: DelayHeaders, due_ms: int, queue: str, redelivered: bool) -> Arrival:
        """Return the unnamed arrival of a message, from its headers."""
        words, others = headers.registry, headers.others
        task_id = _text(others.get("id"))
        if not words:
            return cls(task_id, due_ms, redelivered=redelivered)
        once, is_occurrence = words.get(names.ONCE), names.SCHEDULE in words
        has_once = once is not None and task_id != "" and not is_occurrence
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
            (queue or "-") if has_once else "",
            Mark.of(once),
            redelivered=redelivered,
            in_doubt=names.REDELIVERED in words,
            put_back_ms=headers.early.until_ms,
            is_occurrence=is_occurrence,
        )


class Registration(NamedTuple):
    """The registration of a sent message.

    Attributes:
        task_id: The task's id.
        copy: The name of the message, from its header :data:`COPY`.
        due_ms: When the message is due, in milliseconds since 1970-01-01 UTC.
        attempt: The attempt; see :func:`.attempt_of`.
        ticket: The ticket that the registry assigned before the send.
        key: The task's key; empty if it has none.
        name: The task's name. This field and the following fields are empty if the task is not
            tracked.
        job: The task's job; empty if it has none.
        message: The stored message, from which the task can be sent again.
        queue: The queue that gets the task when it is due; empty if the exchange routes it.
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
        """Make the registration of a message; tracked tasks need ``name`` and ``message``."""
        sent = Arrival.of(headers, headers.due_ms or 0, "", redelivered=False)
        of_message = sent.copy, sent.due_ms, sent.attempt, sent.ticket, sent.key
        job, queue = (sent.job, headers.queue or "") if name else ("", "")
        return cls(task_id, *of_message, name, job, message, queue)


class Decision(NamedTuple):
    """The decision on an arrival.

    Attributes:
        verdict: The verdict.
        until_ms: With ``LATER``: until when the task waits, in milliseconds since 1970-01-01.
        is_new_due: With ``LATER``: whether ``until_ms`` is the new due time of a postponed task;
            otherwise the registry is asked again at that time.
        why: With ``UNREADABLE``: the error from Redis.
        is_paused: With ``LATER``: whether the task waits for a resume. The task then waits until
            ``until_ms`` only if it cannot wait in the queue of paused tasks.
        is_answer: Whether Redis has answered. Without an answer, Redis may have recorded another
            decision.
    """

    verdict: Verdict
    until_ms: int = 0
    is_new_due: bool = False
    why: str = ""
    is_paused: bool = False
    is_answer: bool = True


def new_copy() -> str:
    """Return a name for a message: 48 random bits distinguish the messages of one task."""
    return f"{getrandbits(48):012x}"  # not a secret


def attempt_of(retries: object, nesting: object) -> str:
    """Return the name of an attempt.

    The task's id does not name an attempt, because a retry and a replacement (``Task.replace``)
    keep the id.

    Args:
        retries: How often the task was retried: Celery's header ``retries``.
        nesting: The number of replacements: Celery's header ``replaced_task_nesting``.
    """
    counts = (count if is_int(count, 0, names.MAX_EXACT) else 0 for count in (retries, nesting))
    return ".".join(map(str, counts))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class Record(NamedTuple):
    """The record of a task.

    Attributes:
        cancelled: The last cancelled life of the task; None if the task is not cancelled. If the
            task had already run, its next life is cancelled too, because a message of that life may
            have been sent already.
        not_before: The due time that the task was postponed to; None if it was not postponed.
        won: Every attempt that was allowed to run, with the name of its message.
        marks: With ``once``, per attempt: the mark and the name of the last arrival that was
            allowed to run.
        ran: The latest life in which a message was allowed to run; None if none was.
        waits: The registered attempt that waits; None if no attempt waits.
        copy: The name of the waiting attempt's message that was registered last.
        due: The earliest due time of the waiting attempt's messages.
        order: The task's order among the tasks with its key.
        dropped: Why the last attempt was dropped when it arrived, unless a message has run since;
            see :meth:`Arrival.dropped_by`. No decision depends on it.
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
    dropped: str = ""

    @property
    def life(self) -> int:
        """The latest known life."""
        waiting = int(self.waits[0]) if self.waits and self.waits[0].isdigit() else 0
        return max(self.ran or 0, waiting)

    def is_cancelled(self, life: int) -> bool:
        """Return whether messages of a life are cancelled."""
        return self.cancelled is not None and life <= self.cancelled

    def settled(self) -> Record:
        """Return the record without its waiting attempt."""
        return self._replace(waits=None, copy="", due=0, order=0, dropped="")

    def marked(self, arrival: Arrival) -> Record:
        """Return the record with the mark of an arrival, which replaces an earlier mark."""
        ran = arrival.mark._replace(former=()), arrival.name
        return self._replace(marks=frozenset({**dict(self.marks), arrival.attempt: ran}.items()))


EMPTY = Record()


def arrive(record: Record, message: Arrival, word: str, is_old: bool = False) -> tuple[Record, str]:
    """Apply an arrival; return the new record and the verdict.

    Args:
        record: The record of the task.
        message: The message.
        word: The verdict of the task's key and job: ``run``, ``later``, ``expired``, ``superseded``
            or ``replaced``.
        is_old: Whether the message's due time and its last return to the levels are so long ago
            that decisions about the message may have expired.
    """
    full, is_paused = _full(message), bool(message.paused_ms)
    winner = dict(record.won).get(full) if message.copy else None
    first = dict(record.marks).get(message.attempt) if message.once else None
    if record.is_cancelled(message.ticket.life):
        return record, "cancelled"
    if winner not in (None, message.copy):
        return record, "replaced"
    if first is not None:
        if not message.follows(*first):
            return record, "duplicate"
        return record.marked(message), "paused" if is_paused else "run"
    waits = record.waits == full
    if winner is None:
        if word in ("superseded", "replaced", "expired"):
            if waits and record.copy == message.copy:
                record = record.settled()._replace(dropped=message.dropped_by(word))
            return record, word
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
        ran = max(record.ran or 0, message.ticket.life, 0)
        record = record._replace(won=won, ran=ran, dropped="")
        record = record.settled() if waits else record
    if message.once:
        record = record.marked(message)
    return record, "run"


def _full(message: Arrival | Registration) -> tuple[str, str]:
    """Return the life and the attempt of a message."""
    life = message.ticket.life
    return (f"?{message.copy}" if life < 0 else str(life)), message.attempt


def register(record: Record, message: Registration) -> tuple[Record, str]:
    """Apply a registration; return the new record and the state of the message."""
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
    """Apply a cancellation; return the new record and the outcome.

    Args:
        record: The record of the task.
        newest: The order of the newest task with the same key.
        also_future: Whether to record the cancellation of an unknown task.
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
    """Apply a postponement; return the new record and the outcome.

    The outcome ``earlier`` means that the caller has to send a second message.

    Args:
        record: The record of the task.
        due: The new due time.
        newest: The order of the newest task with the same key.
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
    """Return the life of the next message sent under a task's id."""
    return 0 if record.ran is None else max(record.ran, record.cancelled or 0) + 1


def _number(full: tuple[str, str]) -> int:
    return int(full[0]) if full[0].isdigit() else -1
