"""Delayed Celery tasks that wait in RabbitMQ instead of in a worker.

A delay is a number, written digit by digit. Each digit is a queue with a message TTL that
dead-letters to the next digit's exchange::

    from celery_rabbitdelay import Celery

    app = Celery("shop", broker="amqp://")
    remind.apply_async((order,), countdown=3 * 86_400)

Celery applications import from here, kombu programs from :mod:`celery_rabbitdelay.kombu`, Spark's
drivers from :mod:`celery_rabbitdelay.spark`, tests from :mod:`celery_rabbitdelay.testing`, web
servers from :mod:`celery_rabbitdelay.web`, and additions from :mod:`celery_rabbitdelay.additions`.
All other modules are private.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.exceptions import *  # noqa: F403 - every error is public

if TYPE_CHECKING:
    from celery_rabbitdelay.app import signals
    from celery_rabbitdelay.app.application import Celery, Task, install, shared_task
    from celery_rabbitdelay.app.rows import Report, Row
    from celery_rabbitdelay.registry.decision import Outcome
    from celery_rabbitdelay.registry.index import Pending
    from celery_rabbitdelay.registry.known import KnownTask
    from celery_rabbitdelay.registry.pauses import Paused

__all__ = [
    "Celery",
    "KnownTask",
    "Outcome",
    "Paused",
    "Pending",
    "Report",
    "Row",
    "Task",
    "__version__",
    "install",
    "shared_task",
    "signals",
]
# Type checkers understand only this form.
__all__ += exceptions.__all__

__version__ = "0.1.0"

#: These names need Celery, which a kombu program may lack: they are imported on first use.
_IMPORTED_ON_FIRST_USE: Final = {
    "Celery": "celery_rabbitdelay.app.application",
    "install": "celery_rabbitdelay.app.application",
    "KnownTask": "celery_rabbitdelay.registry.known",
    "Report": "celery_rabbitdelay.app.rows",
    "Row": "celery_rabbitdelay.app.rows",
    "Task": "celery_rabbitdelay.app.application",
    "shared_task": "celery_rabbitdelay.app.application",
    "Outcome": "celery_rabbitdelay.registry.decision",
    "Paused": "celery_rabbitdelay.registry.pauses",
    "Pending": "celery_rabbitdelay.registry.index",
}


def __getattr__(name: str) -> Any:
    """Import a name that needs Celery, on first use (PEP 562)."""
    if name == "signals":
        return import_module("celery_rabbitdelay.app.signals")
    if name not in _IMPORTED_ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_IMPORTED_ON_FIRST_USE[name]), name)
    globals()[name] = value
    return value
