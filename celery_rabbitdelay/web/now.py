"""The page Now: the levels with what waits in each digit, and what falls due when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import zip_longest
from typing import Any, Final

from celery_rabbitdelay.app.control import ARRIVALS
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.topology import PROBE
from celery_rabbitdelay.operations.findings import blocked
from celery_rabbitdelay.operations.status import due_at_least
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.reading import Reading
from celery_rabbitdelay.web.site import HORIZONS, DueSoon, Glance, Workers, modules_of

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
        "blocked": blocked()._asdict() if status.is_blocked else None,
        "next_due": status.next_due,
        "due_within": None if status.due_within_ms is None else status.due_within_ms / 1000,
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
    delays = asked.site.delays
    reading = asked.site.due[horizon].latest() if delays.has_registry else Reading[DueSoon]()
    soon = reading.value
    length, number = HORIZONS[horizon]
    horizons, steps = [], []
    for name, (each, _) in HORIZONS.items():
        tracked = None if soon is None else soon.totals[name]
        least = tracked
        if glance is not None:
            within_ms = each // timedelta(milliseconds=1)
            of_all = due_at_least(delays.topology, glance.status.backlog, within_ms)
            least = max(of_all, tracked or 0)
        horizons.append({"name": name, "tracked": tracked, "all_at_least": least})
    if soon is not None:
        steps = [
            {"start": soon.start + length * step / number, "tracked": count}
            for step, count in enumerate(soon.steps)
        ]
    return {
        "has_registry": delays.has_registry,
        "error": reading.error,
        "overdue": None if soon is None else soon.overdue,
        "later": None if soon is None else soon.later,
        "horizons": horizons,
        "steps": steps,
        "step": length / number,
    }


def _workers(asked: Asked, broker_error: str | None) -> dict[str, Any]:
    """Return the lateness and the rate of arrivals, as the workers count them."""
    reading = Reading[Workers](error=broker_error)  # they are asked through the broker
    if broker_error is None:
        reading = asked.site.workers.latest()
    found = reading.value or Workers({}, None)
    return {
        "workers_taken": reading.taken,
        "workers_error": reading.error,
        "arrivals": found.arrivals,
        "late_by_minute": latest_by_minute(found.answers.values()),
        "workers": [_worker(name, modules) for name, modules in sorted(found.answers.items())],
    }


def latest_by_minute(answers: Iterable[Mapping[str, Any]]) -> list[float | None]:
    """Return how late the latest task of each of the last minutes was, this minute's first.

    Args:
        answers: What the workers answer; those of earlier versions do not say it.
    """
    told = [(answer.get(ARRIVALS) or {}).get("by_minute") or () for answer in answers]
    minutes = zip_longest(*(each[:MINUTES] for each in told))
    return [max((late for late in each if late is not None), default=None) for each in minutes]


def _worker(name: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a worker answers: its error, or its modules, lateness and probes."""
    arrivals, probe = answer.get(ARRIVALS) or {}, answer.get(PROBE) or {}
    late, probes = (probe.get("late") or {}).values(), None
    if late:
        missing = sum((probe.get("missing") or {}).values())
        probes = {
            "routes": len(late),
            "least": min(late),
            "most": max(late),
            "missing": missing,
        }
    return {
        "name": name,
        "error": answer.get("error"),
        "modules": modules_of(answer),
        "received": arrivals.get("received"),
        "latest": arrivals.get("latest"),
        "probes": probes,
    }
