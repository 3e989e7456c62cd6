"""An honest client of an application that is under attack: sends tasks, some each second."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Any, Final

from kombu import Connection

#: Seconds that each task is delayed.
DELAY: Final = 1.0

#: Seconds between two tasks.
INTERVAL: Final = 0.1

#: How tasks go: straight from the levels, and through distribution.
WAYS: Final = {"levels": None, "distribution": 9}


class Honest:
    """Sends tasks in a thread, each way in turn, until it is stopped.

    Args:
        app: The application.

    Attributes:
        sent: How many of each way.
        error: Why it has ended early; None if it has not.
    """

    def __init__(self, app: Any) -> None:
        self.sent = dict.fromkeys(WAYS, 0)
        self.error: BaseException | None = None
        self._app = app
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="honest")

    def __enter__(self) -> Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with Connection(self._app.conf.broker_url) as connection:
                while not self._stopping.is_set():
                    for way, priority in WAYS.items():
                        self._app.tasks["honest"].apply_async(
                            (way, time.time() + DELAY),
                            delay=DELAY,
                            priority=priority,
                            connection=connection,
                        )
                        self.sent[way] += 1
                        self._stopping.wait(INTERVAL)
        except BaseException as error:  # noqa: BLE001 - told at the end
            self.error = error
