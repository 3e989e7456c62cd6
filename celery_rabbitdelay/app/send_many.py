"""Sending one task for many rows, with many messages in flight.

Celery makes the message of the first row, unless a template of an earlier send exists. The messages
of the other rows are copies of this message.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias, TypeVar

import celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu import Connection
from kombu.exceptions import EncodeError, OperationalError

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import additions, copies, instruments, seams
from celery_rabbitdelay.app.celery_internals import check_arguments
from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.instruments import Instrument
from celery_rabbitdelay.app.options import (
    BESIDE_STAMPS,
    Options,
    OwnOptions,
    TaskOrName,
    without_stamps,
)
from celery_rabbitdelay.app.pipelines import borrowed_publisher
from celery_rabbitdelay.app.rows import (
    Given,
    Group,
    Grouper,
    Report,
    Row,
    WrittenRows,
    one_by_one,
    row_of,
)
from celery_rabbitdelay.levels.delay import Delay
from celery_rabbitdelay.levels.headers import KEY
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import DISTRIBUTE
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES, Publication
from celery_rabbitdelay.publishing.publisher import Publisher

#: After this many unconfirmed rows, no more rows are read.
MAX_ERRORS: Final = 1000

#: Seconds between two calls of the caller's ``progress``.
PROGRESS_INTERVAL: Final = 0.5

#: The advice in the error about an option that would have no effect.
NO_PART_IN_ROWS: Final = (
    "would do nothing, because its addition takes no part in send_many: "
    "send each task with apply_async, or leave the option out"
)

GivenT = TypeVar("GivenT")

#: A checked element of the caller's iterable: one call, or many written rows.
Work: TypeAlias = "seams.Call | WrittenRows"


class Sending:
    """Takes the caller's rows, and reports on them.

    If the caller's iterable raises an error, the error is raised at the end, once every earlier row
    has its outcome. If some of these rows are not confirmed, the error's cause is a
    :class:`.RowsNotConfirmed`.

    Args:
        progress: Called with the report, every half second and at the end.

    Attributes:
        report: The report so far.
        stops_taking: Whether no more rows are read.
        is_reporting: Whether ``progress`` is running, or has raised an error.
        next_progress: When :meth:`report_progress` is due, on the monotonic clock.
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
        """Yield rows with their numbers; :class:`.WrittenRows` get their first row's number."""
        try:
            for given in rows:
                if self.stops_taking:
                    # This row is not sent. Its existence shows that not all rows were taken.
                    self._rest = self._taken
                    return
                number = self._taken
                self._taken += given.count if isinstance(given, WrittenRows) else 1
                yield number, given
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - the rows before it are sent first
            self._error_of_rows, self._rest = error, self._taken

    def fail(self, rows: Sequence[int], error: Exception) -> None:
        """Record an error for the rows with these numbers; raise it if it is a soft time limit."""
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
            not_confirmed = exceptions.RowsNotConfirmed(self.report, self._errors, self._rest)
        if self._error_of_rows is not None:
            raise self._error_of_rows from not_confirmed
        if not_confirmed is not None:
            raise not_confirmed
        return self.report


