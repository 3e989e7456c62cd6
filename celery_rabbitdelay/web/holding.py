"""The pages Jobs and Pauses: open jobs and pauses hold tasks until a commit or a resume."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import JobClosed
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.query import Term
from celery_rabbitdelay.web.site import counted, log_action
from celery_rabbitdelay.web.view_request import ViewRequest, Wrong

#: The maximum number of jobs to read, newest first, and of matching jobs to list.
MOST_READ, LISTED = 10_000, 200

#: The ages by which the page filters jobs, with their labels.
AGES: Final = {
    "an hour": timedelta(hours=1),
    "a day": timedelta(days=1),
    "a week": timedelta(days=7),
}

#: A pause is for a task or for a queue. The page warns if only the other kind has the name.
OTHER: Final = {"task": "queue", "queue": "task"}

#: The names of the cached readings that count held tasks; the page Now has one per horizon.
OF_HELD: Final = ("kinds", "due in a ")

#: How many names a form for a pause proposes.
MOST_NAMES: Final = 500


def jobs(request: ViewRequest) -> dict[str, object]:
    """Return the jobs that match, the newest first, with their counts of waiting tracked tasks."""
    fields, registry, now = request.fields, request.with_registry.registry, wall_clock.now()
    pattern = fields.get("name") or "*"
    found = [
        each
        for each in registry.jobs.all(registry.now_ms(), MOST_READ)
        if fnmatchcase(each.name, pattern.replace("[", "[[]"))
    ]
    state = fields.one_of("state", ["", *(each.value for each in JobState)], "")
    age = fields.one_of("age", ["", *AGES], "")
    of_age = [each for each in found if not age or now - each.opened <= AGES[age]]
    of_state = [each for each in found if state in ("", each.state.value)]
    chosen = [each for each in of_age if state in ("", each.state.value)]
    states = Counter(each.state.value for each in of_age)
    ages = {
        name: sum(now - each.opened <= most for each in of_state) for name, most in AGES.items()
    }
    tasks = registry.index.counts([Filter(job=each.name) for each in chosen[:LISTED]])
    return {
        "jobs": [
            {**each._asdict(), "state": each.state.value, "tasks": number}
            for each, number in zip(chosen, tasks, strict=False)
        ],
        "count": len(chosen),
        "states": states,
        "ages": ages,
    }


def job(request: ViewRequest) -> dict[str, object]:
    """Return the state of a job, and the count of its waiting tracked tasks."""
    registry, name = request.with_registry.registry, request.fields.needed("name")
    action = request.fields.get("action")
    state, found = registry.jobs.state(name), registry.jobs.get(name, registry.now_ms())
    return {
        "name": name,
        "state": None if state is None else state.value,
        "opened": found and found.opened,
        "expires": found and found.expires,
        "action": action if action in ("commit", "abort") else "",
        "tasks": registry.index.count(Filter(job=name)),
        "q": str(Term.of("job", name)),
    }


def change_job(method: str, what: str, request: ViewRequest) -> dict[str, object]:
    """Commit or abort a job."""
    name = request.fields.needed("name")
    try:
        getattr(request.with_registry, method)(name)
    except JobClosed as closed:
        raise HTTPException(409, str(closed)) from closed
    log_action(request.user, f"{what} the job", name)
    request.site.outdate(*OF_HELD)
    return {**job(request), "see": f"jobs/one?{request.fields.address()}"}


def pauses(request: ViewRequest) -> dict[str, object]:
    """Return the pauses, with their counts of held tracked tasks."""
    request.with_registry  # noqa: B018 - raises if there is no registry
    holds, kinds = counted(request.site)
    names = {what: {getattr(each.kind, what) for each in kinds if each.total} for what in OTHER}
    names["task"] |= {each for each in request.site.app.tasks if not each.startswith("celery.")}
    paused = []
    for each in holds.paused:
        what, name = ("queue", each.queue) if each.task is None else ("task", each.task)
        of_it = [kind for kind in kinds if getattr(kind.kind, what) == name]
        held = sum(kind.before[holds.late_ms] for kind in of_it)
        shown = {"what": what, "name": name, "held": held, "q": str(Term.of(what, str(name)))}
        shown["other"] = OTHER[what] if name in names[OTHER[what]] else None
        paused.append({**each._asdict(), **shown, "ahead": sum(k.total for k in of_it) - held})
    proposed = {what: sorted(filter(None, names[what]))[:MOST_NAMES] for what in OTHER}
    return {"paused": paused, "names": proposed}


def pause(request: ViewRequest) -> dict[str, object]:
    """Pause a task or a queue until the time in the field ``until``, or until it is resumed."""
    until, (what, name) = request.instant("until"), _target(request)
    if until is not None and until <= wall_clock.now():
        raise Wrong("until", "takes an instant in the future")
    since = request.with_registry.pause(**{what: name}, until=until)
    log_action(request.user, f"paused the {what}", name)
    request.site.outdate(*OF_HELD)
    return {"since": since, "until": until, "see": "pauses"}


def resume(request: ViewRequest) -> dict[str, object]:
    """Resume a task or a queue."""
    what, name = _target(request)
    was_paused = request.with_registry.resume(**{what: name})
    log_action(request.user, f"resumed the {what}", name, "" if was_paused else ": was not paused")
    request.site.outdate(*OF_HELD)
    return {"was_paused": was_paused, "see": "pauses"}


def _target(request: ViewRequest) -> tuple[str, str]:
    """Return ``task`` or ``queue`` from a form, and the name of the task or queue."""
    return request.fields.one_of("what", OTHER, "task"), request.fields.needed("name")
