"""Sending one task for many rows: the messages are made from one, and many are in flight."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import celery
from kombu.exceptions import EncodeError, OperationalError

from celery_rabbitdelay.app.grouping import Bag, Sorter
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.app.task_messages import (
    Call,
    Capture,
    Writer,
    captured,
    sending,
    writer_for,
)
from celery_rabbitdelay.exceptions import (
    InvalidEnvelope,
    InvalidRow,
    NeedsDistribution,
    PublishError,
    RabbitDelayError,
    RowsNotConfirmed,
    UnknownOption,
)
from celery_rabbitdelay.levels.due import Due
from celery_rabbitdelay.levels.place_value import Delay
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.publishing.message import MAX_WORD
from celery_rabbitdelay.publishing.publication import Publication
from celery_rabbitdelay.publishing.publisher import Publisher

__all__ = ["Bulk", "Report", "Row", "send_one_by_one"]

#: With so many rows that were not confirmed, no further ones are taken.
MAX_ERRORS: Final = 1000

#: Seconds between two calls of the caller's ``progress``.
PROGRESS: Final = 0.5

#: What may be wrong with one row, and says nothing about the others.
ROW_ERRORS: Final = (RabbitDelayError, EncodeError, TypeError, ValueError)


class Row(NamedTuple):
    """One call of the task.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        delay: Seconds, or a timedelta, until it may start, from when the row is taken.
        eta: The instant at which it may start; instead of a delay.
        task_id: Its id; a random one by default.
        key: For the registry, which a later version has.
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
        sent: How many rows were published, or tried to.
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


#: Returns when a row is due.
DueOf: TypeAlias = Callable[[Row], Due]


