"""Messages leave ``undeliverable``: which ones, and the report on them.

:mod:`.redrive` and :mod:`.purge` share this: reading up to what was there at the start, choosing,
acknowledging, and going on to the report when the broker goes away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

import amqp

from celery_rabbitdelay.exceptions import ReadTooLong
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.operations.undeliverable import LIMIT, UndeliverableMessage, copy_of
from celery_rabbitdelay.operations.undeliverable_reader import Reader

__all__ = ["Matches", "Progress", "Removal", "RemovalReport"]

#: Seconds between two reports on the progress.
REPORT_EVERY: Final = 0.2

#: How many reasons why messages stay are counted each for itself: anybody can make up reasons.
MOST_REASONS: Final = 200

#: Stands for all further ones.
OTHER_REASONS: Final = "other reasons"


@dataclass
class RemovalReport:
    """What was done with the undeliverable messages so far.

    Attributes:
        present: How many there were at the start; None if the user may not ask.
        examined: How many of them were read.
        matched: How many of those are meant.
        removed: How many have left the queue: published again and confirmed, or deleted. In a dry
            run, how many would have.
        left: How many of those that are meant stay, by the reason why.
        uncertain: How many may be both published and still there, because a connection was lost;
            each of them may come twice.
        stopped: Why it ended before the last message; None if it did not.
        seconds: How long it took.
    """

    present: int | None = None
    examined: int = 0
    matched: int = 0
    removed: int = 0
    left: dict[str, int] = field(default_factory=dict)
    uncertain: int = 0
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether all messages that are meant have left the queue, or would have."""
        return self.stopped is None and not self.left

    def leave(self, reason: str) -> None:
        """Count a message that stays."""
        if reason not in self.left and len(self.left) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.left[reason] = self.left.get(reason, 0) + 1


#: Returns whether a message is meant; see :class:`.UndeliverableFilter`.
Matches: TypeAlias = Callable[[UndeliverableMessage], bool]

#: Called with the report now and then, and at the end.
Progress: TypeAlias = Callable[[RemovalReport], None]


class Removal:
    """Takes messages out of ``undeliverable``.

    Args:
        reader: Reads them.
        topology: The topology.
        matches: Returns whether a message is meant.
        progress: Called with the report.

    Attributes:
        report: The report.
    """

    def __init__(
        self, reader: Reader, topology: Topology, matches: Matches, progress: Progress
    ) -> None:
        self.report = RemovalReport()
        self._reader = reader
        self._topology = topology
        self._matches = matches
        self._progress = progress
        self._began = self._reported_at = time.monotonic()

    @contextmanager
    def reporting(self) -> Iterator[RemovalReport]:
        """Acknowledge in the end what is left to acknowledge, and report, whatever happens."""
        self.report.present = self._reader.ready()
        try:
            yield self.report
        finally:
            try:
                self._reader.finish()
            except self._reader.errors as error:
                self.report.uncertain += self._reader.not_acknowledged
                self.stop(f"the messages cannot be acknowledged: {error}")
            self._report()

    def matching(self) -> Iterator[amqp.Message]:
        """Yield those of the messages that were there at the start which are meant.

        Ends early, and notes why, if the broker goes away or reading takes too long.
        """
        present = self.report.present
        most = LIMIT if present is None else min(present, LIMIT)
        messages = islice(self._reader.messages(most), most)
        errors: tuple[type[BaseException], ...] = (*self._reader.errors, ReadTooLong)
        while self.report.stopped is None:
            try:
                message = next(messages, None)
            except errors as error:
                self.stop(f"the messages cannot be read further: {error}")
                return
            if message is None:
                return
            self.report.examined += 1
            if self._matches(copy_of(message, self._topology)):
                self.report.matched += 1
                yield message
            if time.monotonic() - self._reported_at >= REPORT_EVERY:
                self._report()

    def settle(self, message: amqp.Message) -> None:
        """Let a message leave the queue; nothing else may still need it."""
        self.report.removed += 1
        try:
            self._reader.acknowledge(message)
        except self._reader.errors as error:
            # The report counts it at the end.
            self.stop(f"the messages cannot be acknowledged: {error}")

    def stop(self, why: str) -> None:
        """Read no further messages."""
        self.report.stopped = self.report.stopped or why

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self.report.seconds = self._reported_at - self._began
        self._progress(self.report)
