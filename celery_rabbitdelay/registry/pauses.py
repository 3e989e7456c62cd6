"""Pauses: the due tasks with a name, or for a queue, wait until they are resumed."""

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

#: How long a worker caches the pauses, in seconds.
FRESH: Final = 1.0

#: The maximum number of questions per second that a worker asks about tasks held by a pause or an
#: open job; and the longest wait of a task for its turn, as a fraction of the time for which the
#: task has been held.
PER_SECOND: Final = 50
SHARE: Final = 0.25

#: Waits are shortened at random by up to this fraction, so that tasks do not all return at once.
JITTER: Final = 0.25

#: The minimum of a wait in milliseconds; and the bounds of its maximum, which grows with the time
#: for which the task has been held.
MIN_MS: Final = 1_000
MIN_OF_MANY_MS: Final = 5_000
MAX_MS: Final = 600_000

#: The last instant that a datetime can express: the end of the year 9999.
LATEST_MS: Final = 253_402_300_799_999

_TASK, _QUEUE = "task:", "queue:"


class Paused(NamedTuple):
    """A pause.

    Attributes:
        task: The name of the paused tasks; None if a queue is paused.
        queue: The name of the paused queue; None if a task name is paused.
        since: The start of the pause.
        until: The end of the pause; None if it lasts until it is ended.
    """

    task: str | None
    queue: str | None
    since: datetime
    until: datetime | None = None


class Pauses:
    """The pauses under one prefix.

    Args:
        store: Redis.
        names: The names of all keys.
    """

    def __init__(self, store: Store, names: Names) -> None:
        self._store = store
        self._key = names.only("paused")
        self._unreadable = WarningLimit(logger, "Failed reads of the pauses")
        self._known: Mapping[str, int] | None = None
        self._known_until = 0.0

    def pause(self, task: str | None, queue: str | None, until_ms: int | None = None) -> datetime:
        """Pause the tasks with a name or for a queue; return the start of the pause.

        Args:
            task: The name of the tasks; None to pause a queue.
            queue: The name of the queue; None to pause a task name.
            until_ms: The end of the pause by the clock of Redis, in milliseconds since 1970-01-01
                UTC; None for no end. This end replaces an earlier end.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        until = "" if until_ms is None else str(until_ms)
        return instant_of(int(self._change("pause", _field(task, queue), until)))

    def resume(self, task: str | None, queue: str | None) -> bool:
        """End a pause; return whether the tasks were paused."""
        return bool(self._change("resume", _field(task, queue), ""))

    def all(self) -> list[Paused]:
        """Return all pauses, oldest first."""
        paused = []
        for field, (since_ms, until_ms) in _read(self._look()).items():
            kind, _, name = field.partition(":")
            task, queue = (name, None) if kind == "task" else (None, name)
            until = None if until_ms is None else instant_of(until_ms)
            paused.append(Paused(task, queue, instant_of(since_ms), until))
        return sorted(paused, key=lambda pause: pause.since)

    def known(self) -> Mapping[str, int]:
        """Return the pauses for :func:`paused_since`, from a cache of :data:`FRESH` seconds.

        If the list of pauses cannot be read, no task is held, and an error is logged. While Redis
        is down, its last answer counts.

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
            logger.info("Pauses have changed; paused now: %s", ", ".join(sorted(known)) or "none")
        self._known, self._known_until = known, time.monotonic() + FRESH
        return known

    def oldest_ms(self) -> int | None:
        """Return the start of the oldest pause, in milliseconds; None if nothing is paused.

        Raises:
            RegistryUnavailable: As for :meth:`known`.
        """
        return min(self.known().values(), default=None)

    def _readable_ones(self, answer: Sequence[str]) -> Mapping[str, int]:
        try:
            return {field: since_ms for field, (since_ms, _) in _read(answer).items()}
        except RegistryUnavailable as error:
            if self._unreadable.allows(str(error)):
                logger.error("Cannot read pauses; all due tasks run: %s", error)
            return {}

    def _look(self) -> Sequence[str]:
        return self._call("look")

    def _change(self, verb: str, field: str, until: str) -> str:
        return str(readable("the list of pauses", self._call(verb, field, until)))

    def _call(self, *words: str) -> Sequence[str]:
        call = ScriptCall("pause", [self._key], [words])
        answers: list[list[Sequence[str]]] = self._store.of_each(call)
        return answers[0][0]


def paused_since(known: Mapping[str, int], task: str, queue: str) -> int:
    """Return the start of a task's pause, by name or queue, in milliseconds; 0 if not paused."""
    found = (known.get(_TASK + task, 0), known.get(_QUEUE + queue, 0))
    return min(filter(None, found), default=0)


class Questions:
    """Computes when to ask again about a held task: the longer it is held, the later."""

    def __init__(self) -> None:
        #: The turn of the latest question: held tasks take turns to ask.
        self._last = 0.0

    def after_ms(self, held_ms: int) -> int:
        """Return the wait in milliseconds until a held task asks again.

        Args:
            held_ms: How long the task has been held.
        """
        now, longest = time.monotonic(), min(max(held_ms * SHARE, MIN_OF_MANY_MS), MAX_MS)
        self._last = min(max(self._last, now) + 1 / PER_SECOND, now + MAX_MS / 1000)
        pause = max(min(longest, (self._last - now) * 1000), MIN_MS)
        return int(pause * random.uniform(1 - JITTER, 1))  # noqa: S311 - jitter


def _field(task: str | None, queue: str | None) -> str:
    return f"{_QUEUE}{queue}" if task is None else f"{_TASK}{task}"


def _read(answer: Sequence[str]) -> dict[str, tuple[int, int | None]]:
    """Return the start and the end of every pause by field, in milliseconds.

    A pause with an invalid start counts as old; a pause with an invalid end has no end.
    """
    words = list(readable("the list of pauses", answer))
    paused: dict[str, tuple[int, int | None]] = {}
    for field, value in zip(words[::2], words[1::2], strict=True):
        since, _, until = value.partition(" ")
        since_ms = max(int(since), 1) if is_digits(since, LATEST_MS) else 1
        paused[field] = since_ms, int(until) if is_digits(until, LATEST_MS) else None
    return paused
