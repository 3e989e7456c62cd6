"""The rows of ``send_many``, the report on what was sent, and sending rows one by one."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

import celery
from kombu.exceptions import EncodeError, OperationalError
from kombu.utils.json import loads

from celery_rabbitdelay.app.task_messages import function_to_send
from celery_rabbitdelay.exceptions import InvalidRow, RabbitDelayError, RowsNotConfirmed
from celery_rabbitdelay.levels.delay import NS_PER_MS, Delay, Due, instant_of
from celery_rabbitdelay.modules.envelope import blocks_of, length_prefixed

#: After this many rows that were not confirmed, no further rows are taken.
MAX_ERRORS: Final = 1000

#: Seconds between two calls of the caller's ``progress``.
PROGRESS_INTERVAL: Final = 0.5


class Row(NamedTuple):
    """One call of the task.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        delay: Seconds, or a timedelta, until it may start, from when the row is taken.
        eta: The instant at which it may start; instead of a delay.
        task_id: Its id; a random one by default.
        key: Only the newest task under a key runs; needs the registry.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    delay: Delay | None = None
    eta: datetime | str | None = None
    task_id: str | None = None
    key: str | None = None


@dataclass
class Report:
    """What was sent, so far.

    Attributes:
        sent: How many rows publishing was attempted for.
        confirmed: How many of these the broker has confirmed.
        resent: How often a message was published again.
        messages: How many messages were confirmed, envelopes among them.
        envelopes: How many messages that hold several rows were confirmed.
        seconds: How long it has taken.
        errors: How many rows were not confirmed, by the name of the error.
    """

    sent: int = 0
    confirmed: int = 0
    resent: int = 0
    messages: int = 0
    envelopes: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Confirmed rows a second."""
        return self.confirmed / self.seconds if self.seconds else 0.0


def checked_row(given: Row | Mapping[str, Any]) -> Row:
    """Return a row, also of a mapping of its fields.

    Raises:
        InvalidRow: It is neither, or has an unknown field.
    """
    return given if isinstance(given, Row) else _row_of(given)


def _row_of(given: Mapping[str, Any]) -> Row:
    if not isinstance(given, Mapping):
        raise InvalidRow(given, "takes a celery_rabbitdelay.Row, or a mapping of its fields")
    try:
        return Row(**given)
    except TypeError as wrong:
        unknown = ", ".join(sorted(map(str, given.keys() - set(Row._fields))))
        takes = ", ".join(Row._fields)
        raise InvalidRow(given, f"has {unknown}; takes {takes}") from wrong


class WrittenRow(NamedTuple):
    """One of these rows, read again.

    Attributes:
        task_id: The task's id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        item: The bytes that it was read from.
    """

    task_id: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    item: bytes


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """Rows that are due in the same tick, each as :meth:`.Writer.item` writes it.

    ``send_many`` writes the first of them again. If that gives other bytes, because the application
    has another serializer for example, it reads all of them and writes each itself.

    Attributes:
        items: The bytes of all of them.
        count: How many they are; at least one.
        due_ms: When they are due, in milliseconds since 1970-01-01 UTC.
    """

    items: bytes
    count: int
    due_ms: int

    @property
    def due(self) -> Due:
        """When they are due."""
        now_ms = time.time_ns() // NS_PER_MS
        return Due(self.due_ms * NS_PER_MS, self.due_ms - now_ms, is_instant=True)

    def read(self) -> Iterator[WrittenRow]:
        """Yield each row."""
        blocks = blocks_of(self.items)
        for own in blocks:
            body = next(blocks)
            headers = json.loads(bytes(own))["headers"]
            args, kwargs, _ = loads(bytes(body))
            if headers.get("argsrepr", "").startswith("("):
                args = tuple(args)  # JSON has lists only
            item = length_prefixed(bytes(own)) + length_prefixed(bytes(body))
            yield WrittenRow(headers["id"], args, kwargs, item)


def one_by_one(
    rows: Iterable[Row | Mapping[str, Any] | WrittenRows],
) -> Iterator[Row | Mapping[str, Any]]:
    """Yield each row, those that are written already as well."""
    for given in rows:
        if isinstance(given, WrittenRows):
            eta = instant_of(given.due_ms)
            for each in given.read():
                yield Row(each.args, each.kwargs, eta=eta, task_id=each.task_id)
        else:
            yield given


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
