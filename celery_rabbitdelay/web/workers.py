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
    answers = dict(sorted((reading.value.answers if reading.value is not None else {}).items()))
    about = {
        name: answer[ABOUT]
        for name, answer in answers.items()
        if isinstance(answer.get(ABOUT), Mapping)
    }
    return {
        "taken": reading.taken,
        "error": reading.error,
        "workers": [
            {
                "name": name,
                "error": answer.get("error"),
                "modules": modules_of(answer),
                "versions": _texts(about.get(name), "versions"),
                "settings": _texts(about.get(name), "settings"),
            }
            for name, answer in answers.items()
        ],
        "differences": [
            *differences(
                {name: _texts(each, "versions") for name, each in about.items()}, "version"
            ),
            *differences(
                {name: _texts(each, "settings") for name, each in about.items()}, "setting"
            ),
        ],
    }


def _texts(about: Any, kind: str) -> dict[str, str]:
    """Return the versions or the settings of a worker; of later versions, only what is a text."""
    found = about.get(kind) if about is not None else None
    return {
        str(name): value
        for name, value in (found if isinstance(found, Mapping) else {}).items()
        if isinstance(value, str)
    }


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
