"""Removes chosen messages from ``undeliverable``, and reports on the removal.

Shared by :mod:`.redrive` and :mod:`.purge`: reading the messages that were there at the start,
choosing and acknowledging them, and reporting even if the broker goes away.
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

#: Seconds between two reports on the progress.
REPORT_EVERY: Final = 0.2

#: How many reasons are counted separately: anybody can make up reasons.
MOST_REASONS: Final = 200

#: The name under which all further reasons are counted.
OTHER_REASONS: Final = "other reasons"


@dataclass
class RemovalReport:
    """The progress, and in the end the result, of a removal.

    Attributes:
        present: The number of messages at the start; None if the user may not ask.
        examined: How many of them were read.
        matched: How many of the read messages were chosen.
        removed: How many messages have left the queue: published again and confirmed, or deleted.
            In a dry run, how many would have left it.
        left: How many of the chosen messages stay, by the reason.
        uncertain: How many messages may be published and still be in the queue, because a
            connection was lost; each of them may come twice.
        stopped: The reason for ending before the last message; None at a regular end.
        seconds: The duration.
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
        """Whether all chosen messages have left the queue, or would have left it."""
        return self.stopped is None and not self.left

    def leave(self, reason: str) -> None:
        """Count a message that stays."""
        if reason not in self.left and len(self.left) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.left[reason] = self.left.get(reason, 0) + 1


#: Returns whether a message is chosen; see :class:`.UndeliverableFilter`.
Matches: TypeAlias = Callable[[UndeliverableMessage], bool]

#: Called with the report every :data:`REPORT_EVERY` seconds, and at the end.
Progress: TypeAlias = Callable[[RemovalReport], None]


class Removal:
    """Removes messages from ``undeliverable``.

    Args:
        reader: Reads the messages.
        topology: The topology.
        matches: Returns whether a message is chosen.
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
        """At the end of the block, write the last acknowledgements and report, even on an error."""
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
        """Yield the chosen messages among those that were in the queue at the start.

        If the broker goes away or reading takes too long, it ends early and notes the reason.
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
