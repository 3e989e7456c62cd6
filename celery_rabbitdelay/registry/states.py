"""The states of waiting tasks: on time, held, overdue, or waiting for the commit of a job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Final, NamedTuple, Self

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.index import Kind, KindCounts, Pending
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.record import ON_ITS_WAY

#: The states of a waiting task. "waiting" means on time.
STATES: Final = ("waiting", "held", "overdue", "job-open")

#: The maximum number of due tasks of open jobs to read; if there are more, counts are estimates.
MOST_OF_JOBS: Final = 1_000


def state_of(due: datetime, now: datetime, *, is_paused: bool, is_job_open: bool) -> str:
    """Return the state of a waiting task: one of :data:`STATES`."""
    if due >= now - ON_ITS_WAY:
        return "waiting"
    if is_paused:
        return "held"
    return "job-open" if is_job_open else "overdue"


class Due(NamedTuple):
    """Counts of the tracked tasks that are held or overdue.

    Attributes:
        overdue: The overdue tasks, by kind.
        firsts: The earliest due time of the overdue tasks, by kind, where known.
        paused: The held tasks, by pause and kind.
        jobs: The tasks that wait for the commit of a job, keyed by the job's name and by kind.
    """

    overdue: Counter[Kind]
    firsts: Mapping[Kind, datetime]
    paused: Mapping[Paused, Counter[Kind]]
    jobs: Mapping[str, Counter[Kind]]

    @property
    def job_open(self) -> Counter[Kind]:
        """The tasks that wait for the commit of a job, by kind."""
        return sum(self.jobs.values(), Counter())

    @property
    def held(self) -> Counter[Kind]:
        """The tasks that a pause or an open job holds, by kind."""
        return sum(self.paused.values(), self.job_open)


@dataclass(frozen=True)
class Holds:
    """The pauses and open jobs that hold due tasks.

    Attributes:
        now: The instant of this reading.
        paused: The pauses.
        of_jobs: The due tasks of open jobs, or a sample of them: every task with the number of
            tasks that it represents.
    """

    now: datetime
    paused: Sequence[Paused] = ()
    of_jobs: Sequence[tuple[Pending, float]] = ()

    @classmethod
    def at(cls, delays: RabbitDelay, now: datetime) -> Self:
        """Read the pauses and the open jobs.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        registry, late_ms = delays.registry, cls(now).late_ms
        open_jobs = registry.jobs.open_ones(registry.now_ms())
        of_jobs = registry.index.due_of_jobs(open_jobs, late_ms, MOST_OF_JOBS)
        return cls(now, delays.paused(), of_jobs)

    @property
    def late_ms(self) -> int:
        """A waiting task is held or overdue if it was due before this instant."""
        return milliseconds_of(self.now - ON_ITS_WAY)

    @cached_property
    def jobs(self) -> frozenset[str | None]:
        """The names of the open jobs with due tasks."""
        return frozenset(task.job for task, _ in self.of_jobs)

    def pause_of(self, kind: Kind) -> Paused | None:
        """Return the pause that holds the tasks of a kind; None if they are not paused."""
        found = (each for each in self.paused if kind.task == each.task or kind.queue == each.queue)
        return next(found, None)

    def state(self, task: Pending) -> str:
        """Return the state of a waiting task: one of :data:`STATES`."""
        is_paused = self.pause_of(Kind(task.task, task.queue)) is not None
        return state_of(task.due, self.now, is_paused=is_paused, is_job_open=task.job in self.jobs)

    def due(self, kinds: Sequence[KindCounts]) -> Due:
        """Count the held and the overdue tasks.

        Args:
            kinds: The counts of all kinds, including the counts before :attr:`late_ms`.
        """
        overdue, jobs = Counter[Kind](), defaultdict[str, Counter[Kind]](Counter)
        paused = {each: Counter[Kind]() for each in self.paused}
        for each in kinds:
            if number := each.before[self.late_ms]:
                pause = self.pause_of(each.kind)
                (overdue if pause is None else paused[pause])[each.kind] = number
        estimated = defaultdict[tuple[str, Kind], float](float)
        for task, number_of in self.of_jobs:
            estimated[task.job or "", Kind(task.task, task.queue)] += number_of
        for (job, kind), number_of in estimated.items():
            if kind in overdue:
                jobs[job][kind] = round(number_of)
        job_open = sum(jobs.values(), Counter[Kind]())
        firsts = {
            each.kind: instant_of(each.first_due_ms)
            for each in kinds
            if each.kind in overdue and each.kind not in job_open and each.first_due_ms is not None
        }
        return Due(overdue - job_open, firsts, paused, jobs)
