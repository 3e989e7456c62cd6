"""The kinds of tasks of the soak: how each is sent, and what is decided about it later.

What has to become of a task follows from its notes: see ``checker.py``.
"""

import heapq
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import uuid4

import celery
from celery import chord, group
from celery.exceptions import OperationalError
from kombu import Exchange, Queue

from celery_rabbitdelay import RabbitDelayError, RegistryUnavailable
from tests.chaos.application import PREFIX, SOUND, Part, noted, send_rows, task_queue
from tests.chaos.ledger import Notes, Sent, now_ms

#: The queue of schedules, which the version before does not know: only some workers serve it, and
#: these are always of this version.
SCHEDULED: Final = "scheduled"

#: The two queues of a fanout exchange.
FANNED: Final = ("fan-a", "fan-b")

#: The queues of the application.
QUEUES: Final = (
    task_queue(SOUND),
    task_queue(SCHEDULED),
    *(
        Queue(each, Exchange("fan", type="fanout"), queue_arguments={"x-queue-type": "quorum"})
        for each in FANNED
    ),
)

#: Rows of a ``send_many``, and tasks of a group.
ROWS, SEVERAL = 20, 3

#: Seconds until a decision that has failed is made again, and for how long.
AGAIN, TRIES = 3.0, 30

#: Sends one or more tasks that are due after a delay.
Send: TypeAlias = Callable[["Sender", float], None]


class Sender:
    """What sends tasks of all kinds, and decides about them later.

    Args:
        app: The application.
        notes: The file of the process.
        part: What the process has to know.
        seed: That of its random numbers.
    """

    def __init__(self, app: Any, notes: Notes, part: Part, seed: int) -> None:
        self.app, self.notes, self.random = app, notes, random.Random(seed)
        self._later: list[tuple[float, int, Callable[[], object], int]] = []
        # An application without the package, and without a queue that it would take for quorum.
        self.plain: Any = celery.Celery("plain", broker=part.broker_url, set_as_current=False)
        self.plain.conf.update(
            task_default_queue=SOUND,
            task_queues=[Queue(SOUND, Exchange(SOUND), SOUND, no_declare=True)],
            task_ignore_result=True,
            broker_transport_options={"confirm_publish": True},
        )

    def unit(self, kind: str, delay: float, identity: str = "", **more: Any) -> Sent:
        """Return a send that begins now."""
        at_ms = now_ms()
        return Sent(identity or f"{uuid4()}", kind, at_ms + delay * 1000, at_ms, **more)

    def later(self, seconds: float, call: Callable[[], object], tries: int = TRIES) -> None:
        """Make a decision after some seconds; and again while it fails."""
        item = (time.monotonic() + seconds, self.random.getrandbits(60), call, tries)
        heapq.heappush(self._later, item)

    def decide(self) -> bool:
        """Make the decisions whose time has come; return whether some are left."""
        while self._later and self._later[0][0] <= time.monotonic():
            _, _, call, tries = heapq.heappop(self._later)
            try:
                call()
            except (RegistryUnavailable, OperationalError):
                if tries > 1:
                    self.later(AGAIN, call, tries - 1)
            except RabbitDelayError:  # no further call changes that
                continue
        return bool(self._later)


def task(kind: str, times: int = 1, **options: Any) -> Send:
    """Return what sends one task, with options of ``send_task``; perhaps as if it were new."""

    def send(sender: Sender, delay: float) -> None:
        sent = sender.unit(kind, delay, once=options.get("once", False))
        for _ in range(times):
            with noted(sender.notes, sent):
                sender.app.send_task("note", task_id=sent.id, delay=delay, queue=SOUND, **options)

    return send


def at_once(sender: Sender, _: float) -> None:
    """Send a task without a delay."""
    task("at once")(sender, 0.0)


