"""The rows of ``send_many``, the report on what was sent, and sending rows one by one."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import EncodeError, OperationalError
from kombu.utils.json import loads

from celery_rabbitdelay.app.copies import function_to_send
from celery_rabbitdelay.app.options import BESIDE_STAMPS
from celery_rabbitdelay.exceptions import InvalidRow, RabbitDelayError, RowsNotConfirmed
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Delay, Due, instant_of
from celery_rabbitdelay.modules.envelope import blocks_of, length_prefixed

GivenT = TypeVar("GivenT")

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


def row_of(given: Mapping[str, Any]) -> Row:
    """Return the row that has these fields.

    Raises:
        InvalidRow: It is no mapping, or has an unknown field.
    """
    if not isinstance(given, Mapping):
        takes = 'a celery_rabbitdelay.Row, or its fields, such as {"args": [7], "delay": 3600}'
        raise InvalidRow(given, f"takes {takes}")
    try:
        return Row(**given)
    except TypeError as wrong:
        unknown = ", ".join(sorted(map(str, given.keys() - set(Row._fields))))
        takes = ", ".join(Row._fields)
        raise InvalidRow(given, f"has {unknown}; takes {takes}") from wrong


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
        now_ms = wall_clock.ms()
        return Due(self.due_ms * NS_PER_MS, self.due_ms - now_ms, is_instant=True)

    def read(self) -> Iterator[tuple[Row, bytes]]:
        """Yield each row, and the bytes that it was read from."""
        blocks, eta = blocks_of(self.items), instant_of(self.due_ms)
        for own in blocks:
            body = next(blocks)
            headers = json.loads(bytes(own))["headers"]
            args, kwargs, _ = loads(bytes(body))
            if headers.get("argsrepr", "").startswith("("):
                args = tuple(args)  # JSON has lists only
            item = length_prefixed(bytes(own)) + length_prefixed(bytes(body))
            yield Row(args, kwargs, eta=eta, task_id=headers["id"]), item


#: The input of a send: one row, or many rows in their written form.
Given: TypeAlias = "Row | Mapping[str, Any] | WrittenRows"


def one_by_one(rows: Iterable[Given]) -> Iterator[Row | Mapping[str, Any]]:
    """Yield each row, those that are written already as well."""
    for given in rows:
        if isinstance(given, WrittenRows):
            yield from (row for row, _ in given.read())
        else:
            yield given


class Sending:
    """Takes the caller's rows, and says in the end what became of them.

    If the iterable of rows raises, that error is raised once every row before it is confirmed or
    has an error of its own; in the latter case its cause is a :class:`.RowsNotConfirmed`.

    Args:
        progress: Called with the report, every half second and at the end.

    Attributes:
        report: The report on what was sent.
        stops_taking: Whether no further rows are taken.
        is_reporting: Whether ``progress`` is running, or has raised.
        next_progress: When :meth:`report_progress` is due, by the monotonic clock.
    """

    def __init__(self, progress: Callable[[Report], None] | None) -> None:
        self.report = Report()
        self.stops_taking = False
        self.is_reporting = False
        self._progress = progress
        self._errors: dict[int, Exception] = {}
        self._taken = 0
        self._rest: int | None = None
        self._error_of_rows: Exception | None = None
        self._began = time.monotonic()
        self.next_progress = self._began + PROGRESS_INTERVAL

    def take(self, rows: Iterable[GivenT]) -> Iterator[tuple[int, GivenT]]:
        """Yield rows, each with its number, or with that of the first of many."""
        source = iter(rows)
        while True:
            try:
                given = next(source)
            except StopIteration:
                return
            except SoftTimeLimitExceeded:
                raise
            except Exception as error:  # noqa: BLE001 - the rows before it are sent first
                self._error_of_rows, self._rest = error, self._taken
                return
            if self.stops_taking:
                # Not sent: its existence shows that not all rows were taken.
                self._rest = self._taken
                return
            number = self._taken
            self._taken += given.count if isinstance(given, WrittenRows) else 1
            yield number, given

    def fail(self, rows: Sequence[int], error: Exception) -> None:
        """Note the error of rows, by their numbers; raise it if it is a soft time limit."""
        if isinstance(error, SoftTimeLimitExceeded):
            raise error
        self.report.errors[type(error).__name__] += len(rows)
        for row in rows:
            self._errors[row] = error
        self.stops_taking |= len(self._errors) >= MAX_ERRORS

    def report_progress(self) -> None:
        """Call the caller's ``progress``."""
        now = time.monotonic()
        self.next_progress = now + PROGRESS_INTERVAL
        self.report.seconds = now - self._began
        if self._progress is not None:
            self.is_reporting = True
            self._progress(self.report)
            self.is_reporting = False

    def end(self) -> Report:
        """Return the report, after a last call of ``progress``.

        Raises:
            RowsNotConfirmed: At least one row is not confirmed.
        """
        self.report_progress()
        not_confirmed = None
        if self._errors:
            not_confirmed = RowsNotConfirmed(self.report, self._errors, self._rest)
        if self._error_of_rows is not None:
            raise self._error_of_rows from not_confirmed
        if not_confirmed is not None:
            raise not_confirmed
        return self.report


#: The errors of one row, which say nothing about the others.
ROW_ERRORS: Final = (RabbitDelayError, EncodeError, OperationalError, TypeError, ValueError)


def send_one_by_one(
    app: celery.Celery,
    task: celery.Task[Any, Any] | str,
    rows: Iterable[Given],
    progress: Callable[[Report], None] | None,
    tolerance: Delay,
    options: Mapping[str, Any],
) -> Report:
    """Send a task for each row with Celery's ``apply_async``; its return counts as a confirm.

    Args:
        app: The application.
        task: The task, or its name.
        rows: The rows.
        progress: Called with the report, now and then and at the end.
        tolerance: How much later each may start.
        options: Further options of ``apply_async``, for all rows.

    Raises:
        RowsNotConfirmed: At least one row could not be sent.
    """
    sending, send = Sending(progress), function_to_send(app, task)
    report = sending.report
    for number, given in sending.take(one_by_one(rows)):
        try:
            row = given if isinstance(given, Row) else row_of(given)
            given = row._asdict() | {"tolerance": tolerance}
            ours, celerys = (
                {name: given[name] for name in names if given[name] is not None}
                for names in (("delay", "key", "tolerance"), ("eta", "task_id"))
            )
            send(row.args, row.kwargs, **celerys, **options, **{BESIDE_STAMPS: ours})
        except ROW_ERRORS as error:
            sending.fail([number], error)
            report.sent += isinstance(error, OperationalError)
        else:
            report.sent += 1
            report.confirmed += 1
            report.messages += 1
        if time.monotonic() >= sending.next_progress:
            sending.report_progress()
    return sending.end()