class RowSender(Sending):
    """Sends one task for many rows.

    The messages are copies of a template, and differ in ids, arguments and due times only. The
    template is kept from an earlier send, or Celery makes it from the first row, with its options,
    router and signals. If a receiver is connected to one of the signals of publishing,
    Celery makes the message of each row.

    An error of one row does not affect the other rows.

    Args:
        delays: The application's ``app.rabbitdelay``.
        connection: The caller's own connection; None to use a connection of the pool.
        task: The task, or its name.
        tolerance_ms: The milliseconds by which a task may start late.
        envelopes: Whether rows that are due in the same tick travel in one message.
        progress: Called with the report, every half second and at the end.
        options: Other options of ``apply_async``, for all rows.
    """

    _template: copies.Template

    def __init__(
        self,
        delays: Delays,
        connection: Connection | None,
        task: TaskOrName,
        tolerance_ms: int,
        envelopes: bool,
        progress: Callable[[Report], None] | None,
        options: Options,
    ) -> None:
        super().__init__(progress)
        self._delays = delays
        self._settings = delays.settings
        if envelopes and DISTRIBUTE not in self._settings.modules:
            raise exceptions.NeedsDistribution("an envelope")
        self._connection = connection
        self._task = task
        self._name = task if isinstance(task, str) else task.name
        self._tolerance_ms = tolerance_ms
        # A fake broker accepts only messages of single rows.
        self._envelopes = envelopes and delays.fake_broker is None
        own, stamps = without_stamps(options)
        known = delays.app.tasks.get(task) if isinstance(task, str) else task

        def ask(addition: seams.Addition, options: OwnOptions) -> seams.AddedToRows | None:
            return addition.to_rows(self._name, known, options, self.fail)

        added = seams.checked_added_options(own, delays)
        self._added = seams.parts_of(delays, added, ask, NO_PART_IN_ROWS)
        self._options = {
            name: each for name, each in own.items() if name not in additions.options
        } | stamps
        self._ids = _random_ids()
        #: The counts that are already in the metrics.
        self._counted: Counter[Instrument] = Counter()

    def send(self, rows: Iterable[Given]) -> Report:
        """Send the task for each row.

        Raises:
            RowsNotConfirmed: At least one row is not confirmed.
        """
        try:
            with borrowed_publisher(self._delays, self._connection) as publisher:
                self._send(publisher, self._calls(rows))
        finally:
            for each in self._added:
                each.close()
            self._count(is_end=True)
        return self.end()

    def _send(self, publisher: Publisher, rows: Iterator[tuple[int, Work]]) -> None:
        work = rows
        for each in self._added:
            work = each.with_headers(work)
        for number, given in work:
            first = given if isinstance(given, seams.Call) else next(given.read())[0]
            headers = chain.from_iterable(each.shared_headers.items() for each in self._added)
            try:
                self._template = self._delays.part(copies.Copies).of_rows(
                    self._task, first, self._options, dict(headers), self._connection
                )
            except (EncodeError, exceptions.MessageTooLarge) as error:
                self.fail([number], error)
            else:
                break
        else:
            return
        if self._envelopes:
            try:
                self._template.envelope(b"", 0)
            except exceptions.InvalidEnvelope:
                # JSON cannot express a shared header: send each row as a separate message.
                self._envelopes = False
        groups = self._groups(chain([(number, given)], work))
        publications = filter(None, map(self._publication, groups))
        producer = self._template.producer
        # No web request waits for a bulk send: connecting may take the whole timeout.
        policy = producer.policy._replace(reconnects=None)
        try:
            publisher.publish_all(publications, policy, done=self._done, **producer.declares)
        except exceptions.PublishError as error:
            if self.is_reporting:
                raise  # the caller's ``progress`` has raised it
            # No more rows are read. Rows that were read and not sent yet have this error.
            self.stops_taking = True
            for publication in publications:
                self.report.sent -= len(publication.context)
                self.fail(publication.context, error.copy(may_have_arrived=False))

    def _calls(self, rows: Iterable[Given]) -> Iterator[tuple[int, Work]]:
        """Yield the calls of the rows that can be sent, with the number of the (first) row."""
        for number, given in self.take(rows):
            try:
                # Written rows were checked when they were written.
                work = given if isinstance(given, WrittenRows) else self._call(given)
                due = work.due
                self._settings.check_delay(due)
                for each in self._added:
                    each.take(due)
            except Exception as error:  # noqa: BLE001 - a row may run code of the user's
                self.fail(range(number, self._taken), error)
            else:
                yield number, work

    def _call(self, given: Row | Mapping[str, object]) -> seams.Call:
        row = given if isinstance(given, Row) else row_of(given)
        due = self._delays.due(row.delay, None, row.eta, self._tolerance_ms)
        args, kwargs = row.args or (), row.kwargs or {}
        if not isinstance(args, list | tuple):
            raise exceptions.InvalidRow(row, "takes a list or a tuple as args, such as [7]")
        if not isinstance(kwargs, Mapping):
            raise exceptions.InvalidRow(row, 'takes a mapping as kwargs, such as {"order": 7}')
        given_id = row.task_id
        if given_id is not None and not (
            isinstance(given_id, str)
            and len(given_id.encode("utf-8", "surrogatepass")) <= MAX_SHORTSTR_BYTES
        ):
            takes = f"takes a task_id of up to {MAX_SHORTSTR_BYTES} bytes, such as 'order-7'"
            raise exceptions.InvalidRow(row, takes)
        check_arguments(self._task, args, kwargs)
        if row.key is not None:
            seams.checked_added_options({"key": row.key}, self._delays)
        headers = seams.NO_HEADERS if row.key is None else {KEY: row.key}
        has_id = given_id is not None
        return seams.Call(given_id or next(self._ids), args, kwargs, due, headers, has_id)

    def _groups(self, work: Iterator[tuple[int, Work]]) -> Iterator[Group]:
        """Yield the calls in groups; a call without an envelope is a group without items."""
        layout, max_bytes = self._settings.topology.layout, self._settings.max_message_bytes // 2
        grouper = Grouper(layout, self._template.item, max_bytes=max_bytes)
        for number, given in work:
            if isinstance(given, seams.Call):
                yield from self._add(grouper, number, given)
            elif (group := self._ready_group(number, given)) is not None:
                yield group
            else:
                calls: Iterator[tuple[int, seams.Call]] = enumerate(
                    (call for call, _ in given.read()), number
                )
                for addition in self._added:
                    calls = addition.with_headers(calls)
                for each, call in calls:
                    yield from self._add(grouper, each, call)
        yield from grouper.flush()

    def _ready_group(self, number: int, written: WrittenRows) -> Group | None:
        """Return written rows as a group; None if they have to be written again.

        Rows are written again if this application writes them differently, if an addition needs
        every row (tracked tasks), or if the group is too large for a message.
        """
        template = self._template
        is_ready = self._envelopes and template.can_write_again
        if any(each.needs_each for each in self._added) or not is_ready:
            return None
        if len(written.items) > self._settings.max_message_bytes:
            return None
        first, item = next(written.read())
        if template.item(first) != item:
            return None
        numbers = list(range(number, number + written.count))
        return Group(first.due, first, bytearray(written.items), numbers)

    def _add(self, grouper: Grouper, number: int, call: seams.Call) -> Sequence[Group]:
        """Put a call into a group; return the groups that are ready."""
        if not self._envelopes:
            return [Group(call.due, call, rows=[number])]
        try:
            ready = grouper.add(number, call)
        except exceptions.InvalidEnvelope:
            return [Group(call.due, call, rows=[number])]
        except Exception as error:  # noqa: BLE001 - serializing may run code of the user's
            self.fail([number], error)
            return []
        template = self._template
        content = partial(template.content, call) if template.can_write_again else None
        for each in self._added:
            each.sent(number, call, content, self._template.producer.delayed)
        return ready

    def _publication(self, group: Group) -> Publication | None:
        """Return the message of a group; None if it cannot be made, so that its rows fail."""
        first, rows, due = group.first, group.rows, group.due
        template, producer = self._template, self._template.producer
        is_alone = not group.items or (len(rows) == 1 and template.can_write_again)
        try:
            if is_alone:
                publication = template.publication(first)
            else:
                content = template.envelope(bytes(group.items), due.at_ms)
                # In an envelope of one message, the bound applies to that message.
                size = len(content.body if len(rows) > 1 else group.items)
                producer.check_size(size, DISTRIBUTION, due)
                delayed = producer.delayed._replace(task_id=first.task_id, destination=DISTRIBUTION)
                publication = Publication(content, partial(producer.address, delayed, due))
        except Exception as error:  # noqa: BLE001 - serializing may run code of the user's
            self.fail(rows, error)
            return None
        publication.context = rows
        self.report.sent += len(rows)
        if is_alone:
            for each in self._added:
                each.sent(rows[0], first, lambda: publication.content, producer.delayed)
        return publication

    def _done(self, publication: Publication) -> None:
        report = self.report
        report.resent += publication.resent
        rows = publication.context
        for each in self._added:
            each.ended(rows, publication.error is None)
        if publication.error is not None:
            self.fail(rows, publication.error)
        else:
            report.confirmed += len(rows)
            report.messages += 1
            report.envelopes += len(rows) > 1
        if time.monotonic() >= self.next_progress:
            self._count()
            self.report_progress()

    def _count(self, is_end: bool = False) -> None:
        """Count the rows since the last call; at the end, unconfirmed rows count as refused."""
        sent, confirmed = self.report.sent, self.report.confirmed
        present = Counter({instruments.SENT: sent, instruments.CONFIRMED: confirmed})
        present[instruments.RESENT] = self.report.resent
        present[instruments.REFUSED] = sent - confirmed if is_end else 0
        if more := present - self._counted:
            self._delays.recorder.record(more, self._name, self._template.label)
        self._counted = present