class Bulk:
    """Sends one task for many rows.

    The first row goes through all of Celery: options, router, signals. The others are like it, but
    for what is a row's own. Where somebody listens to the signals of publishing, each row goes
    through all of Celery.

    What is wrong with one row is an error of that row. What ``rows`` raise is raised once all that
    were taken are confirmed or have an error; where some have, its cause is a
    :class:`~celery_rabbitdelay.exceptions.RowsNotConfirmed`.

    Args:
        app: The application.
        settings: Its settings.
        publisher: What publishes.
        task: The task, or its name.
        due_of: Returns when a row is due.
        envelopes: Whether rows that are due in the same tick travel in one message.
        progress: Called with the report, now and then.
        options: What ``apply_async`` takes besides, for all rows.
    """

    def __init__(
        self,
        app: celery.Celery,
        settings: Settings,
        publisher: Publisher,
        task: celery.Task[Any, Any] | str,
        due_of: DueOf,
        envelopes: bool,
        progress: Callable[[Report], None] | None,
        options: Mapping[str, Any],
    ) -> None:
        if envelopes and "distribution" not in settings.modules:
            raise NeedsDistribution("an envelope")
        self._app = app
        self._settings = settings
        self._publisher = publisher
        self._task = task
        self._due_of = due_of
        self._envelopes = envelopes
        self._progress = progress
        self._options = options
        self._ids = _random_ids()
        self._check: Any = None
        if not isinstance(task, str) and task.typing:
            self._check = getattr(task, "__header__", None)
        self._report = Report()
        self._errors: dict[int, Exception] = {}
        self._taken = 0
        self._is_cut_off = False
        self._broken: Exception | None = None
        self._callers: PublishError | None = None
        self._began = self._told = time.monotonic()

    def send(self, rows: Iterable[Row | Mapping[str, Any]]) -> Report:
        """Send the task for each row.

        Raises:
            RowsNotConfirmed: At least one row is not confirmed.
        """
        self._send(self._calls(rows))
        self._tell()
        not_confirmed = None
        if self._errors:
            rest = self._taken if self._is_cut_off or self._broken else None
            not_confirmed = RowsNotConfirmed(self._report, self._errors, rest)
        if self._broken is not None:
            raise self._broken from not_confirmed
        if not_confirmed is not None:
            raise not_confirmed
        return self._report

    def _send(self, calls: Iterator[tuple[int, Call]]) -> None:
        capture = partial(
            captured,
            self._app,
            self._settings,
            self._publisher,
            self._task,
            options=self._options,
        )
        for number, first in calls:
            try:
                made = capture(first)
            except EncodeError as error:
                self._fail([number], error)
            else:
                break
        else:
            return
        writer = writer_for(made, first, self._options, capture)
        if self._envelopes:
            try:
                writer.envelope(b"", 0)
            except InvalidEnvelope:
                # All have a header that JSON has no place for: each travels by itself.
                self._envelopes = False
        calls = chain([(number, first)], calls)
        posted = self._postings(made, writer, calls)
        patience = made.patience._replace(window=self._settings.window)
        try:
            self._publisher.publish_all(posted, patience, done=self._done, **made.declares)
        except PublishError as error:
            if error is self._callers:
                raise
            # What was taken and is not on its way yet; nothing further is taken.
            self._is_cut_off = True
            for posting in posted:
                self._report.sent -= len(posting.subject)
                self._fail(posting.subject, error)

    def _calls(self, rows: Iterable[Row | Mapping[str, Any]]) -> Iterator[tuple[int, Call]]:
        """The rows that can be sent, with their numbers."""
        source = iter(rows)
        while not self._is_cut_off:
            try:
                given = next(source)
            except StopIteration:
                return
            except Exception as broken:  # noqa: BLE001 - what was taken before is sent first
                self._broken = broken
                return
            number, self._taken = self._taken, self._taken + 1
            try:
                call = self._call(_row(given))
            except Exception as error:  # noqa: BLE001 - whatever a row's own code raises
                self._fail([number], error)
            else:
                yield number, call

    def _call(self, row: Row) -> Call:
        due = self._due_of(row)
        if "check-in" not in self._settings.modules:
            self._settings.topology.layout.check(due.delay_ms)
        args, kwargs = row.args or (), row.kwargs or {}
        if not isinstance(args, list | tuple):
            raise InvalidRow(row, "takes a list or a tuple of arguments")
        if not isinstance(kwargs, Mapping):
            raise InvalidRow(row, "takes a mapping of keyword arguments")
        if row.task_id is not None and not _is_id(row.task_id):
            raise InvalidRow(row, f"takes a task_id of up to {MAX_WORD} bytes")
        if self._check is not None:
            self._check(*args, **kwargs)
        return Call(row.task_id or next(self._ids), args, kwargs, due)

    def _postings(
        self, made: Capture, writer: Writer, calls: Iterator[tuple[int, Call]]
    ) -> Iterator[Publication]:
        if not self._envelopes:
            for number, call in calls:
                yield from self._alone(made, writer, [number], call)
            return
        sorter = Sorter(self._settings.topology.layout, writer.item)
        for number, call in calls:
            try:
                bags = sorter.add(number, call, call.due)
            except InvalidEnvelope:
                yield from self._alone(made, writer, [number], call)
                continue
            except Exception as error:  # noqa: BLE001 - whatever an argument's own code raises
                self._fail([number], error)
                continue
            for bag in bags:
                yield from self._together(made, writer, bag)
        for bag in sorter.flush():
            yield from self._together(made, writer, bag)

    def _alone(
        self, made: Capture, writer: Writer, rows: Sequence[int], call: Call
    ) -> Iterator[Publication]:
        try:
            content = writer.content(call)
        except Exception as error:  # noqa: BLE001 - whatever an argument's own code raises
            self._fail(rows, error)
            return
        self._report.sent += len(rows)
        delayed = made.delayed._replace(task_id=call.task_id)
        yield Publication(content, partial(made.address, delayed, call.due), rows)

    def _together(self, made: Capture, writer: Writer, bag: Bag) -> Iterator[Publication]:
        if len(bag.rows) == 1 and writer.writes_twice:
            yield from self._alone(made, writer, bag.rows, bag.first)
            return
        due = bag.due
        try:
            content = writer.envelope(bytes(bag.items), due.at_ms)
        except InvalidEnvelope as too_large:
            self._fail(bag.rows, too_large)
            return
        self._report.sent += len(bag.rows)
        delayed = made.delayed._replace(word=DISTRIBUTION, task_id=bag.first.task_id)
        yield Publication(content, partial(made.address, delayed, due), bag.rows)

    def _done(self, posting: Publication) -> None:
        report = self._report
        report.resent += posting.resent
        rows = posting.subject
        if posting.error is not None:
            self._fail(rows, posting.error)
        else:
            report.confirmed += len(rows)
            report.messages += 1
            report.envelopes += len(rows) > 1
        if self._progress is not None and time.monotonic() - self._told >= PROGRESS:
            self._tell()

    def _fail(self, rows: Sequence[int], error: Exception) -> None:
        self._report.errors[type(error).__name__] += len(rows)
        for row in rows:
            self._errors[row] = error
        self._is_cut_off |= len(self._errors) >= MAX_ERRORS

    def _tell(self) -> None:
        self._told = time.monotonic()
        self._report.seconds = self._told - self._began
        if self._progress is not None:
            try:
                self._progress(self._report)
            except PublishError as error:
                # It says nothing about the rows.
                self._callers = error
                raise


