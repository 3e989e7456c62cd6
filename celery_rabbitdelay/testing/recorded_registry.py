"""The registry of a recording: what was sent, instead of Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from celery_rabbitdelay.exceptions import JobClosed, NotRecorded
from celery_rabbitdelay.registry.decision import Outcome, Ticket
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.registry import Earlier, Registration
from celery_rabbitdelay.testing.recorded_messages import Recorded

if TYPE_CHECKING:
    from celery_rabbitdelay.testing.recording import Recording


class RecordedRegistry:
    """Answers as :class:`.Registry` does, by what was recorded.

    Args:
        recording: The recording.

    Attributes:
        index, jobs, names, store: The registry itself, which answers for these as well.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._order = 0
        self._jobs: dict[str, JobState] = {}
        self._tracked: set[str] = set()
        self._cancelled: set[str] = set()
        self.index = self.jobs = self.names = self.store = self

    def __getattr__(self, name: str) -> Any:
        raise NotRecorded(f"what needs the registry's {name!r}")

    def may_run(self, task: Recorded) -> bool:
        """Return whether a task runs when it is due, and does not go on waiting."""
        key, job, order = task.arrival.key, task.arrival.job, task.arrival.ticket.order
        return (
            task.sent.id not in self._cancelled
            and (not key or order == self._newest(key)[0])
            and (not job or self._jobs.get(job) is JobState.COMMITTED)
        )

    def _newest(self, key: str) -> tuple[int, str]:
        tasks = [each for each in self._recording.recorded if each.arrival.key == key]
        return max(((each.arrival.ticket.order, each.sent.id) for each in tasks), default=(0, ""))

    # Sends.

    def ask(self, tasks: Sequence[tuple[str, str]]) -> list[Ticket]:
        """Return the orders of tasks: microseconds since 1970-01-01 UTC, each later than before."""
        tickets = []
        for _, key in tasks:
            with self._recording.lock:
                self._order = max(self._recording.now_ms() * 1000, self._order + 1)
                tickets.append(Ticket(0, self._order if key else 0))
        return tickets

    def register(self, registrations: Iterable[Registration]) -> list[str]:
        """Note which tasks are tracked."""
        noted = list(registrations)
        self._tracked.update(each.task_id for each in noted if each.message)
        return ["waiting"] * len(noted)

    def alone_under(self, key: str) -> AbstractContextManager[None]:
        """Return a context for the sender of a unique task."""
        return nullcontext()

    def newest_under(self, key: str) -> tuple[str, str]:
        """Return the order and the id of the newest task that was sent under a key; or empty."""
        order, task_id = self._newest(key)
        return (str(order), task_id) if order else ("", "")

    def waiting_under(self, key: str) -> list[str]:
        """Return the id of the newest task that was sent under a key, in a list; empty if none."""
        return [task_id for _, task_id in [self._newest(key)] if task_id]

    # Decisions.

    def cancel(self, task_ids: Sequence[str], also_future: bool = True) -> list[Outcome]:
        """Cancel tasks."""
        outcomes = [self._found(task_id, also_future) for task_id in task_ids]
        self._cancelled.update(
            task_id
            for task_id, outcome in zip(task_ids, outcomes, strict=True)
            if outcome is not Outcome.UNKNOWN
        )
        return outcomes

    #: All records can be read.
    cancel_each = cancel

    def postpone(self, task_id: str, due_ms: int, also_future: bool = True) -> Outcome | Earlier:
        """Let a task run at another time."""
        outcome = self._found(task_id, also_future)
        waiting = self._waiting(task_id)
        if not waiting and outcome is Outcome.NOTED:
            raise NotRecorded("a postponement of a task that is sent later")
        if outcome not in (Outcome.DONE, Outcome.NOTED):
            return outcome
        if due_ms < waiting[0].arrival.due_ms and task_id not in self._tracked:
            # Nothing is known about a task without a key: it is not to run before.
            return Earlier("", "") if outcome is Outcome.DONE else outcome
        self._recording.move(task_id, due_ms)
        return outcome

    def _waiting(self, task_id: str) -> list[Recorded]:
        tasks = self._recording.recorded
        return [each for each in tasks if each.sent.id == task_id and each.waits]

    def _found(self, task_id: str, also_future: bool) -> Outcome:
        waiting = self._waiting(task_id)
        if task_id in self._cancelled:
            return Outcome.CANCELLED
        if waiting and waiting[0].arrival.copy:
            key = waiting[0].arrival.key
            is_newest = not key or waiting[0].arrival.ticket.order == self._newest(key)[0]
            return Outcome.DONE if is_newest else Outcome.CANCELLED
        if not waiting and any(each.sent.id == task_id for each in self._recording.recorded):
            return Outcome.RELEASED
        return Outcome.NOTED if also_future else Outcome.UNKNOWN

    # Jobs.

    def open(self, job: str, expires_ms: int) -> None:
        """Open a job; it does not expire."""
        if job in self._jobs:
            raise JobClosed(job, self._jobs[job].value)
        self._jobs[job] = JobState.OPEN

    def join(self, job: str, due_ms: int) -> tuple[JobState | None, str]:
        """Return the state of a job that a task is sent with, and its id."""
        return self._jobs.get(job), job

    def end(self, job: str, state: JobState) -> tuple[str, int]:
        """Commit or abort a job."""
        found = self._jobs.get(job)
        if found not in (JobState.OPEN, state):
            raise JobClosed(job, "unknown" if found is None else found.value)
        self._jobs[job] = state
        return job, 0

    # The record of a task, as record_of and holder_of read it.

    def of(self, kind: str, task_id: str) -> str:
        """Return the name of a task's record."""
        return task_id

    def commands(self, use: Callable[[Any], Any]) -> list[Any]:
        """Run the one command that reads the record of a task."""
        return [use(self)]

    def hmget(self, task_id: str, *names: str) -> list[Any]:
        """Return fields of the record of a task."""
        tasks = [each for each in self._recording.recorded if each.sent.id == task_id]
        waiting = [each for each in tasks if each.waits][:1]
        found: dict[str, Any] = {
            "cancelled": "0" if task_id in self._cancelled else None,
            "ran": "0" if tasks and not waiting else None,
        }
        for each in waiting:
            order, due_ms = str(each.arrival.ticket.order), str(each.arrival.due_ms)
            found |= {"waits": "0.0.0", "due": due_ms, "order": order, "key": each.arrival.key}
        return [found.get(name) for name in names]

    def tasks(self, task_ids: Sequence[str]) -> list[str]:
        """Return those of some tasks that are tracked and wait."""
        return [each for each in task_ids if each in self._tracked and self._waiting(each)]

    def least_ms(self) -> int:
        """Return that no task that waits is too late."""
        return 0
