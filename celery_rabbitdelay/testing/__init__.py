"""Helpers for the tests of an application: time travel, a recording fake, private servers.

The fixtures are in :mod:`celery_rabbitdelay.testing.plugin`, which pytest finds by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from celery_rabbitdelay.testing.recording import Recording, recorded
    from celery_rabbitdelay.testing.sent import Sent
    from celery_rabbitdelay.testing.servers import (
        RabbitMQServer,
        RedisServer,
        Server,
        ServerNotStarted,
        wait_for,
    )
    from celery_rabbitdelay.testing.session import Worker
    from celery_rabbitdelay.testing.travel import DidNotSettle, Travel

__all__ = [
    "DidNotSettle",
    "RabbitMQServer",
    "Recording",
    "RedisServer",
    "Sent",
    "Server",
    "ServerNotStarted",
    "Travel",
    "Worker",
    "recorded",
    "wait_for",
]

#: Names are imported on first use: a test run that does not use them does not wait for Celery.
_ROOMS: Final = {
    **dict.fromkeys(("DidNotSettle", "Travel", "Worker"), "session"),
    **dict.fromkeys(("Recording", "Sent", "recorded"), "recording"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'servers')}"), name)
