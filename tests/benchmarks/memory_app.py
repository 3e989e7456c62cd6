"""The two applications of the memory benchmark: ours, and plain Celery with its own eta.

A worker is started with ``-A tests.benchmarks.memory_app`` and gets its part as JSON in the
environment variable ``MEMORY_APP``.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import celery
from kombu import Queue

from celery_rabbitdelay import Celery

#: Whose delays they are: the class of the application that makes them.
CASES: Final[dict[str, type[celery.Celery]]] = {"rabbitdelay": Celery, "celery eta": celery.Celery}


def make_app(case: str, broker_url: str) -> celery.Celery:
    """Create an application with one task and one classic queue.

    Args:
        case: One of :data:`CASES`.
        broker_url: The broker.
    """
    app = CASES[case]("memory", broker=broker_url, set_as_current=False)
    queue = queue_name(case)
    app.conf.update(
        task_default_queue=queue,
        task_queues=[Queue(queue, queue_arguments={"x-queue-type": "classic"})],
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        # Without a limit. With one, which Celery raises by each task whose eta is ahead, the plain
        # worker had 2,566 of 20,000 after three and a half minutes (Celery 5.7.0).
        worker_prefetch_multiplier=0,
    )

    @app.task(name="remind", shared=False)
    def remind(order: int, text: str) -> None: ...

    return app


def queue_name(case: str) -> str:
    """The name of the case's queue."""
    return f"memory-{case.replace(' ', '-')}"


if "MEMORY_APP" in os.environ:
    settings: dict[str, Any] = json.loads(os.environ["MEMORY_APP"])
    app = make_app(**settings)
