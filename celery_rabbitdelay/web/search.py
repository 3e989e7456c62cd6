"""Search waiting tracked tasks page by page, and count them by value."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple, Self, TypeAlias

from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.registry.index import KindCounts, Pending
from celery_rabbitdelay.registry.query import Span, kinds_of
from celery_rabbitdelay.registry.search import SOON, Search
from celery_rabbitdelay.web.view_request import ViewRequest

#: The maximum number of records that one page of a search reads if no index contains exactly the
#: matching tasks; and the maximum if the search also reads arguments.
MOST_READ, MOST_READ_WHOLE = 1_000, 500

#: How many of the newest jobs are counted beside a search.
COUNTED_JOBS: Final = 8

#: The counts of matching tasks per value, keyed by the term's name: task, queue, state and so on.
Counts: TypeAlias = Mapping[str, Counter[str]]


class Found(NamedTuple):
    """One page of a search.

    Attributes:
        tasks: The tasks, the next one first.
        next: The last task before the next page: its due time, in milliseconds since 1970-01-01
            UTC, and its id. None on the last page. A page with ``next`` may have fewer tasks than
            wanted, or none, because a page reads a limited number of records.
    """

    tasks: list[Pending]
    next: tuple[int, str] | None

    def first(self, most: int) -> Found:
        """Return the first tasks as a page."""
        if len(self.tasks) <= most:
            return self
        last = self.tasks[most - 1]
        return Found(self.tasks[:most], (milliseconds_of(last.due), last.task_id))


class PagedSearch(Search):
    """A search that reads a limited number of records per page."""

    @classmethod
    def of_request(cls, request: ViewRequest, now: datetime | None = None) -> Self:
        """Parse the search of a request; for ``now``, see :meth:`.Search.of`.

        Raises:
            HTTPException: There is no registry.
            InvalidSearch: The search is invalid.
        """
        options, text = request.site.options, request.fields.get("q", "")
        shown = options.shown if options.shows_arguments else None
        return cls.of(request.with_registry, text, request.site.app.timezone, now, shown)

    @property
    def needs_records(self) -> bool:
        """Whether records have to be read to find the matching tasks, or to count them by value."""
        return self.ids is not None or self.filter.needs_records or self.filter.job is not None

    @property
    def most_read(self) -> int:
        """The maximum number of records that one page of the search reads."""
        return MOST_READ if self.filter.where_message is None else MOST_READ_WHOLE

    @property
    def cancelled(self) -> int:
        """How many tasks of the search's kinds are cancelled and not due yet.

        0 if the search has an id or a key.
        """
        names_tasks = self.query.named("id") or self.query.named("key")
        kinds = () if names_tasks else kinds_of(self.query, self.context)
        return sum(each.cancelled for each in self.summary.kinds if each.kind in kinds)

    def found(self, after: tuple[int, str] | None, most: int) -> Found:
        """Return one page of the matching tasks, in the order of their due times.

        Args:
            after: The due time and the id of the task before the page; None for the first page.
            most: The maximum number of tasks on the page.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        index, most_read = self.delays.registry.index, self.most_read
        if self.ids is not None:
            return Found(index.matching(index.tasks(self.ids), self.filter), None)
        tasks, last, read = list[Pending](), after, 0
        for part in index.parts(self.filter, after, most_read):
            tasks += part.tasks
            if len(tasks) > most:
                return Found(tasks, None).first(most)
            read, last = read + part.read, part.last
        return Found(tasks, last if read >= most_read else None)

    def counted(self) -> tuple[Found | None, int, bool]:
        """Return the tasks read, if any, the count of matching tasks, and if there may be more.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        found = self.found(None, MOST_READ) if self.needs_records else None
        if found is None or (found.next and not self.filter.needs_records):
            return found, self.delays.registry.index.count(self.filter), False
        return found, len(found.tasks), found.next is not None

    def counts(self, found: Found | None) -> Counts:
        """Count the matching tasks by value: the tasks in ``found`` or, if None, all."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        holds, now_ms = self.context.holds, milliseconds_of(self.context.holds.now)
        for task in () if found is None else found.tasks:
            state = holds.state(task)
            counts["state"].update({state, "held"} if state == "job-open" else {state})
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
        due = [each for each in holds.of_jobs if holds.state(each[0]) == "job-open"]
        of_jobs = round(sum(number for task, number in due if self.filter.matches(task)))
        counts["state"].update({"job-open": of_jobs, "held": of_jobs, "overdue": -of_jobs})
        if self.filter.kinds is None:
            registry = self.delays.registry
            names = [each.name for each in registry.jobs.all(registry.now_ms(), COUNTED_JOBS)]
            numbers = registry.index.counts([self.filter._replace(job=each) for each in names])
            counts["job"].update(dict(zip(names, numbers, strict=True)))
        return counts

    def _number(
        self, kind: KindCounts, whole: Span, start: int | None = None, end: int | None = None
    ) -> int:
        """Return how many tasks of a kind are due between two instants, within a span of time."""
        start, end = whole.cut(start, end)
        last = kind.total if end is None else kind.before[end]
        return max(last - (0 if start is None else kind.before[start]), 0)
