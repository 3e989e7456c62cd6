"""A task's page: its history as a line of time, and why it has not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.publishing.declaration import Backlog, queue_counts
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.record import KnownTask, TaskState, known_task, record_of
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.query import Term
from celery_rabbitdelay.web.site import STATUS_PERIOD, Site
from celery_rabbitdelay.web.states import ON_ITS_WAY, state_of
from celery_rabbitdelay.web.workers import unserved

#: What is said of a task that does not wait.
ENDED: Final = {
    TaskState.CANCELLED: "It was cancelled, and will not run.",
    TaskState.ARRIVED: "It has arrived at a worker and may have run: the worker's log and the "
    "result backend say how it ended.",
    TaskState.NOTED: "It was postponed, but no message of it is known.",
    TaskState.SUPERSEDED: "A newer task was sent under its key: this one will not run.",
}


def story(asked: Asked) -> dict[str, object]:
    """Return all that is known of one task."""
    site, delays, task_id = asked.site, asked.with_registry, asked.fields.needed("id")
    glance, layout = site.queues(), delays.topology.layout

    def backlog() -> Backlog:
        # The counts that all share; the page says so if there are none.
        nothing = Backlog({}, {level.name: {} for level in layout.levels}, {}, ())
        return nothing if glance.value is None else glance.value.status.backlog

    found = known_task(delays.registry, task_id, layout, backlog)
    told = {"task_id": task_id, "broker_error": glance.error}
    if found is None:
        return {**told, "task": None, "state": None, "why_not_run": [], "history": []}
    record = record_of(delays.registry, task_id)
    first_due = None if record is None or record.due_ms is None else instant_of(record.due_ms)
    pauses = [
        each
        for each in delays.paused()
        if (each.task or found.task) == found.task and (each.queue or found.queue) == found.queue
    ]
    state = once_due = found.state
    if found.due is not None:
        holds = {"is_paused": bool(pauses), "is_job_open": found.job_state == "open"}
        state = state_of(found.due, wall_clock.now(), **holds)
        once_due = state_of(found.due, found.due + 2 * ON_ITS_WAY, **holds)
    args, kwargs = (
        site.options.shown(found.task or "", text) for text in (found.args, found.kwargs)
    )
    known = asdict(replace(found, args=args, kwargs=kwargs))
    return {
        **told,
        "task": {**known, "arguments_shown": site.options.shows_arguments},
        "state": state,
        "why_not_run": reasons(asked, found, pauses),
        "history": list(_history(found, first_due, state, once_due)),
    }


class Event(NamedTuple):
    """Something that has happened to a task, happens now, or will happen.

    Attributes:
        place: ``past``, ``here`` or ``ahead``.
        at: When; None for now, and for what nobody knows.
        words: What, without anything that others have written.
        queues: In which queues, and how many messages each has; None if that is not known.
    """

    place: str
    at: datetime | None
    words: str
    queues: Mapping[str, int | None] = {}


#: What happens now to a task that waits, by its state; and what will happen next.
HERE: Final = {
    "waiting": ("Waits in the levels", "A free worker runs it"),
    "held": ("Held: it is paused", "Returns to its queue when the pause ends"),
    "job-open": ("Held: its job is open", "Runs within ten minutes after the commit of its job"),
    "overdue": ("Overdue: no worker has taken it", "A free worker runs it"),
}


def _history(
    task: KnownTask, first_due: datetime | None, state: str, once_due: str
) -> Iterator[Event]:
    """Yield what is known of a task's way, in order.

    Args:
        task: The task.
        first_due: When the first of its messages is due, or was.
        state: Its state.
        once_due: Its state once it is due, if nothing changes.
    """
    now, queue = wall_clock.now(), {task.queue: None} if task.queue else {}
    if task.sent is not None:
        yield Event("past", task.sent, "Sent")
    if task.due is None or first_due is None or state not in HERE:
        yield Event("here", None, ENDED.get(TaskState(task.state), "Waits"))
        return
    if task.postponed == task.due:
        yield Event("past", None, "Rescheduled")
    here, (_, following) = HERE[state][0], HERE[once_due]
    # A held task is in one queue; where another one that is due is, its reasons say.
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
    """A reason.

    Attributes:
        words: The sentence, without anything that others have written.
        page: The page where one sees to it; None if there is none.
        fields: The query of its address.
    """

    words: str
    page: str | None = None
    fields: str = ""


def reasons(asked: Asked, task: KnownTask, pauses: Sequence[Paused]) -> list[Reason]:
    """Return why a task has not run, as far as the registry and the broker know it.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    state = TaskState(task.state)
    if state is TaskState.SUPERSEDED:
        search = shown.quoted(str(Term.of("key", task.key or "")))
        return [Reason(ENDED[state], "waiting", f"q={search}")]
    if state is not TaskState.WAITING:
        return [Reason(ENDED[state])]
    found = list(_held_back(asked.site, task, pauses))
    if task.due is not None and task.due > wall_clock.now():
        again = ", because it was postponed" if task.postponed == task.due else ""
        return [Reason(f"Due {shown.left(task.due)}{again}."), *found]
    return found or [*_overdue(asked, task)]