def keyed(sender: Sender, delay: float) -> None:
    """Send tasks under one key, of which only the newest may run."""
    key = f"{uuid4()}"

    def send(number: int) -> None:
        left = delay * sender.random.uniform(0.5, 1.0)
        sent = sender.unit("keyed", left, key=key)
        with noted(sender.notes, sent):
            sender.app.send_task("note", task_id=sent.id, delay=left, queue=SOUND, key=key)
        if number > 1:
            sender.later(left * sender.random.uniform(0.0, 1.0), lambda: send(number - 1), 1)

    send(SEVERAL)


def rows(kind: str, envelopes: bool, **options: Any) -> Send:
    """Return what sends rows by one ``send_many``."""

    def send(sender: Sender, delay: float, **more: Any) -> None:
        job = more.get("job")
        spread = delay * 0.2

        def taken() -> Iterator[tuple[Sent, float]]:
            for _ in range(ROWS):
                left = delay - sender.random.uniform(0.0, spread)
                yield sender.unit(kind, left, job=job), left

        send_rows(sender.app, sender.notes, taken(), SOUND, envelopes=envelopes, **options, **more)

    return send


def job(ends: str) -> Send:
    """Return what sends the rows of a job, and commits or aborts it later."""
    send_all: Any = rows(f"job, {ends}", envelopes=True)

    def send(sender: Sender, delay: float) -> None:
        name, rabbitdelay = f"{uuid4()}", sender.app.rabbitdelay

        def call(what: str, *given: Any, **options: Any) -> None:
            with sender.notes.deciding(name, what) as made:
                getattr(rabbitdelay, f"{what}_job")(name, *given, **options)
                made.outcome = "DONE"

        try:
            call("open", expires=delay + 3 * AGAIN * TRIES)
        except RabbitDelayError:
            return
        send_all(sender, delay, job=name)
        sender.later(delay * sender.random.uniform(0.1, 1.2), lambda: call(ends))

    return send


def decided(kind: str, what: str, factor: float = 0.0) -> Send:
    """Return what sends a tracked task, and cancels or postpones it later.

    Args:
        kind: The kind.
        what: ``cancel`` or ``postpone``.
        factor: The seconds of the postponement, as a part of the delay.
    """

    def send(sender: Sender, delay: float) -> None:
        sent = sender.unit(kind, delay)
        with noted(sender.notes, sent):
            sender.app.send_task("note", task_id=sent.id, delay=delay, queue=SOUND, track=True)

        def call() -> None:
            given = {} if what == "cancel" else {"delay": delay * factor}
            due_ms = now_ms() + delay * factor * 1000
            with sender.notes.deciding(sent.id, what, due_ms=due_ms) as made:
                made.outcome = getattr(sender.app.rabbitdelay, what)(sent.id, **given).name

        sender.later(delay * sender.random.uniform(0.0, 0.9 - factor / 2), call)

    return send


def retried(sender: Sender, delay: float) -> None:
    """Send a task that retries twice, with growing pauses."""
    sent = sender.unit("retried", delay)
    with noted(sender.notes, sent):
        options = {"kwargs": {"retries": 2}, "queue": SOUND}
        sender.app.send_task("note", task_id=sent.id, delay=delay, **options)


def fanned_out(sender: Sender, delay: float) -> None:
    """Send a task to a fanout exchange with two queues."""
    identity = f"{uuid4()}"
    units = [sender.unit("fan-out", delay, f"{identity}@{queue}") for queue in FANNED]
    with noted(sender.notes, *units):
        to = {"exchange": "fan", "routing_key": "any", "kwargs": {"is_fanned": True}}
        sender.app.send_task("note", task_id=identity, delay=delay, **to)


def grouped(sender: Sender, delay: float) -> None:
    """Send a group."""
    units = [sender.unit("group", delay) for _ in range(SEVERAL)]
    with noted(sender.notes, *units):
        group([_signature(sender, each) for each in units]).apply_async(delay=delay)


def chorded(sender: Sender, delay: float) -> None:
    """Send a chord, whose body is due two seconds after its header."""
    units, pause = [sender.unit("chord", delay) for _ in range(SEVERAL)], 2.0
    ids = [each.id for each in units]
    body = sender.unit("chord's body", delay, after=ids, after_ms=pause * 1000)
    with noted(sender.notes, *units, body):
        header = [_signature(sender, each) for each in units]
        chord(header, _signature(sender, body).set(delay=pause)).apply_async(delay=delay)


