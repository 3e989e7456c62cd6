"""The page Workers: what each one does, and what differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from kombu import Queue

from celery_rabbitdelay.app.control import ABOUT, ARRIVALS
from celery_rabbitdelay.publishing.declaration import queue_counts
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.site import Answer, Site
from celery_rabbitdelay.web.states import counted

#: Seconds from one look at the queues that tasks wait for to the next, and how many are looked at.
UNSERVED_PERIOD, MOST_QUEUES = 10.0, 100

_T = TypeVar("_T")


def workers(asked: Asked) -> dict[str, object]:
    """Return what each worker does, and the versions and settings that differ."""
    reading = asked.site.workers()
    answers = dict(sorted((reading.value or {}).items()))
    return {
        "taken": reading.taken,
        "error": reading.error,
        "workers": [_worker(name, answer) for name, answer in answers.items()],
        "unserved": unserved(asked.site),
        "differences": [
            each
            for kind in ("versions", "settings")
            for each in differences({name: _texts(answers[name], kind) for name in answers}, kind)
        ],
    }


def _worker(name: str, answer: Answer) -> dict[str, object]:
    """Return what a worker answers; what earlier versions do not say is empty."""
    arrivals, about = answer.get(ARRIVALS) or {}, answer.get(ABOUT)
    at_work = about if isinstance(about, Mapping) else {}
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


def _of(value: object, kind: type[_T], otherwise: _T | None) -> Any:
    """Return a value of a type; what a later version says otherwise counts as not said."""
    return value if isinstance(value, kind) else otherwise


def unserved(site: Site) -> list[str]:
    """Return the queues that tracked tasks wait for, and nobody takes from; none while unknown."""
    if not site.delays.has_registry:
        return []
    return site.latest("unserved", partial(_unserved, site), UNSERVED_PERIOD).value or []


def _unserved(site: Site) -> list[str]:
    kinds = counted(site).kinds
    names = sorted({each.kind.queue for each in kinds if each.total and each.kind.queue})
    queues = [Queue(name) for name in names[:MOST_QUEUES]]
    counts = site.ask(partial(queue_counts, queues=queues))
    return [name for name, found in counts.items() if found is None or not found.consumers]


def _texts(answer: Answer, kind: str) -> dict[str, str]:
    """Return the versions or the settings of a worker; of later versions, only what is a text."""
    about = answer.get(ABOUT)
    told = about.get(kind) if isinstance(about, Mapping) else None
    if not isinstance(told, Mapping):
        return {}
    return {str(name): value for name, value in told.items() if isinstance(value, str)}


def differences(told: Mapping[str, Mapping[str, str]], kind: str) -> Iterator[dict[str, object]]:
    """Yield each version or setting that is not the same in all workers, with who has which.

    Args:
        told: What each worker says, by its name; workers that say nothing are left out.
        kind: What it is: ``versions`` or ``settings``.
    """
    for name in sorted({name for each in told.values() for name in each}):
        by_value: dict[str | None, list[str]] = {}
        for worker, said in told.items():
            if said:
                by_value.setdefault(said.get(name), []).append(worker)
        if len(by_value) > 1:
            values = [{"value": value, "workers": names} for value, names in by_value.items()]
            yield {"kind": kind, "name": name, "values": values}
