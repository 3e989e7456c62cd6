"""The application of :mod:`tests.upgrade.beside`, for any version of the package.

It is copied to a folder beside the version that it is to run with, so it imports nothing else of
this repository. ``python -m beside_shop FIRST NUMBER`` sends that many tasks, numbered from FIRST.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import kombu
import redis

import celery_rabbitdelay
from celery_rabbitdelay import Celery

#: Levels up to 19.9 s; and seconds that tasks wait, and that those wait which meditate.
LEVELS: Final = [("seconds", 20, 1), ("ms", 10, 0.1)]
DELAYS: Final = (6.0, 19.0)
MEDITATING: Final = (21.0, 35.0)

PREFIX: Final = "beside"
QUEUE: Final = f"{PREFIX}-tasks"
NOTES_KEY: Final = f"{PREFIX}-notes"

app = Celery(PREFIX, broker=os.environ["BESIDE_BROKER"])
app.conf.update(
    task_default_queue=QUEUE,
    task_queues=[kombu.Queue(QUEUE, queue_arguments={"x-queue-type": "quorum"})],
    task_ignore_result=True,
    worker_prefetch_multiplier=50,
    rabbitdelay_prefix=PREFIX,
    rabbitdelay_layout=LEVELS,
)
if Path(celery_rabbitdelay.__file__).parents[1] != Path(os.environ["BESIDE_PACKAGE"]):
    raise ImportError(f"this is another version: {celery_rabbitdelay.__file__}")
notes: Any = redis.Redis.from_url(os.environ["BESIDE_REDIS"])


@app.task(name="note", bind=True)
def note(self: Any, number: int) -> None:
    """Note when the task runs, when it was due, and in which version it runs."""
    due_ms = self.request.headers["rabbitdelay-due"]
    notes.rpush(NOTES_KEY, json.dumps([number, time.time(), due_ms, os.environ["BESIDE_NAME"]]))


def produce(first: int, number: int) -> None:
    """Send tasks in every way."""
    numbers = list(range(first, first + number))
    parts = [numbers[part::10] for part in range(10)]
    send: Any = note.apply_async
    began = time.time()
    for each in (*parts[0], *parts[1], *parts[2]):
        send((each,), delay=random.uniform(*DELAYS))
    for each in parts[3]:
        # Above 4, only distribution restores it.
        send((each,), delay=random.uniform(*DELAYS), priority=9)
    for each in parts[4]:
        send((each,), delay=random.uniform(*MEDITATING))
    rows = [
        {"args": (each,), "delay": random.uniform(*DELAYS)}
        for each in (*parts[5], *parts[6], *parts[7], *parts[8])
    ]
    app.rabbitdelay.send_many(note, rows, tolerance=0.5)
    check_in(parts[9])
    sys.stdout.write(f"{os.environ['BESIDE_NAME']}: {number} sent in {time.time() - began:.0f} s\n")


def check_in(numbers: list[int]) -> None:
    """Publish tasks as a client does that knows nothing of the package."""
    delays: Any = app.rabbitdelay
    with app.connection_for_write() as connection:
        producer = connection.Producer()
        for number in numbers:
            task_id = str(uuid4())
            made = app.amqp.as_task_v2(task_id, "note", (number,))
            producer.publish(
                json.dumps(made.body),
                exchange=delays.topology.module_queues.checkin.exchange.name,
                routing_key=QUEUE,
                headers={**made.headers, "x-delay": random.randint(1000, 15_000)},
                content_type="application/json",
                content_encoding="utf-8",
                correlation_id=task_id,
                delivery_mode=2,
            )
        # The broker answers after it has routed what came before.
        channel: Any = connection.default_channel
        channel.queue_declare(QUEUE, passive=True)


if __name__ == "__main__":
    produce(int(sys.argv[1]), int(sys.argv[2]))
