"""The Celery application of the scenarios, in producers and in workers.

A process gets its part as JSON in the environment variable ``CHAOS``. Its only task notes that it
starts, and lasts as long as it is told.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery.signals import worker_ready
from kombu import Exchange, Queue, binding

from celery_rabbitdelay import Celery
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import COPY, JOB, KEY, ONCE
from tests.chaos.ledger import Start
from tests.chaos.notes import Notes, now_ms

#: ``rabbitdelay_prefix``. The brokers are private, so one is enough.
PREFIX: Final = "chaos"

#: The name of the task.
TASK: Final = "note"

#: Our headers that every delayed task has; each further one says what happened on the way.
USUAL: Final = frozenset(
    {
        *(header_names.DUE, header_names.EXCHANGE, header_names.ROUTING_KEY, header_names.QUEUE),
        *(COPY, KEY, JOB, ONCE),
    }
)


@dataclass(frozen=True)
class TaskQueue:
    """A queue of the application.

    Attributes:
        name: Its name.
        arguments: Its arguments.
        fanout: A fanout exchange that it is bound to, besides a direct one of its own name.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"x-queue-type": "quorum"})
    fanout: str | None = None

    def entity(self) -> Queue:
        """Return it as kombu declares it."""
        own = Exchange(self.name, type="direct")
        further = [binding(Exchange(self.fanout, type="fanout"))] if self.fanout else []
        return Queue(
            self.name, own, self.name, bindings=further, queue_arguments=dict(self.arguments)
        )


@dataclass(frozen=True)
class Part:
    """What a process of a scenario has to know.

    Attributes:
        broker_url: The nodes, separated by semicolons, in the order in which they are tried.
        queues: The queues of the application.
        folder: Where it notes what it does.
        settings: Further settings of Celery.
        place: The queue that a worker notes for tasks which do not say theirs: those that come
            through distribution.
        ready: The file that a worker makes when it takes tasks.
        task: The name of its task.
    """

    broker_url: str
    queues: Sequence[TaskQueue]
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    ready: str = ""
    task: str = TASK

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Part:
        """Return it from what ``asdict`` made of it."""
        return cls(**{**values, "queues": [TaskQueue(**each) for each in values["queues"]]})


def make_app(part: Part) -> Celery:
    """Create the application."""
    app = Celery("chaos", broker=part.broker_url, set_as_current=False)
    settings: dict[str, Any] = {
        "task_default_queue": part.queues[0].name,
        "task_queues": [queue.entity() for queue in part.queues],
        "task_ignore_result": True,
        # A task is lost only if this package or the broker loses it, not by a worker that dies
        # after its ack.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "broker_connection_retry_on_startup": True,
        # Nobody waits for these producers.
        "task_publish_retry_policy": {"max_retries": None},
        "worker_hijack_root_logger": False,
        "rabbitdelay_prefix": PREFIX,
        **part.settings,
    }
    app.conf.update(settings)
    notes = Notes(part.folder)

    @app.task(bind=True, name=part.task, shared=False)
    def note(self: Any, *args: Any, seconds: float = 0.0) -> None:
        at_ms, request = now_ms(), self.request
        headers = request.headers or {}
        place = headers.get(header_names.QUEUE, part.place)
        start = started(request.id, place, at_ms, request.delivery_info, headers)
        notes.start(replace(start, args=args, taken_from=part.place))
        time.sleep(seconds)

    return app


def started(
    identity: str, place: str, at_ms: float, delivery: Mapping[str, Any], headers: Mapping[str, Any]
) -> Start:
    """Return a start with the headers that say what has happened to its message on the way."""
    marks = {
        key: value
        for key, value in headers.items()
        if key.startswith(header_names.OWN_PREFIX) and key not in USUAL
    }
    return Start(identity, place, at_ms, bool(delivery.get("redelivered")), marks)


if "CHAOS" in os.environ:
    given = Part.of(json.loads(os.environ["CHAOS"])["part"])
    app = make_app(given)

    @worker_ready.connect(weak=False)
    def on_ready(**_: Any) -> None:
        if given.ready:
            os.close(os.open(given.ready, os.O_CREAT | os.O_WRONLY))
