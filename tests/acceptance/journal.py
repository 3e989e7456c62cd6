"""What was published, what was started, and what is to be said about the two.

All times are milliseconds since the epoch, UTC.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_celery import CeleryTestSetup

from celery_rabbitdelay.testing import wait_for
from tests.acceptance.journal_task import JOURNAL, write_start
from tests.acceptance.names import QUEUE


class Start(NamedTuple):
    """One start of a task, as the task itself wrote it down.

    Attributes:
        task_id: The task's id.
        started: The time of the start, rounded down.
        due: The due time that the message carried.
    """

    task_id: str
    started: int
    due: int


class Journal:
    """The starts that the tasks of one test write down in the result backend's Redis."""

    def __init__(self, setup: CeleryTestSetup) -> None:
        self._setup = setup

    def publish(self, delay: float) -> tuple[str, float]:
        """Publish the task that writes to the journal; return its id, and its earliest start."""
        # Not `write_start` itself: that belongs to whichever app is the current one.
        task: Any = self._setup.app.tasks[write_start.name]
        before = time.time()
        return task.apply_async(delay=delay).id, (before + delay) * 1000

    def starts(self) -> list[Start]:
        """Return the starts so far, in the order in which they were written."""
        entries = self._setup.app.backend.client.lrange(JOURNAL, 0, -1)
        return [Start(**json.loads(entry)) for entry in entries]

    def wait_until_started(self, number: int, timeout: float) -> None:
        """Wait until so many tasks have started."""
        client = self._setup.app.backend.client

        def all_started() -> bool:
            # Asking for the length first keeps a thousand entries from being read all the time.
            length = client.llen(JOURNAL)
            return length >= number and len({each.task_id for each in self.starts()}) >= number

        wait_for(all_started, f"start of {number} tasks", timeout, interval=0.1)


def assert_each_ran_once_and_none_early(
    starts: list[Start], published: Mapping[str, float]
) -> None:
    """Check every start against the caller's clock and against the due time that it brought.

    Args:
        starts: The starts.
        published: Before when each published task may not start, by its id.
    """
    assert Counter(start.task_id for start in starts) == Counter(published.keys())
    # A start is rounded down to a millisecond, so the bound has to be as well.
    early = [start for start in starts if start.started < int(published[start.task_id])]
    assert not early, f"{len(early)} tasks started too early, for example {early[0]}"
    early = [start for start in starts if start.started < start.due]
    assert not early, f"{len(early)} started before they were due, for example {early[0]}"


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
