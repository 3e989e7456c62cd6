"""``recorded``: a fake that records what an application sends, for unit tests without servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final

import amqp
import celery
from celery import states
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend
from celery.result import denied_join_result
from celery.worker.request import Request

from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.celery_internals import results_kept_in
from celery_rabbitdelay.app.sending.task_producer import StandIn
from celery_rabbitdelay.exceptions import NotRecorded
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, Due, instant_of
from celery_rabbitdelay.testing.recorded_messages import (
    Address,
    Recorded,
    RecordingProducer,
    RecordingPublisher,
    ResultsInMemory,
)
from celery_rabbitdelay.testing.recorded_registry import RecordedRegistry
from celery_rabbitdelay.testing.sent import Sent, Wanted

#: :meth:`Recording.run_due` stops after this many tasks: they seem to send one another endlessly.
MAX_RUNS: Final = 10_000


@contextmanager
def recorded(app: celery.Celery) -> Iterator[Recording]:
    """Record what an application sends in the block, instead of sending it.

    In a test::

        with recorded(app) as sent:
            order.place()
            sent.one(remind, args=[order.id], delay=timedelta(days=3))
            sent.run_due(within=timedelta(days=3))

    This is a fake, for fast unit tests: no broker and no Redis is contacted, nothing waits, and no
    worker runs. Sends are checked, routed and serialized as real ones are, so a wrong delay or an
    unknown queue raises the same error. What RabbitMQ, Redis and workers would do with them is not
    tested: use :class:`.Travel` for that.

    - Everything counts that this application sends with Celery's API or that of
      ``app.rabbitdelay``, in any thread. With ``task_always_eager``, ``apply_async`` runs the task,
      and nothing is recorded.
    - If there is a result backend, results are kept in memory, and lost at the end.
    - If ``rabbitdelay_registry_url`` is set, ``key``, ``unique``, ``job``, ``once``, ``cancel`` and
      ``postpone`` work on what is recorded; other calls of the registry raise
      :class:`.NotRecorded`. Jobs do not expire.
    - Commands to workers (``app.control``) get no answer; ``revoke`` cancels recorded tasks.
      Events that a task sends itself, and result backends of single tasks, are not replaced.
    - In a block within a block, the inner one records.

    Args:
        app: The application, a :class:`celery_rabbitdelay.Celery` or an installed one.

    Raises:
        TypeError: The application is another one.
        NotRecorded: The application uses Celery's message protocol 1.
    """
    if not isinstance(app, Celery):
        raise TypeError(f"takes a celery_rabbitdelay.Celery, or an installed application: {app!r}")
    if app.conf.task_protocol == 1:
        raise NotRecorded("Celery's message protocol 1")
    recording = Recording(app)
    with ExitStack() as stack:
        stack.enter_context(app.rabbitdelay.replaced_by(recording.stand_in))
        if not isinstance(app.backend, DisabledBackend):
            stack.enter_context(results_kept_in(app, ResultsInMemory(app)))
        yield recording


class Recording:
    """What was sent in a block of :func:`recorded`.

    Args:
        app: The application.

    Attributes:
        recorded: The tasks in the order of their sends.
        stand_in: What takes the application's messages.
        lock: Held while the record changes.
    """

    def __init__(self, app: Celery) -> None:
        self.recorded: list[Recorded] = []
        self.lock = threading.RLock()
        self._app = app
        self._registry = RecordedRegistry(self)
        # It is only asked what it is, and never opened.
        connection = app.connection_for_write()
        publisher = RecordingPublisher(connection, self._record)
        producer = RecordingProducer(connection, self._record)
        self.stand_in = StandIn(publisher, producer, self._broadcast, self._registry)
        #: The due time of the task that runs, from which the delays of its sends count.
        self._running_ms: int | None = None
        self._won: set[tuple[str, str]] = set()

    def one(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> Sent:
        """Return the one send that has these fields.

        Args:
            task: The task, or its name; None for any.
            **fields: Fields of :class:`Sent`. ``delay`` and ``tolerance`` are seconds or timedeltas
                and have to be exact to the millisecond; only if the task was sent with an ``eta``,
                ``delay`` may have become up to 5 s shorter since then. ``due`` and ``expires`` are
                aware datetimes, and may be 5 s off; ``expires`` may also be a length of time from
                the send on. Of ``headers``, only the given ones are compared. A list is equal to
                a tuple.

        Raises:
            AssertionError: There is none, or several; it shows what was sent, and what differs.
            TypeError: A send has no such field.
        """
        wanted, found = Wanted(task, fields), self.all(task, **fields)
        if len(found) == 1:
            return found[0]
        number = f"{len(found)} were recorded" if found else "none was recorded"
        listed = wanted.listed(found or self.all())
        raise AssertionError(f"Expected one send of {wanted}; {number}. {listed}")

    def none(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> None:
        """Assert that no send has these fields; takes the same as :meth:`one`.

        Raises:
            AssertionError: There is one; it shows them.
            TypeError: A send has no such field.
        """
        wanted = Wanted(task, fields)
        if found := self.all(task, **fields):
            raise AssertionError(f"Expected no send of {wanted}. {wanted.listed(found)}")

    def all(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> list[Sent]:
        """Return the sends that have these fields, in their order; takes the same as :meth:`one`.

        Raises:
            TypeError: A send has no such field.
        """
        wanted = Wanted(task, fields)
        with self.lock:
            return [each.sent for each in self.recorded if not wanted.differing(each.sent)]

    def run_due(self, within: Delay | None = None) -> list[Sent]:
        """Run the recorded tasks in this process, in the order in which they are due.

        Each runs once, as in a worker: with its id, retries, callbacks, chains, chords and signals.
        What it sends is recorded, and runs as well if it is due by then. Such a delay counts from
        when its sender was due, so that a task that repeats itself hourly runs 24 times within a
        day. The clock is not moved, though: code that asks for the time sees the present, and an
        ``eta`` that it computes counts from the present.

        Left out are tasks that are cancelled, expired or superseded by a newer one under their key,
        those of a job that is not committed, and those that this application does not know.

        Args:
            within: Seconds, or a timedelta: how far from now tasks may be due; None for all.

        Returns:
            The tasks that ran, in their order.

        Raises:
            Exception: A task has failed with it; its error callbacks are recorded. Another call
                goes on with the tasks after it.
            RuntimeError: Tasks send one another without end; or the block has ended, or is not the
                innermost one.
        """
        if self._app.rabbitdelay.stand_in is not self.stand_in:
            raise RuntimeError("run_due() is called within the block: tasks would send for real")
        until_ms = None if within is None else Due.after(within).at_ms
        ran: list[Sent] = []
        while (task := self._next(until_ms)) is not None:
            if len(ran) == MAX_RUNS:
                raise RuntimeError(f"{MAX_RUNS:,} tasks have run, and {task.sent} is still due")
            ran.append(task.sent)
            self._run(task)
        return ran

    def _next(self, until_ms: int | None) -> Recorded | None:
        def may_run(task: Recorded) -> bool:
            sent, due_ms = task.sent, task.arrival.due_ms
            return (
                task.waits
                and (until_ms is None or due_ms <= until_ms)
                and sent.task in self._app.tasks
                and (sent.expires is None or sent.due <= sent.expires)
                and not (sent.once and (sent.id, task.arrival.attempt) in self._won)
                and self._registry.may_run(task)
            )

        with self.lock:
            due = filter(may_run, self.recorded)
            return min(due, key=lambda task: task.arrival.due_ms, default=None)

    def _run(self, recorded: Recorded) -> None:
        recorded.waits = False
        self._won.add((recorded.sent.id, recorded.arrival.attempt))
        task, message = self._app.tasks[recorded.sent.task], recorded.message
        request: Any = Request(
            message,
            app=self._app,
            task=task,
            body=recorded.body,
            headers=message.headers,
            decoded=True,
        )
        context = {**request.request_dict, "is_eager": False, **recorded.body[2]}
        trace: Any = build_tracer(task.name, task, app=self._app)
        former, self._running_ms = self._running_ms, recorded.arrival.due_ms
        try:
            with denied_join_result():
                _, outcome, *_ = trace(recorded.sent.id, *recorded.body[:2], context)
        finally:
            self._running_ms = former
        if outcome is not None and outcome.state == states.FAILURE:
            raise outcome.retval

    def now_ms(self) -> int:
        """Return the present, or when the task that runs is due, in milliseconds since 1970."""
        return wall_clock.ms() if self._running_ms is None else self._running_ms

    def move(self, task_id: str, due_ms: int) -> None:
        """Let the messages of a task that wait be due at another time."""
        with self.lock:
            for each in self.recorded:
                if each.waits and each.sent.id == task_id:
                    each.sent = replace(each.sent, due=instant_of(due_ms))
                    each.arrival = each.arrival._replace(due_ms=due_ms)

    def _record(self, message: amqp.Message, address: Address, due: Due | None) -> None:
        with self.lock:
            recorded = Recorded.of(message, address, due, self._running_ms)
            if recorded is not None:
                self.recorded.append(recorded)

    def _broadcast(self, command: str, arguments: Mapping[str, Any]) -> None:
        if command == "revoke":
            task_ids = arguments["task_id"]
            self._registry.cancel([task_ids] if isinstance(task_ids, str) else list(task_ids))
