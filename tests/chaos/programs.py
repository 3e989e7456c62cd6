"""The programs that run as processes: producers, and workers of Celery.

A process gets its part as JSON in the environment variable ``CHAOS``. The only task of the
application notes that it starts, and lasts as long as it is told.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal
from uuid import uuid4

from celery.signals import worker_ready
from kombu import Exchange, Queue

from celery_rabbitdelay import Celery, Row, RowsNotConfirmed
from celery_rabbitdelay.levels.headers import QUEUE
from tests.celery_process import CeleryProcess
from tests.chaos.ledger import Notes, Sent, Start, now_ms

#: ``rabbitdelay_prefix``. The brokers are private, so one is enough.
PREFIX: Final = "chaos"

#: Rows of one ``send_many``.
ROWS: Final = 1000

#: Seconds that a stream may fall behind before it leaves out the pauses that it has missed.
BEHIND: Final = 5.0

#: How tasks are sent: by ``apply_async``; by ``send_many``, one in a message, or many.
Way = Literal["task", "rows", "envelopes"]


@dataclass(frozen=True)
class TaskQueue:
    """A queue of the application."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"x-queue-type": "quorum"})

    def entity(self) -> Queue:
        """Return it as kombu declares it."""
        own = Exchange(self.name, type="direct")
        return Queue(self.name, own, self.name, queue_arguments=dict(self.arguments))


@dataclass(frozen=True)
class Part:
    """What a process of a scenario has to know.

    Attributes:
        broker_url: The nodes, separated by semicolons, in the order in which they are tried.
        queues: The queues of the application.
        folder: Where it notes what it does.
        settings: Further settings of Celery.
        place: The queue that a worker consumes from, and notes for tasks that do not say theirs:
            those that come through distribution.
        ready: The file that it makes when it takes tasks.
        task: The name of its task.
    """

    broker_url: str
    queues: Sequence[TaskQueue]
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    ready: str = ""
    task: str = "note"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Part:
        """Return it from what ``asdict`` made of it."""
        return cls(**{**values, "queues": [TaskQueue(**each) for each in values["queues"]]})

    def queue(self, name: str) -> Queue:
        """Return one of the queues."""
        return next(each for each in self.queues if each.name == name).entity()


@dataclass(frozen=True)
class Stream:
    """What a producer sends.

    Attributes:
        group: The group in the ledger.
        queue: The queue that the tasks are for.
        count: How many.
        seconds: For how long, evenly; 0 for as fast as possible.
        delays: The shortest and the longest delay in seconds; each is random between them.
        way: How they are sent.
    """

    group: str
    queue: str
    count: int
    seconds: float = 0.0
    delays: tuple[float, float] = (10.0, 10.0)
    way: Way = "task"

    def tasks(self) -> Iterator[tuple[Sent, float]]:
        """Yield each task when its time has come, with its delay."""
        began = time.monotonic()
        for number in range(self.count):
            time.sleep(max(began + self.seconds * number / self.count - time.monotonic(), 0))
            behind = time.monotonic() - began - self.seconds * number / self.count
            if self.seconds and behind > BEHIND:
                began += behind
            delay, at_ms = random.uniform(*self.delays), now_ms()
            yield Sent(str(uuid4()), self.group, at_ms + delay * 1000, at_ms), delay


def make_app(part: Part) -> Celery:
    """Create the application."""
    app = Celery("chaos", broker=part.broker_url, set_as_current=False)
    app.conf.update(
        task_default_queue=part.queues[0].name,
        task_queues=[queue.entity() for queue in part.queues],
        task_ignore_result=True,
        # A task is lost only if this package or the broker loses it, not by a worker that dies
        # after its ack.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        broker_connection_retry_on_startup=True,
        # Nobody waits for these producers.
        task_publish_retry_policy={"max_retries": None},
        worker_hijack_root_logger=False,
        rabbitdelay_prefix=PREFIX,
    )
    app.conf.update(part.settings)
    notes = Notes(part.folder)

    @app.task(bind=True, name=part.task, shared=False)
    def note(self: Any, *args: Any, seconds: float = 0.0) -> None:
        request, at_ms = self.request, now_ms()
        place = (request.headers or {}).get(QUEUE, part.place)
        again = bool(request.delivery_info.get("redelivered"))
        notes.start(Start(request.id, place, at_ms, again, args, part.place))
        time.sleep(seconds)

    return app


