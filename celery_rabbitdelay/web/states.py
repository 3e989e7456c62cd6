"""What becomes of tracked tasks that are due: the one rule for all pages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Final, NamedTuple, Self

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.index import Kind, KindCounts, Pending
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.web.site import Site

#: The states of a task that waits.
STATES: Final = ("waiting", "held", "overdue", "job-open")

#: For how long a task that is due is on its way to a worker; it counts as waiting.
ON_ITS_WAY: Final = timedelta(seconds=5)

#: Seconds from one count of the kinds to the next, for pages that need no more.
COUNTED_PERIOD: Final = 5.0

#: How many due tasks of open jobs are read; of more, the counts of single kinds are estimated.
MOST_OF_JOBS: Final = 1_000


def state_of(due: datetime, now: datetime, *, is_paused: bool, is_job_open: bool) -> str:
    """Return the state of a task that waits: one of :data:`STATES`."""
    if due >= now - ON_ITS_WAY:
        return "waiting"
    if is_paused:
        return "held"
    return "job-open" if is_job_open else "overdue"


class Due(NamedTuple):
    """The tracked tasks that are due and have not arrived, without those on their way.

    Attributes:
        overdue: How many tasks of each kind should have arrived, and nothing holds them.
        firsts: When the first of these was due, by the kind, as far as it is known.
        paused: How many tasks of each kind each pause holds.
        jobs: How many of each kind wait for the commit of each job, by its name.
    """

    overdue: Counter[Kind]
    firsts: Mapping[Kind, datetime]
    paused: Mapping[Paused, Counter[Kind]]
    jobs: Mapping[str, Counter[Kind]]

    @property
    def job_open(self) -> Counter[Kind]:
        """How many tasks of each kind wait for the commit of a job."""
        return sum(self.jobs.values(), Counter())

    @property
    def held(self) -> Counter[Kind]:
        """How many tasks of each kind are held by a pause or an open job."""
        return sum(self.paused.values(), self.job_open)


@dataclass(frozen=True)
class Holds:
    """What holds tasks back that are due.

    Attributes:
        now: When.
        paused: What is paused.
        of_jobs: The due tasks of open jobs; of many, some of them. Each with how many it stands
            for.
    """

    now: datetime
    paused: Sequence[Paused] = ()
    of_jobs: Sequence[tuple[Pending, float]] = ()

    @classmethod
    def at(cls, delays: RabbitDelay, now: datetime) -> Self:
        """Look what holds tasks back.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        registry, late_ms = delays.registry, cls(now).late_ms
        open_jobs = registry.jobs.open_ones(registry.now_ms())
        of_jobs = registry.index.due_of_jobs(open_jobs, late_ms, MOST_OF_JOBS)
        return cls(now, delays.paused(), of_jobs)

    @property
    def late_ms(self) -> int:
        """A task that waits is held or overdue if it was due before this instant."""
        return milliseconds_of(self.now - ON_ITS_WAY)

    @cached_property
    def jobs(self) -> frozenset[str | None]:
        """The names of the open jobs of which tasks are due."""
        return frozenset(task.job for task, _ in self.of_jobs)

    def pause_of(self, kind: Kind) -> Paused | None:
        """Return the pause that holds the tasks of a kind."""
        holding = (
            each for each in self.paused if kind.task == each.task or kind.queue == each.queue
        )
        return next(holding, None)

    def state(self, task: Pending) -> str:
        """Return the state of a task that waits: one of :data:`STATES`."""
        is_paused = self.pause_of(Kind(task.task, task.queue)) is not None
        return state_of(task.due, self.now, is_paused=is_paused, is_job_open=task.job in self.jobs)

    def due(self, kinds: Sequence[KindCounts]) -> Due:
        """Return what is due, and is overdue or held.

        Args:
            kinds: The counts of all kinds, also before :attr:`late_ms`.
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


class Counted(NamedTuple):
    """The kinds of the tracked tasks that wait.

    Attributes:
        holds: What holds those back that are due.
        kinds: The kinds, with how many were due before :attr:`.Holds.late_ms`.
    """

    holds: Holds
    kinds: list[KindCounts]


def counted(site: Site) -> Counted:
    """Return the kinds of which tasks wait, counted once for all who ask.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """

    def look() -> Counted:
        holds = Holds.at(site.delays, wall_clock.now())
        return Counted(holds, site.delays.registry.index.summary([holds.late_ms]).kinds)

    found = site.latest("kinds", look, COUNTED_PERIOD)
    if found.value is None or found.error is not None:
        raise RegistryUnavailable(found.error or "it has not answered yet")
    return found.value
