"""Pauses: the due tasks of one name, or for one queue, wait until they are resumed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.headers import is_digits
from celery_rabbitdelay.levels.warning_limit import WarningLimit
from celery_rabbitdelay.registry.index import Names
from celery_rabbitdelay.registry.store import ScriptCall, Store, readable

logger = logging.getLogger(__name__)

#: Seconds for which a worker does not ask again what is paused.
FRESH: Final = 1.0

#: All tasks that a worker holds, by a pause or an open job, together ask again this often in a
#: second. If that is not enough for all, each asks again after this part of the time that it has
#: been held.
PER_SECOND: Final = 50
SHARE: Final = 0.25

#: Up to this part is taken off at random, so that not all of them come at once.
JITTER: Final = 0.25

#: The bounds of that, in milliseconds: the least, the least if there are many, and the most.
MIN_MS: Final = 1_000
MIN_OF_MANY_MS: Final = 5_000
MAX_MS: Final = 600_000

#: The last instant that a datetime can express: the end of the year 9999.
LATEST_MS: Final = 253_402_300_799_999

_TASK, _QUEUE = "task:", "queue:"


class Paused(NamedTuple):
    """Due tasks that wait until they are resumed.

    Attributes:
        task: The name of the tasks; None if they are those for a queue.
        queue: The name of the queue; None if they are those of a name.
        since: Since when.
        until: Until when; None until they are resumed.
    """

    task: str | None
    queue: str | None
    since: datetime
    until: datetime | None = None


class Pauses:
    """The pauses under one prefix.

    Args:
        store: Where it is kept.
        names: The names of all keys.
    """

    def __init__(self, store: Store, names: Names) -> None:
        self._store = store
        self._key = names.only("paused")
        self._unreadable = WarningLimit(logger, "Reads of what is paused")
        self._known: Mapping[str, int] | None = None
        self._known_until = 0.0

    def pause(self, task: str | None, queue: str | None, until_ms: int | None = None) -> datetime:
        """Pause the tasks of a name, or for a queue; return since when they are paused.

        Args:
            task: The name; None for a queue.
            queue: The queue; None for a name.
            until_ms: When the pause ends by itself, by the clock of Redis, in milliseconds since
                1970-01-01 UTC; None: at the resume. It replaces that of an earlier call.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        until = "" if until_ms is None else str(until_ms)
        return instant_of(int(self._change("pause", _field(task, queue), until)))

    def resume(self, task: str | None, queue: str | None) -> bool:
        """Take :meth:`pause` back; return whether they were paused."""
        return bool(self._change("resume", _field(task, queue), ""))

    def all(self) -> list[Paused]:
        """Return what is paused, the longest first."""
        paused = []
        for field, (since_ms, until_ms) in _read(self._look()).items():
            kind, _, name = field.partition(":")
            task, queue = (name, None) if kind == "task" else (None, name)
            until = None if until_ms is None else instant_of(until_ms)
            paused.append(Paused(task, queue, instant_of(since_ms), until))
        return sorted(paused, key=lambda each: each.since)

    def known(self) -> Mapping[str, int]:
        """Return what is paused, or was a second ago; for :func:`paused_since`.

        What cannot be read holds up no task: then nothing is paused, and it is logged. If the
        server of a cluster that knows is away, what it said last counts.

        Raises:
            RegistryUnavailable: Redis has not answered yet.
        """
        before = self._known
        if before is not None and time.monotonic() < self._known_until:
            return before
        try:
            known = self._readable_ones(self._look())
        except RegistryUnavailable:
            if before is None:
                raise
            known = before
        if known.keys() != (before or {}).keys():
            logger.info("Due tasks are paused: %s", ", ".join(sorted(known)) or "none")
        self._known, self._known_until = known, time.monotonic() + FRESH
        return known

    def oldest_ms(self) -> int | None:
        """Return since when something is paused, in milliseconds; None if nothing is.

        Raises:
            RegistryUnavailable: As for :meth:`known`.
        """
        return min(self.known().values(), default=None)

    def _readable_ones(self, answer: Sequence[str]) -> Mapping[str, int]:
        try:
            return {field: since_ms for field, (since_ms, _) in _read(answer).items()}
        except RegistryUnavailable as error:
            if self._unreadable.allows(str(error)):
                logger.error("No task is paused: %s", error)
            return {}

    def _look(self) -> Sequence[str]:
        return self._call("look")

    def _change(self, verb: str, field: str, until: str) -> str:
        return str(readable("what is paused", self._call(verb, field, until)))

    def _call(self, *words: str) -> Sequence[str]:
        call = ScriptCall("pause", [self._key], [words])
        answers: list[list[Sequence[str]]] = self._store.of_each(call)
        return answers[0][0]


def paused_since(known: Mapping[str, int], task: str, queue: str) -> int:
    """Return since when a task's name or its queue is paused, in milliseconds; 0 if neither is."""
    found = (known.get(_TASK + task, 0), known.get(_QUEUE + queue, 0))
    return min(filter(None, found), default=0)


class Questions:
    """Says when tasks that are held ask again: soon after what holds them ends, at little cost."""

    def __init__(self) -> None:
        #: When the last of them would ask if they came one after the other.
        self._last = 0.0

    def after_ms(self, held_ms: int) -> int:
        """Return after how many milliseconds a task asks again.

        Args:
            held_ms: For how long it has been held.
        """
        now, longest = time.monotonic(), min(max(held_ms * SHARE, MIN_OF_MANY_MS), MAX_MS)
        self._last = min(max(self._last, now) + 1 / PER_SECOND, now + MAX_MS / 1000)
        pause = max(min(longest, (self._last - now) * 1000), MIN_MS)
        return int(pause * random.uniform(1 - JITTER, 1))  # noqa: S311 - jitter


def _field(task: str | None, queue: str | None) -> str:
    return f"{_QUEUE}{queue}" if task is None else f"{_TASK}{task}"


def _read(answer: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Return since when and until when what is paused, by field, in milliseconds.

    What is no instant counts as long ago, or as no end.
    """
    told = list(readable("what is paused", answer))
    paused: dict[str, tuple[int, int | None]] = {}
    for field, value in zip(told[::2], told[1::2], strict=True):
        since, _, until = value.partition(" ")
        since_ms = max(int(since), 1) if is_digits(since, LATEST_MS) else 1
        paused[field] = since_ms, int(until) if is_digits(until, LATEST_MS) else None
    return paused
