"""The messages that go back into the levels (early or retried), or to ``undeliverable``. Pure.

A message goes back into the levels because its destination does not accept it, because it is early,
or because only a worker of a later version can read it. The pauses between retries grow from a
second to ten minutes, so a destination in trouble costs little, even with many messages and for a
long time. No message waits in a module.

The levels release a message early if a policy gives their queues a shorter ``message-ttl``, because
RabbitMQ applies the lower one (https://www.rabbitmq.com/docs/ttl). If the clocks of producer and
worker differ, a message only looks early. A worker cannot distinguish these cases, so the message
goes back in both: a task never starts early, and wrong clocks delay it by their difference, once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import amqp

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import DelayHeaders, Failures, shortened
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.levels.warning_limit import HOUR, WarningLimit
from celery_rabbitdelay.modules.limits import check_delay
from celery_rabbitdelay.publishing import message as messages
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import Address, Content, WaitingMessage
from celery_rabbitdelay.publishing.signature import SigningKeys, signed

logger = logging.getLogger(__name__)

#: The log line of a message of a later version: the message, and the reason.
LATER_VERSION: Final = (
    "%s goes back into the delay levels, unopened: %s. Upgrade celery_rabbitdelay on all workers: "
    "without a worker of the later version, the message is undeliverable after "
    "rabbitdelay_retry_for. For an hour, further such messages are only counted."
)

#: The log line of an early message: the message, and by how many seconds it is early.
_EARLY: Final = (
    "%s left the delay levels %.1f s before it is due, by the clock of this machine, and goes back "
    "for the remaining time. For an hour, further such messages are only counted. Likely causes: a "
    "policy with a short message-ttl (see `rabbitmqctl list_policies`), or clocks that differ "
    "(`date -u`)."
)

#: Bytes of a frame reserved for headers that the broker adds, such as ``x-death``.
FRAME_RESERVE: Final = 2048


class Outgoing(NamedTuple):
    """A message to publish.

    Attributes:
        exchange: The exchange; empty for the default one.
        routing_key: The routing key.
        message: The message.
        reroute: For a message that goes into the levels: returns the current exchange and routing
            key, which depend on the remaining time. None for any other message.
        via: Another exchange and routing key that lead to the message's destination; None if the
            module publishes directly to the destination.
        obstacle: Why the message cannot be published now. The message then waits in the levels,
            which release it straight to its queue. None if the message can be published.
        is_authentic: Whether the module signs it, if there is a key. False if the received message
            was not signed.
    """

    exchange: str
    routing_key: str
    message: WaitingMessage
    reroute: Address | None = None
    via: tuple[str, str] | None = None
    obstacle: str | None = None
    is_authentic: bool = True

    @property
    def address(self) -> tuple[str, str]:
        """The exchange and the routing key to publish it with."""
        return self.via or (self.exchange, self.routing_key)


def into_levels(
    topology: Topology, message: WaitingMessage, due: Due, destination: str = DISTRIBUTION
) -> Outgoing:
    """Return a message that waits in the levels until it is due.

    Args:
        topology: The topology.
        message: The message, with all headers that its destination needs.
        due: When the message is due.
        destination: The queue that gets the due message, or :data:`.DISTRIBUTION`.
    """
    task_id = message.task_id

    def reroute() -> tuple[str, str]:
        route = topology.route(due, destination, task_id)
        return route.exchange, route.routing_key

    return Outgoing(*reroute(), message, reroute)


def with_destination(outgoing: Outgoing, **changes: Any) -> WaitingMessage:
    """Return a message with its destination in the headers, for distribution.

    An exchange or routing key that is already in the headers stays, because the consumer needs it.

    Args:
        outgoing: The message, with its exchange and key.
        **changes: Other headers to set; see :class:`.DelayHeaders`.
    """
    exchange, routing_key, (body, properties, headers) = outgoing[:3]
    changed = headers._replace(
        exchange=exchange if headers.exchange is None else headers.exchange,
        routing_key=routing_key if headers.routing_key is None else headers.routing_key,
        expiration=headers.expiration or properties.get("expiration"),
        **changes,
    )
    return WaitingMessage(body, {**properties, "expiration": None}, changed)


def delayed_task(message: amqp.Message, destination: Destination, due_ms: int) -> WaitingMessage:
    """Convert a received task to a delayed task, as if its sender had delayed it.

    Args:
        message: The task's message, with the exchange, routing key and headers of the task, even if
            it was delayed before.
        destination: The exchange and the routing key that its consumer sees.
        due_ms: When the task is due, in milliseconds since 1970-01-01 UTC.
    """
    headers, _ = header_names.parse(messages.headers_of(message))
    others = {**headers.others, **({"eta": None} if "eta" in headers.others else {})}
    delayed = DelayHeaders(
        due_ms,
        destination.exchange,
        destination.routing_key,
        registry=headers.registry,
        others=others,
    )
    return WaitingMessage.of(message, delayed).having(expiration=None)


def encoded(outgoing: Outgoing, frame_max: int) -> Content:
    """Return a message encoded for AMQP, persistent.

    Args:
        outgoing: The message, with its exchange and key.
        frame_max: The frame size: headers and properties have to fit into one frame.

    Raises:
        UnprocessableMessage: AMQP cannot carry the message.
    """
    for what, word in (("exchange", outgoing.exchange), ("routing key", outgoing.routing_key)):
        if len(word.encode(errors="surrogatepass")) > messages.MAX_SHORTSTR_BYTES:
            raise UnprocessableMessage(
                f"the {what} {shortened(word)} has more than {messages.MAX_SHORTSTR_BYTES} bytes"
            )
    body, given, delay_headers = outgoing.message
    expiration = given.get("expiration")
    if expiration is not None and not header_names.is_expiration(expiration):
        # The broker would close the channel, and fail all messages in flight on it.
        raise UnprocessableMessage(
            f"its expiration is {shortened(expiration)}, not a number of milliseconds"
        )
    try:
        headers = delay_headers.to_headers()
        properties = {**given, "delivery_mode": messages.PERSISTENT, "application_headers": headers}
        content = Content(messages.encoded(properties), body)
    except Exception as error:
        # Values of wrong types raise many kinds of errors.
        reason = f"a header or property cannot be written: {shortened(error)}"
        raise UnprocessableMessage(reason) from error
    size = len(content.properties)
    if size > frame_max - FRAME_RESERVE:
        raise UnprocessableMessage(
            f"its headers and properties take {size} bytes, more than {frame_max - FRAME_RESERVE}"
        )
    return content


#: The headers of a message that was received without any.
NO_HEADERS: Final = DelayHeaders()


def to_undeliverable(
    topology: Topology, outgoing: Outgoing, reason: str, received: DelayHeaders = NO_HEADERS
) -> Outgoing:
    """Return a message for ``undeliverable``; headers keep its destination and failures.

    Args:
        topology: The levels, with the exchange of undeliverable messages.
        outgoing: The message, with its intended exchange and key.
        reason: Why the message cannot be delivered.
        received: The parsed headers of the received message, with the earlier failures.
    """
    failures = _one_more(received.failures or outgoing.message.headers.failures, reason)
    left = with_destination(outgoing, failures=failures, reason=reason, redriven=received.redriven)
    exchange = topology.module_queues.undeliverable.exchange.name
    return Outgoing(exchange, outgoing.routing_key, left)


def _one_more(former: Failures | None, reason: str) -> Failures:
    """Add a failure with this reason to the earlier failures."""
    attempts, since_ms, first_reason = former or (0, wall_clock.ms(), reason)
    return Failures(attempts + 1, min(since_ms, wall_clock.ms()), first_reason)


def without_headers(outgoing: Outgoing) -> Outgoing:
    """Return a message for ``undeliverable`` whose headers are only its reason and its redrives."""
    headers = outgoing.message.headers
    kept = DelayHeaders(reason=headers.reason, redriven=headers.redriven)
    return Outgoing(outgoing.exchange, "", WaitingMessage(outgoing.message.body, {}, kept))


#: The longest time for which a message is put back, in milliseconds. If a clock is years behind, as
#: on a machine that has just booted, tasks are a day late at most, and not years.
MAX_PAUSE_MS: Final = 86_400_000


#: How far the remaining delay of an early message may exceed the longest delay, in milliseconds: a
#: day, because the clock of the sender or of the worker may be wrong.
DUE_SLACK_MS: Final = 86_400_000


@dataclass(frozen=True)
class EarlyMessages:
    """Detects messages that have left the levels before they are due, and puts them back.

    Attributes:
        topology: The levels.
        tolerated_ms: How many milliseconds early a message may be: the setting
            ``rabbitdelay_early_tolerance``.
        on_early: Called for every message that is unexpectedly early.
    """

    topology: Topology
    tolerated_ms: int
    on_early: Callable[[], None] = lambda: None
    _warnings: WarningLimit = field(
        default_factory=lambda: WarningLimit(logger, "Early messages", HOUR)
    )

    def until(self, headers: DelayHeaders, what: Callable[[], str]) -> int | None:
        """Return the due time of an early message; None if it is not early.

        Args:
            headers: The message's headers.
            what: Names the message for the log.
        """
        now_ms = wall_clock.ms()
        by_ms = (headers.due_ms or 0) - now_ms
        # The tolerance does not apply to a message that was put back for only a part of its delay.
        if by_ms <= (0 if headers.early.until_ms else self.tolerated_ms):
            return None
        if not headers.early.expects(now_ms, self.tolerated_ms):
            self.on_early()
            if self._warnings.allows():
                logger.warning(_EARLY, what(), by_ms / _MS_PER_S)
        return now_ms + by_ms

    def put_back(self, message: WaitingMessage) -> Outgoing | None:
        """Return the message that puts an early message back; None if it is not early.

        An envelope goes back as a whole. Body, headers and properties stay, and distribution gets
        the message again when it is due.

        Raises:
            UnprocessableMessage: The due time is too far ahead.
        """
        until_ms = self.until(
            message.headers, lambda: f"rabbitdelay distribution: message {message.task_id}"
        )
        if until_ms is None:
            return None
        # The delay was checked when the message came in, so a due time too far ahead is forged.
        # Without this check, the message would go back into the levels forever.
        check_delay(header_names.DUE, until_ms, until_ms - wall_clock.ms() - DUE_SLACK_MS)
        return into_levels(self.topology, *waiting_on(self.topology, message, until_ms))


def waiting_on(
    topology: Topology, message: WaitingMessage, until_ms: int
) -> tuple[WaitingMessage, Due]:
    """Return a message that goes back into the levels, and the end of its wait there.

    The message waits for :func:`pause_ms`; if that is less than the remaining time, it arrives
    early again.

    Args:
        topology: The levels.
        message: The message, with its due time.
        until_ms: When it may run, in milliseconds since 1970-01-01 UTC: its due time, or later if
            the registry lets the task wait.
    """
    now_ms, early = wall_clock.ms(), message.headers.early
    at_ms = min(now_ms + pause_ms(max(until_ms - now_ms, 0), topology), until_ms)
    again = early._replace(
        times=early.times + 1, until_ms=0 if at_ms == message.headers.due_ms else at_ms
    )
    return message.saying(early=again), Due.until(at_ms)


def pause_ms(by_ms: int, topology: Topology) -> int:
    """Return how long to put back a message that is ``by_ms`` early, in milliseconds.

    The result is the smallest of ``by_ms``, :data:`MAX_PAUSE_MS` and the levels' capacity.
    """
    return min(by_ms, MAX_PAUSE_MS, topology.layout.capacity_ms)


#: The seconds before the first retry, and the later pauses as a fraction of the time since the
#: first failure: a destination that was down for a minute gets its messages some 12 s after it is
#: up again.
PAUSES: Final = (1.0, 0.2)

#: The pauses if other queues may already have the message, and get a copy with every retry.
PAUSES_WITH_COPIES: Final = (60.0, 1.0)

#: The longest pause, in seconds.
LONGEST_PAUSE: Final = 600.0

#: The range of the random factor of pauses, so that messages that failed together do not return
#: together.
JITTER: Final = (0.75, 1.25)

_MS_PER_S: Final = 1000


@dataclass(frozen=True)
class Redelivery:
    """Decides when a message is retried, and when it is undeliverable.

    Attributes:
        topology: The levels in which messages wait for their retries.
        seconds: How long a message is retried; 0 for no retries.
        jitter: Returns a random number between its two arguments.
        signing_keys: Signs the waiting message; None to leave it unsigned.
    """

    topology: Topology
    seconds: float
    jitter: Callable[[float, float], float] = random.uniform
    signing_keys: SigningKeys | None = None

    def after_failure(
        self, outgoing: Outgoing, received: DelayHeaders, reason: str, makes_copies: bool = False
    ) -> Outgoing:
        """Return the message to publish after a destination did not accept a message.

        Args:
            outgoing: The message, with its destination.
            received: The parsed headers of the received message.
            reason: Why the destination did not accept it.
            makes_copies: Whether other queues may have accepted the message, and get a copy with
                every retry.

        Returns:
            The message for the levels; for ``undeliverable`` after the last retry.
        """
        failures, reasons, due = self._again(received.failures, reason, makes_copies)
        if due is None:
            return to_undeliverable(self.topology, outgoing, reasons, received)
        message = with_destination(
            outgoing, failures=failures, reason=reason, redriven=received.redriven
        )
        # Only distribution restores a priority, and a message of classic levels may bypass it.
        if outgoing.obstacle is None or self.topology.queue_type == "quorum":
            message = message.with_low_priority()
        if outgoing.is_authentic:
            message = signed(message, self.signing_keys)
        destination = outgoing.routing_key if outgoing.obstacle else DISTRIBUTION
        return into_levels(self.topology, message, due, destination)

    def until_upgraded(
        self, message: amqp.Message, reason: str, destination: str = DISTRIBUTION
    ) -> Outgoing:
        """Return the message to publish for a message that only a later version can read.

        Body, properties and headers stay; headers that count the attempts are added. Quorum queues
        in the levels take no priority above :data:`.MAX_PRIORITY`. A header that keeps a higher
        priority is added unless the message is signed: the signature covers that header, and this
        version cannot sign a message that it cannot read.

        If the message is not due yet, it waits until it is due, which does not count as an attempt.
        Every version has the same header for the due time.

        Args:
            message: The received message.
            reason: Why this version cannot read it.
            destination: The queue that it came from, or :data:`.DISTRIBUTION`.

        Returns:
            The message for the levels; for ``undeliverable`` after the last retry.
        """
        left = WaitingMessage.unopened(message).having(expiration=None)
        waiting = left
        if self.topology.queue_type == "quorum":
            waiting = left.with_low_priority()
            if left.headers.signature is not None or left.headers.priority is not None:
                waiting = waiting._replace(headers=left.headers)
        by_ms = (left.headers.due_ms or 0) - wall_clock.ms()
        if by_ms > 0:
            pause = Due.after(pause_ms(by_ms, self.topology) / _MS_PER_S)
            return into_levels(self.topology, waiting, pause, destination)
        failures, reasons, due = self._again(left.headers.failures, reason)
        if due is None:
            undeliverable = self.topology.module_queues.undeliverable.exchange.name
            key = (message.delivery_info or {}).get("routing_key", "")
            return Outgoing(undeliverable, key, left.saying(failures=failures, reason=reasons))
        waiting = waiting.saying(failures=failures, reason=reason)
        return into_levels(self.topology, waiting, due, destination)

    def _again(
        self, former: Failures | None, reason: str, makes_copies: bool = False
    ) -> tuple[Failures, str, Due | None]:
        """Add a failure; return all failures, the reason, and the end of the message's next wait.

        Args:
            former: The earlier failures.
            reason: Why the last attempt has failed.
            makes_copies: Whether other queues get a copy with every retry.

        Returns:
            The failures, the reason, and the end of the wait, which is None after the last retry.
        """
        failures = _one_more(former, reason)
        failing = (wall_clock.ms() - failures.since_ms) / _MS_PER_S
        if failing >= self.seconds:
            return failures, _explained(failures, reason), None
        first, share = PAUSES_WITH_COPIES if makes_copies else PAUSES
        pause = min(max(first, failing * share), LONGEST_PAUSE) * self.jitter(*JITTER)
        # A longer pause would go through meditation, which needs check-in.
        return failures, reason, Due.after(min(pause, self.topology.layout.capacity_ms / _MS_PER_S))


def _explained(failures: Failures, reason: str) -> str:
    """Return the first and the last reason as one text."""
    if failures.attempts == 1:
        return reason
    since = datetime.fromtimestamp(failures.since_ms / _MS_PER_S, UTC)
    first = "" if failures.first_reason == reason else f"; the first time: {failures.first_reason}"
    return f"{reason} ({failures.attempts} attempts since {since:%Y-%m-%d %H:%M:%S} UTC{first})"
