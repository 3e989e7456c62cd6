"""The publish loop, which keeps many messages in flight until each has its outcome.

In a publisher, an iterator supplies the messages; in a module, a consumer supplies them. The loop
keeps the window full and resends nacked messages after a pause. For a returned message, it declares
the topology again. It gives up on messages after their timeout, and finds the message that made the
broker close the channel. The loop uses one channel at a time; after a lost connection, its owner
opens the next channel.
"""

from __future__ import annotations

import math
import random
import struct
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from amqp import spec
from amqp.exceptions import ChannelError, FrameSyntaxError, NotFound

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.publishing.confirm_channel import ConfirmChannel
from celery_rabbitdelay.publishing.message import Declaration, Publication
from celery_rabbitdelay.publishing.refusals import error_of

#: If a source takes this many seconds or more per message, every message is written at once, not in
#: batches.
SLOW_SOURCE: Final = 0.005

#: The maximum seconds between two reads of the broker's answers while messages are sent.
READ_EVERY: Final = 0.05

#: The minimum timeout of a write, in seconds, after the deadline has passed.
MIN_WRITE_TIME: Final = 0.001

#: The reason for unconfirmed messages during an alarm; py-amqp drops the broker's reason.
BLOCKED: Final = (
    "RabbitMQ blocks publishers, because a node is low on memory or disk space: see "
    "rabbitmq-diagnostics alarms"
)

#: The reason for unconfirmed messages if the broker has not settled any message.
NOT_IN_TIME: Final = "the broker did not confirm in time"

#: Returns the next message; None if there is no message at present.
NextPublication: TypeAlias = Callable[[], Publication | None]

#: Default maximum of resends: no limit except the timeout.
RESENDS: Final = None

#: Default pauses before resends, in seconds: the first pause, the increment, and the maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: The fraction of a pause that is random, so that producers that lost the same node do not
#: reconnect at the same instant.
JITTER: Final = 0.25

#: Minimum seconds before the second resend and every later resend, for any backoff: a port that
#: refuses connections answers thousands of times a second.
MIN_PAUSE: Final = 0.01


class PublishPolicy(NamedTuple):
    """The limits of publishing: timeout, resends and window.

    Attributes:
        timeout: Seconds for one message, from connecting through resends to the confirm.
        resends: Maximum resends of one message after a nack, and maximum consecutive lost
            connections. None for no limit except the timeout.
        backoff: The seconds before the first resend, the increment, and the maximum.
        window: The maximum number of messages in flight.
        reconnects: The maximum number of attempts to connect after a failed attempt. All attempts
            together take at most the connection's ``connect_timeout``. None for no limit except
            ``resends`` and the timeout.
    """

    timeout: float = 30.0
    resends: int | None = RESENDS
    backoff: tuple[float, float, float] = BACKOFF
    window: int = 1000
    reconnects: int | None = None

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait before a resend, counted from 1."""
        first, step, longest = self.backoff
        seconds = first if attempt == 1 else min(first + step * (attempt - 1), longest)
        seconds *= 1 - JITTER * random.random()  # noqa: S311 - jitter is no secret
        return seconds if attempt == 1 else max(seconds, MIN_PAUSE)

    def is_over(self, attempt: int) -> bool:
        """Return whether a resend, counted from 1, exceeds the maximum."""
        return self.resends is not None and attempt > self.resends


DEFAULT_POLICY: Final = PublishPolicy()


class MayPass(Exception):
    """Wraps an error of this package after which another attempt may succeed."""


class _CallersError(BaseException):
    """Wraps an error of the source or of ``done``, which must not count as a connection error."""


@contextmanager
def unwrap_callers_errors() -> Iterator[None]:
    """Raise the error inside a :class:`_CallersError`: the one that the caller's code raised."""
    try:
        yield
    except _CallersError as wrapped:
        (error,) = wrapped.args
        raise error from error.__cause__


