"""Sending one task for rows that cannot be pipelined, with ``apply_async`` for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import celery
from kombu.exceptions import EncodeError, OperationalError

from celery_rabbitdelay.app.rows import MAX_ERRORS, PROGRESS_INTERVAL, Report, Row, checked_row
from celery_rabbitdelay.app.task_messages import function_to_send
from celery_rabbitdelay.exceptions import RabbitDelayError, RowsNotConfirmed

#: The errors of one row, which say nothing about the others.
ROW_ERRORS: Final = (RabbitDelayError, EncodeError, OperationalError, TypeError, ValueError)


def send_one_by_one(
    app: celery.Celery,
    task: celery.Task[Any, Any] | str,
    rows: Iterable[Row | Mapping[str, Any]],
    progress: Callable[[Report], None] | None,
    options: Mapping[str, Any],
) -> Report:
    """Send a task for each row with Celery's ``apply_async``; its return counts as a confirm.

    Args:
        app: The application.
        task: The task, or its name.
        rows: The rows.
        progress: Called with the report, now and then and at the end.
        options: Further options of ``apply_async``, for all rows.

    Raises:
        RowsNotConfirmed: At least one row could not be sent.
    """
    report, rest = Report(), None
    errors: dict[int, Exception] = {}
    began = last_progress = time.monotonic()
    send = function_to_send(app, task)
    for number, given in enumerate(_chained(rows, report, errors)):
        if len(errors) >= MAX_ERRORS:
            rest = number
            break
        try:
            row = checked_row(given)
            own: dict[str, Any] = {
                name: getattr(row, name)
                for name in ("delay", "eta", "task_id", "key")
                if getattr(row, name) is not None
            }
            send(row.args, row.kwargs, **own, **options)
        except ROW_ERRORS as error:
            errors[number] = error
            report.errors[type(error).__name__] += 1
            report.sent += isinstance(error, OperationalError)
        else:
            report.sent += 1
            report.confirmed += 1
            report.messages += 1
        now = time.monotonic()
        report.seconds = now - began
        if progress is not None and now - last_progress >= PROGRESS_INTERVAL:
            last_progress = now
            progress(report)
    if progress is not None:
        progress(report)
    if errors:
        raise RowsNotConfirmed(report, errors, rest)
    return report


def _chained(
    rows: Iterable[Row | Mapping[str, Any]], report: Report, errors: Mapping[int, Exception]
) -> Iterator[Row | Mapping[str, Any]]:
    """Yield the rows; if taking one raises, the error names those before it that were not sent."""
    taken = 0
    try:
        for row in rows:
            taken += 1
            yield row
    except Exception as error:
        if not errors:
            raise
        raise error from RowsNotConfirmed(report, dict(errors), taken)
