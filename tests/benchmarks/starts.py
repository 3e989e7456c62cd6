"""A Celery worker whose task notes the moment at which it starts, for the benchmarks.

A worker is started with ``-A tests.benchmarks.starts`` and gets its part as JSON in the environment
variable ``STARTS``. A start costs it one write of 16 bytes to a file of its process: no result, no
log, so that what Celery needs for a task is nearly all that it does.
"""

from __future__ import annotations

import json
import os
import struct
import time
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import celery
from celery.signals import worker_ready
from kombu import Queue

from celery_rabbitdelay.testing import RabbitMQServer
from tests.celery_process import CeleryProcess

_RECORD: Final = struct.Struct("<qd")


class Start(NamedTuple):
    """When a task was due, and when it started, in milliseconds since 1970."""

    due_ms: int
    at_ms: float


@cache
def _file(folder: str, process: int) -> int:
    path = Path(folder) / f"{process}.starts"
    return os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)


def make_app(broker_url: str, queue: str, settings: dict[str, Any], folder: str = "") -> Any:
    """Create a plain Celery application with one quorum queue and the task ``note``.

    Args:
        broker_url: The broker.
        queue: The name of the queue.
        settings: Further settings.
        folder: Where a worker notes the starts.
    """
    app = celery.Celery("starts", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_queues=[Queue(queue, queue_arguments={"x-queue-type": "quorum"})],
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        **settings,
    )

    @app.task(name="note", shared=False)
    def note(due_ms: int) -> None:
        at_ms = time.time() * 1000
        os.write(_file(folder, os.getpid()), _RECORD.pack(due_ms, at_ms))

    return app


class Worker(CeleryProcess):
    """``celery -A tests.benchmarks.starts worker``.

    Args:
        broker: The broker.
        queue: The queue that it consumes from.
        settings: What :func:`make_app` takes.
        *options: Further options of ``celery worker``.
    """

    module = "tests.benchmarks.starts"
    variable = "STARTS"

    def __init__(
        self, broker: RabbitMQServer, queue: str, settings: dict[str, Any], *options: str
    ) -> None:
        super().__init__({"broker_url": broker.url, "queue": queue, "settings": settings})
        self._settings["folder"] = str(self.folder)
        self._options = options

    def count(self) -> int:
        """How many tasks have started."""
        files = self.folder.glob("*.starts")
        return sum(path.stat().st_size for path in files) // _RECORD.size

    def starts(self) -> list[Start]:
        """The starts so far, in no particular order."""
        files = self.folder.glob("*.starts")
        return [Start(*each) for path in files for each in _RECORD.iter_unpack(path.read_bytes())]

    def _command(self) -> list[str]:
        command = f"worker -n starts-{self.port}@localhost --without-gossip -l WARNING"
        return [*self.celery(command), *self._options]

    def _ready(self) -> bool:
        return (self.folder / "ready").exists()


if "STARTS" in os.environ:
    given: dict[str, Any] = json.loads(os.environ["STARTS"])
    app = make_app(**given)

    @worker_ready.connect(weak=False)
    def on_ready(**_: Any) -> None:
        # Celery says it in its log as well, but on a level on which it also tells of each task.
        (Path(given["folder"]) / "ready").touch()
