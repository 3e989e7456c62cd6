"""Search the tracked tasks that wait, some at a time; count them; postpone all that match."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import ALL_KINDS, Filter, KindCounts, Pending, Summary
from celery_rabbitdelay.registry.record import Said, record_of
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.options import Options
from celery_rabbitdelay.web.query import Known, Query, Span, filter_of, kinds_of
from celery_rabbitdelay.web.states import Holds

#: How many records one page of a search reads at most, where no index holds just the tasks that
#: match; and how many together with the arguments.
MOST_READ, MOST_READ_WHOLE = 1_000, 500

#: How many jobs, the newest ones, are counted beside a search.
COUNTED_JOBS: Final = 8

#: Until when due tasks are counted beside a search: the value of the term, in milliseconds.
SOON: Final = {"<1h": 3_600_000, "<1d": 86_400_000, "<7d": 604_800_000}

#: Returns when a task is to run, by its id and when it is due; None if it stays as it is.
Until: TypeAlias = Callable[[str, datetime], "datetime | None"]

#: How many tasks match and have a value, by the name of the term that looks for it.
Counts: TypeAlias = Mapping[str, Counter[str]]


class Found(NamedTuple):
    """One page of a search.

    Attributes:
        tasks: The tasks, the next one first.
        next: When the last task before the next page is due, in milliseconds since 1970-01-01 UTC,
            and its id; None if this is the last page. With it, a page may have fewer tasks than
            asked for, or none: as many were read for it as are read at once.
    """

    tasks: list[Pending]
    next: tuple[int, str] | None

    def first(self, most: int) -> Found:
        """Return the first tasks as a page."""
        if len(self.tasks) <= most:
            return self
        last = self.tasks[most - 1]
        return Found(self.tasks[:most], (milliseconds_of(last.due), last.task_id))


@dataclass(frozen=True)
class Search:
    """A search for tracked tasks that wait.

    Attributes:
        delays: The application's delays.
        query: What was asked for.
        known: What it is compared with.
        filter: Which tasks match.
        ids: The ids of the only tasks that may match; None if there may be others.
        summary: How many tasks wait, by their kinds.
    """

    delays: RabbitDelay
    query: Query
    known: Known
    filter: Filter
    ids: Sequence[str] | None
    summary: Summary

    @classmethod
    def of(cls, asked: Asked, now: datetime | None = None) -> Self:
        """Read the search of a request.

        Args:
            asked: The request.
            now: The instant that it was asked at first.

        Raises:
            HTTPException: It cannot be read, or there is no registry.
        """
        delays, query = asked.with_registry, Query.of(asked.fields.get("q", ""))
        registry = delays.registry
        now, zone, options = now or wall_clock.now(), asked.site.app.timezone, asked.site.options
        holds, now_ms = Holds.at(delays, now), milliseconds_of(now)
        due = [each for each in query.span("due", now, zone) if each is not None]
        instants = [holds.late_ms, *(now_ms + each for each in SOON.values()), *due]
        summary = registry.index.summary(instants, ALL_KINDS)
        shown = partial(arguments, options) if options.shows_arguments else None
        known = Known(holds, zone, [each.kind for each in summary.kinds], shown)
        wanted = filter_of(query, known)
        ids = query.texts("id") or None
        if len(query.terms) == 1 and (words := query.texts("")) and record_of(registry, words[0]):
            ids = words  # somebody has pasted it
        if ids is None and wanted.key is not None:
            ids = registry.waiting_under(wanted.key)
        return cls(delays, query, known, wanted, ids, summary)

    @property
    def needs_records(self) -> bool:
        """Whether records are read to find what matches, or to count it by task and so on."""
        return self.ids is not None or self.filter.needs_records or self.filter.job is not None

    @property
    def cancelled(self) -> int:
        """How many tasks of the kinds that it is about are cancelled and not due yet."""
        kinds = kinds_of(self.query, self.known)
        return sum(each.cancelled for each in self.summary.kinds if each.kind in kinds)

    def found(self, after: tuple[int, str] | None, most: int) -> Found:
        """Return tasks that match, the next one first, without reading all of them.

        Args:
            after: Behind which task to begin: when it is due, and its id; None: at the first one.
            most: At most so many.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        index = self.delays.registry.index
        if self.ids is not None:
            return Found(index.matching(index.tasks(self.ids), self.filter), None)
        most_read = MOST_READ if self.filter.says is None else MOST_READ_WHOLE
        tasks, last, read = list[Pending](), after, 0
        for part in index.parts(self.filter, after, most_read):
            tasks += part.tasks
            if len(tasks) > most:
                return Found(tasks, None).first(most)
            read, last = read + part.read, part.last
        return Found(tasks, last if read >= most_read else None)

    def counted(self) -> tuple[Found | None, int, bool]:
        """Return what was read to count the tasks that match; how many; and if there may be more.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        found = self.found(None, MOST_READ) if self.needs_records else None
        if found is None or (found.next and not self.filter.needs_records):
            return found, self.delays.registry.index.count(self.filter), False
        return found, len(found.tasks), found.next is not None

    def counts(self, found: Found | None) -> Counts:
        """Return how many tasks match and have a value: of those that were read, or of all."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        holds, now_ms = self.known.holds, milliseconds_of(self.known.holds.now)
        for task in () if found is None else found.tasks:
            counts["state"][holds.state(task)] += 1
            for name, value in (("task", task.task), ("queue", task.queue), ("job", task.job)):
                if value:
                    counts[name][value] += 1
            for value, length in SOON.items():
                counts["due"][value] += milliseconds_of(task.due) < now_ms + length
        if found is not None:
            return counts
        whole = Span(self.filter.due_after_ms, self.filter.due_before_ms)
        for each in self.summary.kinds:
            if self.filter.kinds is not None and each.kind not in self.filter.kinds:
                continue
            number = partial(self._number, each, whole)
            counts["task"][each.kind.task] += number()
            counts["queue"][each.kind.queue] += number()
            counts["state"]["waiting"] += number(start=holds.late_ms)
            late = "held" if holds.pause_of(each.kind) else "overdue"
            counts["state"][late] += number(end=holds.late_ms)
            for value, length in SOON.items():
                counts["due"][value] += number(end=now_ms + length)
        of_jobs = [
            number
            for task, number in holds.of_jobs
            if holds.state(task) == "job-open" and self.filter.matches(task)
        ]
        counts["state"].update({"job-open": round(sum(of_jobs)), "overdue": -round(sum(of_jobs))})
        if self.filter.kinds is None:
            registry = self.delays.registry
            names = [each.name for each in registry.jobs.all(registry.now_ms(), COUNTED_JOBS)]
            numbers = registry.index.counts([self.filter._replace(job=each) for each in names])
            counts["job"].update(dict(zip(names, numbers, strict=True)))
        return counts

    def _number(
        self, kind: KindCounts, whole: Span, start: int | None = None, end: int | None = None
    ) -> int:
        """Return how many tasks of a kind are due in a part of a span."""
        start, end = whole.cut(start, end)
        last = kind.total if end is None else kind.before[end]
        return max(last - (0 if start is None else kind.before[start]), 0)


