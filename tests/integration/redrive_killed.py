"""Redrives the messages of an application, and kills itself on the way.

``python -m tests.integration.redrive_killed POINT COUNT``, with the application's settings in
``SHOP``. It dies by SIGKILL at the COUNT-th time that it comes to POINT: ``taken`` (a message is
about to be published), ``confirmed`` (it is, and not acknowledged yet) or ``acknowledged`` (some
messages have just been).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from celery_rabbitdelay.operations.undeliverable.reader import Reader
from celery_rabbitdelay.operations.undeliverable.redrive import Removal, redrive, redriving_for
from celery_rabbitdelay.operations.undeliverable.redriving import Redriving
from tests.integration.shop import app

#: Where each point is: whose method, and whether it comes before it is called.
POINTS: dict[str, tuple[type, str, bool]] = {
    "taken": (Redriving, "redriven", True),
    "confirmed": (Removal, "settle", True),
    "acknowledged": (Reader, "_acknowledge", False),
}


def die_at(point: str, count: int) -> None:
    """Kill this process at the count-th call of a point's method."""
    owner, name, before = POINTS[point]
    method: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def counted(self: Any, *args: Any) -> Any:
        nonlocal calls
        if before and calls + 1 == count:
            os.kill(os.getpid(), signal.SIGKILL)
        former = getattr(self, "_acknowledged", None)
        result = method(self, *args)
        # Some calls find nothing to acknowledge.
        calls += former is None or former != self._acknowledged
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def main() -> None:
    """Redrive, and die."""
    die_at(sys.argv[1], int(sys.argv[2]))
    with app.connection_for_write() as connection:
        redrive(connection, app.rabbitdelay.topology, redriving_for(app))


if __name__ == "__main__":
    main()
