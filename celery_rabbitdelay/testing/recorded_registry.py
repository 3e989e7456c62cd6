"""An in-memory registry for recorded applications, which uses the real registry's rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import RLock
from typing import NoReturn

from celery_rabbitdelay.exceptions import NotRecorded
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry import decision as rule
from celery_rabbitdelay.registry.decision import Outcome
from celery_rabbitdelay.registry.index import Filter, Index, Kind, Part
from celery_rabbitdelay.registry.jobs import Jobs
from celery_rabbitdelay.registry.pauses import Pauses
from celery_rabbitdelay.registry.registry import NOTE_MS, Earlier, Registry
from celery_rabbitdelay.registry.store import Store


@dataclass
class _Noted:
    """The entry of a task.

    Attributes:
        record: The record that the rule reads.
        sent: The registration of the waiting attempt; None if no attempt waits.
        sent_ms: When the attempt was sent, in milliseconds since 1970-01-01 UTC.
        until_ms: When this entry expires, in the same unit.
    """

    record: rule.Record = rule.EMPTY
    sent: rule.Registration | None = None
    sent_ms: int = 0
    until_ms: int = 0

    @property
    def key(self) -> str:
        """The key of the waiting attempt."""
        return "" if self.sent is None else self.sent.key

    def note(self, record: rule.Record, until_ms: int) -> None:
        """Replace the record."""
        self.record, self.until_ms = record, max(until_ms, self.until_ms)
        if record.waits is None:
            self.sent = None


class RecordedRegistry(Registry):
    """Makes in memory the decisions that scripts make in Redis.

    Functions that need Redis raise :class:`.NotRecorded`.

    Args:
        prefix: As for :class:`.Registry`.
        keep_ms: As for :class:`.Registry`.
        margin_ms: As for :class:`.Registry`.
        postponed: Called with the id and the new due time of a postponed task.
    """

    def __init__(
        self, prefix: str, keep_ms: int, margin_ms: int, postponed: Callable[[str, int], None]
    ) -> None:
        super().__init__(Store(_refuse, False, ()), prefix, keep_ms, margin_ms)
        self.jobs: _Jobs = _Jobs(self.store, self.names, keep_ms, margin_ms)
        self.pauses: _Pauses = _Pauses(self.store, self.names)
        self.index: _Index = _Index(self.store, self.names, margin_ms, self.pauses.oldest_ms, self)
        self._postponed = postponed
        self._lock = RLock()
        self._notes: dict[str, _Noted] = {}
        #: The order and the id of the newest task under a key.
        self._newest: dict[str, tuple[int, str]] = {}

    def _noted(self, task_id: str) -> _Noted:
        noted = self._notes.get(task_id)
        if noted is None or 0 < noted.until_ms <= wall_clock.ms():
            noted = self._notes[task_id] = _Noted()
        return noted

    def _order_under(self, key: str) -> int:
        return self._newest.get(key, (0, ""))[0]

    def listed(self) -> list[str]:
        """Return the ids of the tracked tasks that wait."""
        return [*filter(self.listing, [*self._notes])]

    def listing(self, task_id: str) -> rule.Registration | None:
        """Return a task's registration if it is tracked, waits, and is not superseded."""
        noted = self._noted(task_id)
        is_tracked = noted.sent is not None and noted.sent.name
        is_newest = noted.record.order >= self._order_under(noted.key)
        return noted.sent if is_tracked and is_newest else None

    def fields(self, task_id: str) -> dict[str, str]:
        """Return the fields of a task's record that :class:`.Index` reads; see ``shared.lua``."""
        noted, listing = self._noted(task_id), self.listing(task_id)
        record = noted.record
        known: dict[str, object] = {
            name: getattr(record, name) for name in ("cancelled", "not_before", "ran")
        }
        if record.waits is not None:
            known |= {"waits": ".".join(record.waits), "due": record.due, "order": record.order}
        if listing is not None:
            kind = Kind(listing.name, listing.queue).text
            known |= {"kind": kind, "job": listing.job or None, "sent": noted.sent_ms}
        known |= {"key": noted.key or None, "dropped": record.dropped or None}
        return {name: str(value) for name, value in known.items() if value is not None}

    def now_ms(self) -> int:
        """Return the time by the clock of the registry."""
        return wall_clock.ms()

    def ask(self, tasks: Sequence[tuple[str, str]]) -> list[rule.Ticket]:
        """Return tickets for the messages of tasks that are about to be sent."""
        tickets, orders = [], dict[str, int]()
        for task_id, key in tasks:
            if key:
                before = orders.get(key, self._order_under(key))
                orders[key] = max(wall_clock.ns() // 1000, before + 1)
            life = rule.next_life(self._noted(task_id).record) if task_id else 0
            tickets.append(rule.Ticket(life, orders.get(key, 0)))
        return tickets

    def decide(self, arrivals: Sequence[rule.Arrival], notes: bool = True) -> list[rule.Decision]:
        """Return decisions about tasks that have arrived."""
        with self._lock:
            words = self._words_of_jobs(arrivals)
            if notes:
                words.update(self._words_of_keys(arrivals))
            found = [
                self._arrive(each, words.get(number, "run"), notes)
                for number, each in enumerate(arrivals)
            ]
        return [self._decision(*each) for each in zip(found, arrivals, strict=True)]

    def _words_of_keys(self, arrivals: Sequence[rule.Arrival]) -> Iterator[tuple[int, str]]:
        for number, each in enumerate(arrivals):
            if each.key and each.ticket.order and (word := self._claim(each)):
                yield number, word

    def _claim(self, claim: rule.Arrival | rule.Registration) -> str:
        """Return "superseded" or "replaced" if a task is not the newest with its key; else ""."""
        own, newest = (claim.ticket.order, claim.task_id), self._newest.get(claim.key, (0, ""))
        if own < newest:
            return "replaced" if newest[1] == claim.task_id else "superseded"
        self._newest[claim.key] = own
        return ""

    def _arrive(self, arrival: rule.Arrival, word: str, notes: bool) -> str:
        noted = self._noted(arrival.task_id)
        record, verdict = rule.arrive(noted.record, arrival, word)  # in memory, no task is too late
        if notes:
            noted.note(record, max(arrival.due_ms, wall_clock.ms()) + self.keep_ms)
        return verdict

    def register(self, registrations: Sequence[rule.Registration]) -> list[str]:
        """Record messages that were sent; a task with a key supersedes older ones."""
        with self._lock:
            return [self._register(each) for each in registrations]

    def _register(self, sent: rule.Registration) -> str:
        noted = self._noted(sent.task_id)
        record, state = rule.register(noted.record, sent)
        if record != noted.record:
            if record.waits != noted.record.waits:
                noted.sent_ms = wall_clock.ms()
            noted.sent = sent
        noted.note(record, sent.due_ms + self.keep_ms)
        is_superseded = sent.key and self._claim(sent) == "superseded"
        return "superseded" if is_superseded else state

    def cancel_each(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome | str]:
        """Cancel tasks; return their outcomes."""
        with self._lock:
            found = {each: self._cancel(each, also_future) for each in dict.fromkeys(task_ids)}
        return [found[task_id] for task_id in task_ids]

    def _cancel(self, task_id: str, also_future: bool) -> Outcome:
        noted = self._noted(task_id)
        keep_ms = self.keep_ms + (NOTE_MS if noted.sent is None else 0)
        until_ms = max(noted.record.due, noted.record.not_before or 0, wall_clock.ms()) + keep_ms
        record, found = rule.cancel(noted.record, self._order_under(noted.key), also_future)
        noted.note(record, until_ms)
        return Outcome(found)

    def newest_under(self, key: str) -> tuple[str, str]:
        """Return the order and the id of the newest task under a key; empty if no task has it."""
        order, task_id = self._newest.get(key, ("", ""))
        return str(order), task_id

    def postpone(self, task_id: str, due_ms: int, also_future: bool = True) -> Outcome | Earlier:
        """Change the due time of a task."""
        with self._lock:
            noted, listing = self._noted(task_id), self.listing(task_id)
            newest = self._order_under(noted.key)
            record, found = rule.postpone(noted.record, due_ms, newest, also_future)
            earlier = None
            if found == "earlier":
                earlier = Earlier(listing.name, listing.message) if listing else Earlier("", "")
            if record != noted.record and earlier != ("", ""):
                noted.note(record, due_ms + self.keep_ms)
                self._postponed(task_id, due_ms)
            return earlier or Outcome(found)


def _refuse() -> NoReturn:
    raise NotRecorded("a feature that needs Redis, such as schedules or shared rates")


@dataclass(frozen=True)
class _Index(Index):
    """Reads the entries of tasks.

    Attributes:
        registry: The registry.
    """

    registry: RecordedRegistry

    def parts(
        self, wanted: Filter, after: tuple[int, str] | None = None, most: int | None = None
    ) -> Iterator[Part]:
        """Yield one page with all tasks, sorted by due time."""
        earliest, listed = instant_of(self.least_ms()), self.tasks(self.registry.listed())
        found = [each for each in listed if each.due >= earliest and wanted.matches(each)]
        found.sort(key=lambda each: (each.due, each.task_id))
        yield Part(found, len(found), (0, ""))

    def count(self, wanted: Filter) -> int:
        """Return the number of matching tasks."""
        return sum(1 for _ in self.pending(wanted))

    def messages(self, task_ids: Sequence[str]) -> list[str | None]:
        """Return the stored messages of tasks, from which they can be sent again."""
        listings = map(self.registry.listing, task_ids)
        return [None if each is None else each.message for each in listings]

    def fields(self, task_ids: Sequence[str], *fields: str) -> list[list[str | None]]:
        """Return fields of the records of tasks."""
        records = map(self.registry.fields, task_ids)
        return [[record.get(name) for name in fields] for record in records]


@dataclass
class _Job:
    """A job.

    Attributes:
        job_id: The job's id.
        expires_ms: When the job is aborted unless committed, in milliseconds since 1970.
        free_ms: When another job may take its name, in the same unit.
        ended: "committed" or "aborted"; empty while the job is open.
    """

    job_id: str
    expires_ms: int
    free_ms: int
    ended: str = ""

    @property
    def state(self) -> str:
        """The job's state."""
        return self.ended or ("open" if wall_clock.ms() < self.expires_ms else "aborted")


class _Jobs(Jobs):
    """Jobs by name, the latest job last."""

    @cached_property
    def _known(self) -> dict[str, list[_Job]]:
        return defaultdict(list)

    def _run(self, calls: Sequence[tuple[str, str, str, int]]) -> list[Sequence[str]]:
        return [self._say(self._known[job], verb, own, at) for job, verb, own, at in calls]

    def _say(self, known: list[_Job], verb: str, job_id: str, instant: int) -> Sequence[str]:
        """Return the answer of ``job.lua``."""
        now_ms = wall_clock.ms()
        found = [each for each in known if verb != "look" or job_id in ("", each.job_id)]
        job = found[-1] if found else None
        if verb == "open" and (job is None or (job.state != "open" and now_ms >= job.free_ms)):
            ends_ms = now_ms + instant
            known.append(_Job(job_id, ends_ms, ends_ms + self._margin_ms))
            return "opened", job_id, ""
        if job is None:
            return "", "", ""
        if verb == "join":
            job.free_ms = max(job.free_ms, instant + self._margin_ms)
        elif verb in ("commit", "abort") and job.state == "open":
            job.ended = {"commit": "committed", "abort": "aborted"}[verb]
        return job.state, job.job_id, str(job.expires_ms)


class _Pauses(Pauses):
    """The pauses, with their start times."""

    @cached_property
    def _since(self) -> dict[str, str]:
        return {}

    def _look(self) -> list[str]:
        for field, value in [*self._since.items()]:
            _, _, until = value.partition(" ")
            if until and int(until) <= wall_clock.ms():
                del self._since[field]
        return [word for pause in self._since.items() for word in pause]

    def _change(self, verb: str, field: str, until: str) -> str:
        since, _, _ = self._since.pop(field, "").partition(" ")
        if verb == "pause":
            since = since or str(wall_clock.ms())
            self._since[field] = f"{since} {until}" if until else since
        return since
