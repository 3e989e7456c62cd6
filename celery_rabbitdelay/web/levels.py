"""The page Levels: the messages in each delay queue and in the queues of the modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.web.site import Glance, Site
from celery_rabbitdelay.web.view_request import ViewRequest

#: The delay of the example, in milliseconds: 2 h 5 min.
EXAMPLE: Final = 7_500_000


def levels(request: ViewRequest) -> dict[str, object]:
    """Return the message counts and rates of every level, its digits, and the module queues."""
    topology, reading = request.site.delays.topology, request.site.queues()
    about: dict[str, object] = {
        "layout": topology.layout.name,
        "example": _example(topology.layout),
        "taken": reading.taken,
        "broker_error": reading.error,
    }
    if reading.value is None:
        return {**about, "levels": [], "others": [], "total": None, "due_within": None}
    status, rates = reading.value
    within_ms = status.due_within_ms
    return {
        **about,
        "levels": list(_levels(request.site, reading.value)),
        "total": sum(status.backlog.levels.values()),
        "due_within": None if within_ms is None else within_ms / 1000,
        "others": [
            {"name": name, **counts._asdict(), "rate": rates.get(name)}
            for name, counts in status.backlog.others.items()
        ],
    }


def _example(layout: Layout) -> dict[str, object]:
    """Return an example delay in seconds, and the queues that its message waits in, in order."""
    delay = min(EXAMPLE, layout.capacity_ms)
    digits = zip(layout.levels, layout.digits(delay), strict=True)
    queues = [level.queue_name(digit) for level, digit in digits if digit]
    return {"delay": delay / 1000, "queues": queues}


def _levels(site: Site, glance: Glance) -> Iterator[dict[str, object]]:
    """Yield the levels with their digits, the highest level first."""
    backlog = glance.status.backlog
    for level in site.delays.topology.layout.levels:
        digits = backlog.digits[level.name].items()
        yield {
            "name": level.name,
            "unit": level.unit,
            "messages": backlog.levels[level.name],
            "rate": glance.rates.get(level.name),
            "digits": [
                {
                    "queue": level.queue_name(digit),
                    "count": digit * level.multiple,
                    "messages": each,
                }
                for digit, each in digits
            ],
        }
