"""The messages that a module publishes for one that it has received. Pure.

A message goes back into the levels because its destination does not take it, or because it is
early. The pauses before another attempt grow from a second to ten minutes, so that a destination in
trouble costs little, however long that lasts and however many messages are due for it. No message
waits in a module for it. A message that only a worker of a later version can read goes back in the
same way.

The levels release a message early if a policy gives their queues a shorter ``message-ttl`` than
their own, because RabbitMQ applies the lower one (https://www.rabbitmq.com/docs/ttl). If the clocks
of producer and worker differ, a message only looks early. These cases look the same, so it
goes back in both: a task never starts early, and wrong clocks delay it by their difference, once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
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
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import (
    MAX_SHORTSTR_BYTES,
    PERSISTENT,
    Address,
    Content,
    WaitingMessage,
    headers_of,
)
from celery_rabbitdelay.publishing.message import encoded as encoded_properties
from celery_rabbitdelay.publishing.signature import SigningKeys, signed

logger = logging.getLogger(__name__)

#: What the log says of a message of a later version: what it is, and why it is of one.
LATER_VERSION: Final = (
    "%s goes back into the delay levels, unopened: %s. Upgrade celery_rabbitdelay on all workers: "
    "without one of the later version, it is undeliverable after rabbitdelay_retry_for. Others go "
    "back without a word for an hour."
)

#: What the log says of a message that is early: what it is, and by how many seconds.
_EARLY: Final = (
    "%s left the delay levels %.1f s before it is due, by the clock of this machine, and goes back "
    "into them for the rest. Others go back without a word for an hour. Likely causes: a policy "
    "with a short message-ttl (see `rabbitmqctl list_policies`), or clocks that differ (`date -u`)."
)

#: Bytes of a frame reserved for headers that the broker adds, such as ``x-death``.
FRAME_RESERVE: Final = 2048


class Outgoing(NamedTuple):
    """A message to publish.

    Attributes:
        exchange: The exchange; empty for the default one.
        routing_key: The routing key.
        message: The message.
        reroute: For a message that goes into the levels, returns exchange and routing key anew at
            each attempt, because they depend on the time that is left; None for any other message.
        via: Exchange and routing key by which it reaches the above; None if it is published
            straight there.
        obstacle: Why it is not published now, but tried later straight from the levels; None if it
            is published.
        is_authentic: Whether the module signs it, if there is a key. Not if it is made of a message
            whose sender has shown no key.
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
        """The exchange and the routing key that it is published with."""
        return self.via or (self.exchange, self.routing_key)


def into_levels(
    topology: Topology, message: WaitingMessage, due: Due, destination: str = DISTRIBUTION
) -> Outgoing:
    """Return a message that waits in the levels until it is due.

    Args:
        topology: The topology.
        message: The message, with all headers that its destination needs.
        due: When it is due.
        destination: The queue that gets it then, or :data:`.DISTRIBUTION`.
    """
    task_id = message.task_id

    def reroute() -> tuple[str, str]:
        route = topology.route(due, destination, task_id)
        return route.exchange, route.routing_key

    return Outgoing(*reroute(), message, reroute)


def with_destination(outgoing: Outgoing, **changes: Any) -> WaitingMessage:
    """Return a message whose headers say where distribution publishes it.

    What they say already stays: distribution has left it, because its consumer needs it.

    Args:
        outgoing: The message, with the exchange and key that it goes to then.
        **changes: What else its headers say from now on; see :class:`.DelayHeaders`.
    """
    exchange, routing_key, (body, properties, said) = outgoing[:3]
    told = said._replace(
        exchange=exchange if said.exchange is None else said.exchange,
        routing_key=routing_key if said.routing_key is None else said.routing_key,
        expiration=said.expiration or properties.get("expiration"),
        **changes,
    )
    return WaitingMessage(body, {**properties, "expiration": None}, told)


def delayed_task(message: amqp.Message, destination: Destination, due_ms: int) -> WaitingMessage:
    """Return a task that was received, as its sender would have delayed it.

    Args:
        message: Its message, restored if it was delayed before.
        destination: The exchange and the routing key that its consumer sees.
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC.
    """
    headers, _ = header_names.parse(headers_of(message))
    others = {**headers.others, **({"eta": None} if "eta" in headers.others else {})}
    said = DelayHeaders(
        due_ms,
        destination.exchange,
        destination.routing_key,
        registry=headers.registry,
        others=others,
    )
    return WaitingMessage.of(message, said).having(expiration=None)