def send(part: Part, stream: Stream) -> None:
    """Send a stream, and note each send."""
    notes, app = Notes(part.folder), make_app(part)
    if stream.way != "task":
        send_rows(app, part, stream, notes)
        return
    task: Any = app.tasks[part.task]
    for sent, delay in stream.tasks():
        notes.begin(sent)
        try:
            task.apply_async(task_id=sent.id, delay=delay, queue=stream.queue)
        except Exception as error:  # noqa: BLE001  # whatever a call raises is what is asked for
            notes.end(sent.id, error)
        else:
            notes.end(sent.id)


def send_rows(app: Celery, part: Part, stream: Stream, notes: Notes) -> None:
    """Send by one ``send_many`` after the other; only its end says what is confirmed."""
    tasks = stream.tasks()
    while True:
        ids: list[str] = []

        def rows(ids: list[str] = ids) -> Iterator[Row]:
            for sent, delay in islice(tasks, ROWS):
                ids.append(sent.id)
                notes.begin(sent)
                yield Row(delay=delay, task_id=sent.id)

        errors: dict[int, Exception] = {}
        try:
            envelopes = stream.way == "envelopes"
            app.rabbitdelay.send_many(part.task, rows(), queue=stream.queue, envelopes=envelopes)
        except RowsNotConfirmed as failed:
            rest = len(ids) if failed.rest is None else failed.rest
            errors = {**failed.errors, **{at: NotTaken() for at in range(rest, len(ids))}}
        for number, identity in enumerate(ids):
            notes.end(identity, errors.get(number))
        if not ids:
            return


class NotTaken(Exception):
    """``send_many`` gave up before it took this row."""

    may_have_arrived = False


class ChaosProcess(CeleryProcess):
    """A process of a scenario.

    Args:
        part: What it has to know.
        environment: Further environment variables, for a clock that is wrong.
        **settings: Further values for its program.
    """

    module = "tests.chaos.programs"
    variable = "CHAOS"

    def __init__(
        self, part: Part, environment: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__({})
        self._ready_file = self.folder / "ready"
        self.part = replace(part, ready=str(self._ready_file))
        self._settings = {"part": asdict(self.part), **settings}
        self._further = dict(environment or {})

    def begin(self) -> None:
        """Start the process and do not wait."""
        assert not self.running, "the process runs already"
        self._ready_file.unlink(missing_ok=True)
        self._process = self._spawn(self._command())

    def end(self, signum: signal.Signals = signal.SIGTERM) -> None:
        """End the process; its folder stays."""
        self._end(signum)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._further}

    def _ready(self) -> bool:
        return self._ready_file.exists()


class Producer(ChaosProcess):
    """Sends a stream, then ends."""

    def __init__(
        self, part: Part, stream: Stream, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(part, environment, stream=asdict(stream))
        self.stream = stream

    @property
    def failed(self) -> bool:
        """Whether its program has raised: the scenario is wrong, not what it plays with."""
        return self._process is not None and (self._process.poll() or 0) > 0

    def _command(self) -> list[str]:
        return [sys.executable, "-m", self.module]


class Worker(ChaosProcess):
    """``celery worker`` for the queue ``part.place``, with further options."""

    def __init__(
        self, part: Part, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(part, environment)
        self._options = options

    @property
    def name(self) -> str:
        """The worker's node name."""
        return f"chaos-{self.port}@localhost"

    def last_words(self) -> str:
        """Return the last error in its log, without numbers."""
        errors = re.findall(r"^[\w.]+: .*", self.log, re.MULTILINE)
        return re.sub(r"\d+", "#", (errors or [""])[-1])[:150]

    def _command(self) -> list[str]:
        command = f"worker -c 1 -l WARNING -n {self.name} -Q {self.part.place}"
        return [*self.celery(command), *self._options]


if __name__ == "__main__":
    told = json.loads(os.environ["CHAOS"])
    send(Part.of(told["part"]), Stream(**told["stream"]))
elif "CHAOS" in os.environ:
    given = Part.of(json.loads(os.environ["CHAOS"])["part"])
    app = make_app(given)

    @worker_ready.connect(weak=False)
    def on_ready(**_: Any) -> None:
        Path(given.ready).touch()
