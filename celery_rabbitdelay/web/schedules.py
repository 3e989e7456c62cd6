"""The page Schedules: a time line of the next runs, and the last outcome; edit, pause, trigger."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from starlette.exceptions import HTTPException

from celery_rabbitdelay.exceptions import InvalidDelay, InvalidSchedule
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import UNITS, instant_of, milliseconds_of, parse_duration
from celery_rabbitdelay.schedules.recurrence import INVALID
from celery_rabbitdelay.schedules.schedules import Schedule
from celery_rabbitdelay.web.now import HORIZONS
from celery_rabbitdelay.web.shown import quoted
from celery_rabbitdelay.web.site import log_action
from celery_rabbitdelay.web.view_request import ViewRequest, Wrong

#: The prefix of an interval rule; milliseconds follow.
EVERY: Final = "every "

#: An occurrence that is later than this, in seconds, counts as missing.
MISSING: Final = 60.0

#: The maximum number of runs on the time line: of one schedule, and of all schedules.
MOST_RUNS, MOST_OF_ALL = 12, 200

#: The error for an unknown name.
UNKNOWN: Final = "There is no schedule with this name."

#: How many next runs a schedule's own page lists.
NEXT: Final = 5


def schedules(request: ViewRequest) -> dict[str, object]:
    """Return all schedules in the order of their next runs, with the runs within a span of time."""
    horizon = request.fields.one_of("horizon", HORIZONS, "day")
    found = sorted(request.with_registry.schedules.all(), key=lambda each: each.next_at)
    start, (length, _) = wall_clock.now(), HORIZONS[horizon]
    listed, left = [], MOST_OF_ALL
    for each in found:
        runs = runs_until(each, start, start + length, min(MOST_RUNS, left))
        left -= len(runs)
        listed.append({**_shown(request, each), "runs": runs})
    return {
        "schedules": listed,
        "horizon": horizon,
        "horizons": list(HORIZONS),
        "start": start,
        "length": length,
        "most_runs": MOST_RUNS,
        "is_cut_off": not left,
    }


def runs_until(found: Schedule, start: datetime, end: datetime, most: int) -> list[datetime]:
    """Return the first runs of a schedule within a span of time, without an overdue run."""
    instants, end_ms = list[datetime](), milliseconds_of(end)
    with suppress(*INVALID):  # the rules of a later version
        at_ms: int | None = milliseconds_of(found.next_at)
        if found.next_at < start:
            at_ms = found.recurrence.after(milliseconds_of(start))
        while at_ms is not None and at_ms < end_ms and len(instants) < most:
            instants.append(instant_of(at_ms))
            at_ms = found.recurrence.after(at_ms)
    return instants


def schedule(request: ViewRequest) -> dict[str, object]:
    """Return one schedule and its next runs."""
    found = _known(request)
    instants = request.with_registry.schedules.next(found.name, NEXT)
    return {"schedule": _shown(request, found), "next": instants}


def _known(request: ViewRequest) -> Schedule:
    """Return the schedule that the request names.

    Raises:
        HTTPException: There is no such schedule.
    """
    found = request.with_registry.schedules.get(request.fields.needed("name"))
    if found is None:
        raise HTTPException(404, UNKNOWN)
    return found


def edit(request: ViewRequest) -> dict[str, object]:
    """Change the timing of a schedule; its task and arguments stay."""
    fields = request.fields
    changed: dict[str, object] = {}
    lines = "\n".join(fields.getlist("when")).splitlines()
    if rules := [_rule(line.strip()) for line in lines if line.strip()]:
        changed["when"] = rules
    if "timezone" in fields:
        changed["timezone"] = fields.needed("timezone").strip()
    found = _known(request)
    if not found.task:
        lost = "Redis has lost the schedule's task: create the schedule anew in the application."
        raise HTTPException(409, lost)
    if found.args is None:
        hidden = "The schedule's arguments cannot be read here: see Celery's accept_content."
        raise HTTPException(409, hidden)
    try:
        put = request.with_registry.schedules.put_exported(found.exported(), **changed)
    except (InvalidSchedule, InvalidDelay) as wrong:
        raise Wrong("when", str(wrong)) from wrong
    log_action(request.user, "edited the schedule", found.name, f": {changed!r:.500}")
    done = "edited the schedule" if put is not None else "ended the schedule: no run is left"
    see = "schedules" if put is None else f"schedules/one?name={quoted(found.name)}"
    return {"name": found.name, "done": done, "see": see}


def _rule(line: str) -> str | timedelta:
    """Parse a rule as the page writes it: an interval has a unit."""
    if not line.startswith(EVERY):
        return line
    text = line.removeprefix(EVERY)
    if text.strip().replace(".", "").isdigit():
        raise Wrong("when", "takes an interval with its unit, such as every 90s or every 1h30m")
    try:
        return parse_duration(text, "when")
    except InvalidDelay as wrong:
        raise Wrong("when", f"takes an interval such as every 1h30m, not {text!r:.100}") from wrong


def written(rule: str) -> str:
    """Format a rule as the page writes and parses it."""
    milliseconds = rule.removeprefix(EVERY)
    if not (rule.startswith(EVERY) and milliseconds.isdigit()):
        return rule
    rest, text = int(milliseconds), ""
    for unit, length in UNITS.items():
        number, rest = divmod(rest, length)
        text += f"{number}{unit}" if number else ""
    return f"{EVERY}{text}"


def end(request: ViewRequest) -> dict[str, object]:
    """End a schedule."""
    return {**change("delete", "ended the schedule", request), "see": "schedules"}


def change(method: str, what: str, request: ViewRequest) -> dict[str, object]:
    """Pause, resume, trigger or end a schedule."""
    name, see = request.fields.needed("name"), request.fields.address()
    if not getattr(request.with_registry.schedules, method)(name):
        raise HTTPException(404, UNKNOWN)
    log_action(request.user, what, name)
    return {"name": name, "done": what, "see": f"schedules/one?{see}"}


def _shown(request: ViewRequest, found: Schedule) -> dict[str, object]:
    """Return the content of a schedule, with masked or hidden arguments."""
    content = found.exported()
    for name in ("args", "kwargs", "options"):
        text = None if content[name] is None else str(content[name])
        content[name] = request.site.options.shown(found.task, text)
    late, last = (wall_clock.now() - found.next_at).total_seconds(), None
    if found.last is not None:
        due, came, fate = found.last
        last = {"due": due, "fate": fate, "late": max((came - due).total_seconds(), 0.0)}
    return {
        **content,
        "is_readable": found.args is not None,
        "written": [written(each) for each in content["when"]],
        "next_at": found.next_at,
        "late": late if late > MISSING else None,
        "last": last,
    }
