"""The shop's Celery application and its one task: ask a customer for a review."""

from __future__ import annotations

import time

from celery import Task

from celery_rabbitdelay import Celery
from example_project.gateway import MailGateway, MailRefused
from example_project.journal import Journal, Start
from example_project.run import Run

__all__ = ["app", "journal", "remind"]

run = Run.from_environment()

app = Celery("record_shop", broker=run.broker_url, backend=run.redis_url)
app.conf.update(
    rabbitdelay_prefix=run.prefix,
    task_default_queue=run.queue,
    # A task is acknowledged when it is done, so that a killed worker's tasks go to the next one.
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    result_expires=3600,
    result_backend_transport_options={"global_keyprefix": f"{run.prefix}:"},
    # Remote control would leave its exchanges on a broker that is not ours.
    worker_enable_remote_control=False,
)

redis = run.connect_redis()
journal = Journal(redis, run.prefix)
gateway = MailGateway(redis, run.prefix)


@app.task(
    bind=True,
    autoretry_for=(MailRefused,),
    max_retries=10,
    retry_backoff=True,
    # With jitter, the wait before a retry would be a random one; here every run is to be the same.
    retry_jitter=False,
)
def remind(self: Task[..., str], order_id: str, customer_id: str, number_of_cds: int) -> str:
    """Ask a customer for a review of an order; a refused mail is tried again 1, 2, 4 ... s later.

    Returns:
        What became of the mail; it is the task's result.
    """
    started_ms = time.time_ns() // 1_000_000
    request = self.request
    due_ms = (request.headers or {}).get("rabbitdelay-due")
    redelivered = bool((request.delivery_info or {}).get("redelivered"))
    journal.write_start(Start(order_id, request.retries, due_ms, started_ms, redelivered))

    went_out = gateway.send(order_id, idempotency_key=order_id, attempt=request.retries)
    if not went_out:
        return f"customer {customer_id} had got the mail about order {order_id} already"
    return f"asked customer {customer_id} how the {number_of_cds} CDs of {order_id} sound"
