"""Jobs: either all tasks of a job run, or none of them runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, NamedTuple

from kombu.utils.functional import LRUCache

from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.decision import new_copy
from celery_rabbitdelay.registry.index import Names, shard_of
from celery_rabbitdelay.registry.store import ScriptCall, Store, readable

logger = logging.getLogger(__name__)

#: The maximum number of committed jobs in the cache. Workers ask Redis about the tasks of all other
#: jobs.
REMEMBERED: Final = 10_000


class JobState(Enum):
    """The state of a job, which decides whether its due tasks run."""

    #: The job's due tasks wait.
    OPEN = "open"

    #: The job's due tasks run.
    COMMITTED = "committed"

    #: The job's due tasks do not run.
    ABORTED = "aborted"


_STATES: Final = frozenset(each.value for each in JobState)


class Job(NamedTuple):
    """A job in Redis.

    Attributes:
        name: The job's name.
        state: The job's state.
        opened: When the job was opened.
        expires: When the job is aborted, unless it was committed.
    """

    name: str
    state: JobState
    opened: datetime
    expires: datetime


class Jobs:
    """The jobs under one prefix.

    Successive jobs may have the same name; every job has its own id.

    Args:
        store: Redis.
        names: The names of all keys.
        keep_ms: How long a job's outcome is kept after its name has become free, in milliseconds.
        margin_ms: How long a job's name stays taken after its last task is due, in milliseconds.

    Attributes:
        on_expired: Called for a job that was not committed in time, in the first process that
            notices the expiry.
    """

    def __init__(self, store: Store, names: Names, keep_ms: int, margin_ms: int) -> None:
        self._store = store
        self._names = names
        self._keep_ms = keep_ms
        self._margin_ms = margin_ms
        self.on_expired: Callable[[], None] | None = None
        #: The names and ids of committed jobs. A commit is final, and the tasks of a committed job
        #: run even after its record has expired.
        self._committed: LRUCache[tuple[str, str], JobState] = LRUCache(limit=REMEMBERED)
        #: The ids of jobs for which :meth:`open` got no answer; the next call uses the same id.
        #: Other threads that open the same job have their own ids.
        self._opening: dict[str, str] = {}

    def open(self, job: str, expires_ms: int) -> None:
        """Open a job: its tasks wait until the job is committed.

        If the answer of Redis is lost, repeat the call in the same process, which remembers the
        job's id.

        Args:
            job: The name.
            expires_ms: Milliseconds after which the job is aborted unless committed.

        Raises:
            JobClosed: A job with this name exists, open or not.
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
        """Record the due time of a task that is being sent with a job.

        Returns:
            The job's state, or None if the job does not exist; and the job's id.
        """
        state, job_id, _ = self._call(job, "join", "", due_ms)
        return JobState(state) if state else None, job_id

    def end(self, job: str, state: JobState) -> tuple[str, int]:
        """Commit or abort a job, in one write. Repeating the call changes nothing.

        Returns:
            The job's id, and when the job would have expired, in milliseconds since 1970-01-01.

        Raises:
            JobClosed: The job has ended in the other state, or does not exist.
        """
        verb = "commit" if state is JobState.COMMITTED else "abort"
        found, job_id, expires_ms = self._call(job, verb)
        if found != state.value:
            raise JobClosed(job, found or "unknown")
        return job_id, int(expires_ms)

    def confirm(self, job: str, job_id: str) -> None:
        """Record a job's commit again, in case Redis has lost the commit; see :meth:`end`."""
        self._call(job, "confirm", job_id)

    def state(self, job: str) -> JobState | None:
        """Return the state of the latest job with a name; None if no job has this name."""
        state = self.states([(job, "")]).get((job, ""))
        known: JobState | None = readable(f"the record of job {job!r}", state)
        return known

    def all(self, now_ms: int, most: int) -> list[Job]:
        """Return the jobs in Redis, newest first.

        Args:
            now_ms: The time by the clock of Redis.
            most: The maximum number of jobs to return.
        """
        lists = self._names.in_shards("jobs")
        found: list[list[tuple[str, float]]] = self._store.commands(
            lambda pipe: [pipe.zrevrange(key, 0, most - 1, withscores=True) for key in lists]
        )
        newest = sorted((-int(opened_ms), name) for shard in found for name, opened_ms in shard)
        return self._read([(name, -opened_ms) for opened_ms, name in newest[:most]], now_ms)

    def get(self, job: str, now_ms: int) -> Job | None:
        """Return the latest job with a name; None if Redis does not list it.

        Args:
            job: The name.
            now_ms: The time by the clock of Redis.
        """
        key = self._names.in_shards("jobs")[shard_of(job)]
        (opened_ms,) = self._store.commands(lambda pipe: [pipe.zscore(key, job)])
        listed = [] if opened_ms is None else [(job, int(opened_ms))]
        return next(iter(self._read(listed, now_ms)), None)

    def _read(self, listed: Sequence[tuple[str, int]], now_ms: int) -> list[Job]:
        """Return the jobs in a list of names and opening times; leave out jobs without a record."""
        keys = self._names.each("job", (name for name, _ in listed))
        records = self._store.commands(
            lambda pipe: [pipe.hmget(key, "state", "expires") for key in keys]
        )
        jobs = []
        for (name, opened_ms), (state, expires) in zip(listed, records, strict=True):
            if state in _STATES and expires:
                is_expired = state == JobState.OPEN.value and int(expires) <= now_ms
                now = JobState.ABORTED if is_expired else JobState(state)
                jobs.append(Job(name, now, instant_of(opened_ms), instant_of(int(expires))))
        return jobs

    def open_ones(self, now_ms: int) -> list[str]:
        """Return the names of all jobs that are open at ``now_ms`` on Redis's clock."""
        lists = self._names.in_shards("open")
        found: list[list[str]] = self._store.commands(
            lambda pipe: [pipe.zrangebyscore(key, f"({now_ms}", "+inf") for key in lists]
        )
        return [name for names in found for name in names]

    def states(self, jobs: Collection[tuple[str, str]]) -> dict[tuple[str, str], JobState | str]:
        """Return the states of jobs, without the jobs that do not exist.

        Args:
            jobs: Names and ids of jobs; an empty id stands for the latest job with that name.

        Returns:
            The state of every existing job, or an error text if the record cannot be read.
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
                    self._committed[job] = state
        return found

    def _call(self, job: str, verb: str, job_id: str = "", instant: int = 0) -> Sequence[str]:
        (answer,) = self._run([(job, verb, job_id, instant)])
        return self._noted(job, answer)

    def _run(self, calls: Sequence[tuple[str, str, str, int]]) -> Sequence[Any]:
        """Call ``job.lua`` with jobs' names, verbs, ids and instants; return the answers."""
        keys = self._names.each("job", (job for job, *_ in calls))
        arguments = [(verb, own, at, self._margin_ms) for _, verb, own, at in calls]
        script = ScriptCall("job", keys, arguments, self._keep_ms)
        (answers,) = self._store.of_each(script)
        return answers

    def _noted(self, job: str, answer: Sequence[str]) -> Sequence[str]:
        """Return the state, the id and the expiry in an answer; report a job that has expired.

        Raises:
            RegistryUnavailable: The answer is an error: the job's record cannot be read.
        """
        state, job_id, expires_ms, *is_newly_expired = readable(
            f"the record of job {job!r}", answer
        )
        if is_newly_expired:
            logger.warning("Job %r was not committed in time: its tasks do not run.", job)
            if self.on_expired is not None:
                self.on_expired()
        return state, job_id, expires_ms
