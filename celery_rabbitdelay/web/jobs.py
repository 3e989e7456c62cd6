"""The page Jobs: what became of a job, its tasks that wait; open, commit and abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import JobClosed
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.registry.index import Filter
from celery_rabbitdelay.registry.open_jobs import OpenJobs
from celery_rabbitdelay.web.asked import Asked, Wrong, servers_away
from celery_rabbitdelay.web.work import log_action

#: How many open jobs are listed, those that expire first.
MOST: Final = 50


def jobs(asked: Asked) -> dict[str, Any]:
    """Return the jobs that are open, and the state of the job of a name.

    Of each, also how many of its tracked tasks wait.
    """
    registry = asked.with_registry.registry
    with servers_away():
        opened = registry.jobs.opened(registry.now_ms(), MOST + 1)
        tasks = registry.index.counts([Filter(job=name) for name, _ in opened[:MOST]])
    told = [
        {"name": name, "expires": instant_of(expires_ms), "tasks": waiting}
        for (name, expires_ms), waiting in zip(opened, tasks, strict=False)
    ]
    return {**_named(asked), "open": told, "may_be_more": len(opened) > MOST}


def _named(asked: Asked) -> dict[str, Any]:
    """Return the state of the job of a name, and how many of its tracked tasks wait."""
    registry, name = asked.with_registry.registry, asked.fields.text("name")
    if name is None:
        return {"name": None, "state": None, "tasks": None}
    with servers_away():
        state = registry.jobs.state(name)
        tasks = registry.index.count(Filter(job=name))
    return {"name": name, "state": None if state is None else state.value, "tasks": tasks}


def open_job(asked: Asked) -> dict[str, Any]:
    """Open a job: the tasks that are sent with it wait until it is committed."""
    expires = asked.duration("expires")
    if not expires:
        raise Wrong("expires", "takes the time until it is aborted unless it is committed: 1h30m")
    return _changed(asked, lambda own, name: own.open_job(name, expires=expires), "opened the job")


def commit(asked: Asked) -> dict[str, Any]:
    """Let all tasks of a job run, when they are due."""
    return _changed(asked, OpenJobs.commit_job, "committed the job")


def abort(asked: Asked) -> dict[str, Any]:
    """Let no task of a job run."""
    return _changed(asked, OpenJobs.abort_job, "aborted the job")


def _changed(asked: Asked, change: Callable[[OpenJobs, str], object], what: str) -> dict[str, Any]:
    name = asked.fields.needed("name")
    with servers_away():
        try:
            change(asked.with_registry, name)
        except JobClosed as closed:
            raise HTTPException(409, str(closed)) from closed
    log_action(asked.user, what, 1, name)
    return {**_named(asked), "see": f"jobs?{asked.fields.address(token=None, expires=None)}"}
