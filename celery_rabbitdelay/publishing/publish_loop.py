"""Publishing messages, many of them in flight, until each of them has its outcome."""

from __future__ import annotations

import struct
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final, TypeAlias

from amqp.exceptions import (
    AccessRefused,
    FrameSyntaxError,
    NotAllowed,
    NotFound,
    PreconditionFailed,
)
from kombu import Connection

from celery_rabbitdelay.exceptions import (
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    DeclarationRefused,
    MessageNacked,
    MessageReturned,
    PublishError,
)
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel, Sent
from celery_rabbitdelay.publishing.connection import Line, remaining
from celery_rabbitdelay.publishing.posting import Patience, Posting

__all__ = ["Batch", "Declaration"]

#: Seconds that the caller's iterator takes for one message without being called slow.
SLOW: Final = 0.005

#: Seconds that may pass, while messages are taken, without a look at what the broker says.
LOOK_EVERY: Final = 0.05

#: Called with a connection, to declare what is missing.
Declaration: TypeAlias = Callable[[Connection], None]


class _CallersError(BaseException):
    """What the caller's own code has raised; its type must not be taken for the connection's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Batch:
    """The messages of one call, in whatever order the broker settles them.

    Args:
        line: What they are published over.
        source: The messages; no more of them are taken than may be in flight.
        patience: How long and how often each is tried.
        declare: Called with each new connection, and at least once, to declare what is missing.
        redeclare: Called if no queue takes a message or an exchange does not exist.
        done: Called with each message that is confirmed, or has an error.
    """

    def __init__(
        self,
        line: Line,
        source: Iterator[Posting],
        patience: Patience,
        declare: Declaration | None,
        redeclare: Declaration | None,
        done: Callable[[Posting], None] | None,
    ) -> None:
        self._line = line
        self._source: Iterator[Posting] | None = source
        self._patience = patience
        self._declare = declare
        self._redeclare = redeclare
        self._must_redeclare = False
        self._done = done
        self._confirming: ConfirmChannel | None = None
        #: Seconds that the caller's iterator took for the last message; unknown before the first.
        self._took = SLOW
        #: What is to be sent before anything new, and when, on the clock of time.monotonic: the
        #: earliest first.
        self._again: deque[tuple[float, Posting]] = deque()
        #: How many messages are sent one at a time, because one of them has the channel closed.
        self._suspects = 0
        self._losses = 0
        self._progress = time.monotonic()

    def run(self) -> None:
        """Publish them.

        Raises:
            PublishError: Nothing can be published any more.
        """
        try:
            self._run()
        except _CallersError as callers:
            raise callers.error from callers.error.__cause__

    def _run(self) -> None:
        while self._has_more():
            try:
                self._serve(self._channel())
            except PublishError as error:
                self._end_with(error, error.__cause__)
            except NotAllowed as refused:
                # The virtual host does not exist, or is not the user's: so it is the next time.
                self._end_with(self._lost(refused), refused)
            except self._line.connection_errors as lost:
                self._after_loss(lost)
            except BaseException:
                # Also an interrupt or a time limit: nobody knows what is on its way, and the next
                # message must not be taken for this one.
                self._line.discard()
                raise

    def _has_more(self) -> bool:
        """Whether there is a message to send; takes one where none is waiting."""
        if not self._again and (posting := self._take()) is not None:
            self._again.append((0.0, posting))
        return bool(self._again)

    def _take(self) -> Posting | None:
        if self._source is None:
            return None
        began = time.monotonic()
        try:
            posting = next(self._source, None)
        except Exception as error:
            raise _CallersError(error) from error
        now = time.monotonic()
        self._took = now - began
        if self._took >= LOOK_EVERY:
            self._excuse(self._took)
        if posting is None:
            self._source = None
        else:
            posting.deadline = now + self._patience.timeout
        return posting

    def _excuse(self, seconds: float) -> None:
        """The caller was busy for so long, and the broker's answers were not listened to."""
        self._progress += seconds
        in_flight = self._confirming.unsettled.subjects() if self._confirming else []
        posting: Posting
        for posting in (*in_flight, *(posting for _, posting in self._again)):
            posting.deadline += seconds

    def _next(self) -> Posting | None:
        if self._again and self._again[0][0] <= time.monotonic():
            return self._again.popleft()[1]
        return self._take() if self._may_take else None

    @property
    def _may_take(self) -> bool:
        """Whether new messages are taken: not while too many are waiting to be sent again."""
        return self._source is not None and len(self._again) < self._patience.window

    @property
    def _window(self) -> int:
        """How many messages may be in flight."""
        return 1 if self._suspects else self._patience.window

    def _channel(self) -> ConfirmChannel:
        """A channel on a connection where everything is declared."""
        deadline = self._again[0][1].deadline
        try:
            confirming = self._line.open(deadline)
        except AccessRefused as refused:
            raise self._lost(refused) from refused
        if self._declare is not None:
            self._run_declaration(confirming, self._declare, deadline)
        return confirming

    def _run_declaration(
        self, confirming: ConfirmChannel, declare: Declaration, deadline: float
    ) -> None:
        try:
            with confirming.answers_within(remaining(deadline)):
                declare(self._line.connection)
        except self._line.channel_errors as refused:
            raise DeclarationRefused(*self._again[0][1].address(), str(refused)) from refused

    def _serve(self, confirming: ConfirmChannel) -> None:
        """Publish all there is on one channel."""
        self._confirming = confirming
        try:
            while self._has_more() or confirming.in_flight:
                self._send(confirming)
                if self._again or confirming.in_flight:
                    self._wait(confirming)
        except PublishError:
            self._take_back(confirming)
            # What the broker says about these later must not be taken for the next ones'.
            self._line.discard()
            raise
        except self._line.channel_errors as closed:
            self._after_close(confirming, closed)
        except self._line.connection_errors:
            self._take_back(confirming)
            raise
        finally:
            self._confirming = None

    def _send(self, confirming: ConfirmChannel) -> None:
        if self._must_redeclare and self._redeclare is not None:
            self._must_redeclare = False
            deadline = self._again[0][1].deadline
            self._run_declaration(confirming, self._redeclare, deadline)
        timeout, look_at = self._patience.timeout, time.monotonic() + LOOK_EVERY
        # What comes back meanwhile is sent again once all is declared again.
        while (
            confirming.blocked is None
            and confirming.in_flight < self._window
            and not self._must_redeclare
        ):
            posting = self._next()
            if posting is None:
                return
            exchange, routing_key = posting.address()
            try:
                confirming.send(
                    posting.content, exchange, routing_key, timeout, self._settled, posting
                )
            except (FrameSyntaxError, struct.error) as unwritable:
                reason = f"cannot be written in AMQP: {unwritable}"
                self._finish(posting, PublishError(exchange, routing_key, reason))
            if self._took >= SLOW:
                # It does not wait for the next one.
                confirming.flush(timeout)
            if confirming.in_flight and time.monotonic() >= look_at:
                confirming.look(timeout)
                look_at = time.monotonic() + LOOK_EVERY

    def _wait(self, confirming: ConfirmChannel) -> None:
        """Take in confirms until more can be sent, or time is up for a message."""
        oldest: Posting = next(iter(confirming.unsettled.subjects()), None) or self._again[0][1]
        now = time.monotonic()
        again_at = self._again[0][0] if self._again else oldest.deadline
        has_more = self._may_take or (bool(self._again) and again_at <= now)
        enough = self._window * 3 // 4 if has_more else 0
        was_blocked, was_in_flight = confirming.blocked is not None, confirming.in_flight > 0
        if not was_blocked and not was_in_flight and again_at <= now:
            # It has come due since it was looked at: there is nothing to wait for.
            return

        def can_go_on() -> bool:
            if was_blocked or confirming.blocked is not None:
                return was_blocked != (confirming.blocked is not None)
            return was_in_flight and confirming.in_flight <= enough

        wake = again_at if now < again_at < oldest.deadline else oldest.deadline
        if not confirming.drain(can_go_on, wake) and time.monotonic() >= oldest.deadline:
            self._give_up(confirming, oldest)

    def _give_up(self, confirming: ConfirmChannel, oldest: Posting) -> None:
        """Time is up for one message, at least."""
        was_in_flight = oldest in confirming.unsettled.subjects()
        # This process may have been busy or suspended while the broker spoke.
        confirming.hear()
        if was_in_flight and oldest not in confirming.unsettled.subjects():
            return
        now, address = time.monotonic(), oldest.address()
        if confirming.blocked is not None:
            raise ConnectionBlocked(*address, confirming.blocked)
        if now - self._progress >= self._patience.timeout or not confirming.in_flight:
            raise ConfirmTimeout(*address, "the broker did not confirm in time")
        over = [each for each in confirming.unsettled.subjects() if each.deadline <= now]
        confirming.unsettled.forget(over)
        posting: Posting
        for posting in over:
            reason = "the broker did not confirm in time, though it did confirm others"
            self._finish(posting, ConfirmTimeout(*posting.address(), reason))

    def _settled(self, sent: Sent) -> None:
        posting: Posting = sent.subject
        self._progress = time.monotonic()
        self._losses = 0
        self._suspects = max(self._suspects - 1, 0)
        error = sent.error
        if isinstance(error, MessageNacked):
            attempt = posting.resent + 1
            at = self._progress + self._patience.pause(attempt)
            if not self._patience.is_over(attempt) and at < posting.deadline:
                self._send_again(posting, at)
                return
        elif isinstance(error, MessageReturned) and self._redeclare and not posting.returned:
            posting.returned = self._must_redeclare = True
            self._send_again(posting, 0.0)
            return
        self._finish(posting, error)

    def _send_again(self, posting: Posting, at: float) -> None:
        posting.resent += 1
        insort(self._again, (at, posting), key=itemgetter(0))

    def _finish(self, posting: Posting, error: PublishError | None) -> None:
        posting.error = error
        if self._done is None:
            return
        try:
            self._done(posting)
        except Exception as callers:
            raise _CallersError(callers) from callers

    def _take_back(self, confirming: ConfirmChannel) -> None:
        """What is in flight is to be sent again, in its order, before everything else."""
        in_flight = confirming.unsettled.subjects()
        self._again.extendleft((0.0, posting) for posting in reversed(in_flight))

    def _after_close(self, confirming: ConfirmChannel, closed: BaseException) -> None:
        """The broker has closed the channel: it tells why, but not because of which message."""
        in_flight = confirming.in_flight
        self._take_back(confirming)
        # py-amqp opens a channel that the broker closed again, but not in confirm mode.
        self._line.close_channel()
        if isinstance(closed, PreconditionFailed):
            self._find_refused(in_flight, closed)
            return
        address = self._again[0][1].address()
        if not isinstance(closed, NotFound):
            raise MessageNacked(*address, str(closed)) from closed
        first = self._again[0][1]
        if self._redeclare is None or first.returned:
            raise MessageReturned(*address, str(closed)) from closed
        for _, posting in self._again:
            posting.returned = True
            posting.resent += 1
        self._must_redeclare = True

    def _find_refused(self, in_flight: int, closed: PreconditionFailed) -> None:
        """One of those in flight is what the broker refuses: it is too large, for example.

        All are sent again, one at a time, and the one that has the channel closed then is it.
        """
        if in_flight > 1:
            self._suspects = in_flight
            for _, posting in islice(self._again, in_flight):
                posting.resent += 1
            return
        self._suspects = max(self._suspects - 1, 0)
        if in_flight:
            _, posting = self._again.popleft()
            self._finish(posting, MessageNacked(*posting.address(), str(closed)))

    def _after_loss(self, lost: BaseException) -> None:
        self._line.discard()
        self._line.connection.maybe_switch_next()
        self._losses += 1
        pause = self._patience.pause(self._losses)
        late = time.monotonic() + pause >= self._again[0][1].deadline
        if self._patience.is_over(self._losses) or late:
            self._end_with(self._lost(lost), lost)
        for _, posting in self._again:
            posting.resent += 1
        time.sleep(pause)

    def _lost(self, cause: BaseException) -> ConnectionLost:
        broker = self._line.connection.as_uri()
        reason = f"no connection to {broker}, attempt {max(self._losses, 1)}: {cause!r}"
        return ConnectionLost(*self._again[0][1].address(), reason)

    def _end_with(self, error: PublishError, cause: BaseException | None) -> None:
        """Nothing can be published any more."""
        if not isinstance(error, MessageNacked | MessageReturned | DeclarationRefused):
            self._line.discard()
        for _, posting in self._again:
            self._finish(posting, error)
        self._again.clear()
        raise error from cause
