"""Search for waiting tracked tasks; see :mod:`.query` for the language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from hashlib import sha256
from typing import Final, Self

from celery_rabbitdelay.app.extension import RabbitDelay
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import milliseconds_of
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import ALL_KINDS, Filter, Pending, Summary
from celery_rabbitdelay.registry.query import Context, Query, Term, filter_of
from celery_rabbitdelay.registry.record import MessageFacts, record_of
from celery_rabbitdelay.registry.registry import Registry
from celery_rabbitdelay.registry.states import Holds

#: The spans for which tasks are counted by due time: the value of the term ``due``, and its length
#: in milliseconds.
SOON: Final = {"<1h": 3_600_000, "<1d": 86_400_000, "<7d": 604_800_000}


@dataclass(frozen=True)
class Search:
    """A search for waiting tracked tasks.

    Attributes:
        delays: The application's delays.
        query: The terms.
        context: The context of the terms.
        filter: Selects the matching tasks.
        ids: The ids of the only candidates; None for any task.
        summary: The counts of waiting tasks by kind.
    """

    delays: RabbitDelay
    query: Query
    context: Context
    filter: Filter
    ids: Sequence[str] | None
    summary: Summary

    @classmethod
    def of(
        cls,
        delays: RabbitDelay,
        text: str,
        zone: tzinfo,
        now: datetime | None = None,
        shown: Callable[[str, str], str | None] | None = lambda _, text: text,
    ) -> Self:
        """Parse a search.

        Args:
            delays: The application's delays.
            text: The search.
            zone: The time zone of dates in the search.
            now: The present. A confirmed action passes the instant at which its tasks were counted.
            shown: Masks a text with the arguments of a task; words then match the masked text. None
                if words do not match arguments.

        Raises:
            InvalidSearch: The search is invalid.
            RegistryUnavailable: Redis does not answer.
        """
        registry, now = delays.registry, now or wall_clock.now()
        query = _exact(registry, Query.of(text))
        holds, now_ms = Holds.at(delays, now), milliseconds_of(now)
        due = [each for each in query.span("due", now, zone) if each is not None]
        instants = [holds.late_ms, *(now_ms + each for each in SOON.values()), *due]
        summary = registry.index.summary(instants, ALL_KINDS)

        def arguments(task: str, message: str) -> str | None:
            headers = MessageFacts.of(message)
            given = [each for each in (headers.args, headers.kwargs) if each not in ("()", "{}")]
            texts = (shown and each and shown(task, each) for each in given)
            return " ".join(filter(None, texts)) or None

        kinds = [each.kind for each in summary.kinds]
        context = Context(holds, zone, kinds, arguments if shown else None)
        wanted = filter_of(query, context)
        ids = [*dict.fromkeys(query.texts("id"))] or None
        if ids is None and wanted.key is not None:
            ids = registry.waiting_under(wanted.key)
        return cls(delays, query, context, wanted, ids, summary)

    @property
    def held_by(self) -> str:
        """A digest of the pauses and open jobs; empty if the search does not ask for states.

        Pauses and jobs decide the states of tasks, so a resume or a commit changes what the search
        finds.
        """
        holds = self.context.holds
        held = sorted((each.task or "", each.queue or "") for each in holds.paused)
        text = repr((held, sorted(filter(None, holds.jobs))))
        return sha256(text.encode()).hexdigest() if self.query.states() else ""

    def sent_before(self, end: datetime) -> Self:
        """Return the search, limited to tasks that were sent before ``end``."""
        return replace(self, filter=self.filter._replace(sent_before_ms=milliseconds_of(end)))

    def tasks(self) -> Iterator[Pending]:
        """Yield the matching tasks by due time."""
        index = self.delays.registry.index
        if self.ids is None:
            yield from index.pending(self.filter)
        else:
            yield from index.matching(index.tasks(self.ids), self.filter)

    def count(self) -> int:
        """Count the matching tasks."""
        if self.ids is None:
            return self.delays.registry.index.count(self.filter)
        return sum(1 for _ in self.tasks())

    def cancel(self) -> Iterator[int]:
        """Cancel the matching tasks in batches; yield the number of cancelled tasks per batch."""
        if self.ids is None:
            yield from self.delays.cancel_batches(self.filter)
            return
        for each in self.tasks():
            yield int(self.delays.cancel(each.task_id, also_future=False) is Outcome.DONE)


def _exact(registry: Registry, query: Query) -> Query:
    """Turn a search for one string, such as a pasted id, into one for that id or key, if known."""
    if not (text := query.pasted):
        return query
    if record_of(registry, text):
        return Query((Term.of("id", text),))
    # A word that is not the key of a waiting task may be a part of other keys.
    ids = registry.waiting_under(text)
    is_key = ids and (":" in text or registry.index.tasks(ids))
    return Query((Term.of("key", text),)) if is_key else query