def _random_ids() -> Iterator[str]:
    """Yield random UUIDs (RFC 9562, version 4); :mod:`uuid` needs a system call for each."""
    while True:
        digits = os.urandom(16 * 256).hex()
        for begin in range(0, len(digits), 32):
            d = digits[begin : begin + 32]
            variant = "89ab"[int(d[16], 16) % 4]
            yield f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{variant}{d[17:20]}-{d[20:]}"


#: Errors of a single row, after which the other rows are still sent.
ROW_ERRORS: Final = (
    exceptions.RabbitDelayError,
    EncodeError,
    OperationalError,
    TypeError,
    ValueError,
)


def send_one_by_one(
    app: celery.Celery,
    task: TaskOrName,
    rows: Iterable[Given],
    progress: Callable[[Report], None] | None,
    tolerance: Delay,
    options: Options,
) -> Report:
    """Send a task for each row with Celery's ``apply_async``; a call that returns is confirmed.

    Args:
        app: The application.
        task: The task, or its name.
        rows: The rows.
        progress: Called with the report, every half second and at the end.
        tolerance: Seconds, or a timedelta, by which a task may start late.
        options: Other options of ``apply_async``, for all rows.

    Raises:
        RowsNotConfirmed: At least one row could not be sent.
    """
    sending, send = Sending(progress), copies.function_to_send(app, task)
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