class PublishLoop:
    """Publishes messages over one channel after another.

    Args:
        source: Returns the next message; called at most ``window`` messages ahead. A message
            without a deadline gets one from the policy's timeout.
        policy: The timeout and the resends of each message.
        done: Called with each message that is confirmed or has an error.
        redeclare: Declares the topology again if a message is returned, or an exchange does not
            exist. The message is then sent once more. None to let the message fail.

    Attributes:
        policy: The policy.
        window: The maximum number of messages in flight.
        last_settled: When the broker last settled a message, on the clock of
            :func:`time.monotonic`; 0 before the first settled message.
    """

    def __init__(
        self,
        source: NextPublication,
        policy: PublishPolicy,
        done: Callable[[Publication], None],
        redeclare: Declaration | None = None,
    ) -> None:
        self.policy = policy
        self.window = policy.window
        self.last_settled = 0.0
        self._source = source
        self._done = done
        self._redeclare = redeclare
        self._must_redeclare = False
        self._channel: ConfirmChannel | None = None
        #: Messages to send before new messages from the source, mostly resends, and when to send
        #: each message; the earliest first.
        self._queued: deque[tuple[float, Publication]] = deque()
        #: The number of messages still to be resent one at a time, to find the message that made
        #: the broker close the channel.
        self._suspects_left = 0
        #: Whether the last call of the source returned no message.
        self._source_is_empty = False
        #: Seconds that the source took for its last message; initially the value of a slow source.
        self._source_took = SLOW_SOURCE
        #: Time of the last progress, from which the timeout counts.
        self._progress = time.monotonic()
        #: When :meth:`flush` next reads answers.
        self._read_at = 0.0

    @property
    def channel(self) -> ConfirmChannel:
        """The channel that messages are sent on."""
        assert self._channel is not None, "the loop has no channel yet"
        return self._channel

    def use(self, channel: ConfirmChannel) -> None:
        """Send on this channel from now on; the former channel must have no messages in flight."""
        self._channel = channel
        self._progress = time.monotonic()

    def has_more(self) -> bool:
        """Return whether work is left; may take a message from the source."""
        if self._channel is not None and self._channel.unconfirmed:
            return True
        if not self._queued and (publication := self._take()) is not None:
            self._queued.append((0.0, publication))
        return bool(self._queued)

    @property
    def has_unwritten(self) -> bool:
        """Whether a message is ready to be sent, and not in a pause."""
        return bool(self._queued) and self._queued[0][0] <= time.monotonic()

    def add(self, publication: Publication) -> None:
        """Queue a message that is not from the source, after the messages ready to be sent."""
        publication.deadline = time.monotonic() + self.policy.timeout
        self._queue(publication, time.monotonic())

    def _queue(self, publication: Publication, at: float) -> None:
        insort(self._queued, (at, publication), key=itemgetter(0))

    @property
    def silent_for(self) -> float:
        """Seconds since the last progress; 0 if no message is in flight or the broker blocks."""
        channel = self.channel
        if not channel.unconfirmed or channel.blocked is not None:
            return 0.0
        return time.monotonic() - self._progress

    @property
    def next_waiting(self) -> Publication:
        """The message that is sent next; at least one message must be queued."""
        return self._queued[0][1]

    def send_first(self, publication: Publication) -> None:
        """Queue a message ahead of all others.

        ``done`` uses this method to publish a replacement, such as the copy for ``undeliverable``.
        The message is not sent at once, because the channel reads the broker's answers while
        ``done`` runs.
        """
        self._queued.appendleft((0.0, publication))
        if self._suspects_left:
            # The message is sent before the next suspected message, and its outcome counts like a
            # suspect's.
            self._suspects_left += 1

    def send(self, timeout: float | None = None) -> bool:
        """Send messages until the window is full; the channel's flush writes them.

        While messages are in flight, this method returns after :data:`READ_EVERY` seconds even if
        the window has room, so that its owner can do other work.

        Args:
            timeout: Maximum seconds for writing; None: until the oldest message's deadline.

        Returns: Whether time was up, so that more messages may be ready.
        """
        if self._must_redeclare:
            self._ensure_declared(self._redeclare, self.next_waiting, again=True)
            self._must_redeclare = False
        channel = self.channel
        timeout = self._time_to_write() if timeout is None else timeout
        read_at = time.monotonic() + READ_EVERY
        # After a returned message, declare first.
        while channel.blocked is None and not self._must_redeclare:
            in_flight = len(channel.unconfirmed)
            publication = self._next(in_flight)
            if publication is None:
                break
            if not in_flight:
                self._progress = time.monotonic()
            if publication.declare is not None and not self._is_prepared(publication):
                continue
            try:
                channel.send(publication, timeout)
            except (FrameSyntaxError, struct.error) as error:
                reason = f"message cannot be written in AMQP: {error}"
                address = publication.exchange, publication.routing_key
                publication.error = exceptions.PublishError(*address, reason)
                self._finish(publication)
            if self._source_took >= SLOW_SOURCE:
                channel.flush(timeout)
            if time.monotonic() >= read_at and channel.unconfirmed:
                channel.flush(timeout)
                channel.read_all()
                return True
        return False

    def _ensure_declared(
        self, declare: Declaration | None, publication: Publication, again: bool = False
    ) -> None:
        """Declare the topology or the queue of a message; an error becomes the message's error.

        After a :class:`MayPass`, the message is sent again. A module declares nothing.

        Args:
            declare: The declaration; None if there is nothing to declare.
            publication: The message.
            again: Whether to repeat a declaration that was made on the same connection.
        """

    def _is_prepared(self, publication: Publication) -> bool:
        """Call a message's own ``declare``; return whether to send the message now."""
        try:
            self._ensure_declared(publication.declare, publication)
        except MayPass as refused:
            (publication.error,) = refused.args
            self.settled(publication, may_pass=True)
            publication.resent += 1
        except exceptions.RabbitDelayError as error:
            publication.error = error
            self.settled(publication)
        except BaseException:
            self._queued.appendleft((0.0, publication))
            raise
        else:
            return True
        return False

    def flush(self) -> None:
        """Write the channel's batch; read the broker's answers every :data:`READ_EVERY` seconds."""
        channel, now = self.channel, time.monotonic()
        channel.flush(self._time_to_write())
        if now >= self._read_at:
            channel.read_all()
            self._read_at = time.monotonic() + READ_EVERY

    def _time_to_write(self) -> float:
        """Return the seconds until the deadline of the oldest message."""
        left, oldest = self.policy.timeout, self._oldest
        if oldest is not None:
            left = min(left, oldest.deadline - time.monotonic())
        return max(left, MIN_WRITE_TIME)

    @property
    def _oldest(self) -> Publication | None:
        """The first message in flight, or else the first queued message."""
        waiting = self._queued[0][1] if self._queued else None
        return next(iter(self.channel.unconfirmed.values()), waiting)

    def _next(self, in_flight: int) -> Publication | None:
        if in_flight >= (1 if self._suspects_left else self.window):
            return None
        if self._queued and self._queued[0][0] <= time.monotonic():
            return self._queued.popleft()[1]
        if self._suspects_left or in_flight + len(self._queued) >= self.window:
            return None
        return self._take()

    def _take(self) -> Publication | None:
        began = time.monotonic()
        try:
            publication = self._source()
        except Exception as error:
            raise _CallersError(error) from error
        now = time.monotonic()
        self._source_took = now - began
        if self._source_took >= READ_EVERY:
            self.excuse(self._source_took)
        self._source_is_empty = publication is None
        if publication is not None and publication.deadline == math.inf:
            publication.deadline = now + self.policy.timeout
        return publication

    def excuse(self, seconds: float) -> None:
        """Extend all deadlines by the seconds in which no answers could be read."""
        self._progress += seconds
        in_flight = self._channel.unconfirmed.values() if self._channel else ()
        for publication in (*in_flight, *(publication for _, publication in self._queued)):
            publication.deadline += seconds

    def wait(self) -> None:
        """Read answers until more messages can be sent, or a deadline has passed."""
        channel, oldest, now = self.channel, self._oldest, time.monotonic()
        if oldest is None:
            return
        resend_at = self._queued[0][0] if self._queued else oldest.deadline
        if self._suspects_left:
            room = 0
        elif self._queued and resend_at <= now:
            room = self.window
        else:
            room = 0 if self._source_is_empty else max(self.window - len(self._queued), 0)
        # Wait until a quarter of the window is free, so that messages are written in batches.
        enough = room * 3 // 4
        was_blocked, was_in_flight = channel.blocked is not None, bool(channel.unconfirmed)
        if not was_blocked and not was_in_flight and resend_at <= now:
            # A resend has become due since send().
            return

        def can_go_on() -> bool:
            if was_blocked or channel.blocked is not None:
                return was_blocked != (channel.blocked is not None)
            return was_in_flight and len(channel.unconfirmed) <= enough

        wake = resend_at if now < resend_at < oldest.deadline else oldest.deadline
        if not channel.drain(can_go_on, wake):
            self.check_time()

    def check_time(self) -> None:
        """Give up on the messages whose deadline has passed.

        Raises:
            ConfirmTimeout: The broker has settled no message within the timeout.
            ConnectionBlocked: The broker blocks the connection at the deadline.
        """
        channel, now = self.channel, time.monotonic()
        if not channel.unconfirmed or channel.blocked is not None:
            self._progress = now
        oldest = self._oldest
        if oldest is None:
            return
        if oldest.deadline <= now:
            self._give_up(oldest)
        elif now - self._progress > self.policy.timeout:
            raise exceptions.ConfirmTimeout(*oldest.address(), NOT_IN_TIME)

    def _give_up(self, oldest: Publication) -> None:
        channel = self.channel
        was_in_flight = oldest in channel.unconfirmed.values()
        # This process may have been busy or suspended while the broker answered.
        channel.read_all()
        if was_in_flight and oldest not in channel.unconfirmed.values():
            return
        if channel.blocked is not None:
            raise exceptions.ConnectionBlocked(*oldest.address(), BLOCKED)
        now = time.monotonic()
        taken_at = oldest.deadline - self.policy.timeout
        over = [each for each in channel.unconfirmed.values() if each.deadline <= now]
        if self.last_settled <= taken_at or not channel.unconfirmed:
            # The broker has settled nothing, perhaps because all messages were for one queue that
            # does not answer. If the source publishes replacements, their outcomes will show the
            # cause.
            over = [each for each in over if each.single_attempt]
            if not over:
                raise exceptions.ConfirmTimeout(*oldest.address(), NOT_IN_TIME)
        unanswered = channel.unanswered
        channel.unconfirmed.forget(over)
        self._suspects_left = max(self._suspects_left - len(over), 0)
        for publication in over:
            publication.unanswered |= publication in unanswered
            reason = "the broker did not confirm the message in time"
            publication.error = exceptions.ConfirmTimeout(*publication.address(), reason)
            self._finish(publication)

    def settled(self, publication: Publication, may_pass: bool = False) -> None:
        """Handle a publication that the broker has settled; called by the channel.

        Args:
            publication: The publication, with its error.
            may_pass: Whether another attempt may succeed, as after a nack.
        """
        self.last_settled = self._progress = time.monotonic()
        self._suspects_left = max(self._suspects_left - 1, 0)
        error = publication.error
        may_pass = may_pass or isinstance(error, exceptions.MessageNacked)
        may_redeclare = self._redeclare is not None and not publication.redeclared
        again_at = math.inf
        if may_pass and not publication.single_attempt:
            attempt = publication.resent + 1
            if not self.policy.is_over(attempt):
                again_at = self._progress + self.policy.pause(attempt)
        elif isinstance(error, exceptions.MessageReturned) and may_redeclare:
            publication.redeclared = self._must_redeclare = True
            again_at = 0.0
        if again_at < publication.deadline:
            publication.error = None
            self._queue(publication, again_at)
        else:
            self._finish(publication)

    def _finish(self, publication: Publication) -> None:
        if publication.error is not None:
            publication.error.may_have_arrived = publication.may_have_arrived
        try:
            self._done(publication)
        except Exception as error:
            raise _CallersError(error) from error

    def take_back(self, closed_for_one: bool = False) -> int:
        """Queue the messages in flight before all others, in their order, and drop the channel.

        Args:
            closed_for_one: Whether the broker closed the channel because of one of the messages.

        Returns:
            The number of messages in flight.
        """
        if self._channel is None:
            return 0
        written, in_flight = self._channel.unanswered, [*self._channel.unconfirmed.values()]
        self._channel = None
        for publication in written:
            publication.unanswered |= not closed_for_one
            publication.suspected |= closed_for_one and len(written) > 1
        for publication in in_flight:
            # A message may have been returned and not acked before the connection was lost.
            publication.error = None
        self._queued.extendleft((0.0, publication) for publication in reversed(in_flight))
        return len(in_flight)

    def channel_closed(self, closed: ChannelError) -> Publication | None:
        """Find the message that made the broker close the channel; AMQP does not name it.

        Call this method before the next :meth:`use`. If several messages are in flight, they are
        resent one at a time until the broker closes the channel again. If an exchange does not
        exist, the topology is declared again first.

        Returns:
            The message, with its error; None if the message is not found yet.

        Raises:
            amqp.exceptions.ChannelError: The channel was not closed because of a message.
        """
        for_a_message = closed.method_sig == spec.Basic.Publish
        in_flight = self.take_back(for_a_message)
        if not for_a_message or not in_flight:
            raise closed
        suspects = [publication for _, publication in islice(self._queued, in_flight)]
        may_redeclare = self._redeclare is not None and not suspects[0].redeclared
        if isinstance(closed, NotFound) and may_redeclare:
            self._must_redeclare = True
            for publication in suspects:
                publication.redeclared = True
            return None
        if in_flight > 1:
            self._suspects_left = in_flight
            return None
        self._suspects_left = max(self._suspects_left - 1, 0)
        (culprit,) = suspects
        self._queued.popleft()
        culprit.suspected = False
        address = culprit.exchange, culprit.routing_key
        if isinstance(closed, NotFound):
            culprit.error = exceptions.MessageReturned(*address, str(closed))
        else:
            kinds = exceptions.MessageRefused, exceptions.MessageNotPermitted
            culprit.error = error_of(closed, address, *kinds)
        culprit.error.__cause__ = closed
        self._finish(culprit)
        return culprit

    def fail_all(self, error: exceptions.RabbitDelayError) -> None:
        """Finish all queued messages with an error.

        A message with another ``may_have_arrived`` gets a copy of the error with its own value.
        """
        error.may_have_arrived |= any(each.may_have_arrived for _, each in self._queued)
        errors = {error.may_have_arrived: error}
        while self._queued:
            _, publication = self._queued.popleft()
            arrived = publication.may_have_arrived
            publication.error = errors.setdefault(arrived, error.copy(arrived))
            self._finish(publication)
