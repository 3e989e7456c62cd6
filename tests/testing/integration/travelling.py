"""The application of the tests that travel: its tasks note in Redis when they run."""

import os
import time
from datetime import timedelta
from typing import Any

from kombu import Exchange, Queue

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.testing import wait_for

NOTES = "notes-of-travelling"

app = Celery("travelling", broker="amqp://", backend="redis://", set_as_current=False)
app.conf.update(
    rabbitdelay_registry_url="redis://",
    # Each step of a travel ages all records one by one: those of a year's tasks are too many.
    rabbitdelay_track="none" if os.environ.get("RABBITDELAY_WHOLE_YEAR") else "all",
    rabbitdelay_early_tolerance=0.001,
    rabbitdelay_modules=("check-in", "distribution"),
    task_default_queue="travelling",
    task_queues=[
        Queue("travelling", queue_arguments={"x-queue-type": "quorum"}),
        Queue("travelling.mirror", Exchange("travelling.fanout", type="fanout")),
    ],
    task_ignore_result=True,
)


def redis() -> Any:
    backend: Any = app.backend
    return backend.client


def ran() -> list[tuple[str, int]]:
    """What has run, and when, in milliseconds since 1970-01-01 UTC."""
    notes = [text.decode().rpartition(" ") for text in redis().lrange(NOTES, 0, -1)]
    return [(text, int(at_ms)) for text, _, at_ms in notes]


def texts() -> list[str]:
    return [text for text, _ in ran()]


@app.task
def note(text: str) -> None:
    redis().rpush(NOTES, f"{text} {wall_clock.ms()}")


@app.task
def remind(text: str, times: int, hours: float) -> None:
    note(f"{text}-{times}")
    if times > 1:
        remind.apply_async((text, times - 1, hours), delay=timedelta(hours=hours))
        note.delay(f"{text}-sent")


@app.task(bind=True, max_retries=None)
def try_again(self: Any, text: str, times: int, first: float) -> None:
    note(f"{text}-{self.request.retries}")
    if self.request.retries < times:
        raise self.retry(countdown=first * 2**self.request.retries)


@app.task
def wait_until_told(text: str) -> None:
    note(text)
    wait_for(lambda: redis().get(text), "the word")


@app.task
def wait_for_seconds(seconds: float) -> None:
    time.sleep(seconds)
    note(f"{seconds} seconds")


@app.task
def note_what_time_it_seems() -> None:
    from datetime import UTC, datetime

    note(datetime.now(UTC).isoformat())


@app.task
def kill_the_worker() -> None:
    os.kill(os.getppid(), 9)
