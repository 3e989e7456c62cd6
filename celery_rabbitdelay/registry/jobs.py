"""A job is a set of tasks, however many. All of them run, or none does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.index import Names
from celery_rabbitdelay.registry.store import ScriptCall, Store, readable

logger = logging.getLogger(__name__)

#: How many jobs that are committed are remembered, so that their tasks need not ask.
REMEMBERED: Final = 10_000


class JobState(Enum):
    """What becomes of the tasks of a job that are due."""

    #: They wait.
    OPEN = "open"

    #: They run.
    COMMITTED = "committed"

    #: They do not run.
    ABORTED = "aborted"


_STATES: Final = frozenset(each.value for each in JobState)


class Job(NamedTuple):
    """A job that Redis remembers.

    Attributes:
        name: Its name.
        state: Its state.
        opened: When it was opened.
        expires: When it turns aborted unless it is committed, or would have.
    """

    name: str
    state: JobState
    opened: datetime
    expires: datetime


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
        #: The names and ids of jobs that are committed: nothing changes that any more, and when
        #: Redis forgets them, their tasks run likewise.
        self._committed: set[tuple[str, str]] = set()
        #: The ids of jobs of which this process does not know whether it has opened them: other
        #: threads that open the same job have ids of their own.
        self._opening: dict[str, str] = {}

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
            state, *_ = self._call(job, "open", job_id, expires_ms)
        except RegistryUnavailable:
            self._opening[job] = job_id
            raise
        if state != "opened":
            raise JobClosed(job, state)

    def join(self, job: str, due_ms: int) -> tuple[JobState | None, str]:
        """Note that a task is sent with a job, and when it is due.

        Returns:
            The job's state, None if there is no such job; and its id.
        """
        state, job_id, _ = self._call(job, "join", "", due_ms)
        return JobState(state) if state else None, job_id

    def end(self, job: str, state: JobState) -> tuple[str, int]:
        """Commit or abort a job, by one write. To do so again changes nothing.

        Returns:
            The job's id, and when it would have expired, in milliseconds since 1970-01-01 UTC.

        Raises:
            JobClosed: It was ended otherwise, or there is no such job.
        """
        verb = "commit" if state is JobState.COMMITTED else "abort"
        found, job_id, expires_ms = self._call(job, verb)
        if found != state.value:
            raise JobClosed(job, found or "unknown")
        return job_id, int(expires_ms)

    def confirm(self, job: str, job_id: str) -> None:
        """Say that a job was committed, in case that Redis has lost it; see :meth:`end`."""
        self._call(job, "confirm", job_id)

    def state(self, job: str) -> JobState | None:
        """Return the state of the latest job of a name; None if there is none."""
        state = self.states([(job, "")]).get((job, ""))
        known: JobState | None = readable(f"the record of job {job!r}", state)
        return known

    def all(self, now_ms: int, most: int) -> list[Job]:
        """Return the jobs that Redis remembers, the newest first.

        Args:
            now_ms: The time by the clock of Redis.
            most: At most so many.
        """
        lists = [*self._names.jobs()]
        found: list[list[tuple[str, float]]] = self._store.commands(
            lambda pipe: [pipe.zrevrange(each, 0, most - 1, withscores=True) for each in lists]
        )
        newest = sorted((-int(opened_ms), name) for shard in found for name, opened_ms in shard)
        keys = [self._names.of("job", name) for _, name in newest[:most]]
        records = self._store.commands(
            lambda pipe: [pipe.hmget(each, "state", "expires") for each in keys]
        )
        jobs = []
        for (opened_ms, name), (state, expires) in zip(newest, records, strict=False):
            if state in _STATES and expires:
                is_expired = state == JobState.OPEN.value and int(expires) <= now_ms
                told = JobState.ABORTED if is_expired else JobState(state)
                jobs.append(Job(name, told, instant_of(-opened_ms), instant_of(int(expires))))
        return jobs

    def open_ones(self, now_ms: int) -> list[str]:
        """Return the names of all jobs that are open at an instant by the clock of Redis."""
        lists = [*self._names.open_jobs()]
        found: list[list[str]] = self._store.commands(
            lambda pipe: [pipe.zrangebyscore(each, f"({now_ms}", "+inf") for each in lists]
        )
        return [name for names in found for name in names]

    def states(self, jobs: Collection[tuple[str, str]]) -> dict[tuple[str, str], JobState | str]:
        """Return the states of jobs, without those that do not exist.

        Args:
            jobs: Their names and ids; an empty id is that of the latest job of the name.

        Returns:
            For each its state, or if its record cannot be read, a text that says so.
        """
        found = dict[tuple[str, str], JobState | str]()
        found |= {job: JobState.COMMITTED for job in jobs if job in self._committed}
        asked = [job for job in jobs if job not in found]
        answers = self._run([(name, "look", job_id, 0) for name, job_id in asked])
        for job, answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                found[job] = answer
                continue
            word, _, _ = self._noted(job[0], answer)
            if word:
                found[job] = state = JobState(word)
                if state is JobState.COMMITTED and job[1]:
                    self._remember(job)
        return found

    def _remember(self, job: tuple[str, str]) -> None:
        if len(self._committed) >= REMEMBERED:
            self._committed.clear()
        self._committed.add(job)

    def _call(self, job: str, verb: str, job_id: str = "", instant: int = 0) -> Sequence[str]:
        (answer,) = self._run([(job, verb, job_id, instant)])
        return self._noted(job, answer)

    def _run(self, calls: Sequence[tuple[str, str, str, int]]) -> Sequence[Any]:
        """Return what ``job.lua`` says to names of jobs, verbs, ids and instants."""
        keys = [self._names.of("job", job) for job, *_ in calls]
        arguments = [(verb, own, at, self._margin_ms) for _, verb, own, at in calls]
        script = ScriptCall("job", keys, arguments, self._keep_ms)
        (answers,) = self._store.of_each(script)
        return answers

    def _noted(self, job: str, answer: Sequence[str]) -> Sequence[str]:
        """Return the state, the id and the expiry that the script answers; note if it has expired.

        Raises:
            RegistryUnavailable: It is a text, which says that the record of the job cannot be read.
        """
        state, job_id, expires_ms, *is_newly_expired = readable(
            f"the record of job {job!r}", answer
        )
        if is_newly_expired:
            logger.warning("Job %r was not committed in time; its tasks do not run.", job)
            if self.on_expired is not None:
                self.on_expired()
        return state, job_id, expires_ms