def _signature(sender: Sender, sent: Sent) -> Any:
    return sender.app.signature("note", task_id=sent.id, queue=SOUND, immutable=True)


def unaware(sender: Sender, delay: float) -> None:
    """Send a task as plain Celery does, with an ``eta`` that a worker meets too early."""
    sent = sender.unit("unaware", delay)
    with noted(sender.notes, sent):
        sender.plain.send_task("note", task_id=sent.id, countdown=delay)


def checked_in(sender: Sender, delay: float) -> None:
    """Send a task as any AMQP client does, to check-in."""
    sent = sender.unit("check-in", delay)
    with noted(sender.notes, sent):
        made = sender.plain.amqp.as_task_v2(sent.id, "note")
        with sender.plain.producer_pool.acquire(block=True) as producer:
            producer.publish(
                *(made.body, SOUND, 2),
                exchange=f"{PREFIX}.checkin",
                headers={**made.headers, "x-delay": int(delay * 1000) + 1},
                serializer="json",
                retry=True,
                retry_policy={"max_retries": 30, "interval_max": 1.0},
                **made.properties,
            )


class Kind(NamedTuple):
    """A kind: how often it is chosen, how many tasks one send makes, and what sends it."""

    weight: float
    tasks: int
    send: Send


KINDS: Final = {
    "plain": Kind(12, 1, task("plain")),
    "at once": Kind(2, 1, at_once),
    "priority": Kind(2, 1, task("priority", priority=9)),
    "once": Kind(3, 1, task("once", times=2, once=True)),
    "tracked": Kind(2, 1, task("tracked", track=True)),
    "keyed": Kind(3, 2, keyed),
    "cancelled": Kind(4, 1, decided("cancelled", "cancel")),
    "postponed": Kind(3, 1, decided("postponed", "postpone", 1.0)),
    "made earlier": Kind(3, 1, decided("made earlier", "postpone", 0.2)),
    "retried": Kind(3, 3, retried),
    "rows": Kind(0.5, ROWS, rows("rows", envelopes=False)),
    "envelopes": Kind(0.7, ROWS, rows("envelopes", envelopes=True, tolerance=1)),
    "job, commit": Kind(0.4, ROWS, job("commit")),
    "job, abort": Kind(0.3, ROWS, job("abort")),
    "fan-out": Kind(2, 2, fanned_out),
    "group": Kind(1, SEVERAL, grouped),
    "chord": Kind(1, SEVERAL + 1, chorded),
    "unaware": Kind(3, 1, unaware),
    "check-in": Kind(3, 1, checked_in),
}

#: How many tasks a send makes.
TASKS_PER_SEND: Final = sum(each.weight * each.tasks for each in KINDS.values()) / sum(
    each.weight for each in KINDS.values()
)


@dataclass(frozen=True)
class Mixed:
    """What a producer of the soak sends: tasks of all kinds, until an instant.

    Attributes:
        seed: That of its choices.
        until_ms: When it ends.
        tasks_a_second: How many tasks a second.
        longest: The longest delay in seconds; the shorter, the more.
    """

    seed: int
    until_ms: float
    tasks_a_second: float
    longest: float

    def send(self, app: Any, notes: Notes, part: Part) -> None:
        """Send, and make every decision, to the end."""
        sender = Sender(app, notes, part, self.seed)
        kinds, began_ms, number = [*KINDS.values()], now_ms(), 0
        weights = [each.weight for each in kinds]
        while now_ms() < self.until_ms:
            sender.decide()
            if (now_ms() - began_ms) / 1000 * self.tasks_a_second < number * TASKS_PER_SEND:
                time.sleep(0.01)
                continue
            number += 1
            (kind,) = sender.random.choices(kinds, weights)
            kind.send(sender, 0.3 + self.longest * sender.random.random() ** 3)
        while sender.decide():
            time.sleep(0.01)
