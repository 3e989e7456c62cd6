"""The application of all processes, and what a producer sends.

A process gets its part, pickled, in the environment variable ``CHAOS``. The only task of the
application notes that it starts, and retries as often as it is told. Workers of the version before
import this file too, so it takes the package's public names only.
"""

import json
import os
import pickle
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal
from uuid import uuid4

from celery.exceptions import Retry
from kombu import Exchange, Queue

from celery_rabbitdelay import Celery, JobClosed, RegistryUnavailable, Row, RowsNotConfirmed
from tests.chaos.ledger import Notes, Sent, Start, now_ms

#: ``rabbitdelay_prefix``. The brokers are private, so one is enough.
PREFIX: Final = "chaos"

#: The queue of the tasks that have nothing to do with the trouble; that of most tasks of the soak.
SOUND: Final = "sound"

#: Rows of one ``send_many``.
ROWS: Final = 1000

#: Seconds that a stream may fall behind before it leaves out the pauses that it has missed.
BEHIND: Final = 5.0

#: The environment variable that names the last of a worker's queues.
OWN_QUEUE: Final = "CHAOS_QUEUE"

#: The environment variable of workers of the version before.
IS_FORMER: Final = "CHAOS_FORMER"

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

    @app.task(bind=True, name="note", shared=False, max_retries=None)
    def note(self: Any, retries: int = 0, is_fanned: bool = False) -> None:
        # An occurrence that a schedule sends again ends in another number.
        identity = self.request.id.rpartition(":")[0] or self.request.id
        number = self.request.retries
        which = f"/{number}" * bool(number) + f"@{os.environ.get(OWN_QUEUE)}" * is_fanned
        headers, again = self.request.headers or {}, self.request.delivery_info.get("redelivered")
        # A worker has put back a message that was redelivered.
        again = bool(again or headers.get("rabbitdelay-redelivered"))
        ahead_ms = float(os.environ.get("WRONG_CLOCK", "0")) * 1000
        where = ahead_ms, IS_FORMER in os.environ, os.getppid(), headers.get("rabbitdelay-once")
        notes.write("start", Start(identity + which, now_ms(), again, *where))
        if number >= retries:
            return
        at_ms, countdown = now_ms(), 2.0**number
        notes.begin(Sent(f"{identity}/{number + 1}", "retries", at_ms + countdown * 1000, at_ms))
        try:
            raise self.retry(countdown=countdown)
        except Retry:
            notes.end(f"{identity}/{number + 1}")
            raise
        except Exception as error:
            notes.end(f"{identity}/{number + 1}", error)
            raise

    return app


def produce() -> None:
    """Send the stream of this process, and note each send."""
    notes = Notes(given.folder)
    if not isinstance(stream, Stream):
        stream.send(app, notes, given)
        return
    tasks = stream.tasks()
    if stream.way != "task":
        while send_rows(app, notes, islice(tasks, ROWS), stream.queue, stream.way == "envelopes"):
            pass
        return
    for sent, delay in tasks:
        with noted(notes, sent):
            app.send_task("note", task_id=sent.id, delay=delay, queue=stream.queue)


@contextmanager
def noted(notes: Notes, *sent: Sent) -> Iterator[None]:
    """Note what one call sends, and how the call ends."""
    for each in sent:
        notes.begin(each)
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever a call raises is what is asked for
        failed = error
    for each in sent:
        notes.end(each.id, failed)


def send_rows(
    app: Any,
    notes: Notes,
    tasks: Iterable[tuple[Sent, float]],
    queue: str,
    envelopes: bool,
    **options: Any,
) -> int:
    """Send tasks by one ``send_many``, whose end says what is confirmed; return how many."""
    ids: list[str] = []

    def rows() -> Iterator[Row]:
        for sent, delay in tasks:
            ids.append(sent.id)
            notes.begin(sent)
            yield Row(delay=delay, task_id=sent.id)

    errors: dict[int, Exception] = {}
    rest: int | None = None  # rows from here on were not taken, and are as if cut off
    try:
        app.rabbitdelay.send_many("note", rows(), queue=queue, envelopes=envelopes, **options)
    except RowsNotConfirmed as failed:
        errors, rest = {**failed.errors}, failed.rest
    except (RegistryUnavailable, JobClosed) as failed:
        errors = dict.fromkeys(range(len(ids)), failed)
    for number, identity in enumerate(ids[:rest]):
        notes.end(identity, errors.get(number))
    return len(ids)


if "CHAOS" in os.environ:
    given: Part
    stream: Any
    given, stream = pickle.loads(bytes.fromhex(json.loads(os.environ["CHAOS"])["pickled"]))
    app = make_app(given)
