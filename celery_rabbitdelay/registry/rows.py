"""Registers the rows of ``send_many``: their job, their keys, and tracked rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from celery_rabbitdelay.app.delays import Delays
from celery_rabbitdelay.app.options import OwnOptions
from celery_rabbitdelay.app.seams import Call
from celery_rabbitdelay.exceptions import JobClosed, RegistryUnavailable
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import COPY, KEY
from celery_rabbitdelay.publishing.message import Content
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.registry.application import RegistryOptions, register_sent, registry_of
from celery_rabbitdelay.registry.decision import Registration, Ticket, new_copy
from celery_rabbitdelay.registry.jobs import JobState
from celery_rabbitdelay.registry.record import stored

#: The number of rows registered in one round trip.
BATCH: Final = 500

#: The number of rows whose tickets are fetched in one round trip; and the seconds after which the
#: next row ends a smaller batch.
ASKED: Final = 500
ASK_AFTER: Final = 0.05

#: How far beyond a row's due time the row's job is extended, in milliseconds. Without this margin,
#: every row of a list sorted by due time would extend the job.
MORE_MS: Final = 7 * 86_400_000


class RowRegistration:
    """Registers rows once the broker has confirmed them, many in one round trip.

    Args:
        delays: The application's ``app.rabbitdelay``. The registry is looked up only for rows that
            need it.
        wanted: The registry's options that all rows share.
        task_name: The task's name.
        fail: Called with the numbers of rows that cannot be sent, and the error.
    """

    def __init__(
        self,
        delays: Delays,
        wanted: RegistryOptions,
        task_name: str,
        fail: Callable[[Sequence[int], Exception], None],
    ) -> None:
        self._delays = delays
        self._wanted = wanted
        self._task_name = task_name
        self._fail = fail
        self._joined_until_ms = 0
        self._job_id = ""
        self._thread = ThreadPoolExecutor(1, "rabbitdelay-register")
        self._registering: Future[list[str]] | None = None
        #: The unconfirmed rows, by number.
        self._sent: dict[int, Registration] = {}
        #: The confirmed rows, in any order: only the order in their tickets matters.
        self._confirmed: list[Registration] = []

    @property
    def shared_headers(self) -> OwnOptions:
        """The headers shared by the messages of all rows."""
        return self._wanted._replace(key="").headers("", job_id=self._job_id)

    @property
    def needs_each(self) -> bool:
        """Whether all rows are tracked, so that every row's message is stored."""
        return self._wanted.track

    def take(self, due: Due) -> None:
        """Extend the rows' job, if there is one, beyond the due time of a row.

        Raises:
            JobClosed: The job is not open.
            RegistryUnavailable: Redis does not answer.
        """
        job = self._wanted.job
        if job and due.at_ms > self._joined_until_ms:
            state, self._job_id = registry_of(self._delays).jobs.join(job, due.at_ms + MORE_MS)
            if state is not JobState.OPEN:
                raise JobClosed(job, "unknown" if state is None else state.value)
            self._joined_until_ms = due.at_ms + MORE_MS

    def with_headers(self, work: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Add the registry's headers to the calls of rows, fetching tickets in batches.

        Args:
            work: The rows' numbers and calls; other values pass through unchanged.
        """
        batch: list[tuple[int, Call]] = []
        began = 0.0
        for number, each in work:
            needs = isinstance(each, Call) and (self._wanted.track or KEY in each.headers)
            if needs:
                began = began if batch else time.monotonic()
                batch.append((number, each))
                if len(batch) < ASKED and time.monotonic() - began < ASK_AFTER:
                    continue
            yield from self._with_tickets(batch)
            batch = []
            if not needs:
                yield number, each
        yield from self._with_tickets(batch)

    def _with_tickets(self, batch: list[tuple[int, Call]]) -> Iterator[tuple[int, Call]]:
        if not batch:
            return
        once = self._wanted.once
        asked = [
            (call.task_id if call.has_id and not once else "", call.headers.get(KEY, ""))
            for _, call in batch
        ]
        try:
            tickets = registry_of(self._delays).ask(asked)
        except RegistryUnavailable as error:
            self._fail([number for number, _ in batch], error)
            return
        for (number, call), ticket in zip(batch, tickets, strict=True):
            headers = {COPY: new_copy(), **call.headers, **ticket.headers}
            yield number, Call(call.task_id, call.args, call.kwargs, call.due, headers, call.has_id)

    def sent(
        self,
        row: int,
        call: Call,
        content: Callable[[], Content] | None,
        delayed: Delayed,
    ) -> None:
        """Prepare the registration of a row that is being sent.

        Args:
            row: The row's number.
            call: The row's call.
            content: Returns the row's message; None if the message cannot be written a second time,
                so that the task cannot be postponed to an earlier time.
            delayed: One row's message, and the destination of all rows.
        """
        copy = call.headers.get(COPY)
        if copy is None:
            return
        name = job = message = ""
        if self._wanted.track:
            name, job = self._task_name, self._wanted.job
            if content is not None:
                message = stored(delayed, content(), call.due.tolerance_ms)
        ticket, key = Ticket.of(call.headers), call.headers.get(KEY, "")
        self._sent[row] = Registration(
            *(call.task_id, copy, call.due.at_ms, "0.0", ticket, key, name, job, message),
            delayed.message.headers.queue or "",
        )

    def ended(self, rows: Iterable[int], is_confirmed: bool) -> None:
        """Handle the broker's answer about rows; register confirmed rows in batches."""
        for row in rows:
            registration = self._sent.pop(row, None)
            if registration is not None and is_confirmed:
                self._confirmed.append(registration)
        if len(self._confirmed) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Start to register the confirmed rows, in another thread."""
        if not self._confirmed:
            return
        self.wait()
        batch, self._confirmed = self._confirmed, []
        self._registering = self._thread.submit(register_sent, registry_of(self._delays), batch)

    def wait(self) -> None:
        """Wait until the registration that :meth:`flush` started has ended."""
        if self._registering is not None:
            self._registering.result()
            self._registering = None

    def close(self) -> None:
        """Register the confirmed rows, and end the thread."""
        self.flush()
        self.wait()
        self._thread.shutdown()