def _held_back(site: Site, task: KnownTask, pauses: Sequence[Paused]) -> Iterator[Reason]:
    """Yield what will hold it back, or does, when it is due."""
    name = shown.quoted(task.job or "")
    if task.job_state == "open":
        words = "Its job is open: no task of it runs before the job is committed."
        yield Reason(words, "jobs/one", f"name={name}")
    if task.job_state == "aborted":
        yield Reason("Its job was aborted: it will not run.", "jobs/one", f"name={name}")
    for each in pauses:
        whose = "of its name" if each.queue is None else "for its queue"
        lasts = shown.brief((wall_clock.now() - each.since).total_seconds())
        end = "until somebody resumes them"
        if each.until is not None:
            end = f"and resume {shown.left(each.until)}"
        yield Reason(f"Tasks {whose} have been paused for {lasts}, {end}.", "pauses")
    if task.due is not None and task.due > wall_clock.now() and task.queue in unserved(site):
        yield Reason("At present, no worker takes from its queue.", "workers")
    if task.missing:
        yield Reason(
            f"The broker lacks {len(task.missing):,} queues of the levels and modules.", "health"
        )


def _waits_on(task: KnownTask, held: Counts | None) -> str:
    """Return for what else a task may wait that is due."""
    if task.job:
        return " If its job was open, it asks again within ten minutes after the commit."
    if held is not None and held.messages:
        return f" If it was paused, it is one of {held.messages:,} tasks that are about to return."
    return ""


def _overdue(asked: Asked, task: KnownTask) -> Iterator[Reason]:
    """Yield why a task is not taken that is due and that nothing holds back."""
    if task.queue is None:
        yield Reason("It is due, and its exchange routes it: no worker has taken it yet.")
        return
    site, paused = asked.site, asked.site.delays.topology.module_queues.paused
    ask = partial(queue_counts, queues=[Queue(task.queue), paused])
    found = site.latest(f"queue {task.queue}", partial(site.ask, ask), STATUS_PERIOD).value
    if found is None:
        return  # the page says that the broker cannot be asked
    counts, held = found[task.queue], found[paused.name]
    if counts is None:
        yield Reason("It is due, but its queue does not exist.", "health")
    elif not counts.messages:
        holder = "a worker holds it until it has a free process, or " if counts.consumers else ""
        yield Reason(
            f"It is due, and its queue is empty: {holder}its message was lost."
            f"{_waits_on(task, held)} Run now sends another message; one of the two runs.",
            "health",
        )
    elif not counts.consumers:
        yield Reason(
            f"It is due, but no worker takes from its queue. Messages in it: {counts.messages:,}; "
            "the option -Q of celery worker names the queues that it takes from."
        )
    else:
        yield Reason(
            "It is due, and the workers of its queue are busy. Messages in it: "
            f"{counts.messages:,}."
        )