def encoded(outgoing: Outgoing, frame_max: int) -> Content:
    """Return a message as AMQP writes it, persistent.

    Args:
        outgoing: The message, with its exchange and key.
        frame_max: The bytes of a frame, which headers and properties have to fit into.

    Raises:
        UnprocessableMessage: AMQP cannot carry it.
    """
    for what, word in (("exchange", outgoing.exchange), ("routing key", outgoing.routing_key)):
        if len(word.encode(errors="surrogatepass")) > MAX_SHORTSTR_BYTES:
            raise UnprocessableMessage(
                f"the {what} {shortened(word)} has more than {MAX_SHORTSTR_BYTES} bytes"
            )
    body, given, said = outgoing.message
    expiration = given.get("expiration")
    if expiration is not None and not header_names.is_expiration(expiration):
        # The broker would close the channel, with all that is in flight on it.
        raise UnprocessableMessage(
            f"its expiration is {shortened(expiration)}, not a number of milliseconds"
        )
    try:
        headers = said.to_headers()
        properties = {**given, "delivery_mode": PERSISTENT, "application_headers": headers}
        content = Content(encoded_properties(properties), body)
    except Exception as error:
        # Values of wrong types raise errors of many kinds.
        reason = f"a header or property cannot be written: {shortened(error)}"
        raise UnprocessableMessage(reason) from error
    size = len(content.properties)
    if size > frame_max - FRAME_RESERVE:
        raise UnprocessableMessage(
            f"its headers and properties take {size} bytes, a frame has {frame_max}"
        )
    return content


def to_undeliverable(
    topology: Topology, outgoing: Outgoing, reason: str, redriven: int = 0
) -> Outgoing:
    """Return a message for ``undeliverable``, with its destination and the reason in headers.

    Args:
        topology: The levels, with the exchange of undeliverable messages.
        outgoing: The message, with the exchange and key that it was meant for.
        reason: Why it cannot be delivered.
        redriven: How often the message was redriven that the module has received for it.
    """
    left = with_destination(outgoing, reason=reason, redriven=redriven)
    exchange = topology.module_queues.undeliverable.exchange.name
    return Outgoing(exchange, outgoing.routing_key, left)


def without_headers(outgoing: Outgoing) -> Outgoing:
    """Return a message for ``undeliverable`` without the headers that do not fit into a frame."""
    said = outgoing.message.headers
    kept = DelayHeaders(reason=said.reason, redriven=said.redriven)
    return Outgoing(outgoing.exchange, "", WaitingMessage(outgoing.message.body, {}, kept))


#: The longest time, in milliseconds, for which a message is put back at once. A clock that is years
#: behind, on a machine that has just booted for example, then costs a day and not those years.
MAX_PAUSE_MS: Final = 86_400_000


#: How much further ahead than the longest delay the due time of a message may be that has left the
#: levels, in milliseconds: a day. The clock of its sender or of the worker may be wrong.
DUE_SLACK_MS: Final = 86_400_000


class EarlyMessages:
    """Detects messages that have left the levels before they are due, and puts them back.

    Args:
        topology: The levels.
        tolerated_ms: How many milliseconds early a message may be: the setting
            ``rabbitdelay_early_tolerance``.
        on_early: Called for each message that was not expected to be early.
    """

    def __init__(
        self,
        topology: Topology,
        tolerated_ms: int,
        on_early: Callable[[], None] = lambda: None,
    ) -> None:
        self._topology = topology
        self._tolerated_ms = tolerated_ms
        self._on_early = on_early
        self._warnings = WarningLimit(logger, "Early messages", HOUR)

    def until(self, headers: DelayHeaders, what: Callable[[], str]) -> int | None:
        """Return when a message is due that is early; None if it is not.

        Args:
            headers: Its headers.
            what: Says what it is, for the log.
        """
        now_ms = wall_clock.ms()
        by_ms = (headers.due_ms or 0) - now_ms
        # Nothing is tolerated if it was put back before for only a part of its delay.
        if by_ms <= (0 if headers.early.until_ms else self._tolerated_ms):
            return None
        if not headers.early.expects(now_ms, self._tolerated_ms):
            self._on_early()
            if self._warnings.allows():
                logger.warning(_EARLY, what(), by_ms / _MS_PER_S)
        return now_ms + by_ms

    def put_back(self, message: WaitingMessage) -> Outgoing | None:
        """Return the message as it goes back into the levels; None if it is not early.

        An envelope goes back as a whole. Body, headers and properties stay, and distribution gets
        the message again, when it is due.

        Raises:
            UnprocessableMessage: It is early by more than the longest delay.
        """
        until_ms = self.until(message.headers, lambda: f"Distribution: message {message.task_id}")
        if until_ms is None:
            return None
        # The delay was checked when the message came in. A due time too far ahead is forged, and
        # the message would go back into the levels for ever.
        check_delay(header_names.DUE, until_ms, until_ms - wall_clock.ms() - DUE_SLACK_MS)
        return into_levels(self._topology, *waiting_on(self._topology, message, until_ms))


def waiting_on(
    topology: Topology, message: WaitingMessage, until_ms: int
) -> tuple[WaitingMessage, Due]:
    """Return a message that goes back into the levels, and for how long it waits there.

    That is for the rest, or if it is longer, for :data:`MAX_PAUSE_MS` or the capacity of the
    levels: then the message arrives early once more.

    Args:
        topology: The levels.
        message: The message, with its due time.
        until_ms: Until when it waits on, in milliseconds since 1970-01-01 UTC. It is not its due
            time if the registry says that a task waits.
    """
    now_ms, early = wall_clock.ms(), message.headers.early
    at_ms = min(now_ms + pause_ms(max(until_ms - now_ms, 0), topology), until_ms)
    again = early._replace(
        times=early.times + 1, until_ms=0 if at_ms == message.headers.due_ms else at_ms
    )
    return message.saying(early=again), Due.until(at_ms)


