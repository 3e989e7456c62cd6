"""The question about a task that arrives, and the registry's answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from random import getrandbits
from typing import Any, NamedTuple, Self

from celery_rabbitdelay.levels.headers import (
    COPY,
    JOB,
    JOB_ID,
    KEY,
    LIFE,
    MAX_EXACT,
    ONCE,
    ORDER,
    REDELIVERED,
    SCHEDULE,
    DelayHeaders,
    Mark,
    is_digits,
    is_int,
    is_life,
)


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
    """The state in which ``cancel`` or ``postpone`` found a task."""

    #: The task was waiting, and will not run, or not before.
    DONE = "done"

    #: Too late: the task has arrived at a worker already. A cancel stops its retries, and a worker
    #: that has not started it may still revoke it, as Celery does; a postponement changes nothing.
    RELEASED = "released"

    #: Nothing is known of the task, and the decision was noted: it will not run, or not before,
    #: unless it has arrived already.
    NOTED = "noted"

    #: Nothing is known of the task, or no task has the key; nothing was noted.
    UNKNOWN = "unknown"

    #: The task was cancelled or superseded before; nothing was changed.
    CANCELLED = "cancelled"


class Ticket(NamedTuple):
    """What the registry says of a task before it is sent, for its message to carry.

    Attributes:
        life: How often the task was sent anew under its id after it had run.
        order: Its order among the tasks under its key; 0 without one.
    """

    life: int = 0
    order: int = 0

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Self:
        """Read it from what the headers say, which any sender may have written."""
        life, order = words.get(LIFE), words.get(ORDER)
        return cls(
            int(life) if is_life(life) else 0, int(order) if is_digits(order, MAX_EXACT) else 0
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers in which a message carries it."""
        return {
            name: str(value) for name, value in ((LIFE, self.life), (ORDER, self.order)) if value
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
        """The last generation any arrival of which it follows, whether it knows its name or not.

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
        once = words.get(ONCE) if task_id else None
        copy, key, job, job_id = (_text(words.get(name)) for name in (COPY, KEY, JOB, JOB_ID))
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
            in_doubt=REDELIVERED in words,
            put_back_ms=headers.early.until_ms,
            is_occurrence=SCHEDULE in words,
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
    counts = (each if is_int(each, 0, MAX_EXACT) else 0 for each in (retries, nesting))
    return ".".join(map(str, counts))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
