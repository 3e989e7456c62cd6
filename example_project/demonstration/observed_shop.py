"""The shop as the demonstration runs it: with unique names on the servers, and a journal.

The worker and the Spark executors import this module instead of ``example_project.shop``.
"""

import time
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.signals import task_prerun

from example_project.demonstration.journal import Journal, Start
from example_project.demonstration.run import Run
from example_project.shop import app, remind

__all__ = ["app", "journal", "remind", "run"]

run = Run.from_environment()

app.conf.update(
    # The servers may also hold queues and keys of other programs.
    rabbitdelay_prefix=run.prefix,
    task_default_queue=run.queue,
    result_backend_transport_options={"global_keyprefix": f"{run.prefix}:"},
    result_expires=3600,
    # Remote control would leave its exchanges behind.
    worker_enable_remote_control=False,
)

journal = Journal(run.connect_redis(), run.prefix)


@task_prerun.connect(sender=remind)
def write_start(task: Task[..., None], kwargs: Mapping[str, Any], **_: Any) -> None:
    """Record the start of a reminder in the journal."""
    started_ms = time.time_ns() // 1_000_000
    request = task.request
    is_delayed = "rabbitdelay-due" in (request.headers or {})
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    order_id = kwargs["order_id"]
    journal.write_start(Start(order_id, request.retries, is_delayed, started_ms, redelivered))
