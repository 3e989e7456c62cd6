"""The outcome of a run, counted from its journal and the mails.

Uses no server.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Final, NamedTuple

from example_project.demonstration.journal import Dispatch, Start

#: If fewer reminders wait when the worker is killed, the run shows little.
LEAST_WAITING: Final = 1_000


class FirstStart(NamedTuple):
    """The first start of a reminder's first attempt.

    Attributes:
        due_ms: When it was due, in milliseconds since 1970-01-01 UTC.
        started_ms: When it started.
    """

    due_ms: int
    started_ms: int

    @property
    def lateness_ms(self) -> int:
        """Start minus due."""
        return self.started_ms - self.due_ms


class Kill(NamedTuple):
    """The kill of the worker.

    Attributes:
        killed_ms: When, in milliseconds since 1970-01-01 UTC.
        waiting: The number of reminders that were sent and had not started then.
        in_levels: The number of messages in the delay queues right after the kill, with retries.
    """

    killed_ms: int
    waiting: int
    in_levels: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        dispatch: The report of the Spark job.
        sent: The due times of the reminders that RabbitMQ has confirmed, by order, in milliseconds
            since 1970-01-01 UTC.
        starts: All starts of tasks, in order.
        mails: The number of mails that the gateway sent, by order.
        refused: The number of attempts that the gateway refused.
        results: The number of tasks with the result SUCCESS in Celery's result backend.
        kill: The kill of the worker.
    """

    dispatch: Dispatch
    sent: Mapping[str, int]
    starts: Sequence[Start]
    mails: Mapping[str, int]
    refused: int
    results: int
    kill: Kill

    @property
    def delivered(self) -> int:
        """Orders with a mail."""
        return len(self.mails)

    @property
    def duplicates(self) -> int:
        """Orders with more than one mail."""
        return sum(count > 1 for count in self.mails.values())

    @property
    def lost(self) -> int:
        """Orders without a mail, although the broker had confirmed their reminder."""
        return len(self.sent.keys() - self.mails.keys())

    @property
    def unseen(self) -> int:
        """Orders with a mail, although the journal has no start of their task."""
        return len(self.mails.keys() - {start.order_id for start in self.starts})

    @property
    def retried(self) -> int:
        """Orders whose task was retried at least once."""
        return len({start.order_id for start in self.starts if start.attempt > 0})

    @property
    def retries(self) -> int:
        """Retries of all orders."""
        return len({(start.order_id, start.attempt) for start in self.starts if start.attempt > 0})

    @property
    def redelivered(self) -> int:
        """Starts of messages that the broker had delivered before."""
        return sum(start.redelivered for start in self.starts)

    @property
    def started_twice(self) -> int:
        """Attempts that were started more than once."""
        starts = Counter((start.order_id, start.attempt) for start in self.starts)
        return sum(count > 1 for count in starts.values())

    @cached_property
    def first_starts(self) -> list[FirstStart]:
        """The first start of each order that was sent with a delay, with its due time."""
        first: dict[str, FirstStart] = {}
        for start in self.starts:
            if start.attempt == 0 and start.is_delayed and start.order_id in self.sent:
                due_ms = self.sent[start.order_id]
                first.setdefault(start.order_id, FirstStart(due_ms, start.started_ms))
        return list(first.values())

    @property
    def overdue(self) -> int:
        """Orders that were due before they could be sent, and so had no delay."""
        return len(
            {start.order_id for start in self.starts if start.attempt == 0 and not start.is_delayed}
        )

    @property
    def back_ms(self) -> int:
        """The first start of a task after the kill, in milliseconds since 1970-01-01 UTC."""
        killed_ms = self.kill.killed_ms
        return min(
            (start.started_ms for start in self.starts if start.started_ms > killed_ms),
            default=killed_ms,
        )

    @cached_property
    def lateness(self) -> list[int]:
        """Start minus due of every first attempt, in milliseconds, smallest first."""
        return sorted(start.lateness_ms for start in self.first_starts)

    @cached_property
    def lateness_before_kill(self) -> list[int]:
        """Start minus due of first attempts before the kill, in milliseconds, smallest first."""
        killed_ms = self.kill.killed_ms
        return sorted(
            start.lateness_ms for start in self.first_starts if start.started_ms <= killed_ms
        )

    def failures(self) -> list[str]:
        """Return the faults of the run; none if all is well."""
        checks = {
            f"{self.dispatch.orders - len(self.sent):,} orders were not sent": (
                len(self.sent) != self.dispatch.orders
            ),
            f"{self.lost:,} reminders are lost": self.lost != 0,
            f"{self.duplicates:,} orders were mailed more than once": self.duplicates != 0,
            f"{self.unseen:,} orders were mailed, but no start was recorded": self.unseen != 0,
            "no lateness was measured": not self.lateness,
            "a reminder was early": bool(self.lateness) and self.lateness[0] < 0,
            f"only {self.kill.waiting:,} reminders were waiting when the worker was killed; "
            f"fewer than {LEAST_WAITING:,} show little": self.kill.waiting < LEAST_WAITING,
        }
        return [failure for failure, found in checks.items() if found]


def percentile(ascending: Sequence[int], percent: float) -> int:
    """Return the smallest value that ``percent`` of a hundred values do not exceed.

    Args:
        ascending: The values, sorted; at least one.
        percent: Above 0, up to 100.
    """
    return ascending[ceil(len(ascending) * percent / 100) - 1]
