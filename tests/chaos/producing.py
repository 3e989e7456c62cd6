"""The program of a producer: it sends one stream of delayed tasks and notes each send."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal
from uuid import uuid4

from kombu import Connection

from celery_rabbitdelay import Celery, Row, RowsNotConfirmed
from celery_rabbitdelay.kombu import DelayedProducer, Destination, Publisher
from tests.chaos.application import TASK, Part, make_app
from tests.chaos.ledger import Sent
from tests.chaos.notes import Notes, now_ms

#: ``task``: ``apply_async``. ``rows``: one ``send_many``. ``kombu``: a :class:`DelayedProducer`.
Way = Literal["task", "rows", "kombu"]

#: Seconds that a stream may fall behind before it leaves out the pauses that it has missed.
BEHIND: Final = 5.0


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
        fanout: The exchange to send to instead of a queue, and the queues that it reaches.
        envelopes: Whether rows travel in envelopes, many in a message.
    """

    group: str
    queue: str
    count: int
    seconds: float = 0.0
    delays: tuple[float, float] = (10.0, 10.0)
    way: Way = "task"
    fanout: tuple[str, tuple[str, ...]] | None = None
    envelopes: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """The queues at which each task has to arrive."""
        return tuple(self.fanout[1]) if self.fanout else (self.queue,)

    def shortened(self, count: int) -> Stream:
        """Return a stream of this pace with so many tasks."""
        return replace(self, count=count, seconds=self.seconds * count / self.count)

    def tasks(self) -> Iterator[tuple[Sent, float]]:
        """Yield each task when its time has come, with its delay."""
        began = time.monotonic()
        for number in range(self.count):
            time.sleep(max(began + self.seconds * number / self.count - time.monotonic(), 0))
            behind = time.monotonic() - began - self.seconds * number / self.count
            if self.seconds and behind > BEHIND:
                began += behind
            delay, at_ms = random.uniform(*self.delays), now_ms()
            sent = Sent(str(uuid4()), self.group, self.places, at_ms + delay * 1000, at_ms)
            yield replace(sent, distributed=self.fanout is not None or self.envelopes), delay


class Attempts:
    """How often the address of a message was asked for: once for each attempt to send it."""

    def __init__(self) -> None:
        self.count = 0
        address = DelayedProducer.address

        def counting(producer: DelayedProducer, *message: Any) -> tuple[str, str]:
            self.count += 1
            return address(producer, *message)

        DelayedProducer.address = counting  # type: ignore[method-assign, assignment]


def send_one_by_one(stream: Stream, notes: Notes, send: Callable[[str, float], object]) -> None:
    """Send each task by a call of its own."""
    attempts = Attempts()
    for sent, delay in stream.tasks():
        attempts.count = 0
        notes.begin(sent)
        try:
            send(sent.id, delay)
        except Exception as error:  # noqa: BLE001  # whatever a call raises is what is asked for
            notes.end(sent.id, "raised", error, attempts.count)
        else:
            notes.end(sent.id, "confirmed", attempts=attempts.count)


def send_tasks(app: Celery, stream: Stream, notes: Notes) -> None:
    """Send by ``apply_async``."""
    target: dict[str, Any] = {"queue": stream.queue}
    if stream.fanout:
        # Without a routing key, Celery would send to its default queue.
        target = {"exchange": stream.fanout[0], "routing_key": "all"}
    task: Any = app.tasks[TASK]
    send_one_by_one(
        stream,
        notes,
        lambda identity, delay: task.apply_async(task_id=identity, delay=delay, **target),
    )


def send_rows(app: Celery, stream: Stream, notes: Notes) -> None:
    """Send by ``send_many``, again and again until as many rows are confirmed as the stream has.

    Another row, with an id of its own, takes the place of each that is not confirmed. No id is sent
    twice, so a task that starts although its error says that it cannot have arrived is seen.
    """
    missing, tasks = stream.count, stream.tasks()
    while missing:
        confirmed, took_all = send_rows_once(app, stream, tasks, notes)
        missing -= confirmed
        if took_all:
            tasks = stream.shortened(missing).tasks()


def send_rows_once(
    app: Celery, stream: Stream, tasks: Iterator[tuple[Sent, float]], notes: Notes
) -> tuple[int, bool]:
    """Send by one ``send_many``; only its end says what is confirmed.

    Returns:
        How many rows are confirmed, and whether it took all of them.
    """
    ids: list[str] = []

    def rows() -> Iterator[Row]:
        for sent, delay in tasks:
            ids.append(sent.id)
            notes.begin(sent)
            yield Row(delay=delay, task_id=sent.id)

    errors: dict[int, Exception] = {}
    rest: int | None = None
    try:
        app.rabbitdelay.send_many(
            app.tasks[TASK], rows(), queue=stream.queue, envelopes=stream.envelopes
        )
    except RowsNotConfirmed as failed:
        errors, rest = failed.errors, failed.rest
    if rest is not None:
        errors |= {number: NotTaken() for number in range(rest, len(ids))}
    for number, identity in enumerate(ids):
        if number in errors:
            notes.end(identity, "raised", errors[number])
        else:
            notes.end(identity, "confirmed")
    return len(ids) - len(errors), rest is None


class NotTaken(Exception):
    """``send_many`` gave up before it took this row."""

    may_have_arrived = False


def send_messages(part: Part, stream: Stream, notes: Notes) -> None:
    """Send by a kombu producer."""
    topology = make_app(part).rabbitdelay.topology
    (queue,) = (each.entity() for each in part.queues if each.name == stream.queue)
    ssl = part.settings.get("broker_use_ssl", False)
    producer = DelayedProducer(Publisher(Connection(part.broker_url, ssl=ssl)), topology)
    destination = Destination(queue, stream.queue, stream.queue)
    send_one_by_one(
        stream,
        notes,
        lambda identity, delay: producer.publish_delayed(
            {"chaos": True}, destination, delay, headers={"id": identity}
        ),
    )


def main() -> None:
    """Send the stream of the environment variable ``CHAOS``."""
    given = json.loads(os.environ["CHAOS"])
    part, stream = Part.of(given["part"]), Stream(**given["stream"])
    notes = Notes(part.folder)
    match stream.way:
        case "task":
            send_tasks(make_app(part), stream, notes)
        case "rows":
            send_rows(make_app(part), stream, notes)
        case "kombu":
            send_messages(part, stream, notes)


if __name__ == "__main__":
    main()
