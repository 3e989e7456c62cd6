"""The page Workers: the workers' activity, and differences between their versions and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from kombu import Queue

from celery_rabbitdelay.operations.workers import ABOUT, ARRIVALS
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.web.site import PATIENCE, WORKERS_PERIOD, Answer, Site, counted, is_awaited
from celery_rabbitdelay.web.view_request import ViewRequest

#: Seconds between two checks for queues without a worker, and the maximum of queues to check.
UNSERVED_PERIOD, MOST_QUEUES = 10.0, 100


def workers(request: ViewRequest) -> dict[str, object]:
    """Return the workers' activity, and the versions and settings that differ."""
    reading = request.site.workers()
    answers = dict(sorted((reading.value or {}).items()))
    return {
        "taken": reading.taken,
        "is_awaited": is_awaited(reading, WORKERS_PERIOD),
        "error": reading.error,
        "workers": [_worker(name, answer) for name, answer in answers.items()],
        "unserved": [*unserved(request.site)],
        "differences": [
            each
            for kind in ("versions", "settings")
            for each in differences({name: _texts(answers[name], kind) for name in answers}, kind)
        ],
    }


def _worker(name: str, answer: Answer) -> dict[str, object]:
    """Return a worker's answer; fields that its version does not report are empty."""
    arrivals, at_work = answer.get(ARRIVALS) or {}, _of(answer.get(ABOUT), dict, {})
    return {
        "name": name,
        "error": answer.get("error"),
        "modules": sorted(answer.keys() - {ABOUT, ARRIVALS, "error"}),
        "received": arrivals.get("received"),
        "latest": arrivals.get("latest"),
        "queues": [str(each) for each in _of(at_work.get("queues"), list, [])],
        "processes": _of(at_work.get("processes"), int, None),
        "uptime": _of(at_work.get("uptime"), int, None),
        "running": [
            {"name": str(each.get("name")), "seconds": _of(each.get("seconds"), float, 0.0)}
            for each in _of(at_work.get("running"), list, [])
            if isinstance(each, dict)
        ],
        "versions": _texts(answer, "versions"),
        "settings": _texts(answer, "settings"),
    }


def _of(value: object, kind: type, otherwise: object) -> Any:
    """Return a value of a type; a value of another type, from a later version, counts as absent."""
    return value if isinstance(value, kind) else otherwise


def unserved(site: Site) -> Mapping[str, bool]:
    """Return the queues that tracked tasks wait for and no worker consumes; whether each exists.

    Empty if unknown.
    """
    if not site.delays.has_registry:
        return {}
    look = partial(_unserved, site)
    return site.latest("unserved", look, UNSERVED_PERIOD, PATIENCE).value or {}


def _unserved(site: Site) -> Mapping[str, bool]:
    kinds = counted(site).kinds
    names = sorted({each.kind.queue for each in kinds if each.total and each.kind.queue})
    queues = [Queue(name) for name in names[:MOST_QUEUES]]
    counts = site.ask(partial(queue_counts, queues=queues))
    return {
        name: found is not None for name, found in counts.items() if not (found and found.consumers)
    }


def _texts(answer: Answer, kind: str) -> dict[str, str]:
    """Return the versions or the settings of a worker; values that are not strings are left out."""
    found = _of(_of(answer.get(ABOUT), dict, {}).get(kind), dict, {})
    return {str(name): value for name, value in found.items() if isinstance(value, str)}


def differences(reports: Mapping[str, Mapping[str, str]], kind: str) -> Iterator[dict[str, object]]:
    """Yield the versions or settings that differ between workers, with the workers per value.

    Args:
        reports: The versions or settings of every worker; workers without any are left out.
        kind: ``versions`` or ``settings``.
    """
    for name in sorted({name for each in reports.values() for name in each}):
        by_value: dict[str | None, list[str]] = {}
        for worker, report in reports.items():
            if report:
                by_value.setdefault(report.get(name), []).append(worker)
        if len(by_value) > 1:
            values = [{"value": value, "workers": names} for value, names in by_value.items()]
            yield {"kind": kind, "name": name, "values": values}