def pause_ms(by_ms: int, topology: Topology) -> int:
    """Return for how many milliseconds to put a message back that is early by ``by_ms``.

    That is the rest, or if it is longer, :data:`MAX_PAUSE_MS` or the capacity of the levels: then
    the message arrives early once more.
    """
    return min(by_ms, MAX_PAUSE_MS, topology.layout.capacity_ms)


#: Seconds before the second attempt, and each further pause as a share of the time since the first
#: failure: a destination that was away for a minute gets its messages some 12 s after its return.
PAUSES: Final = (1.0, 0.2)

#: The same if other queues may have the message already, and get a copy with each attempt.
PAUSES_WITH_COPIES: Final = (60.0, 1.0)

#: The longest pause, in seconds.
LONGEST_PAUSE: Final = 600.0

#: Each pause is multiplied by a random number in this range, so that messages which were refused
#: together do not come back together.
JITTER: Final = (0.75, 1.25)

_MS_PER_S: Final = 1000


@dataclass(frozen=True)
class Redelivery:
    """Decides when a message is tried again, and when it is given up.

    Attributes:
        topology: The levels that it waits in.
        seconds: How long a message is tried again; 0 for not at all.
        jitter: Returns a random number between two others.
        signing_keys: Signs the message that waits; None: it stays unsigned.
    """

    topology: Topology
    seconds: float
    jitter: Callable[[float, float], float] = random.uniform
    signing_keys: SigningKeys | None = None

    def after_failure(
        self, outgoing: Outgoing, received: DelayHeaders, reason: str, makes_copies: bool = False
    ) -> Outgoing:
        """Return what to publish for a message that its destination has not taken.

        Args:
            outgoing: The message, with its destination.
            received: The parsed headers of the message that the module received.
            reason: Why the destination has not taken it.
            makes_copies: Whether other queues may have taken it, and get it with each attempt.

        Returns:
            The message for the levels; for ``undeliverable`` if it has been tried for too long.
        """
        failures, reasons, due = self._again(received.failures, reason, makes_copies)
        if due is None:
            return to_undeliverable(self.topology, outgoing, reasons, received.redriven)
        message = with_destination(
            outgoing, failures=failures, reason=reason, redriven=received.redriven
        )
        # Only distribution gives a priority back, and one of classic levels need not go there.
        if outgoing.obstacle is None or self.topology.queue_type == "quorum":
            message = message.with_low_priority()
        if outgoing.is_authentic:
            message = signed(message, self.signing_keys)
        destination = outgoing.routing_key if outgoing.obstacle else DISTRIBUTION
        return into_levels(self.topology, message, due, destination)

    def until_upgraded(
        self, message: amqp.Message, reason: str, destination: str = DISTRIBUTION
    ) -> Outgoing:
        """Return what to publish for a message that only a later version can read.

        Its body, its properties and all its headers stay; those that count the attempts are added.
        Quorum queues in the levels take no priority above :data:`.MAX_PRIORITY`. The header that
        keeps a higher one is added if the message is not signed: a signature covers that header,
        and whoever cannot read a message does not sign it.
        If it is not due yet, which every version reads from the same header, it waits until then,
        and that is no attempt.

        Args:
            message: The message, as it was received.
            reason: Why this version cannot read it.
            destination: The queue that it came from, or :data:`.DISTRIBUTION`.

        Returns:
            The message for the levels; for ``undeliverable`` if it has been tried for too long.
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
        """Return the failed attempts with one more, all reasons, and until when the message waits.

        Args:
            former: The failed attempts before it.
            reason: Why it has failed.
            makes_copies: Whether other queues get the message with each attempt.

        Returns:
            None for the last if it has failed for too long.
        """
        now_ms = wall_clock.ms()
        failures = Failures(1, now_ms, reason)
        if former is not None:
            since_ms = min(former.since_ms, now_ms)
            failures = Failures(former.attempts + 1, since_ms, former.first_reason)
        failing = (now_ms - failures.since_ms) / _MS_PER_S
        if failing >= self.seconds:
            return failures, _explained(failures, reason), None
        first, share = PAUSES_WITH_COPIES if makes_copies else PAUSES
        pause = min(max(first, failing * share), LONGEST_PAUSE) * self.jitter(*JITTER)
        # Above the capacity, it would wait in meditation, which needs check-in.
        return failures, reason, Due.after(min(pause, self.topology.layout.capacity_ms / _MS_PER_S))


def _explained(failures: Failures, reason: str) -> str:
    """Return a text with the first and the last reason."""
    if failures.attempts == 1:
        return reason
    since = datetime.fromtimestamp(failures.since_ms / _MS_PER_S, UTC)
    first = "" if failures.first_reason == reason else f"; the first time: {failures.first_reason}"
    return f"{reason} ({failures.attempts} attempts since {since:%Y-%m-%d %H:%M:%S} UTC{first})"
