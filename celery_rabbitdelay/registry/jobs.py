"""Jobs: tasks in any number of which all run, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from threading import Lock
from typing import Any, Final

from celery_rabbitdelay.exceptions import JobClosed
from celery_rabbitdelay.registry.connection import Call, Store
from celery_rabbitdelay.registry.names import Names

__all__ = ["JobState", "Jobs"]

logger = logging.getLogger(__name__)

#: How many jobs that are committed or aborted are remembered, so that their tasks need not ask.
REMEMBERED: Final = 10_000


class JobState(Enum):
    """What becomes of the tasks of a job that are due."""

    #: They wait.
    OPEN = "open"

    #: They run.
    COMMITTED = "committed"

    #: They do not run.
    ABORTED = "aborted"


class Jobs:
    """The jobs under one prefix.

    Args:
        store: Where they are kept.
        names: The names of all keys.
        margin_ms: For how many milliseconds after it is due a task may still arrive.

    Attributes:
        on_expired: Called, if it is set, for each job that turns out not to have been committed in
            time, in the process that finds out first.
    """

    def __init__(self, store: Store, names: Names, margin_ms: int) -> None:
        self._store = store
        self._names = names
        self._margin_ms = margin_ms
        self.on_expired: Callable[[], None] | None = None
        #: The state of jobs that cannot change any more, and until when (of the monotonic clock)
        #: Redis keeps them at least: then their names are free again.
        self._ended: dict[str, tuple[JobState, float]] = {}
        self._lock = Lock()

    def open(self, job: str, expires_ms: int) -> None:
        """Open a job, whose tasks wait until it is committed.

        Args:
            job: Its name.
            expires_ms: Milliseconds after which it turns aborted unless it is committed.

        Raises:
            JobClosed: There is such a job already, open or not.
        """
        lives = _now_ms() + expires_ms + self._margin_ms
        state = self._call(job, "open", expires_ms, lives)
        if state:
            raise JobClosed(job, state)

    def join(self, job: str, due_ms: int) -> None:
        """Note that a task is sent with an open job, and when it is due.

        Raises:
            JobClosed: The job is not open.
        """
        state = self._call(job, "join", 0, due_ms + self._margin_ms)
        if state != JobState.OPEN.value:
            raise JobClosed(job, state or "unknown")

    def extend(self, lives: Mapping[str, int]) -> None:
        """Let jobs live longer, because tasks of theirs were postponed.

        Args:
            lives: For each job until when, in milliseconds since 1970-01-01 UTC.
        """
        self._store.call_each(
            [
                Call("job", [self._names.job(job)], ("join", 0, until))
                for job, until in lives.items()
            ]
        )

    def end(self, job: str, state: JobState) -> None:
        """Commit or abort a job, by one write. To do so again changes nothing.

        Raises:
            JobClosed: It was ended otherwise, or there is no such job.
        """
        verb = "commit" if state is JobState.COMMITTED else "abort"
        found = self._call(job, verb)
        if found != state.value:
            raise JobClosed(job, found or "unknown")

    def state(self, job: str) -> JobState | None:
        """Return the state of a job; None if there is none."""
        return self.states([job]).get(job)

    def states(self, jobs: Collection[str]) -> dict[str, JobState]:
        """Return the states of jobs, without those that do not exist."""
        now = time.monotonic()
        with self._lock:
            ended = {job: self._ended[job] for job in jobs if job in self._ended}
        found = {job: state for job, (state, until) in ended.items() if now < until}
        asked = [job for job in jobs if job not in found]
        answers = self._store.call_each(
            [Call("job", [self._names.job(job)], ("look",)) for job in asked]
        )
        for job, (word, left_ms, *expired) in zip(asked, answers, strict=True):
            if not word:
                continue
            self._note(expired)
            found[job] = JobState(word)
            if found[job] is not JobState.OPEN:
                self._remember(job, found[job], now + left_ms / 1000, bool(expired))
        return found

    def _remember(self, job: str, state: JobState, until: float, has_expired: bool) -> None:
        with self._lock:
            self._ended.pop(job, None)
            while len(self._ended) >= REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._ended[job] = (state, until)
        if has_expired:
            logger.warning("Job %r was not committed in time; its tasks do not run.", job)

    def _call(self, job: str, verb: str, *arguments: int) -> str:
        answer: list[Any] = self._store.call("job", [self._names.job(job)], verb, *arguments)
        self._note(answer[2:])
        return str(answer[0])

    def _note(self, words: Sequence[str]) -> None:
        if "now" in words and self.on_expired is not None:
            self.on_expired()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
