"""The registry's rule in Python: what is noted about a task, and what becomes of its messages.

``arrive.lua`` and its neighbours do the same in Redis;
``tests/registry/integration/test_registry_rule.py`` compares the two.
``tests/registry/unit/test_registry_rule.py`` explores what can happen to the messages.
"""

from __future__ import annotations

from typing import NamedTuple

from celery_rabbitdelay.registry.decision import Arrival, Registration


class Mark(NamedTuple):
    """What was let run with ``once``.

    Attributes:
        name: The name of the message.
        generation: How often it had been put back.
        arrival: The name of its arrival.
    """

    name: str
    generation: int
    arrival: str


class Record(NamedTuple):
    """What is noted about a task.

    Attributes:
        cancelled: The life up to which it is cancelled; None if it is not. After it has run, that
            includes the one after it, of which a message may be on its way.
        not_before: Until when it was postponed; None if it was not.
        won: For each attempt the name of the message that was let run.
        marks: With ``once``, for each attempt the mark of what was let run last.
        ran: The latest life that a message was let run of; None if none was.
        waits: The attempt that is registered and waits; None if none does.
        copy: The name of its message that was registered last.
        due: When the first of its messages is due.
        order: Its order under its key.
    """

    cancelled: int | None = None
    not_before: int | None = None
    won: frozenset[tuple[tuple[str, str], str]] = frozenset()
    marks: frozenset[tuple[str, Mark]] = frozenset()
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
        mark = Mark(arrival.mark.name, arrival.mark.generation, arrival.name)
        return self._replace(marks=frozenset({**dict(self.marks), arrival.attempt: mark}.items()))


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
        if not _follows(message, first):
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


def _follows(message: Arrival, first: Mark) -> bool:
    """Return whether an arrival may take the place of the one that was let run."""
    arrivals = (*message.mark.former, message.name)
    is_known = first.arrival in arrivals or first.generation <= message.heir_of
    return first.name == message.mark.name and is_known


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