def send_one_by_one(
    app: celery.Celery,
    task: celery.Task[Any, Any] | str,
    rows: Iterable[Row | Mapping[str, Any]],
    progress: Callable[[Report], None] | None,
    options: Mapping[str, Any],
) -> Report:
    """Send a task for each row with Celery's ``apply_async``, whose word counts as a confirm.

    Raises:
        RowsNotConfirmed: At least one row could not be sent.
    """
    report, errors, rest = Report(), {}, None
    began = told = time.monotonic()
    send = sending(app, task)
    for number, given in enumerate(rows):
        try:
            row = _row(given)
            times: dict[str, Any] = {"delay": row.delay, "eta": row.eta, "task_id": row.task_id}
            given_times = {name: value for name, value in times.items() if value is not None}
            send(row.args, row.kwargs, **given_times, **options)
        except (*ROW_ERRORS, OperationalError) as error:
            errors[number] = error
            report.errors[type(error).__name__] += 1
        else:
            report.sent += 1
            report.confirmed += 1
            report.messages += 1
        now = time.monotonic()
        report.seconds = now - began
        if progress is not None and now - told >= PROGRESS:
            told = now
            progress(report)
        if len(errors) >= MAX_ERRORS:
            rest = number + 1
            break
    if progress is not None:
        progress(report)
    if errors:
        raise RowsNotConfirmed(report, errors, rest)
    return report


def _random_ids() -> Iterator[str]:
    """Random UUIDs (RFC 9562, version 4), which :mod:`uuid` makes one at a time."""
    while True:
        digits = os.urandom(16 * 256).hex()
        for begin in range(0, len(digits), 32):
            d = digits[begin : begin + 32]
            variant = "89ab"[int(d[16], 16) % 4]
            yield f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{variant}{d[17:20]}-{d[20:]}"


def _is_id(given: object) -> bool:
    return isinstance(given, str) and len(given.encode("utf-8", "surrogatepass")) <= MAX_WORD


def _row(given: Row | Mapping[str, Any]) -> Row:
    row = given if isinstance(given, Row) else _row_of(given)
    if row.key is not None:
        raise UnknownOption("key", row.key)
    return row


def _row_of(given: Mapping[str, Any]) -> Row:
    if not isinstance(given, Mapping):
        raise InvalidRow(given, "takes a celery_rabbitdelay.Row, or a mapping of its fields")
    try:
        return Row(**given)
    except TypeError as wrong:
        unknown = ", ".join(sorted(map(str, given.keys() - set(Row._fields))))
        takes = ", ".join(Row._fields)
        raise InvalidRow(given, f"has {unknown}; takes {takes}") from wrong
