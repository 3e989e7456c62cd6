"""Why a task has not run, each reason in a sentence, and the page where one sees to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kombu import Queue

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.publishing.declaration import Counts, queue_counts
from celery_rabbitdelay.registry.known_task import KnownTask
from celery_rabbitdelay.registry.record import TaskState
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.reading import AWAY, ask_once


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


#: What is said of a task that does not wait.
ENDED: Final = {
    TaskState.CANCELLED: "It was cancelled, and will not run.",
    TaskState.ARRIVED: "It has arrived at a worker and may have run: the worker's log and the "
    "result backend say how it ended.",
    TaskState.NOTED: "It was postponed, but no message of it is known.",
}


def reasons(asked: Asked, task: KnownTask) -> list[Reason]:
    """Return why a task has not run, as far as the registry and the broker know it.

    Raises:
        RegistryUnavailable: Redis does not answer.
    """
    state = TaskState(task.state)
    if state is TaskState.SUPERSEDED:
        words = "A newer task was sent under its key: this one will not run."
        return [Reason(words, "waiting", f"key={shown.quoted(task.key or '')}")]
    if state is not TaskState.WAITING:
        return [Reason(ENDED[state])]
    found = [*_held_back(asked, task)]
    if task.due is not None and task.due > wall_clock.now():
        again = ", because it was postponed" if task.postponed == task.due else ""
        return [Reason(f"It is not due yet, but {shown.left(task.due)}{again}."), *found]
    return found or [*_overdue(asked, task)]


def _held_back(asked: Asked, task: KnownTask) -> Iterator[Reason]:
    """Yield what will hold it back, or does, when it is due."""
    name = shown.quoted(task.job or "")
    if task.job_state == "open":
        yield Reason(
            "Its job is open: no task of it runs before the job is committed.",
            "jobs",
            f"name={name}",
        )
    if task.job_state == "aborted":
        yield Reason("Its job was aborted: it will not run.", "jobs", f"name={name}")
    for each in asked.site.delays.paused():
        if each.task is not None and each.task == task.task:
            yield Reason("Tasks of its name are paused: celery rabbitdelay resume ends that.")
        if each.queue is not None and each.queue == task.queue:
            yield Reason("Tasks for its queue are paused: celery rabbitdelay resume ends that.")
    if task.missing:
        yield Reason(
            f"The broker lacks {len(task.missing):,} queues of the levels and modules.", "health"
        )


def _waits_on(task: KnownTask, held: Counts | None) -> str:
    """Return for what else a task may wait that is due."""
    if task.job:
        return "If its job was open, it asks again within ten minutes after the commit."
    if held is not None and held.messages:
        return f"If it was paused, it is one of {held.messages:,} tasks that are about to return."
    return "If it was paused, it has returned from the queue of paused tasks."


def _overdue(asked: Asked, task: KnownTask) -> Iterator[Reason]:
    """Yield why a task is not taken that is due and that nothing holds back."""
    if task.queue is None:
        yield Reason("It is due, and its exchange routes it: no worker has taken it yet.")
        return
    try:
        paused = asked.site.delays.topology.module_queues.paused
        queues = [Queue(task.queue), paused]
        found = ask_once(asked.site.app, lambda found: queue_counts(found, queues))
    except AWAY:
        return  # the page says that the broker cannot be asked
    counts, held = found[task.queue], found[paused.name]
    if counts is None:
        yield Reason("It is due, but its queue does not exist.", "health")
    elif not counts.consumers:
        yield Reason(
            f"It is due, but no worker takes from its queue. Messages in it: {counts.messages:,}; "
            "the option -Q of celery worker names the queues that it takes from."
        )
    elif counts.messages:
        yield Reason(
            "It is due, and the workers of its queue are busy. Messages in it: "
            f"{counts.messages:,}."
        )
    else:
        yield Reason(
            "It is due, and its queue is empty: it is about to arrive, or a worker holds it until "
            f"it has a free process. {_waits_on(task, held)} Otherwise its message was lost.",
            "health",
        )
