"""``celery rabbitdelay``, the group of commands that Celery loads by its entry point.

Each module adds its commands to the group when it is imported; the last one registers the control
command, so that ``celery inspect`` knows it in this process.
"""

from __future__ import annotations

from celery_rabbitdelay.command import (  # noqa: F401
    declare,
    moving,
    pausing,
    route,
    status,
    undeliverable,
    waiting,
)
from celery_rabbitdelay.command.shared import rabbitdelay
from celery_rabbitdelay.schedules import command as schedules  # noqa: F401
from celery_rabbitdelay.web import command as web  # noqa: F401
from celery_rabbitdelay.worker.status import rabbitdelay_status

__all__ = ["rabbitdelay", "rabbitdelay_status"]
