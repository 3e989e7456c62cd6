"""``app.rabbitdelay``: cancel, postpone and list tasks that wait."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Final, TypeAlias, TypedDict, Unpack
from uuid import UUID

from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult, ResultBase

from celery_rabbitdelay.app import signals
from celery_rabbitdelay.app.control import revoke_by_celery
from celery_rabbitdelay.app.options import Result
from celery_rabbitdelay.exceptions import JobClosed, NotRecorded, NotTracked, RegistryUnavailable
from celery_rabbitdelay.levels.delay import (
    Delay,
    Due,
    check_max_delay,
    instant_of,
    milliseconds_of,
)
from celery_rabbitdelay.levels.headers import COPY
from celery_rabbitdelay.publishing.declaration import Backlog, backlog_of
from celery_rabbitdelay.publishing.kombu_internals import closing, connect
from celery_rabbitdelay.registry.application import register_sent
from celery_rabbitdelay.registry.decision import Outcome, Registration, new_copy
from celery_rabbitdelay.registry.holding import Holding, publish_signed
from celery_rabbitdelay.registry.index import Filter, Pending
from celery_rabbitdelay.registry.record import KnownTask, known_task, record_of, restored
from celery_rabbitdelay.registry.registry import Earlier
from celery_rabbitdelay.registry.store import readable

logger = logging.getLogger(__name__)

#: Several tasks have the least certain of their outcomes.
LEAST_CERTAIN: Final = tuple(Outcome)

#: The outcomes by which a task will not run, or not before.
_DECIDED: Final = (Outcome.DONE, Outcome.NOTED)

#: What a second message of a task was too late for, by what the registry says of it.
_FOUND: Final = {
    "cancelled": Outcome.CANCELLED,
    "superseded": Outcome.CANCELLED,
    "released": Outcome.RELEASED,
}

#: A task, or several: ids and results of sends.
Meant: TypeAlias = "str | UUID | ResultBase | Iterable[Meant]"

#: The reason in the result of a task that was cancelled while it waited.
REASON: Final = "cancelled"


class Filters(TypedDict, total=False):
    """Which tracked tasks that wait are meant; see :meth:`Waiting.pending`."""

    task: str | None
    key: str | None
    job: str | None
    due_before: datetime | None
    due_after: datetime | None


class Waiting(Holding):
    """What the registry can do about tasks that wait, all of it a part of ``app.rabbitdelay``.

    All methods raise :class:`.RegistryRequired` where ``rabbitdelay_registry_url`` is not set, and
    :class:`.RegistryUnavailable` if Redis does not answer.

    Args:
        delays: The application's delay levels.
    """

    @property
    def has_registry(self) -> bool:
        """Whether there is a registry, and the broker has levels."""
        return self._delays.available and bool(self._delays.setting("registry_url"))

    def cancel(
        self,
        task: Meant | None = None,
        *,
        key: str | None = None,
        job: str | None = None,
        also_future: bool = True,
    ) -> Outcome:
        """Cancel a task that waits: it will not run, whatever restarts until it is due.

        Its result becomes ``REVOKED``: at once if it is known that it waits, otherwise when it
        would have been due. Workers that have received it already, and have not started it, revoke
        it as Celery does.

        Redis does not know of a task that is neither tracked nor sent with a key before it arrives.
        The id of such a task, or of one that is sent later, is noted for ten years.

        Args:
            task: Its id; or the result of a send: of one task, of a chain, or of a group, whose
                tasks are all cancelled; or several of these.
            key: Instead of a task: the key that it was sent with.
            job: Instead of a task: the job that tasks were sent with. An open job is aborted; of
                a job that is committed, the tracked tasks are cancelled.
            also_future: Whether to note an id of which nothing is known.

        Returns:
            What was found. For an id of which nothing is known ``NOTED``, or without
            ``also_future`` ``UNKNOWN``, as for a key that no task has. For several tasks, the
            least certain answer.

        Raises:
            TypeError: Not exactly one of a task, a key and a job.
        """
        if job is not None:
            if task is not None or key is not None:
                raise TypeError(_one_of(task, key, job))
            with suppress(JobClosed):
                self.abort_job(job)
                return Outcome.DONE
            return self._cancel([each.task_id for each in self.pending(job=job)])
        return self._cancel(self._meant(task, key), also_future)

    def _cancel(self, ids: list[str], also_future: bool = True) -> Outcome:
        if not ids:
            return Outcome.UNKNOWN
        outcomes = self.registry.cancel(ids, also_future)
        found = dict(zip(ids, outcomes, strict=True))
        try:
            for task_id, outcome in found.items():
                if outcome is Outcome.DONE:
                    self._delays.app.backend.mark_as_revoked(task_id, REASON, store_result=True)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - the tasks are cancelled, whatever a backend says
            logger.warning("Results become REVOKED only when their tasks are due: %s", error)
        self._say_cancelled(found)
        return min(outcomes, key=LEAST_CERTAIN.index)

    def _say_cancelled(self, found: Mapping[str, Outcome | str]) -> None:
        for task_id, outcome in found.items():
            if outcome in _DECIDED:
                signals.send(signals.cancelled, self._delays.app, task_id, None)
        # No worker has a task that waits: it asks the registry when the task arrives.
        arrived = (Outcome.RELEASED, Outcome.NOTED, Outcome.CANCELLED)
        ids = [task_id for task_id, outcome in found.items() if outcome in arrived]
        revoke_by_celery(self._delays.app, ids)

    def cancel_pending(
        self,
        *,
        sent_before: datetime | None = None,
        **filters: Unpack[Filters],
    ) -> int:
        """Cancel all tasks that :meth:`pending` lists, a hundred at a time; return how many.

        Their results become ``REVOKED`` when they would have been due. If it fails in the middle,
        some are cancelled: call it again.

        Args:
            sent_before: Only those that were sent before; None: before this call.
            **filters: As for :meth:`pending`; without any, all tasks.
        """
        before = sent_before or instant_of(self.registry.now_ms() + 1)
        wanted = Filter.of(**filters)._replace(sent_before_ms=milliseconds_of(before))
        return sum(self.cancel_batches(wanted))

    def cancel_batches(self, wanted: Filter) -> Iterator[int]:
        """Cancel tasks as :meth:`cancel_pending`, and yield how many were after each batch.

        Args:
            wanted: Which tasks; with ``sent_before_ms``, or it goes on as long as more are sent.
        """
        has_found = True
        # Until none is found: one that is postponed meanwhile may have moved to a place that was
        # read before.
        while has_found:
            has_found = False
            for part in self.registry.index.parts(wanted):
                ids = [each.task_id for each in part.tasks]
                outcomes = self.registry.cancel_each(ids, also_future=False)
                self._say_cancelled(dict(zip(ids, outcomes, strict=True)))
                done = outcomes.count(Outcome.DONE)
                yield done
                for task_id, outcome in zip(ids, outcomes, strict=True):
                    readable(f"the record of task {task_id}", outcome)
                has_found = has_found or done > 0

    def is_waiting(self, task_id: str) -> bool:
        """Return whether a task is tracked and waits; False without a registry as well.

        It never raises. While Redis does not answer, it returns False, most times at once.
        """
        if not self.has_registry:
            return False
        try:
            return bool(self.registry.breaker.call(lambda: self.registry.index.tasks([task_id])))
        except RegistryUnavailable:
            return False

    def postpone(
        self,
        task: Meant | None = None,
        *,
        key: str | None = None,
        delay: Delay | None = None,
        eta: datetime | None = None,
        also_future: bool = True,
    ) -> Outcome:
        """Let a task that waits run at another time, later or earlier.

        A tracked task that is overdue is sent again if it is to run now, in case its message was
        lost. Of several messages of a task, the one that arrives first runs.

        Args:
            task: Its id; or the result of a send, as for :meth:`cancel`.
            key: Instead of a task: the key that it was sent with.
            delay: Seconds, or a timedelta, from now on.
            eta: Instead of a delay: the instant, an aware datetime.
            also_future: As for :meth:`cancel`.

        Returns:
            What was found; see :meth:`cancel`. After ``NOTED``, a task will not run before, and if
            it was due later than that, it runs when it was due.

        Raises:
            NotTracked: It is to run earlier, and is not tracked.
            TypeError: Neither a task nor a key, or both; or neither a delay nor an eta, or both.
            InvalidDelay: The delay or the eta is invalid.
        """
        if delay is None and eta is None:
            raise TypeError("takes a delay or an eta, such as delay=60; neither was given")
        due = self._delays.due(delay, None, eta)
        check_max_delay(due)
        ids = self._meant(task, key)
        outcomes = [self._postpone(task_id, due, also_future) for task_id in ids]
        return min(outcomes, key=LEAST_CERTAIN.index, default=Outcome.UNKNOWN)

    def _meant(self, task: Meant | None, key: str | None) -> list[str]:
        """Return the ids of the tasks that a task or a key stands for."""
        if (task is None) == (key is None):
            raise TypeError(_one_of(task, key))
        return _ids(task) if key is None else self.registry.waiting_under(key)

    def _postpone(self, task_id: str, due: Due, also_future: bool) -> Outcome:
        record = record_of(self.registry, task_id) if due.is_past else None
        if record is not None and record.name is not None and record.due_ms is not None:
            # Only what is to run earlier is sent again.
            due = Due.until(min(due.at_ms, record.due_ms - 1))
        outcome = self.registry.postpone(task_id, due.at_ms, also_future)
        if isinstance(outcome, Earlier):
            if not outcome.message:
                raise NotTracked(task_id)
            outcome = self._send_earlier(task_id, outcome, due)
        if outcome in _DECIDED:
            signals.send(signals.postponed, self._delays.app, task_id, due.at_ms)
        return outcome

    def _send_earlier(self, task_id: str, waiting: Earlier, due: Due) -> Outcome:
        """Send a second message of a task: the one that arrives first runs."""
        delayed, copy = restored(waiting.message, task_id), new_copy()
        message = delayed.message.saying(
            due_ms=due.at_ms, registry={**delayed.message.headers.registry, COPY: copy}
        )
        queue = delayed.queue  # of which nothing but the name is known
        if queue is not None:
            queue = self._delays.app.amqp.queues.get(queue.name) or queue
        publish_signed(self._delays, delayed._replace(message=message, queue=queue), due)
        sent = Registration.of(task_id, message.headers, waiting.name, waiting.message)
        states = register_sent(self.registry, [sent])
        return _FOUND.get(states[0], Outcome.DONE) if states else Outcome.DONE

    def show(
        self, task: str | UUID | Result | None = None, *, key: str | None = None
    ) -> KnownTask | None:
        """Return what is known of one task: its due time, where it goes, what was decided, ...

        If it waits, the broker is asked as well.

        Args:
            task: Its id, or the result of its send.
            key: Instead of a task: the key that it was sent with.

        Returns:
            See :class:`.KnownTask`; None if nothing is known of it, or nothing was sent with the
            key lately.

        Raises:
            TypeError: Neither a task nor a key, or both.
            OSError: The broker cannot be reached.
        """
        own = task.id if isinstance(task, AsyncResult) else task
        ids = self._meant(own, key)
        topology = self._delays.settings.topology

        def backlog() -> Backlog:
            if self._delays.fake_broker is not None:
                raise NotRecorded("show(), which asks the broker where a task waits")
            with closing(self._delays.app.connection_for_write()) as connection:
                connect(connection)
                return backlog_of(connection, topology)

        return known_task(self.registry, ids[0], topology.layout, backlog) if ids else None

    def pending(self, **filters: Unpack[Filters]) -> Iterator[Pending]:
        """Yield the tracked tasks that wait, in the order in which they are due.

        Args:
            **filters: Only some tasks: those of the name ``task``; those that were sent with this
                ``key`` or ``job``; those that are due before ``due_before``, or at ``due_after`` or
                later, which are aware datetimes.
        """
        return self.registry.index.pending(Filter.of(**filters))

    def count(self, **filters: Unpack[Filters]) -> int:
        """Return how many tracked tasks wait; takes the same as :meth:`pending`."""
        return self.registry.index.count(Filter.of(**filters))

    def pending_since(self) -> datetime:
        """Return since when :meth:`pending` is complete.

        What was sent before may be missing, because it was lost with Redis or because there was no
        registry yet.
        """
        return self.registry.index.complete_since()


def _one_of(*given: object) -> str:
    """Return what is wrong where not exactly one of a task, a key and a job was given."""
    shown = " and ".join(repr(each) for each in given if each is not None) or "none"
    return f"takes one of a task, a key='order:7' and, to cancel, a job='import-7', not {shown}"


def _ids(task: object) -> list[str]:
    """Return the ids that are meant: of a result, those of a chain from its start.

    Raises:
        TypeError: It is neither an id nor a result, nor several of them.
    """
    if isinstance(task, str | UUID):
        return [str(task)]
    if isinstance(task, Iterable) and not isinstance(task, ResultBase | bytes | Mapping):
        return [task_id for each in task for task_id in _ids(each)]
    if not isinstance(task, ResultBase):
        takes = "takes the id or the result of a task, such as result.id, or several of them"
        raise TypeError(f"{takes}, not {task!r}")
    ids = []
    if isinstance(task, AsyncResult):
        ids.append(str(task.id))
    for each in getattr(task, "results", None) or ():
        ids += _ids(each)
    parent = getattr(task, "parent", None)
    return (_ids(parent) if parent is not None else []) + ids
