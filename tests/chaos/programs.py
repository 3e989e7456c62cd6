"""The programs that run as processes: producers, and workers of Celery.

A process gets its part, pickled, in the environment variable ``CHAOS``. The only task of the
application notes that it starts, and lasts as long as it is told.
"""

import json
import os
import pickle
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal
from uuid import uuid4

from kombu import Exchange, Queue

from celery_rabbitdelay import Celery, Row, RowsNotConfirmed
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


def task_queue(name: str, **arguments: Any) -> Queue:
    """Return a quorum queue of the application; ``x_max_length=5`` stands for ``x-max-length``."""
    given = {key.replace("_", "-"): value for key, value in arguments.items()}
    own = Exchange(name, type="direct")
    return Queue(name, own, name, queue_arguments={"x-queue-type": "quorum", **given})


@dataclass(frozen=True)
class Part:
    """What a process of a scenario has to know.

    Attributes:
        broker_url: The nodes, separated by semicolons, in the order in which they are tried.
        queues: The queues of the application; the first is its default.
        folder: Where it notes what it does.
        settings: Further settings of Celery.
    """

    broker_url: str
    queues: Sequence[Queue]
    folder: str
    settings: Mapping[str, Any] = field(default_factory=dict)


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
        task_queues=part.queues,
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

    @app.task(bind=True, name="note", shared=False)
    def note(self: Any, seconds: float = 0.0) -> None:
        # An occurrence that a schedule sends again ends in another number.
        identity = self.request.id.rpartition(":")[0] or self.request.id
        again = bool(self.request.delivery_info.get("redelivered"))
        notes.start(Start(identity, now_ms(), again))
        time.sleep(seconds)

    return app


def produce() -> None:
    """Send the stream of this process, and note each send."""
    notes = Notes(given.folder)
    if stream.way != "task":
        send_rows(notes)
        return
    for sent, delay in stream.tasks():
        notes.begin(sent)
        try:
            app.send_task("note", task_id=sent.id, delay=delay, queue=stream.queue)
        except Exception as error:  # noqa: BLE001  # whatever a call raises is what is asked for
            notes.end(sent.id, error)
        else:
            notes.end(sent.id)


def send_rows(notes: Notes) -> None:
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
        rest: int | None = None  # rows from here on were not taken, and are as if cut off
        try:
            envelopes = stream.way == "envelopes"
            app.rabbitdelay.send_many("note", rows(), queue=stream.queue, envelopes=envelopes)
        except RowsNotConfirmed as failed:
            errors, rest = {**failed.errors}, failed.rest
        for number, identity in enumerate(ids[:rest]):
            notes.end(identity, errors.get(number))
        if not ids:
            return


class ChaosProcess(CeleryProcess):
    """A process of a scenario.

    Args:
        part: What it has to know.
        stream: What it sends, if it is a producer.
        environment: Further environment variables, for a clock that is wrong.
    """

    module = "tests.chaos.programs"
    variable = "CHAOS"

    def __init__(
        self,
        part: Part,
        stream: Stream | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({"pickled": pickle.dumps((part, stream)).hex()})
        self._further = dict(environment or {})

    def begin(self) -> None:
        """Start the process, unless it runs, and do not wait."""
        if not self.running:
            self._process = self._spawn(self._command())

    def end(self) -> None:
        """End the process in order; its folder stays."""
        self._end(signal.SIGTERM)

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._further}


class Producer(ChaosProcess):
    """Sends a stream, then ends."""

    @property
    def failed(self) -> bool:
        """Whether its program has raised: the scenario is wrong, not what it plays with."""
        return self._process is not None and (self._process.poll() or 0) > 0

    def _command(self) -> list[str]:
        return [sys.executable, "-c", f"from {self.module} import produce; produce()"]


class Worker(ChaosProcess):
    """``celery worker`` for a queue, with further options."""

    def __init__(
        self, part: Part, queue: str, options: Sequence[str], environment: Mapping[str, str] | None
    ) -> None:
        super().__init__(part, None, environment)
        self._queue, self._options = queue, options

    def last_words(self) -> str:
        """Return the last error in its log, without numbers."""
        errors = re.findall(r"^[\w.]+: .*", self.log, re.MULTILINE)
        return re.sub(r"\d+", "#", (errors or [""])[-1])[:150]

    def _ready(self) -> bool:
        return " ready." in self.log

    def _command(self) -> list[str]:
        name = f"chaos-{self.port}@localhost"
        return [*self.celery(f"worker -c 1 -l INFO -n {name} -Q {self._queue}"), *self._options]


if "CHAOS" in os.environ:
    given: Part
    stream: Stream
    given, stream = pickle.loads(bytes.fromhex(json.loads(os.environ["CHAOS"])["pickled"]))
    app = make_app(given)