def arguments(options: Options, task: str, message: str) -> str | None:
    """Return the arguments of a task as far as they may be shown, by its stored message."""
    said = Said.by(message)
    given = [each for each in (said.args, said.kwargs) if each not in ("()", "{}")]
    return " ".join(filter(None, (options.shown(task, each) for each in given))) or None


def postpone_batches(delays: RabbitDelay, wanted: Filter, until: Until) -> Iterator[int]:
    """Let all tasks that match run at another time; yield how many after each batch.

    If a batch fails partway, the number of its decided tasks is yielded before the error is raised.

    Args:
        delays: The application's delays.
        wanted: Which tasks.
        until: When they run. A task that has moved in the order meanwhile may come up twice.

    Raises:
        InvalidDelay: A task would wait for too long.
        NotTracked: A task is to run earlier, and its message is not known.
        RegistryUnavailable: Redis does not answer.
    """
    for part in delays.registry.index.parts(wanted):
        done = 0
        try:
            for each in part.tasks:
                if (eta := until(each.task_id, each.due)) is not None:
                    outcome = delays.postpone(each.task_id, eta=eta, also_future=False)
                    done += outcome is Outcome.DONE
        except Exception:
            yield done  # before it says why the rest of the batch was not decided
            raise
        yield done


def all_at(instant: datetime) -> Until:
    """Return what lets all tasks run at one instant."""
    instant = instant_of(milliseconds_of(instant))
    return lambda _, due: None if due == instant else instant


def at_once() -> Until:
    """Return what lets all tasks run now; one that has moved since does not move again."""
    now = instant_of(wall_clock.ms())
    return lambda _, due: None if now <= due <= wall_clock.now() else now


def each_by(delay: timedelta) -> Until:
    """Return what lets each task run that much later than it is due, or than now if it is late.

    A task that has moved comes up again at its new place in the order, and stays there.
    """
    moved = dict[str, datetime]()

    def until(task_id: str, due: datetime) -> datetime | None:
        while (passed := next(iter(moved), None)) is not None and moved[passed] < due:
            del moved[passed]  # in the order of due times, it does not come up again
        if task_id in moved:
            return None
        return moved.setdefault(task_id, max(due, wall_clock.now()) + delay)

    return until
