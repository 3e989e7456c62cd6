"""Signal receivers that log each delivered reminder as a line of JSON.

The worker imports this module: ``celery -A example_project.shop worker -I
example_project.pipelines.delivered_log``. Each process of the worker writes to a file of its own in
the folder ``SHOP_DELIVERED_LOG``.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from celery import Task
from celery.signals import task_prerun, task_success

from example_project.shop import remind

#: The folder of the log.
FOLDER: Final = Path(os.environ.get("SHOP_DELIVERED_LOG", "delivered"))


@task_prerun.connect(sender=remind)
def note_start(task: Task[..., None], **_: Any) -> None:
    """Note the start of a reminder."""
    task.request.update(started_ms=time.time_ns() // 1_000_000)


@task_success.connect(sender=remind)
def write_delivered(sender: Task[..., None], **_: Any) -> None:
    """Log a delivered reminder, with its due time and its start."""
    request = sender.request
    headers: Mapping[str, Any] = request.headers or {}
    line = {
        "task_id": request.id,
        "order_id": (request.kwargs or {})["order_id"],
        # None if it was already due when it was sent, so without a delay.
        "due_ms": headers.get("rabbitdelay-due"),
        "started_ms": request.get("started_ms"),
        "retries": request.retries,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{os.getpid()}.jsonl").open("a") as log:
        log.write(f"{json.dumps(line)}\n")
