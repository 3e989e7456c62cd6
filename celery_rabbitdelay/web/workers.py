"""The page Workers: what each one does, and what differs between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from celery_rabbitdelay.app.control import ABOUT, ARRIVALS
from celery_rabbitdelay.web.asked import Asked

#: The answer of a worker.
Answer: TypeAlias = Mapping[str, Any]


def workers(asked: Asked) -> dict[str, object]:
    """Return what each worker does, and the versions and settings that differ."""
    reading = asked.site.workers()
    answers = {} if reading.value is None else dict(sorted(reading.value.status.workers.items()))
    return {
        "taken": reading.taken,
        "error": reading.error,
        "workers": [_worker(name, answer) for name, answer in answers.items()],
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
        "queues": at_work.get("queues") or [],
        "pool": at_work.get("pool") or {},
        "uptime": at_work.get("uptime"),
        "running": at_work.get("running") or [],
        "versions": _texts(answer, "versions"),
        "settings": _texts(answer, "settings"),
    }


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
