"""The application of ``test_recorded_sequences.py``: its tasks note what ran, here or in Redis."""

import json
from typing import Any

from kombu import Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels import wall_clock

NOTES = "notes-of-playing"

#: What ran in this process; None: it is noted in Redis.
noted: list[Any] | None = None

app = Celery("playing", broker="amqp://", backend="redis://", set_as_current=False)
app.conf.update(
    rabbitdelay_registry_url="redis://",
    rabbitdelay_early_tolerance=0.001,
    rabbitdelay_modules=("check-in", "distribution"),
    task_default_queue="playing",
    task_queues=[Queue("playing", queue_arguments={"x-queue-type": "quorum"})],
)


def note(task: Any, *what: Any) -> None:
    name, request = task.name.rpartition(".")[2], task.request
    entry = [wall_clock.ms(), request.id, name, request.retries, *what]
    if noted is not None:
        noted.append(entry)
    else:
        redis: Any = app.backend
        redis.client.rpush(NOTES, json.dumps(entry))


@app.task(bind=True)
def work(self: Any, *what: Any) -> str:
    note(self, *what)
    return "+".join(map(str, what))


@app.task(bind=True)
def fail(self: Any, *what: Any) -> None:
    note(self, *what)
    raise LookupError("no such order")


@app.task(bind=True, max_retries=2)
def try_again(self: Any, *what: Any, pause: int = 600) -> str:
    note(self, *what)
    if self.request.retries < 2:
        raise self.retry(countdown=pause)
    return "at last"


@app.task(bind=True)
def errback(self: Any, task_id: str) -> None:
    note(self, task_id)
