"""The registry's part of ``app.rabbitdelay``: cancel, postpone and list waiting tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Final, TypeAlias, TypedDict, Unpack
from uuid import UUID

import celery
from amqp.exceptions import AMQPError, ChannelError
from celery.app.control import Control
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult, ResultBase
from kombu import Queue
from kombu.exceptions import OperationalError

from celery_rabbitdelay.app import signals
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
from celery_rabbitdelay.publishing.declaration import Backlog, backlog_of, queue_counts
from celery_rabbitdelay.publishing.kombu_internals import Counts, closing, connect
from celery_rabbitdelay.publishing.refusals import missing_permission
from celery_rabbitdelay.registry.application import register_sent
from celery_rabbitdelay.registry.decision import Outcome, Registration, new_copy
from celery_rabbitdelay.registry.holding import Holding, publish_signed
from celery_rabbitdelay.registry.index import Filter, Pending
from celery_rabbitdelay.registry.known import KnownTask, known_task
from celery_rabbitdelay.registry.record import record_of, restored
from celery_rabbitdelay.registry.registry import Earlier
from celery_rabbitdelay.registry.store import readable

logger = logging.getLogger(__name__)

#: The maximum number of ids in one revoke, which a worker logs in one line.
MAX_REVOKED: Final = 100

#: The outcomes, least certain first. The outcome of several tasks is their least certain one.
LEAST_CERTAIN: Final = tuple(Outcome)

#: The outcomes after which the task will not run, or will not run before its new due time.
_DECIDED: Final = (Outcome.DONE, Outcome.NOTED)

#: The outcome if a second message came too late, keyed by the message's state in the registry.
_FOUND: Final = {
    "cancelled": Outcome.CANCELLED,
    "superseded": Outcome.CANCELLED,
    "released": Outcome.RELEASED,
}

#: One or several tasks, given by ids or by results of sends.
Meant: TypeAlias = "str | UUID | ResultBase | Iterable[Meant]"

#: The reason in the result of a task that was cancelled while it waited.
REASON: Final = "cancelled"


class Filters(TypedDict, total=False):
    """Filters of waiting tracked tasks; see :meth:`Waiting.pending`."""

    task: str | None
    key: str | None
    job: str | None
    due_before: datetime | None
    due_after: datetime | None


class Waiting(Holding):
    """The methods of ``app.rabbitdelay`` that concern waiting tasks.

    All methods raise :class:`.RegistryRequired` if ``rabbitdelay_registry_url`` is not set, and
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
        """Cancel a waiting task. The cancellation survives restarts until the task is due.

        The task's result becomes ``REVOKED``: at once if the registry knows that the task waits,
        otherwise when the task would have been due. A worker that has received but not started the
        task revokes it, as with Celery's ``revoke``.

        Redis does not know an untracked task without a key until the task arrives.
        The cancellation of an unknown id is kept for ten years.

        Args:
            task: The id; or the result of a send (of one task, of a chain, or of a group, whose
                tasks are all cancelled); or several of these.
            key: The task's key, instead of ``task``.
            job: A job, instead of ``task``. An open job is aborted; in a committed job, the tracked
                tasks are cancelled.
            also_future: Whether to record the cancellation of an unknown id.

        Returns:
            The outcome. For an unknown id, it is ``NOTED``, or ``UNKNOWN`` without ``also_future``;
            for an unknown key, ``UNKNOWN``; for several tasks, their least certain outcome.

        Raises:
            TypeError: Not exactly one of a task, a key and a job is given.
        """
        if job is not None:
            if task is not None or key is not None:
                raise TypeError(_one_of(task, key, job))
            with suppress(JobClosed):
                self.abort_job(job)
                return Outcome.DONE
            return self._cancel([waiting.task_id for waiting in self.pending(job=job)])
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
        except Exception as error:  # noqa: BLE001 - the tasks are cancelled anyway
            logger.warning(
                "Cancelled tasks are not marked REVOKED until due; the result backend failed: %s",
                error,
            )
        self._say_cancelled(found)
        return min(outcomes, key=LEAST_CERTAIN.index)

    def _say_cancelled(self, found: Mapping[str, Outcome | str]) -> None:
        for task_id, outcome in found.items():
            if outcome in _DECIDED:
                signals.send(signals.cancelled, self._delays.app, task_id, None)
        # No worker holds a waiting task; a worker asks the registry when the task arrives.
        arrived = (Outcome.RELEASED, Outcome.NOTED, Outcome.CANCELLED)
        ids = [task_id for task_id, outcome in found.items() if outcome in arrived]
        _revoke_by_celery(self._delays.app, ids)

    def cancel_pending(
        self,
        *,
        sent_before: datetime | None = None,
        **filters: Unpack[Filters],
    ) -> int:
        """Cancel all tasks that :meth:`pending` lists, a hundred at a time; return their number.

        The results become ``REVOKED`` when the tasks would have been due. If the call fails
        halfway, some tasks are cancelled: repeat the call.

        Args:
            sent_before: Cancel only tasks sent before this instant; by default before this call.
            **filters: As for :meth:`pending`. Without filters, all tracked tasks are cancelled.
        """
        before = sent_before or instant_of(self.registry.now_ms() + 1)
        wanted = Filter.of(**filters)._replace(sent_before_ms=milliseconds_of(before))
        return sum(self.cancel_batches(wanted))

    def cancel_batches(self, wanted: Filter) -> Iterator[int]:
        """Cancel tasks like :meth:`cancel_pending`; yield the number of cancelled tasks per batch.

        Args:
            wanted: The filter. Without ``sent_before_ms``, the iteration continues as long as
                matching tasks are sent.
        """
        has_found = True
        # Repeat until no task is found: a task postponed meanwhile may have moved to a page that
        # was read before.
        while has_found:
            has_found = False
            for part in self.registry.index.parts(wanted):
                ids = [waiting.task_id for waiting in part.tasks]
                outcomes = self.registry.cancel_each(ids, also_future=False)
                self._say_cancelled(dict(zip(ids, outcomes, strict=True)))
                done = outcomes.count(Outcome.DONE)
                yield done
                for task_id, outcome in zip(ids, outcomes, strict=True):
                    readable(f"the record of task {task_id}", outcome)
                has_found = has_found or done > 0

    def is_waiting(self, task_id: str) -> bool:
        """Return whether a task is tracked and waits.

        Never raises: without a registry, or while Redis does not answer, the result is False.
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
        """Change the due time of a waiting task to a later or an earlier time.

        Making an overdue tracked task due now sends a new message, in case the first message was
        lost. If a task has several messages, the message that arrives first runs.

        Args:
            task: The id, or the result of a send, as for :meth:`cancel`.
            key: The task's key, instead of ``task``.
            delay: The new delay from now, in seconds or as a timedelta.
            eta: The new due time, an aware datetime, instead of ``delay``.
            also_future: As for :meth:`cancel`.

        Returns:
            The outcome, as for :meth:`cancel`. After ``NOTED``, the task runs at the new or at its
            own due time, whichever is later.

        Raises:
            NotTracked: The new due time is earlier, and the task is not tracked.
            TypeError: Not exactly one of a task and a key is given, or not exactly one of a delay
                and an eta.
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
        """Return the task ids given by ids, results or a key."""
        if (task is None) == (key is None):
            raise TypeError(_one_of(task, key))
        return _ids(task) if key is None else self.registry.waiting_under(key)

    def _postpone(self, task_id: str, due: Due, also_future: bool) -> Outcome:
        record = record_of(self.registry, task_id) if due.is_past else None
        if record is not None and record.name is not None and record.due_ms is not None:
            # The registry asks for a second message only if the new due time is earlier.
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
        """Send a second message of a task; the message that arrives first runs."""
        delayed, copy = restored(waiting.message, task_id), new_copy()
        message = delayed.message.saying(
            due_ms=due.at_ms, registry={**delayed.message.headers.registry, COPY: copy}
        )
        queue = delayed.queue  # has a name only, no arguments
        if queue is not None:
            queue = self._delays.app.amqp.queues.get(queue.name) or queue
        publish_signed(self._delays, delayed._replace(message=message, queue=queue), due)
        sent = Registration.of(task_id, message.headers, waiting.name, waiting.message)
        states = register_sent(self.registry, [sent])
        return _FOUND.get(states[0], Outcome.DONE) if states else Outcome.DONE

    def show(
        self, task: str | UUID | Result | None = None, *, key: str | None = None
    ) -> KnownTask | None:
        """Return the state of one task: its due time, destination, why it has not run, ...

        For a waiting task, the broker is asked where its message is.

        Args:
            task: The id, or the result of the send.
            key: The task's key, instead of ``task``.

        Returns:
            The state of the task; None if the registry does not know the id or the key.

        Raises:
            TypeError: Not exactly one of a task and a key is given.
            OSError: The broker cannot be reached.
        """
        own = task.id if isinstance(task, AsyncResult) else task
        ids = self._meant(own, key)
        topology = self._delays.settings.topology

        def look(queue: str | None) -> tuple[Backlog, Mapping[str, Counts | None]]:
            if self._delays.fake_broker is not None:
                raise NotRecorded("show(), which asks the broker where a task waits")
            with closing(self._delays.app.connection_for_write()) as connection:
                connect(connection)
                counts: Mapping[str, Counts | None] = {}
                with suppress(ChannelError):  # another connection's queue, or no permission
                    counts = queue_counts(connection, [] if queue is None else [Queue(queue)])
                return backlog_of(connection, topology), counts

        return known_task(self.registry, ids[0], topology.layout, look) if ids else None

    def pending(self, **filters: Unpack[Filters]) -> Iterator[Pending]:
        """Yield the waiting tracked tasks by due time.

        Args:
            **filters: ``task``, a task's name; ``key``; ``job``; and the aware datetimes
                ``due_after`` (inclusive) and ``due_before`` (exclusive).
        """
        return self.registry.index.pending(Filter.of(**filters))

    def count(self, **filters: Unpack[Filters]) -> int:
        """Return the number of waiting tracked tasks; takes the filters of :meth:`pending`."""
        return self.registry.index.count(Filter.of(**filters))

    def pending_since(self) -> datetime:
        """Return the instant since which :meth:`pending` is complete.

        Tasks sent earlier may be missing: Redis has lost them, or the application had no registry
        yet.
        """
        return self.registry.index.complete_since()


def _one_of(*given: object) -> str:
    """Return the error text for a call without exactly one of a task, a key and a job."""
    shown = " and ".join(repr(value) for value in given if value is not None) or "none"
    return f"takes one of a task, a key='order:7' and, to cancel, a job='import-7', not {shown}"


def _ids(task: object) -> list[str]:
    """Return the ids of tasks given by id or result; a chain's result gives the whole chain.

    Raises:
        TypeError: The argument is not an id, a result, or several of these.
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


def _revoke_by_celery(app: celery.Celery, task_ids: list[str]) -> None:
    """Revoke tasks in all workers, without the registry.

    The revoke matters for tasks that a worker has received and holds. If workers cannot be reached,
    or the broker's user lacks the permission, no error is raised, because the registry has recorded
    the cancellation.
    """
    try:
        for start in range(0, len(task_ids), MAX_REVOKED):
            Control.revoke(app.control, task_ids[start : start + MAX_REVOKED])
    except (AMQPError, OperationalError, OSError) as error:
        why = missing_permission(error) or error
        logger.warning(
            "rabbitdelay cancel: workers were not notified of the recorded cancellation, so a task "
            "that one of them holds may run: %s",
            why,
        )
