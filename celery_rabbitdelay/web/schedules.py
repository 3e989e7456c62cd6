"""The page Schedules: when each is due next, what became of the last occurrence; pause, trigger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.app.schedule_imports import exported
from celery_rabbitdelay.app.schedules import Schedule, Schedules
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.web.asked import Asked, servers_away
from celery_rabbitdelay.web.waiting import check_registry, masked
from celery_rabbitdelay.web.work import log_action

#: Seconds after which it is said of an occurrence that it has not come.
MISSING: Final = 60.0

#: How many next instants a schedule's own page has.
NEXT: Final = 10


def schedules(asked: Asked) -> dict[str, Any]:
    """Return all schedules, the one that is due next first."""
    check_registry(asked)
    with servers_away():
        found = asked.site.delays.schedules.all()
    found = sorted(found, key=lambda each: each.next_at)
    return {"schedules": [_told(asked, each) for each in found]}


def schedule(asked: Asked) -> dict[str, Any]:
    """Return one schedule, and when it is due next."""
    check_registry(asked)
    name, own = asked.fields.needed("name"), asked.site.delays.schedules
    with servers_away():
        found = own.get(name)
        instants = own.next(name, NEXT) if found is not None else []
    if found is None:
        raise HTTPException(404, "There is no schedule of this name.")
    return {"schedule": _told(asked, found), "next": instants}


def pause(asked: Asked) -> dict[str, Any]:
    """Let the occurrences of a schedule come and not run."""
    return _changed(asked, Schedules.pause, "paused the schedule")


def resume(asked: Asked) -> dict[str, Any]:
    """Let the occurrences of a schedule run again."""
    return _changed(asked, Schedules.resume, "resumed the schedule")


def trigger(asked: Asked) -> dict[str, Any]:
    """Send the task of a schedule now."""
    return _changed(asked, lambda own, name: own.trigger(name) is not None, "triggered")


def end(asked: Asked) -> dict[str, Any]:
    """End a schedule."""
    return {**_changed(asked, Schedules.delete, "ended the schedule"), "see": "schedules"}


def _changed(asked: Asked, change: Callable[[Schedules, str], bool], what: str) -> dict[str, Any]:
    check_registry(asked)
    name = asked.fields.needed("name")
    with servers_away():
        is_known = change(asked.site.delays.schedules, name)
    if not is_known:
        raise HTTPException(404, "There is no schedule of this name.")
    log_action(asked.user, what, 1, name)
    return {"name": name, "done": what, "see": f"schedules/one?{asked.fields.address(token=None)}"}


def _told(asked: Asked, found: Schedule) -> dict[str, Any]:
    """Return a schedule without arguments that may not be shown."""
    options, told = asked.site.options, exported(found)
    for name in ("args", "kwargs", "options"):
        told[name] = masked(options, found.task, str(told[name]))
    late = (wall_clock.now() - found.next_at).total_seconds()
    last = None
    if found.last is not None:
        due, came, fate = found.last
        last = {"due": due, "fate": fate, "late": max((came - due).total_seconds(), 0.0)}
    return {
        **told,
        "next_at": found.next_at,
        "late": late if late > MISSING else None,
        "last": last,
    }
