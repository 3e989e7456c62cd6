"""The page Now: the levels with what waits in each digit, and what falls due when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Final

from celery_rabbitdelay.app.control import ARRIVALS
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.entities import PROBE
from celery_rabbitdelay.operations.status import due_at_least
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.reading import Reading
from celery_rabbitdelay.web.site import HORIZONS, Glance, Workers, modules_of

#: For how many minutes it is shown how late tasks came.
MINUTES: Final = 10

#: For how long a rate counts as that of now.
RECENT: Final = timedelta(seconds=30)


def now(asked: Asked) -> dict[str, Any]:
    """Return how many messages wait in each digit, when they are due, and how late tasks arrive."""
    site = asked.site
    topology, reading = site.delays.topology, site.glance.latest()
    horizon = asked.fields.one_of("horizon", HORIZONS, "hour")
    told: dict[str, Any] = {
        "prefix": topology.prefix,
        "layout": topology.layout.name,
        "taken": reading.taken,
        "broker_error": reading.error,
        "horizon": horizon,
        "entering": _entering(asked),
        "due": _due(asked, horizon, reading.value),
        **_workers(asked, reading.error),
    }
    if reading.value is None:
        return {**told, "levels": [], "others": [], "total": None}
    status = reading.value.status
    return {
        **told,
        "levels": list(_levels(asked, reading.value)),
        "total": sum(status.backlog.levels.values()),
        "others": [
            {"name": name, **counts._asdict(), "rate": reading.value.rates.get(name)}
            for name, counts in status.backlog.others.items()
        ],
        "missing": status.backlog.missing,
        "next_due": status.next_due,
        "due_within": _seconds(status.due_within_ms),
        "paused": [each._asdict() for each in status.paused],
        "registry_error": status.registry_error,
    }


def _entering(asked: Asked) -> dict[str, Any]:
    """Return how many messages a second enter the levels, as the management API counts them."""
    rate, taken, error = asked.site.entering.latest()
    is_new = error is None and taken is not None and wall_clock.now() - taken < RECENT
    return {"rate": rate if is_new else None, "error": error}


def _levels(asked: Asked, glance: Glance) -> Iterator[dict[str, Any]]:
    """Yield each level with its digits, the highest first."""
    backlog = glance.status.backlog
    for level in asked.site.delays.topology.layout.levels:
        yield {
            "name": level.name,
            "unit": level.unit,
            "messages": backlog.levels[level.name],
            "rate": glance.rates.get(level.name),
            "digits": [
                {
                    "queue": level.queue_name(digit),
                    "count": digit * level.multiple,
                    "messages": messages,
                }
                for digit, messages in backlog.digits[level.name].items()
            ],
        }


def _due(asked: Asked, horizon: str, glance: Glance | None) -> dict[str, Any]:
    """Return what falls due within each horizon: of the tracked tasks, and of all at least."""
    site = asked.site
    reading = site.due[horizon].latest() if site.delays.has_registry else None
    soon = None if reading is None else reading.value
    least = {
        name: None
        if glance is None
        else due_at_least(site.delays.topology, glance.status.backlog, _milliseconds(length))
        for name, (length, _) in HORIZONS.items()
    }
    length, number = HORIZONS[horizon]
    start = None if soon is None else soon.start
    return {
        "has_registry": site.delays.has_registry,
        "error": None if reading is None else reading.error,
        "overdue": None if soon is None else soon.overdue,
        "later": None if soon is None else soon.later,
        "horizons": [
            {
                "name": name,
                "tracked": None if soon is None else soon.totals[name],
                "all_at_least": _most(least[name], None if soon is None else soon.totals[name]),
            }
            for name in HORIZONS
        ],
        "steps": [
            {"start": start + length * step / number, "tracked": count}
            for step, count in enumerate(soon.steps if soon is not None else ())
            if start is not None
        ],
        "step": length / number,
    }


def _workers(asked: Asked, broker_error: str | None) -> dict[str, Any]:
    """Return the lateness and the rate of arrivals, as the workers count them."""
    if broker_error is not None:  # they are asked through the broker
        reading = Reading[Workers](error=broker_error)
    else:
        reading = asked.site.workers.latest()
    found = reading.value
    return {
        "workers_taken": reading.taken,
        "workers_error": reading.error,
        "arrivals": None if found is None else found.arrivals,
        "late_by_minute": latest_by_minute(found.answers.values() if found is not None else ()),
        "workers": [
            _worker(name, modules)
            for name, modules in sorted(found.answers.items() if found is not None else ())
        ],
    }


def latest_by_minute(answers: Iterable[Mapping[str, Any]]) -> list[float | None]:
    """Return how late the latest task of each of the last minutes was, this minute's first.

    Args:
        answers: What the workers answer; those of earlier versions do not say it.
    """
    told = [(answer.get(ARRIVALS) or {}).get("by_minute") or () for answer in answers]
    minutes = zip_longest(*(each[:MINUTES] for each in told))
    return [max((late for late in each if late is not None), default=None) for each in minutes]


def _worker(name: str, modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker answers: its error, or its modules, lateness and probes."""
    arrivals, probe = modules.get(ARRIVALS) or {}, modules.get(PROBE) or {}
    late = [*(probe.get("late") or {}).values()]
    return {
        "name": name,
        "error": modules.get("error"),
        "modules": modules_of(modules),
        "received": arrivals.get("received"),
        "latest": arrivals.get("latest"),
        "probes": None
        if not late
        else {
            "routes": len(late),
            "least": min(late),
            "most": max(late),
            "missing": sum((probe.get("missing") or {}).values()),
        },
    }


def _most(*numbers: int | None) -> int | None:
    """Return the largest number of those that are known."""
    return max((each for each in numbers if each is not None), default=None)


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _milliseconds(length: timedelta) -> int:
    return length // timedelta(milliseconds=1)
