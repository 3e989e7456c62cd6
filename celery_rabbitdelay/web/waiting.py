"""The pages Waiting and Jobs: tracked tasks, why one has not run, and what became of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Final, NamedTuple

from kombu import Queue
from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import JobClosed
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of, milliseconds_of
from celery_rabbitdelay.publishing.declaration import Backlog, queue_counts
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.record import KnownTask, TaskState, known_task
from celery_rabbitdelay.web import shown
from celery_rabbitdelay.web.asked import Asked, Wrong
from celery_rabbitdelay.web.search import Found, Place, count_at_least, search
from celery_rabbitdelay.web.site import STATUS_PERIOD, log_action

#: How many tasks a page has unless it says so, and at most.
PAGE, MOST = 50, 500

#: How many similar names of tasks are proposed.
SIMILAR: Final = 5

#: The fields that choose tasks.
FILTERS: Final = ("task", "key", "job", "due_after", "due_before")

#: How many open jobs are listed, those that expire first.
MOST_JOBS: Final = 50

#: What is said of a task that does not wait.
ENDED: Final = {
    TaskState.CANCELLED: "It was cancelled, and will not run.",
    TaskState.ARRIVED: "It has arrived at a worker and may have run: the worker's log and the "
    "result backend say how it ended.",
    TaskState.NOTED: "It was postponed, but no message of it is known.",
}


def waiting(asked: Asked) -> dict[str, object]:
    """Return the tracked tasks that wait and match, the next one first."""
    fields, delays = asked.fields, asked.with_registry
    wanted, task_id = filter_of(asked), fields.get("id")
    most, after = fields.number("limit", PAGE, MOST), _place(asked)
    if task_id is not None:
        found = Found(delays.registry.index.tasks([task_id]), None)
    else:
        found = search(delays, wanted, most, after)
    count, is_least = len(found.tasks), found.next is not None
    if task_id is None and wanted.key_start is None:
        count, is_least = count_at_least(delays, wanted)
    names = sorted(each for each in asked.site.app.tasks if not each.startswith("celery."))
    name = "" if wanted.task is None or count else wanted.task.lower()
    similar = [each for each in names if name and name in each.lower()]
    return {
        "count": count,
        "may_be_more": is_least,
        "complete_since": delays.pending_since(),
        "tasks": found.tasks,
        "next": None if found.next is None else str(found.next),
        "next_address": None if found.next is None else fields.address(after=str(found.next)),
        "can_decide_about_all": task_id is None,
        "has_filter": any(each in fields for each in FILTERS),
        "task_names": names,
        "similar": similar[:SIMILAR],
    }


def filter_of(asked: Asked) -> Filter:
    """Return which tasks the fields choose; ``key=order:*`` chooses the keys that begin so."""
    fields, key, start = asked.fields, asked.fields.get("key"), None
    if key is not None and key.endswith("*"):
        start, key = key[:-1], None
    after, before = asked.instant("due_after"), asked.instant("due_before")
    wanted = Filter.of(fields.get("task"), key, fields.get("job"), before, after)
    return wanted._replace(key_start=start)


def _place(asked: Asked) -> Place | None:
    text = asked.fields.get("after")
    if text is None:
        return None
    if (place := Place.of(text)) is None:
        raise Wrong("after", "takes what 'next' of the page before says")
    return place


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
        return {**told, "task": None, "why_not_run": [], "levels": []}
    args, kwargs = (
        site.options.shown(found.task or "", text) for text in (found.args, found.kwargs)
    )
    known = asdict(replace(found, args=args, kwargs=kwargs))
    return {
        **told,
        "task": {**known, "arguments_shown": site.options.shows_arguments},
        "why_not_run": reasons(asked, found),
        "levels": list(_levels(asked, found)),
    }


def _levels(asked: Asked, found: KnownTask) -> Iterator[dict[str, object]]:
    """Yield the levels that are still ahead of a task, and where it may be; none if it is due."""
    left_ms = 0 if found.due is None else milliseconds_of(found.due) - wall_clock.ms()
    for level in asked.site.delays.topology.layout.levels if left_ms > 0 else ():
        digit = left_ms // level.place_ms % level.base
        queues = [level.queue_name(each) for each in range(1, level.base)]
        yield {
            "name": level.name,
            "digit": digit,
            "unit": level.unit,
            "count": digit * level.multiple,
            "may_be_in": {
                queue: found.may_be_in[queue] for queue in queues if queue in found.may_be_in
            },
        }


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
    found = list(_held_back(asked, task))
    if task.due is not None and task.due > wall_clock.now():
        again = ", because it was postponed" if task.postponed == task.due else ""
        return [Reason(f"Due {shown.left(task.due)}{again}."), *found]
    return found or [*_overdue(asked, task)]


def _held_back(asked: Asked, task: KnownTask) -> Iterator[Reason]:
    """Yield what will hold it back, or does, when it is due."""
    name = shown.quoted(task.job or "")
    if task.job_state == "open":
        words = "Its job is open: no task of it runs before the job is committed."
        yield Reason(words, "jobs", f"name={name}")
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
    site, paused = asked.site, asked.site.delays.topology.module_queues.paused
    ask = partial(queue_counts, queues=[Queue(task.queue), paused])
    found = site.latest(f"queue {task.queue}", partial(site.ask, ask), STATUS_PERIOD).value
    if found is None:
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


def jobs(asked: Asked) -> dict[str, object]:
    """Return the jobs that are open, and the state of the job of a name.

    Of each, also how many of its tracked tasks wait.
    """
    registry = asked.with_registry.registry
    opened = registry.jobs.opened(registry.now_ms(), MOST_JOBS + 1)
    tasks = registry.index.counts([Filter(job=name) for name, _ in opened[:MOST_JOBS]])
    told = [
        {"name": name, "expires": instant_of(expires_ms), "tasks": waiting}
        for (name, expires_ms), waiting in zip(opened, tasks, strict=False)
    ]
    return {**_named(asked), "open": told, "may_be_more": len(opened) > MOST_JOBS}


def _named(asked: Asked) -> dict[str, object]:
    """Return the state of the job of a name, and how many of its tracked tasks wait."""
    registry, name = asked.with_registry.registry, asked.fields.get("name")
    if name is None:
        return {"name": None, "state": None, "tasks": None}
    state = registry.jobs.state(name)
    tasks = registry.index.count(Filter(job=name))
    return {"name": name, "state": None if state is None else state.value, "tasks": tasks}


def open_job(asked: Asked) -> dict[str, object]:
    """Open a job: the tasks that are sent with it wait until it is committed."""
    expires = asked.duration("expires")
    if not expires:
        raise Wrong("expires", "takes the time until it is aborted unless it is committed: 1h30m")
    return change_job("open_job", "opened", asked, expires=expires)


def change_job(method: str, what: str, asked: Asked, **options: object) -> dict[str, object]:
    """Change the job of a name: open, commit or abort it."""
    name = asked.fields.needed("name")
    try:
        getattr(asked.with_registry, method)(name, **options)
    except JobClosed as closed:
        raise HTTPException(409, str(closed)) from closed
    log_action(asked.user, f"{what} the job", 1, name)
    return {**_named(asked), "see": f"jobs?{asked.fields.address(token=None, expires=None)}"}
