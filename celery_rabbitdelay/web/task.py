"""A task's page: its timeline, and links from the reasons why it has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.publishing.declaration import Backlog, queue_counts
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.known import NO_BACKLOG, KnownTask, Reason, known_task
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.registry.record import record_of
from celery_rabbitdelay.registry.states import state_of
from celery_rabbitdelay.web.shown import quoted
from celery_rabbitdelay.web.site import STATUS_PERIOD
from celery_rabbitdelay.web.view_request import ViewRequest

#: The page that shows details or a remedy, keyed by the subject of a reason; by default, Workers.
PAGES: Final = {
    "": None,
    "key": "waiting",
    "job": "jobs/one",
    "aborted": "jobs/one",
    "pause": "pauses",
    "levels": "health",
    "queue": "health",
}

#: The last event of a waiting task's timeline, keyed by the subject of the reason.
AHEAD: Final = {
    "job": "Runs within ten minutes after the commit of its job",
    "aborted": "A worker drops it",
    "pause": "Returns to its queue when the pause ends",
    "distribution": "A worker that serves distribution publishes it to its exchange",
    "queue": "Distribution publishes it to the queue once the queue exists",
    "consumers": "A worker that consumes its queue runs it",
    "lost": "'Run now' sends it again",
}


def story(request: ViewRequest) -> dict[str, object]:
    """Return all known facts about one task."""
    site, delays, task_id = request.site, request.with_registry, request.fields.needed("id")
    glance = site.queues()

    # The cached counts; without them, the page shows the broker's error.
    backlog = NO_BACKLOG if glance.value is None else glance.value.status.backlog

    def look(queue: str | None) -> tuple[Backlog, Mapping[str, Counts | None]]:
        counts = None
        if queue is not None and glance.error is None:
            ask = partial(queue_counts, queues=[Queue(queue)])
            counts = site.latest(f"queue {queue}", partial(site.ask, ask), STATUS_PERIOD).value
        return backlog, counts or {}

    found = known_task(delays.registry, task_id, delays.topology.layout, look)
    about = {"task_id": task_id, "broker_error": glance.error}
    if found is None:
        return {**about, "task": None, "state": None, "history": []}
    record = record_of(delays.registry, task_id)
    first_due = None if record is None or record.due_ms is None else instant_of(record.due_ms)
    state = found.state
    if found.due is not None:
        holds = {"is_paused": bool(found.pauses), "is_job_open": found.job_state == "open"}
        state = state_of(found.due, wall_clock.now(), **holds)
    known = {**asdict(found), "why": [_linked(each, found) for each in found.why]}
    known |= {"first_due": first_due, "arguments_shown": site.options.shows_arguments}
    for name in ("args", "kwargs"):
        known[name] = site.options.shown(found.task or "", known[name])
    return {**about, "task": known, "state": state, "history": [*_history(found, first_due, state)]}


class Event(NamedTuple):
    """An event of a task's timeline: past, present or future.

    Attributes:
        place: ``past``, ``here`` (now) or ``ahead``.
        at: The event's time; None for now, or if unknown.
        words: The event; no untrusted text.
        queues: The queues that the task is in or goes to, with their message counts; None for an
            unknown count.
    """

    place: str
    at: datetime | None
    words: str
    queues: Mapping[str, int | None] = {}


#: The present event of a waiting task, keyed by its state.
HERE: Final = {
    "waiting": "Waits in the levels",
    "held": "Held: it is paused",
    "job-open": "Held: its job is open",
    "overdue": "Overdue: no worker has received it",
}


def _history(task: KnownTask, first_due: datetime | None, state: str) -> Iterator[Event]:
    """Yield the events of a task's timeline, in order.

    Args:
        task: The task.
        first_due: The due time of its first message.
        state: The task's state.
    """
    now, queue = wall_clock.now(), {task.queue: None} if task.queue else {}
    if task.sent is not None:
        yield Event("past", task.sent, "Sent")
    if task.due is None or first_due is None or state not in HERE:
        yield Event("here", None, "Waits" if task.due else task.why[0].words)
        return
    if task.postponed == task.due:
        yield Event("past", None, "Rescheduled")
    # A held task is in the queue of paused tasks; the reasons explain where an overdue task is.
    names = task.may_be_in if state == "waiting" else {"paused"} if state == "held" else {}
    where = {name: count for name, count in task.may_be_in.items() if name in names}
    instants = [(task.due, "Due", queue)]
    if first_due < task.due:
        words = "Original due time: a worker delays it again"
        instants.insert(0, (first_due, words, {}))
    yield from (Event("past", *each) for each in instants if each[0] <= now)
    yield Event("here", None, HERE[state], where)
    yield from (Event("ahead", *each) for each in instants if each[0] > now)
    following = (AHEAD[each.about] for each in task.why if each.about in AHEAD)
    yield Event("ahead", None, next(following, "A free worker runs it"))


def _linked(reason: Reason, task: KnownTask) -> dict[str, str | None]:
    """Return the words of a reason, with the address of the page that shows details or a remedy."""
    page = PAGES.get(reason.about, "workers")
    key, job = quoted(str(Term.of("key", task.key or ""))), quoted(task.job or "")
    fields = {"waiting": f"q={key}", "jobs/one": f"name={job}"}.get(page or "", "")
    return {"words": reason.words, "page": page, "fields": fields}
