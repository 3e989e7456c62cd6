"""The task of the acceptance tests: it writes down in Redis that it started, and when."""

from __future__ import annotations

import json
import time
from typing import Any

from celery import Task, shared_task

#: The Redis list that the starts are appended to, in the database of the result backend.
JOURNAL = "rabbitdelay-acceptance:journal"


# Nobody waits for a result, and keeping track of a thousand would cost more than the tasks do.
@shared_task(bind=True, ignore_result=True)
def write_start(self: Task[[], None]) -> None:
    """Append this task's id, the time of its start and the due time it brought to the journal."""
    started = time.time_ns() // 1_000_000
    headers = self.request.headers or {}
    entry = {"task_id": self.request.id, "started": started, "due": headers.get("rabbitdelay-due")}
    backend: Any = self.backend  # the Redis one: only that has a client
    backend.client.rpush(JOURNAL, json.dumps(entry))
