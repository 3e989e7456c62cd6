"""All known facts about one task, and the reasons why it has not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import instant_of
from celery_rabbitdelay.levels.layout import Layout
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.declaration import Backlog, unserved_modules
from celery_rabbitdelay.publishing.kombu_internals import Counts
from celery_rabbitdelay.registry.durations import brief, left
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.pauses import Paused
from celery_rabbitdelay.registry.record import (
    ON_ITS_WAY,
    MessageFacts,
    TaskState,
    possible_queues,
    record_of,
)
from celery_rabbitdelay.registry.registry import Registry

#: The explanation of a task that does not wait, keyed by its state.
ENDED: Final = {
    TaskState.CANCELLED: "The task was cancelled and will not run.",
    TaskState.ARRIVED: "The task has arrived at a worker and may have run. For its outcome, see "
    "the worker's log and the result backend.",
    TaskState.NOTED: "The task was postponed, but the registry does not know its message.",
    TaskState.SUPERSEDED: "A newer task was sent under the same key. This task will not run.",
    TaskState.EXPIRED: "Its job was aborted or has expired. This task will not run.",
}


class Reason(NamedTuple):
    """A reason why a task has not run.

    Attributes:
        words: One or several sentences; no untrusted text.
        about: The subject: ``key``, ``job`` (open), ``aborted`` (the job), ``pause``, ``levels``
            (queues are missing), ``distribution`` (not served), ``queue`` (does not exist),
            ``consumers`` (none), ``workers`` (busy) or ``lost`` (the message may be lost); empty
            for others.
    """

    words: str
    about: str = ""


@dataclass(frozen=True)
class KnownTask:
    """The present state of a task, from the registry and the broker; None where unknown.

    Attributes:
        task_id: The task's id.
        state: ``waiting``, ``arrived`` (at a worker), ``cancelled``, ``superseded``, ``expired``
            (its job was aborted or has expired), or ``noted`` (postponed, but otherwise unknown).
        due: When the task is due, if it waits.
        postponed: The due time that the task was postponed to.
        sent: When the task was sent, if it is tracked and waits.
        key: The task's key, if it waits or is superseded.
        job: The task's job. This field and the following fields are known for waiting tracked tasks
            only; the job and its state are known for expired tasks too.
        job_state: ``open``, ``committed`` or ``aborted``; None if the job no longer exists.
        task: The task's name.
        args: The task's positional arguments as text: Celery's ``argsrepr``.
        kwargs: The task's keyword arguments as text: Celery's ``kwargsrepr``.
        queue: The queue that gets the task when it is due; None if the exchange routes it.
        exchange: The exchange that gets the task when it is due.
        routing_key: The routing key with which the exchange gets the task.
        priority: The task's priority.
        may_be_in: The non-empty queues, apart from ``queue``, that may hold the message of a
            waiting task: their names in ``status``, and their message counts. For a tracked task
            before its due time, there is one queue, or two while the message moves between queues.
            For other tasks, there are all queues with a long enough wait. A level may hold the
            message of an overdue task only if the message was put back.
        missing: For a waiting task, the queues of levels and modules that the broker lacks.
        in_queue: For a waiting task, the ``messages`` and ``consumers`` of its queue; empty if the
            queue does not exist, None if the counts are unknown.
        pauses: The pauses of the task's name and queue, if the task waits.
        why: The reasons why the task has not run, or its outcome: each has ``words``, a text for
            readers, and ``about``, the name of its subject.
    """

    task_id: str
    state: str
    due: datetime | None
    postponed: datetime | None
    sent: datetime | None
    key: str | None
    job: str | None
    job_state: str | None
    task: str | None
    args: str | None
    kwargs: str | None
    queue: str | None
    exchange: str | None
    routing_key: str | None
    priority: int | None
    may_be_in: Mapping[str, int]
    missing: tuple[str, ...]
    in_queue: Mapping[str, int] | None
    pauses: tuple[Paused, ...]
    why: tuple[Reason, ...] = field(default=(), compare=False)  # the texts change with time


NO_BACKLOG: Final = Backlog({}, {}, {}, ())

#: Reads the message counts of the levels, and the counts of the queue with the given name. The
#: result lacks the counts of the queue if the name is None or the counts are unknown.
Look: TypeAlias = Callable[[str | None], tuple[Backlog, Mapping[str, Counts | None]]]


def known_task(registry: Registry, task_id: str, layout: Layout, look: Look) -> KnownTask | None:
    """Return the state of a task; None if the registry does not know it.

    Args:
        registry: The registry.
        task_id: The id of the task.
        layout: The layout of the levels.
        look: Reads the message counts of queues; called only if the task is waiting.

    Raises:
        RegistryUnavailable: Redis did not answer, or the record of the task or of its job cannot be
            read.
    """
    record = record_of(registry, task_id)
    if record is None:
        return None
    facts = MessageFacts.of(registry.index.messages([task_id])[0])
    job = registry.jobs.state(record.job) if record.job else None
    if record.state is TaskState.EXPIRED:
        job = JobState.ABORTED  # a later job may have the same name
    waits = record.state is TaskState.WAITING
    in_queue: Mapping[str, int] | None = None
    pauses, may_be_in, backlog = list[Paused](), dict[str, int](), NO_BACKLOG
    if waits:
        backlog, counts = look(facts.queue)
        if facts.queue is not None and facts.queue in counts:
            found = counts[facts.queue]
            in_queue = {} if found is None else found._asdict()
        all_pauses = registry.pauses.all()
        pauses = [
            each
            for each in all_pauses
            if each.task in (None, record.name) and each.queue in (None, facts.queue)
        ]
        is_put_back = not in_queue or job is JobState.OPEN
        places = possible_queues(layout, record, facts.tolerance_ms, backlog, is_put_back)
        is_held = pauses or are_returning(all_pauses, backlog.others)
        may_be_in = {name: count for name, count in places if is_held or name != "paused"}
    known = KnownTask(
        task_id,
        record.state.value,
        instant_of(record.runs_ms) if waits else None,
        _instant(record.postponed_ms),
        _instant(record.sent_ms),
        record.key,
        record.job,
        None if job is None else job.value,
        facts.shadow or record.name,
        facts.args,
        facts.kwargs,
        facts.queue,
        facts.exchange,
        facts.routing_key,
        facts.priority,
        may_be_in,
        backlog.missing,
        in_queue,
        tuple(pauses),
    )
    return replace(known, why=tuple(reasons(known, backlog.others)))


def _instant(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else instant_of(at_ms)


def are_returning(pauses: Sized, others: Mapping[str, Counts]) -> bool:
    """Return whether held tasks are returning to their queues: nothing is paused any more.

    Args:
        pauses: All pauses.
        others: The counts of the module queues, as in :attr:`.Backlog.others`.
    """
    held = others.get("paused")
    return not pauses and held is not None and held.messages > 0


def reasons(task: KnownTask, others: Mapping[str, Counts]) -> list[Reason]:
    """Return the reasons why a task has not run, known to the registry and the broker.

    Args:
        task: The task.
        others: The counts of the module queues, as in :attr:`.Backlog.others`.
    """
    if task.due is None:
        state = TaskState(task.state)
        about = {TaskState.SUPERSEDED: "key", TaskState.EXPIRED: "aborted"}.get(state, "")
        return [Reason(ENDED[state], about)]
    is_due = task.due <= wall_clock.now()
    found = list(_held_back(task, is_due))
    if not is_due:
        again = ", because it was postponed" if task.postponed == task.due else ""
        found.insert(0, Reason(f"Due {left(task.due)}{again}."))
    elif not found and task.due >= wall_clock.now() - ON_ITS_WAY:
        found.append(Reason("The task is due now, and on its way to a worker."))
    elif not found:
        found.append(_overdue(task, DISTRIBUTE not in unserved_modules(others)))
    if task.missing:
        more = f" and {len(task.missing) - 1:,} more" if task.missing[1:] else ""
        found.append(Reason(f"Missing on the broker: {task.missing[0]}{more}.", "levels"))
    return found


def _held_back(task: KnownTask, is_due: bool) -> Iterator[Reason]:
    """Yield the reasons that hold a task, now or once it is due."""
    if task.job_state == "open":
        yield Reason("Its job is open: the task runs only after the job is committed.", "job")
    if task.job_state == "aborted":
        yield Reason("Its job was aborted: the task will not run.", "aborted")
    for each in task.pauses:
        subject = "All tasks with this name have" if each.queue is None else "Its queue has"
        lasts = brief((wall_clock.now() - each.since).total_seconds())
        end = "has no end time" if each.until is None else f"ends {left(each.until)}"
        yield Reason(f"{subject} been paused for {lasts}; the pause {end}.", "pause")
    if not is_due and task.in_queue == {}:
        yield Reason("Its queue does not exist now.", "queue")
    if not is_due and task.in_queue and not task.in_queue["consumers"]:
        yield Reason("No worker consumes its queue now.", "consumers")


def _overdue(task: KnownTask, is_distributed: bool) -> Reason:
    """Return the reason why no worker has received a task that is due and not held.

    Args:
        task: The task.
        is_distributed: Whether distribution is served, or has no messages.
    """
    counts, elsewhere = task.in_queue, ""
    nobody = "no worker serves distribution, which"
    if task.exchange is not None and task.queue is None and not is_distributed:
        words = f"The task is due, and {nobody} publishes it to its exchange."
        return Reason(words, "distribution")
    if counts is None:
        return Reason("The task is due, and no worker has received it yet.", "workers")
    if not counts:
        words = "distribution tries again" if is_distributed else f"{nobody} tries again"
        return Reason(f"The task is due, but its queue does not exist: {words}.", "queue")
    if task.job:
        elsewhere = " If its job was open, it returns within ten minutes after the commit."
    if "paused" in task.may_be_in:
        elsewhere += " Held tasks are returning to their queues; it may be one of them."
    hint = f"Messages in the queue: {counts['messages']:,}."
    if not counts["messages"]:
        holder = "a worker has prefetched it, or " if counts["consumers"] else ""
        names = ", ".join(name for name in task.may_be_in if name != "paused")
        holder += f"its message is in {names}, or " if names else ""
        about, words = "lost", f"and its queue is empty: {holder}its message was lost"
        hint = "Running it now (postpone --delay 0) sends a new message; the task runs only once."
    elif counts["consumers"]:
        about, words = "workers", "and the workers of its queue are busy"
    else:
        about, words = "consumers", "but no worker consumes its queue"
        hint += " The option -Q of celery worker names a worker's queues."
    return Reason(f"The task is due, {words}.{elsewhere} {hint}", about)
