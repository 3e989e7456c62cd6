"""A task's page: its timeline, and the reasons why it has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.declaration import Backlog, queue_counts, unserved_modules
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.registry.record import KnownTask, TaskState, known_task, record_of
from celery_rabbitdelay.registry.states import ON_ITS_WAY, state_of
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.site import STATUS_PERIOD, Site, counted
from celery_rabbitdelay.web.view_request import ViewRequest
from celery_rabbitdelay.web.workers import unserved

#: The explanation of a task that does not wait, by its state.
ENDED: Final = {
    TaskState.CANCELLED: "The task was cancelled and will not run.",
    TaskState.ARRIVED: "The task has arrived at a worker and may have run. For its outcome, see "
    "the worker's log and the result backend.",
    TaskState.NOTED: "The task was postponed, but the registry does not know its message.",
    TaskState.SUPERSEDED: "A newer task was sent under the same key. This task will not run.",
    TaskState.EXPIRED: "Its job was aborted or has expired. This task will not run.",
}


def story(request: ViewRequest) -> dict[str, object]:
    """Return all known facts about one task."""
    site, delays, task_id = request.site, request.with_registry, request.fields.needed("id")
    glance, layout = site.queues(), delays.topology.layout

    # The cached counts; without them, the page shows the broker's error.
    backlog = Backlog({}, {level.name: {} for level in layout.levels}, {}, ())
    if glance.value is not None:
        backlog = glance.value.status.backlog

    def look(queue: str | None) -> tuple[Backlog, Mapping[str, Counts | None]]:
        counts = None
        if queue is not None:
            ask = partial(queue_counts, queues=[Queue(queue)])
            counts = site.latest(f"queue {queue}", partial(site.ask, ask), STATUS_PERIOD).value
        return backlog, counts or {}

    found = known_task(delays.registry, task_id, layout, look)
    about = {"task_id": task_id, "broker_error": glance.error}
    if found is None:
        return {**about, "task": None, "state": None, "why_not_run": [], "history": []}
    record = record_of(delays.registry, task_id)
    first_due = None if record is None or record.due_ms is None else instant_of(record.due_ms)
    state = once_due = found.state
    if found.due is not None:
        holds = {"is_paused": bool(found.pauses), "is_job_open": found.job_state == "open"}
        state = state_of(found.due, wall_clock.now(), **holds)
        once_due = state_of(found.due, found.due + 2 * ON_ITS_WAY, **holds)
    why = reasons(request, found, backlog)
    following = HERE.get(once_due, ("", ""))[1] if state != "overdue" or not why else why[0].ahead
    known = {**asdict(found), "first_due": first_due}
    known["arguments_shown"] = site.options.shows_arguments
    for name in ("args", "kwargs"):
        known[name] = site.options.shown(found.task or "", known[name])
    history = list(_history(found, first_due, state, following))
    return {**about, "task": known, "state": state, "why_not_run": why, "history": history}


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


#: The present and the next event of a waiting task, by its state.
HERE: Final = {
    "waiting": ("Waits in the levels", "A free worker runs it"),
    "held": ("Held: it is paused", "Returns to its queue when the pause ends"),
    "job-open": ("Held: its job is open", "Runs within ten minutes after the commit of its job"),
    "overdue": ("Overdue: no worker has received it", "A free worker runs it"),
}


def _history(
    task: KnownTask, first_due: datetime | None, state: str, following: str
) -> Iterator[Event]:
    """Yield the events of a task's timeline, in order.

    Args:
        task: The task.
        first_due: The due time of its first message.
        state: The task's state.
        following: The last event.
    """
    now, queue = wall_clock.now(), {task.queue: None} if task.queue else {}
    if task.sent is not None:
        yield Event("past", task.sent, "Sent")
    if task.due is None or first_due is None or state not in HERE:
        yield Event("here", None, ENDED.get(TaskState(task.state), "Waits"))
        return
    if task.postponed == task.due:
        yield Event("past", None, "Rescheduled")
    here = HERE[state][0]
    # A held task is in the queue of paused tasks; the reasons explain where an overdue task is.
    names = task.may_be_in if state == "waiting" else {"paused"} if state == "held" else {}
    where = {name: count for name, count in task.may_be_in.items() if name in names}
    instants = [(task.due, "Due", queue)]
    if first_due < task.due:
        words = "Original due time: a worker delays it again"
        instants.insert(0, (first_due, words, {}))
    yield from (Event("past", *each) for each in instants if each[0] <= now)
    yield Event("here", None, here, where)
    yield from (Event("ahead", *each) for each in instants if each[0] > now)
    yield Event("ahead", None, following)


class Reason(NamedTuple):
    """A reason why a task has not run.

    Attributes:
        words: The sentence; no untrusted text.
        page: The page that shows details or a remedy; None without such a page.
        fields: The query of that page's address.
        ahead: The next event of the task's timeline, if this is why it is overdue.
    """

    words: str
    page: str | None = None
    fields: str = ""
    ahead: str = HERE["overdue"][1]


def reasons(request: ViewRequest, task: KnownTask, backlog: Backlog) -> list[Reason]:
    """Return the reasons why a task has not run, known to the registry and the broker."""
    state = TaskState(task.state)
    if state is TaskState.SUPERSEDED:
        search = shown.quoted(str(Term.of("key", task.key or "")))
        return [Reason(ENDED[state], "waiting", f"q={search}")]
    if state is TaskState.EXPIRED:
        return [Reason(ENDED[state], "jobs/one", f"name={shown.quoted(task.job or '')}")]
    if state is not TaskState.WAITING:
        return [Reason(ENDED[state])]
    found = list(_held_back(request.site, task))
    if task.due is not None and task.due > wall_clock.now():
        again = ", because it was postponed" if task.postponed == task.due else ""
        return [Reason(f"Due {shown.left(task.due)}{again}."), *found]
    return found or [*_overdue(task, backlog.others, _returning(request.site, backlog))]


def _held_back(site: Site, task: KnownTask) -> Iterator[Reason]:
    """Yield the reasons that hold a task, now or once it is due."""
    name = shown.quoted(task.job or "")
    if task.job_state == "open":
        words = "Its job is open: the task runs only after the job is committed."
        yield Reason(words, "jobs/one", f"name={name}")
    if task.job_state == "aborted":
        yield Reason("Its job was aborted: the task will not run.", "jobs/one", f"name={name}")
    for each in task.pauses:
        subject = "All tasks of this name have" if each.queue is None else "Its queue has"
        lasts = shown.brief((wall_clock.now() - each.since).total_seconds())
        end = "has no end time" if each.until is None else f"ends {shown.left(each.until)}"
        yield Reason(f"{subject} been paused for {lasts}; the pause {end}.", "pauses")
    if task.due is not None and task.due > wall_clock.now() and task.queue is not None:
        exists = unserved(site).get(task.queue)
        if exists is not None:
            words = "No worker consumes its queue" if exists else "Its queue does not exist"
            yield Reason(f"{words} now.", "workers")
    if task.missing:
        words = f"Missing on the broker: {len(task.missing):,} queues of the levels and modules."
        yield Reason(words, "health")


def _returning(site: Site, backlog: Backlog) -> int:
    """Return the most tasks in the queue of paused tasks that no pause holds; they return soon."""
    (holds, kinds), messages = counted(site), backlog.others.get("paused")
    held = sum(each.total() for each in holds.due(kinds).paused.values())
    return max(messages.messages - held, 0) if messages else 0


def _waits_on(task: KnownTask, returning: int) -> str:
    """Return another possible reason why a due task is not in its queue; empty for none."""
    if task.job:
        return " If its job was open, the task returns within ten minutes after the commit."
    if returning:
        return f" If it was resumed lately, it is one of at most {returning:,} tasks that return."
    return ""


def _overdue(task: KnownTask, others: Mapping[str, Counts], returning: int) -> Iterator[Reason]:
    """Yield the reason why no worker has received a task that is due and not held.

    Args:
        task: The task.
        others: The counts of the module queues.
        returning: How many resumed tasks return soon.
    """
    is_distributed = DISTRIBUTE not in unserved_modules(others)
    nobody = "no worker serves distribution, which"
    if task.queue is None:
        words, ahead = "no worker has received it yet", HERE["overdue"][1]
        if not is_distributed:
            words = f"{nobody} publishes to exchanges"
            ahead = "A worker that serves distribution publishes it to its exchange"
        yield Reason(f"The task is due. Its exchange routes it, and {words}.", "workers", "", ahead)
        return
    counts = task.in_queue
    if counts is None:
        return  # the page shows the broker's error
    if not counts:
        words, ahead = "distribution tries again", "Distribution publishes it to the queue"
        if not is_distributed:
            words = f"{nobody} tries again"
            ahead = "A worker that serves distribution publishes it to the queue"
        words = f"The task is due, but its queue does not exist: {words}."
        yield Reason(words, "health", "", f"{ahead} once the queue exists")
        return
    messages, ahead, waits_on = counts["messages"], HERE["overdue"][1], _waits_on(task, returning)
    if not messages:
        holder = "a worker has prefetched it, or " if counts["consumers"] else ""
        words = f"and its queue is empty: {holder}its message was lost"
        hint = " 'Run now' sends a new message; the task runs only once."
        ahead = "'Run now' sends it again"
    elif not counts["consumers"]:
        words = f"but no worker consumes its queue, which has {messages:,} messages"
        hint = " The option -Q of celery worker names a worker's queues."
        ahead = "A worker that consumes its queue runs it"
    else:
        words = "and the workers of its queue are busy"
        hint = f" Messages in the queue: {messages:,}."
    yield Reason(f"The task is due, {words}.{waits_on}{hint}", "workers", "", ahead)
