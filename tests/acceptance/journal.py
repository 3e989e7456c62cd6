"""What was published, what was started, and what is to be said about the two.

All times are milliseconds since the epoch, UTC.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_celery import CeleryTestSetup

from celery_rabbitdelay import Celery
from celery_rabbitdelay.testing import wait_for
from tests.acceptance.journal_task import JOURNAL, write_start
from tests.acceptance.names import QUEUE


@dataclass(frozen=True)
class Publication:
    """A task that was published with a delay.

    Attributes:
        task_id: The task's id.
        not_before: The time of the call plus the delay: an earlier start is too early.
    """

    task_id: str
    not_before: float


@dataclass(frozen=True)
class Start:
    """One start of a task, as the task itself wrote it down.

    Attributes:
        task_id: The task's id.
        started: The time of the start, rounded down.
        due: The due time that the message carried.
    """

    task_id: str
    started: int
    due: int | None


class Journal:
    """The starts that the tasks of one test write down in the result backend's Redis."""

    def __init__(self, setup: CeleryTestSetup) -> None:
        self._setup = setup

    def publish(self, delay: float) -> Publication:
        """Publish the task that writes to the journal, to start ``delay`` seconds from now."""
        task = _task_of(self._setup.app)
        before = time.time()
        result = task.apply_async(delay=delay)
        return Publication(result.id, (before + delay) * 1000)

    def starts(self) -> list[Start]:
        """Return the starts so far, in the order in which they were written."""
        entries = self._setup.app.backend.client.lrange(JOURNAL, 0, -1)
        return [Start(**json.loads(entry)) for entry in entries]

    def wait_until_all_started(
        self, publications: Iterable[Publication], timeout: float
    ) -> list[Start]:
        """Wait until each of these tasks has started, and return their starts.

        Raises:
            TimeoutError: Not all of them started within ``timeout`` seconds.
        """
        awaited = {publication.task_id for publication in publications}

        def all_started() -> bool:
            # Asking for the length first keeps a thousand entries from being read all the time.
            length = self._setup.app.backend.client.llen(JOURNAL)
            return length >= len(awaited) and awaited <= {each.task_id for each in self.starts()}

        try:
            wait_for(all_started, f"start of {len(awaited)} tasks", timeout, interval=0.1)
        except TimeoutError as error:
            started = {each.task_id for each in self.starts()}
            raise TimeoutError(f"{error}; {len(awaited & started)} started") from None
        return self.starts()


def assert_none_was_early(starts: Iterable[Start], publications: Iterable[Publication]) -> None:
    """Check every start against the caller's clock and against the due time that it brought."""
    not_before = {publication.task_id: publication.not_before for publication in publications}
    # A start is rounded down to a millisecond, so the bound has to be as well.
    early = [start for start in starts if start.started < int(not_before[start.task_id])]
    assert not early, f"{len(early)} tasks started too early, for example {early[0]}"
    without_due = [start for start in starts if start.due is None]
    assert not without_due, f"{len(without_due)} tasks did not bring their due time"
    before_due = [start for start in starts if start.due is None or start.started < start.due]
    assert not before_due, f"{len(before_due)} started before due, for example {before_due[0]}"


def assert_each_ran_once(starts: Iterable[Start], publications: Iterable[Publication]) -> None:
    """Check that there is exactly one start for each publication, and none of anything else."""
    counts = Counter(start.task_id for start in starts)
    published = {publication.task_id for publication in publications}
    assert set(counts) == published
    repeated = {task_id: count for task_id, count in counts.items() if count > 1}
    assert not repeated, f"{len(repeated)} tasks ran more than once: {repeated}"


def assert_nothing_is_left_to_run(setup: CeleryTestSetup) -> None:
    """Check that no message waits for a worker: neither in the queue nor unacknowledged.

    The worker is stopped for that, since the broker does not count what a worker holds.
    """
    container = setup.worker.container
    setup.worker.kill("SIGTERM")

    def exited() -> bool:
        container.reload()
        return bool(container.status == "exited")

    wait_for(exited, "end of the worker")
    with setup.app.connection_for_read() as connection:
        left = connection.default_channel.queue_declare(QUEUE, passive=True).message_count
    assert left == 0


def _task_of(app: Celery) -> Any:
    # Not `write_start` itself: that belongs to whichever app is the current one.
    return app.tasks[write_start.name]
