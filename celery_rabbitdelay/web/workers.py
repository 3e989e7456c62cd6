"""The page Workers: the modules, versions and settings of each, and where these differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_rabbitdelay.app.control import ABOUT
from celery_rabbitdelay.web.asked import Asked
from celery_rabbitdelay.web.site import modules_of


def workers(asked: Asked) -> dict[str, Any]:
    """Return the modules and versions of each worker, and the settings that differ."""
    reading = asked.site.workers.latest()
    answers = {} if reading.value is None else reading.value.answers
    about = {
        name: answer[ABOUT]
        for name, answer in sorted(answers.items())
        if isinstance(answer.get(ABOUT), Mapping)
    }
    versions = {name: _texts(each.get("versions")) for name, each in about.items()}
    settings = {name: _texts(each.get("settings")) for name, each in about.items()}
    return {
        "taken": reading.taken,
        "error": reading.error,
        "workers": [
            {
                "name": name,
                "error": answer.get("error"),
                "modules": modules_of(answer),
                "versions": versions.get(name, {}),
                "settings": settings.get(name, {}),
            }
            for name, answer in sorted(answers.items())
        ],
        "differences": [*differences(versions, "version"), *differences(settings, "setting")],
    }


def _texts(found: object) -> dict[str, str]:
    """Return the versions or the settings of a worker; of later versions, only what is a text."""
    told = found if isinstance(found, Mapping) else {}
    return {str(name): value for name, value in told.items() if isinstance(value, str)}


def differences(told: Mapping[str, Mapping[str, str]], kind: str) -> Iterator[dict[str, Any]]:
    """Yield each version or setting that is not the same in all workers, with who has which.

    Args:
        told: What each worker says, by its name.
        kind: What it is: ``version`` or ``setting``.
    """
    for name in sorted({name for each in told.values() for name in each}):
        by_value: dict[str | None, list[str]] = {}
        for worker, said in told.items():
            by_value.setdefault(said.get(name), []).append(worker)
        if len(by_value) > 1:
            values = [{"value": value, "workers": names} for value, names in by_value.items()]
            yield {"kind": kind, "name": name, "values": values}
