"""``recorded``: a fake that records what an application sends, for unit tests without servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import amqp
import celery
from celery import states
from celery.app.trace import build_tracer
from celery.backends.base import DisabledBackend
from celery.backends.cache import CacheBackend
from celery.result import denied_join_result
from celery.utils.functional import LRUCache
from celery.worker import control, state
from celery.worker.request import Request
from kombu import Connection, Producer, Queue

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.application import Celery
from celery_rabbitdelay.app.celery_internals import results_kept_in
from celery_rabbitdelay.app.delays import Delays, FakeBroker
from celery_rabbitdelay.exceptions import NotRecorded
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Delay, Due, instant_of
from celery_rabbitdelay.levels.headers import DUE
from celery_rabbitdelay.publishing.message import Publication
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.registry.application import how_kept, open_registry
from celery_rabbitdelay.registry.decision import Decision, Verdict
from celery_rabbitdelay.registry.decisions import DISCARDED, discard_as_revoked
from celery_rabbitdelay.registry.pauses import paused_since
from celery_rabbitdelay.testing.recorded_registry import RecordedRegistry
from celery_rabbitdelay.testing.sent import Address, Recorded, Sent, Take, Wanted
from celery_rabbitdelay.testing.worker import Clock, going_by

#: :meth:`Recording.run_due` stops after this many tasks, because they seem to send tasks endlessly.
MAX_RUNS: Final = 10_000


@contextmanager
def recorded(app: celery.Celery) -> Iterator[Recording]:
    """Record what an application sends in the block, instead of sending it.

    In a test::

        with recorded(app) as sent:
            order.place()
            sent.one(remind, args=[order.id], delay=timedelta(days=3))
            sent.run_due(within=timedelta(days=3))

    This fake is for fast unit tests: it contacts no broker and no Redis, nothing waits, and no
    worker runs. Sends are checked, routed and serialized as usual, so a wrong delay or an unknown
    queue raises the same error. The behavior of RabbitMQ, Redis and workers is not tested: use
    :class:`.Travel` for that.

    - All sends of this application are recorded, with Celery's API or ``app.rabbitdelay``, in any
      thread. With ``task_always_eager``, ``apply_async`` runs the task, and nothing is recorded.
    - Results are kept in memory if there is a result backend, and lost at the end.
    - The registry is kept in memory if ``rabbitdelay_registry_url`` is set. Schedules, and calls
      that ask the broker, raise :class:`.NotRecorded`.
    - Commands to workers (``app.control``) get no answer; ``revoke`` cancels recorded tasks.
      The fake does not replace events that a task sends itself, and result backends of single
      tasks.
    - In nested blocks, the innermost block records.

    Args:
        app: The application, a :class:`celery_rabbitdelay.Celery` or an installed one.

    Raises:
        TypeError: The application cannot delay tasks.
    """
    if not isinstance(app, Celery):
        raise TypeError(
            f"takes a celery_rabbitdelay.Celery or an installed application, not {app!r}"
        )
    recording = Recording(app)
    with ExitStack() as stack:
        stack.enter_context(
            app.rabbitdelay.replaced_by(
                recording.fake_broker, {open_registry: recording.open_registry}
            )
        )
        if not isinstance(app.backend, DisabledBackend):
            stack.enter_context(results_kept_in(app, ResultsInMemory(app)))
        stack.enter_context(going_by(recording.clock.ns))
        stack.enter_context(patch.dict(state.revoked_stamps, clear=True))
        stack.callback(state.revoked.update, [*state.revoked])
        stack.callback(state.revoked.clear)
        state.revoked.clear()
        yield recording


class Recording:
    """The tasks that were sent in a block of :func:`recorded`.

    Args:
        app: The application.

    Attributes:
        recorded: The tasks, in the order in which they were sent.
        fake_broker: Records the application's messages.
        lock: Held while the record changes.
        clock: The package's clock in the block, which :meth:`run_due` sets ahead.
    """

    def __init__(self, app: Celery) -> None:
        self.recorded: list[Recorded] = []
        self.lock: threading.RLock = threading.RLock()
        self._app = app
        self.clock: Clock = Clock(wall_clock.ns)
        # The connection only provides settings, and is never opened.
        connection = app.connection_for_write()
        publisher = RecordingPublisher(connection, self._record)
        producer = RecordingProducer(connection, self._record)
        self.fake_broker: FakeBroker = FakeBroker(publisher, producer, self._broadcast)

    def open_registry(self, delays: Delays) -> RecordedRegistry:
        """Return the registry of the block, in memory."""
        return RecordedRegistry(*how_kept(delays), postponed=self._postponed)

    def one(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> Sent:
        """Return the only send with these fields.

        Args:
            task: The task, or its name; None for any.
            **fields: Fields of :class:`Sent`. ``delay`` and ``tolerance`` are seconds or timedeltas
                and have to be exact to the millisecond; for a task that was sent with an ``eta``,
                the actual ``delay`` may be up to 5 s shorter. ``due`` and ``expires`` are aware
                datetimes, and may be up to 5 s off; ``expires`` may also be a length of time after
                the send. Only the headers that you give are compared. A list is equal to a tuple.

        Raises:
            AssertionError: No send, or several sends, have these fields. The error lists the sends,
                and the fields that differ.
            TypeError: A send has no such field.
        """
        wanted, found = Wanted(task, fields), self.all(task, **fields)
        if len(found) == 1:
            return found[0]
        number = f"{len(found)} were recorded" if found else "none was recorded"
        listed = wanted.listed(found or self.all())
        raise AssertionError(f"Expected one send of {wanted}; {number}. {listed}")

    def none(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> None:
        """Assert that no send has these fields; for the fields, see :meth:`one`.

        Raises:
            AssertionError: A send has these fields; the error lists all such sends.
            TypeError: A send has no such field.
        """
        wanted = Wanted(task, fields)
        if found := self.all(task, **fields):
            raise AssertionError(f"Expected no send of {wanted}. {wanted.listed(found)}")

    def all(self, task: celery.Task[Any, Any] | str | None = None, **fields: Any) -> list[Sent]:
        """Return the sends with these fields, in their order; the fields are as for :meth:`one`.

        Raises:
            TypeError: A send has no such field.
        """
        wanted = Wanted(task, fields)
        with self.lock:
            return [each.sent for each in self.recorded if not wanted.differing(each.sent)]

    def run_due(self, within: Delay | None = None) -> list[Sent]:
        """Run the recorded tasks in this process, in the order in which they are due.

        A task runs as in a worker: with its id, retries, callbacks, chains, chords and signals. The
        tasks that it sends are recorded, and also run if they are due by then. The package's clock
        moves to the due time of every task, so that a task that repeats itself hourly runs 24 times
        within a day, and finally to the end of ``within``. All other code sees the real time, and
        an ``eta`` that it computes counts from the real time.

        Tasks that are cancelled, expired or superseded do not run, and their results become
        ``REVOKED``. Tasks that this application does not know, paused tasks and tasks of an open
        job keep waiting; without ``within``, held tasks wait for another call.

        Args:
            within: Seconds, or a timedelta: run only tasks that are due within this time from now;
                None for all.

        Returns:
            The tasks that ran, in the order of their runs.

        Raises:
            Exception: The error of a task that failed; its error callbacks are recorded. Another
                call continues with the following tasks.
            RuntimeError: Tasks send other tasks endlessly, or the block has ended or is not the
                innermost block.
        """
        if self._app.rabbitdelay.fake_broker is not self.fake_broker:
            raise RuntimeError(
                "call run_due() within the block: outside it, tasks would really be sent"
            )
        self._stand_at(0)
        until_ms = None if within is None else Due.after(within).at_ms
        ran: list[Sent] = []
        try:
            self._run_until(until_ms, ran)
            if until_ms is not None:
                self._stand_at(until_ms)
                self._run_until(until_ms, ran)
        finally:
            self.clock.go_on()
        return ran

    def _stand_at(self, ms: int) -> None:
        """Stop the clock at ``ms``, or at the present time if ``ms`` has passed."""
        self.clock.stand_at(max(ms * wall_clock.NS_PER_MS, self.clock.ns()))

    def _run_until(self, until_ms: int | None, ran: list[Sent]) -> None:
        """Run tasks that are due by ``until_ms`` (None: all), and held tasks that may run now."""
        for each in self.recorded:
            if each.is_held:
                each.at_ms, each.is_held = wall_clock.ms(), False
        while (task := self._next(until_ms)) is not None:
            self._stand_at(task.at_ms)
            if len(ran) == MAX_RUNS:
                raise RuntimeError(f"{MAX_RUNS:,} tasks have run, and {task.sent} is still due")
            self._arrive(task, ran)

    def _next(self, until_ms: int | None) -> Recorded | None:
        def comes(task: Recorded) -> bool:
            is_due = not task.is_held if until_ms is None else task.at_ms <= until_ms
            return task.waits and is_due and task.sent.task in self._app.tasks

        with self.lock:
            return min(filter(comes, self.recorded), key=lambda task: task.at_ms, default=None)

    def _arrive(self, task: Recorded, ran: list[Sent]) -> None:
        """Handle an arriving task as a worker would; add it to ``ran`` if it runs."""
        task.waits = False
        decision = self._decided(task)
        request = Request(task.message, app=self._app)
        match decision.verdict:
            case Verdict.RUN:
                if not request.revoked():
                    self._signal(signals.released, task)
                    ran.append(task.sent)
                    self._run(request)
            case Verdict.LATER:
                task.waits, task.at_ms = True, decision.until_ms
                task.is_held = not decision.is_new_due
                task.arrival = task.arrival._replace(put_back_ms=decision.until_ms)
                if decision.is_new_due:
                    task.message.headers[DUE] = decision.until_ms  # type: ignore[assignment]
                    task.arrival = task.arrival._replace(due_ms=decision.until_ms)
            case Verdict.CANCELLED | Verdict.EXPIRED | Verdict.SUPERSEDED as verdict:
                consumer = SimpleNamespace(controller=SimpleNamespace(state=state))
                discard_as_revoked(consumer, request.id, request.revoked)
                self._signal(DISCARDED[verdict], task)

    def _decided(self, task: Recorded) -> Decision:
        delays = self._app.rabbitdelay
        if not (task.has_waited and delays.has_registry):
            return Decision(Verdict.RUN)
        paused = delays.registry.pauses.known()
        paused_ms = paused_since(paused, task.sent.task, task.sent.queue or "")
        task.arrival = task.arrival.named()._replace(paused_ms=paused_ms)
        (decision,) = delays.registry.decide([task.arrival])
        return decision

    def _run(self, request: Request) -> None:
        task = request.task
        args, kwargs, embedded = request.message.payload
        context = {**request.request_dict, "is_eager": False, **embedded}
        trace = build_tracer(task.name, task, app=self._app)
        with denied_join_result():
            _, outcome, *_ = trace(request.id, args, kwargs, context)
        if outcome is not None and outcome.state == states.FAILURE:
            raise outcome.retval

    def _signal(self, signal: Any, task: Recorded) -> None:
        if task.has_waited:
            signals.send(signal, self._app, task.sent.task_id, task.arrival.due_ms)

    def _postponed(self, task_id: str, due_ms: int) -> None:
        """Show the new due time of a postponed task; its message is put back when it arrives."""
        for each in self.recorded:
            if each.waits and each.sent.task_id == task_id and due_ms > each.arrival.due_ms:
                each.sent = replace(each.sent, due=instant_of(due_ms))

    def _record(self, message: amqp.Message, address: Address, due: Due | None) -> None:
        with self.lock:
            recorded = Recorded.of(message, address, due)
            if recorded is not None:
                self.recorded.append(recorded)

    def _broadcast(self, command: str, arguments: Mapping[str, Any]) -> None:
        if command in ("revoke", "revoke_by_stamped_headers"):
            worker: Any = SimpleNamespace(app=self._app)
            getattr(control, command)(worker, **{**arguments, "terminate": False})


class RecordingPublisher(Publisher):
    """Records the messages that would wait in the levels; all count as confirmed.

    Args:
        connection: A connection to the broker, which is never opened.
        take: Called with every message.
    """

    def __init__(self, connection: Connection, take: Take) -> None:
        super().__init__(connection)
        self._take = take

    def publish_all(
        self,
        publications: Iterable[Publication],
        *args: object,
        done: Callable[[Publication], None] | None = None,
        **options: object,
    ) -> None:
        """Record messages; replaces :meth:`.Publisher.publish_all`."""
        for publication in publications:
            # The address of a delayed task is DelayedProducer.address with its arguments.
            address: Any = publication.address
            *_, due = address.args
            self._take(publication.content.message(), Address(), due)
            if done is not None:
                done(publication)


class RecordingProducer(Producer):
    """Records the messages that would go straight to their queues.

    Args:
        connection: A connection to the broker, which is never opened.
        take: Called with every message.
    """

    def __init__(self, connection: Connection, take: Take) -> None:
        super().__init__(connection, auto_declare=False)
        self._take = take

    def _publish(self, *given: Any) -> None:
        # The arguments are kombu's: its public method has serialized the body.
        body, priority, kind, encoding, headers, properties, key, _, _, exchange, declare, *_ = (
            given
        )
        message = amqp.Message(
            body,
            priority=priority,
            content_type=kind,
            content_encoding=encoding,
            application_headers={**headers},
            **properties,
        )
        known = [each.name for each in declare if isinstance(each, Queue)]
        direct = None if exchange else key
        self._take(message, Address(exchange, key, [*known, direct][0]), None)


class ResultsInMemory(CacheBackend):
    """A result backend that keeps the results of one block in memory.

    Args:
        app: The application.
    """

    def __init__(self, app: celery.Celery) -> None:
        super().__init__(app, url="memory://")
        self.client.cache = LRUCache(limit=None)

    def wait_for(self, task_id: str, *more: object, **options: object) -> Any:
        """Return the result of a task.

        Raises:
            NotRecorded: The task has not run, so waiting would be endless.
        """
        meta = self.get_task_meta(task_id)
        if meta["status"] not in states.READY_STATES:
            raise NotRecorded("waiting for the result of a task that run_due() has not run")
        return meta
