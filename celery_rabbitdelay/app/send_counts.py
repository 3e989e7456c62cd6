"""Counts the tasks that are sent into the levels, in processes that count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from celery_rabbitdelay.app.instruments import CONFIRMED, REFUSED, RESENT, SENT
from celery_rabbitdelay.app.metrics import Metrics
from celery_rabbitdelay.app.rows import Report
from celery_rabbitdelay.app.task_producer import DelayedTaskProducer
from celery_rabbitdelay.publishing.producer import Delayed

#: Seconds between two counts of a running ``send_many``.
EVERY: Final = 0.5


def queue_label(delayed: Delayed) -> str:
    """Return the name of a message's queue; empty if its exchange decides the queue."""
    return "" if delayed.queue is None else str(delayed.queue.name)


@contextmanager
def counted_send(metrics: Metrics, task: str, producer: DelayedTaskProducer) -> Iterator[None]:
    """Count the one task that a producer sends within the block.

    Args:
        metrics: The metrics.
        task: The task's name.
        producer: The producer.
    """
    resent = producer.publisher.resent
    try:
        yield
    finally:
        # It is missing if an error occurred before publishing.
        delayed: Delayed | None = getattr(producer, "delayed", None)
        if delayed is not None:
            values = {SENT: 1, CONFIRMED if producer.is_sent else REFUSED: 1}
            if producer.publisher.resent > resent:
                values[RESENT] = producer.publisher.resent - resent
            metrics.record_all(values, task, queue_label(delayed))


class RowCounts:
    """Counts the rows of one ``send_many``, every :data:`EVERY` seconds and at its end.

    Args:
        metrics: The metrics.
        task: The task's name.
        report: The report of the running ``send_many``.
    """

    def __init__(self, metrics: Metrics, task: str, report: Report) -> None:
        self._metrics = metrics
        self._task = task
        self._report = report
        self._labels = task, ""
        self._counted = {SENT: 0, CONFIRMED: 0, RESENT: 0, REFUSED: 0}
        self._again_at = 0.0

    def begin(self, delayed: Delayed) -> None:
        """Note the queue of the rows.

        Args:
            delayed: The message of the first row.
        """
        self._labels = self._task, queue_label(delayed)

    def now_and_then(self) -> None:
        """Count the rows, unless :data:`EVERY` seconds have not passed since the last count."""
        now = time.monotonic()
        if now >= self._again_at:
            self._again_at = now + EVERY
            self._count(self._counted[REFUSED])

    def end(self) -> None:
        """Count the remaining rows; those without a confirm count as refused."""
        self._count(self._report.sent - self._report.confirmed)

    def _count(self, refused: int) -> None:
        report = self._report
        present = {
            SENT: report.sent,
            CONFIRMED: report.confirmed,
            RESENT: report.resent,
            REFUSED: refused,
        }
        more = {
            instrument: number - self._counted[instrument]
            for instrument, number in present.items()
            if number > self._counted[instrument]
        }
        self._counted = present
        if more:
            self._metrics.record_all(more, *self._labels)
