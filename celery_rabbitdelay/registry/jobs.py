"""Jobs: tasks in any number of which all run, or none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from threading import Lock
from typing import Any, Final

from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.registry.connection import ScriptCall, Store
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.index import Names

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

    Several jobs may have a name, one after the other; each has an id of its own.

    Args:
        store: Where they are kept.
        names: The names of all keys.
        keep_ms: For how many milliseconds what became of a job outlives its tasks.
        margin_ms: For how many milliseconds after its last task is due its name is taken.

    Attributes:
        on_expired: Called, if it is set, for each job that turns out not to have been committed in
            time, in the process that finds out first.
    """

    def __init__(self, store: Store, names: Names, keep_ms: int, margin_ms: int) -> None:
        self._store = store
        self._names = names
        self._keep_ms = keep_ms
        self._margin_ms = margin_ms
        self.on_expired: Callable[[], None] | None = None
        #: The state of jobs that cannot change any more, by name and id, and until when (of the
        #: monotonic clock) Redis keeps them at least; not at all if it has expired, because a note
        #: of its commit may still come.
        self._ended: dict[tuple[str, str], tuple[JobState, float]] = {}
        #: The ids of jobs of which this process does not know whether it has opened them: other
        #: threads that open the same job have ids of their own.
        self._opening: dict[str, str] = {}
        self._lock = Lock()

    def open(self, job: str, expires_ms: int) -> None:
        """Open a job, whose tasks wait until it is committed.

        If the answer of Redis is lost, call it again in the same process: it knows its own job.

        Args:
            job: Its name.
            expires_ms: Milliseconds after which it turns aborted unless it is committed.

        Raises:
            JobClosed: There is such a job already, open or not.
        """
        job_id = self._opening.pop(job, None) or new_copy()
        try:
            (answer,) = self._store.call_durably([self._script(job, "open", job_id, expires_ms)])
        except RegistryUnavailable:
            self._opening[job] = job_id
            raise
        state, _, _, _, *words = _readable(job, answer)
        self._note(words)
        if state != "opened":
            raise JobClosed(job, state)

    def join(self, job: str, due_ms: int) -> tuple[JobState | None, str]:
        """Note that a task is sent with a job, and when it is due.

        Returns:
            The job's state, None if there is no such job; and its id.
        """
        state, job_id = self._call(job, "join", "", due_ms)
        return JobState(state) if state else None, job_id

    def end(self, job: str, state: JobState) -> tuple[str, int]:
        """Commit or abort a job, by one write. To do so again changes nothing.

        Returns:
            The job's id, and when it would have expired, in milliseconds since 1970-01-01 UTC.

        Raises:
            JobClosed: It was ended otherwise, or there is no such job.
        """
        verb = "commit" if state is JobState.COMMITTED else "abort"
        (answer,) = self._store.call_durably([self._script(job, verb)])
        found, job_id, _, expires_ms, *words = _readable(job, answer)
        self._note(words)
        if found != state.value:
            raise JobClosed(job, found or "unknown")
        return str(job_id), int(expires_ms)

    def confirm(self, job: str, job_id: str) -> None:
        """Say that a job was committed, in case that Redis has lost it; see :meth:`end`."""
        self._call(job, "confirm", job_id)
        with self._lock:
            self._ended.pop((job, job_id), None)

    def state(self, job: str) -> JobState | None:
        """Return the state of the latest job of a name; None if there is none."""
        state = self.states([(job, "")]).get((job, ""))
        return _readable(job, state) if isinstance(state, str) else state

    def opened(self, now_ms: int, most: int) -> list[tuple[str, int]]:
        """Return the jobs that are open, those that expire first before the others.

        Args:
            now_ms: The time by the clock of Redis.
            most: At most so many.

        Returns:
            Their names, and when they expire, in milliseconds since 1970-01-01 UTC.
        """
        found: list[list[tuple[str, float]]] = self._store.commands(
            lambda pipe: [
                pipe.zrangebyscore(name, f"({now_ms}", "+inf", 0, most, withscores=True)
                for name in self._names.open_jobs()
            ]
        )
        jobs = sorted((int(expires_ms), name) for shard in found for name, expires_ms in shard)
        # An earlier version ends a job, and leaves it in the list.
        states = self.states([(name, "") for _, name in jobs[:most]])
        return [
            (name, expires_ms)
            for expires_ms, name in jobs[:most]
            if states.get((name, "")) is JobState.OPEN
        ]

    def states(self, jobs: Collection[tuple[str, str]]) -> dict[tuple[str, str], JobState | str]:
        """Return the states of jobs, without those that do not exist.

        Args:
            jobs: Their names and ids; an empty id is that of the latest job of the name.

        Returns:
            For each its state, or if its record cannot be read, a text that says so.
        """
        now = time.monotonic()
        with self._lock:
            ended = {job: self._ended[job] for job in jobs if job in self._ended}
        found: dict[tuple[str, str], JobState | str] = {
            job: state for job, (state, until) in ended.items() if now < until
        }
        asked = [job for job in jobs if job not in found]
        calls = [self._script(job, "look", job_id) for job, job_id in asked]
        for job, answer in zip(asked, self._store.call_each(calls), strict=True):
            if isinstance(answer, str):
                found[job] = answer
                continue
            word, _, left_ms, _, *expired = answer
            if not word:
                continue
            self._note(expired)
            found[job] = state = JobState(word)
            if state is not JobState.OPEN and job[1]:
                self._remember(job, state, 0.0 if expired else now + left_ms / 1000)
        return found

    def _remember(self, job: tuple[str, str], state: JobState, until: float) -> None:
        with self._lock:
            before = self._ended.pop(job, None)
            while len(self._ended) >= REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._ended[job] = (state, until)
        if not (before or until):
            logger.warning("Job %r was not committed in time; its tasks do not run.", job[0])

    def _call(self, job: str, verb: str, job_id: str = "", instant: int = 0) -> tuple[str, str]:
        (answer,) = self._store.call_each([self._script(job, verb, job_id, instant)])
        self._note(_readable(job, answer)[4:])
        return str(answer[0]), str(answer[1])

    def _script(self, job: str, verb: str, job_id: str = "", instant: int = 0) -> ScriptCall:
        arguments = [(verb, job_id, instant, self._margin_ms)]
        return ScriptCall("job", [self._names.of("job", job)], arguments, self._keep_ms)

    def _note(self, words: Sequence[str]) -> None:
        if "now" in words and self.on_expired is not None:
            self.on_expired()


def _readable(job: str, answer: Any) -> Any:
    """Return what the script answers.

    Raises:
        RegistryUnavailable: It is a text, which says that the record of the job cannot be read.
    """
    if isinstance(answer, str):
        raise RegistryUnavailable(f"the record of job {job!r} cannot be read: {answer}")
    return answer
