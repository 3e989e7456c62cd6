"""Retry, dead-letter or reject the messages that a module cannot publish or read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, TypeAlias, cast

from amqp.exceptions import NotFound

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.levels.headers import DelayHeaders, shortened, unopened
from celery_rabbitdelay.levels.warning_limit import HOUR, WarningLimit
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.modules.answer_times import MAX_REMEMBERED, AnswerTimes
from celery_rabbitdelay.modules.deliveries import Module, Received
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.publishing.message import Content, Publication, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import signed
from celery_rabbitdelay.publishing.wire import REJECT

logger = logging.getLogger(__name__)

#: Seconds until the broker is asked again for an exchange that did not exist.
ASK_AGAIN: Final = 1.0

#: Limit of missing exchanges found per second. Every answer about a missing exchange costs a
#: channel, and some milliseconds in which the module cannot publish.
MAX_MISSING: Final = 20

#: The context of a publication: the received message, the message published for it, and the name of
#: its destination.
Origin: TypeAlias = tuple[Received, Outgoing, str | None]


@dataclass(eq=False, repr=False)
class MissingExchanges:
    """Caches whether exchanges exist.

    If a message goes to a missing exchange, the broker closes the channel, and all messages in
    flight on the channel fail.

    Attributes:
        ask: Asks the broker whether an exchange exists.
        always: Exchanges that always exist; the broker is not asked about these.
        clock: Returns the time in seconds, like :func:`time.monotonic`.
    """

    ask: Callable[[str], bool]
    always: Collection[str]
    clock: Callable[[], float] = time.monotonic
    _known: set[str] = field(default_factory=set)
    #: The missing exchanges, with the time until which the answer is cached.
    _missing: dict[str, float] = field(default_factory=dict)

    def why_missing(self, exchange: str, is_limited: bool = True) -> str | None:
        """Return why nothing can be published to an exchange; None if the exchange exists.

        A missing exchange is looked up again after a second. After :data:`MAX_MISSING` missing
        exchanges within a second, the broker is not asked about more names.

        Args:
            exchange: The exchange's name.
            is_limited: Whether the limit :data:`MAX_MISSING` applies, because a client may have
                chosen the name.
        """
        if exchange in self.always or exchange in self._known:
            return None
        now = self.clock()
        self._missing = {name: until for name, until in self._missing.items() if now < until}
        if exchange not in self._missing:
            if is_limited and len(self._missing) >= MAX_MISSING:
                return (
                    f"the exchange {shortened(exchange)} was not looked up, because "
                    f"{len(self._missing)} others were missing within one second"
                )
            if self.ask(exchange):
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.pop()
                self._known.add(exchange)
                return None
            self.add(exchange)
        return no_exchange(exchange)

    def add(self, exchange: str) -> None:
        """Record that the broker has reported an exchange as missing."""
        self._known.discard(exchange)
        if len(self._missing) < MAX_REMEMBERED:
            self._missing[exchange] = self.clock() + ASK_AGAIN


def no_exchange(exchange: str) -> str:
    """Return the failure reason for an exchange that does not exist."""
    return f"there is no exchange {exchange!r}"


@dataclass(eq=False, repr=False)
class Forwarder:
    """Makes publications from messages, and replaces every failed publication.

    ==================================== ====================================================
    failure                              replaced by a publication to
    ==================================== ====================================================
    the destination does not take it     the levels; after ``retry_for``, ``undeliverable``
    it requires a later version          the levels; after ``retry_for``, ``undeliverable``
    it can never be published            ``undeliverable``
    the levels nack it                   the levels again, by a new route
    ``undeliverable`` nacks it           ``undeliverable`` again
    ``undeliverable`` can never take it  ``undeliverable`` without the headers; then the received
                                         message is rejected, and the broker dead-letters it
    ==================================== ====================================================

    Attributes:
        module: The module.
        exists: Asks the broker whether an exchange exists.
        frame_max: The frame size of the connection, in bytes.
        answer_times: The state of destinations, kept across connections.
        bytes_in_flight: The bytes of the bodies in flight.
    """

    module: Module
    exists: Callable[[str], bool]
    frame_max: int
    answer_times: AnswerTimes
    bytes_in_flight: int = 0

    def __post_init__(self) -> None:
        """Start without messages in flight."""
        self.statistics = self.module.statistics
        self.name, topology = self.module.name, self.module.topology
        self.undeliverable = topology.module_queues.undeliverable.exchange.name
        self.redelivery = forwarding.Redelivery(
            topology, self.module.retry_for, signing_keys=self.module.signing_keys
        )
        self.answer_times.begin()
        self.missing = MissingExchanges(self.exists, frozenset(("", self.undeliverable)))
        log_name = f"rabbitdelay {self.name}"
        self._not_taken = WarningLimit(logger, f"{log_name}: retried messages")
        self._given_up = WarningLimit(logger, f"{log_name}: undeliverable messages")
        self._later = WarningLimit(logger, f"{log_name}: messages of a later version", HOUR)

    def first(
        self, received: Received, outgoing: Outgoing, broker_silent_for: float
    ) -> Publication | None:
        """Return the first publication for a message: to its destination, or a replacement.

        Args:
            received: The received message that it is published for.
            outgoing: The message.
            broker_silent_for: Seconds since the broker's last answer about any destination.

        Returns:
            None if the message has to wait because its destination is full.
        """
        destination, state = self._destination(outgoing), "ready"
        if destination is not None:
            state = self.answer_times.state_of(destination, broker_silent_for)
        if state == "full":
            received.held, received.waits_for = outgoing, destination
            return None
        received.held = received.waits_for = None
        try:
            content = forwarding.encoded(outgoing, self.frame_max)
        except exceptions.UnprocessableMessage as invalid:
            return self.give_up(received, outgoing, invalid.reason)
        obstacle = outgoing.obstacle or self.missing.why_missing(
            outgoing.address[0], is_limited=destination is not None
        )
        if obstacle is None and state == "silent":
            obstacle = f"{destination} answers too slowly, or not at all"
        if obstacle is not None:
            return self._try_later(received, outgoing, obstacle)
        return self._publication(received, outgoing, content)

    def settled(self, publication: Publication) -> Publication | None:
        """Record a settled publication; return its replacement if it has failed.

        Raises:
            PublishError: The broker does not accept messages for ``undeliverable``.
        """
        received, outgoing, destination = cast(Origin, publication.context)
        error = publication.error
        received.pending -= 1
        self.bytes_in_flight -= len(publication.content.body)
        in_time = not isinstance(error, exceptions.ConfirmTimeout)
        self.answer_times.settled(publication, destination, in_time)
        if error is None:
            self.statistics.published += 1
            self.statistics.undeliverable += outgoing.exchange == self.undeliverable
            return None
        may_pass = isinstance(error, exceptions.MessageNacked | exceptions.ConfirmTimeout)
        if destination is None and may_pass:
            return self._publication(received, outgoing, publication.content)
        if outgoing.exchange == self.undeliverable:
            if not isinstance(error, exceptions.MessageRefused):
                raise error
            return self._refused_by_undeliverable(received, outgoing, error)
        if isinstance(error.__cause__, NotFound):
            # The next messages for this exchange go into the levels, and do not close the channel.
            self.missing.add(outgoing.address[0])
        reason = _reason(error, outgoing)
        if destination is None or isinstance(error, exceptions.MessageRefused):
            return self.give_up(received, outgoing, reason)
        makes_copies = may_pass and outgoing.exchange != ""
        return self._try_later(received, outgoing, reason, makes_copies)

    def _destination(self, outgoing: Outgoing) -> str | None:
        """Return the name of a message's destination.

        None if the message goes into the levels or to ``undeliverable``.
        """
        if outgoing.reroute is not None or outgoing.exchange == self.undeliverable:
            return None
        # The name is the key of the answer times, so it is not shortened; every message needs it,
        # so it must be cheap.
        if outgoing.exchange:
            return f"the exchange {outgoing.exchange!r}"
        return f"the queue {outgoing.routing_key!r}"

    def give_up(
        self,
        received: Received,
        outgoing: Outgoing,
        reason: str,
        undeliverable: Outgoing | None = None,
        error: Exception | None = None,
    ) -> Publication:
        """Return the publication of a message to ``undeliverable``.

        Args:
            received: The received message that it is published for.
            outgoing: The message.
            reason: Why the message cannot be delivered.
            undeliverable: The message for ``undeliverable``, if it exists already.
            error: An unexpected error, logged with its traceback.
        """
        if self._given_up.allows(reason):
            level = logging.WARNING if error is None else logging.ERROR
            text = "rabbitdelay %s: a message is undeliverable: %s"
            logger.log(level, text, self.name, reason, exc_info=error)
        headers = unopened(headers_of(received.message))
        refused = undeliverable or forwarding.to_undeliverable(
            self.module.topology, outgoing, reason, headers
        )
        if outgoing.is_authentic:
            # The module has accepted the original message: sign its copy, so it can be redriven.
            refused = refused._replace(message=signed(refused.message, self.module.signing_keys))
        try:
            content = forwarding.encoded(refused, self.frame_max)
        except exceptions.UnprocessableMessage:
            refused = forwarding.without_headers(refused)
            content = forwarding.encoded(refused, self.frame_max)
        return self._publication(received, refused, content)

    def refuse(self, received: Received, error: Exception) -> Publication:
        """Return the publication that forwards an unreadable message unchanged.

        The message goes to ``undeliverable``, or into the levels if a later version can read it.

        Args:
            received: The message.
            error: Why the module cannot read it.
        """
        received.outgoing, info = iter(()), received.message.delivery_info or {}
        as_it_came = Outgoing(
            info["exchange"],
            info["routing_key"],
            WaitingMessage.unopened(received.message),
            is_authentic=False,
        )
        if isinstance(error, exceptions.LaterVersion):
            later = self.redelivery.until_upgraded(received.message, error.reason)
            if later.reroute is not None and self._later.allows():
                log_name = f"rabbitdelay {self.name}: a message"
                logger.warning(forwarding.LATER_VERSION, log_name, error.reason)
            return self._put_back(received, as_it_came, later, error.reason)
        if isinstance(error, exceptions.UnprocessableMessage):
            return self.give_up(received, as_it_came, error.reason)
        return self.give_up(received, as_it_came, shortened(error), error=error)

    def _refused_by_undeliverable(
        self, received: Received, outgoing: Outgoing, error: exceptions.MessageRefused
    ) -> Publication | None:
        """Return the next publication of a message that RabbitMQ refused in ``undeliverable``.

        RabbitMQ refuses some headers (a ``CC`` that is not a list, for example), and bodies above
        its own limit. Without this method, each delivery of such a message would close the module's
        channel or connection, until the delivery limit.
        """
        headers = outgoing.message.headers
        if headers != DelayHeaders(reason=headers.reason, redriven=headers.redriven):
            reason = f"{headers.reason}; its headers are left out: {_reason(error, outgoing)}"
            explained = outgoing._replace(message=outgoing.message.saying(reason=reason))
            bare = forwarding.without_headers(explained)
            return self._publication(received, bare, forwarding.encoded(bare, self.frame_max))
        text = "rabbitdelay %s: a message is rejected, because %s does not accept it: %s"
        logger.error(text, self.name, self.undeliverable, error.reason)
        received.settlement, received.outgoing, received.held = REJECT, iter(()), None
        return None

    def _publication(self, received: Received, outgoing: Outgoing, content: Content) -> Publication:
        address, destination = outgoing.address, self._destination(outgoing)
        origin: Origin = received, outgoing, destination
        publication = Publication(content, outgoing.reroute or (lambda: address), origin)
        publication.deadline = time.monotonic() + self.module.timeout
        publication.single_attempt = destination is not None
        received.pending += 1
        self.bytes_in_flight += len(content.body)
        self.answer_times.sent(publication, destination)
        return publication

    def _try_later(
        self, received: Received, outgoing: Outgoing, reason: str, makes_copies: bool = False
    ) -> Publication:
        """Return the publication of a message into the levels, for a retry."""
        headers = unopened(headers_of(received.message))
        later = self.redelivery.after_failure(outgoing, headers, reason, makes_copies)
        destination = self._destination(outgoing)
        if later.reroute is not None and self._not_taken.allows(destination):
            text = "rabbitdelay %s: %s does not accept a message; it is retried later: %s"
            logger.warning(text, self.name, destination, reason)
        return self._put_back(received, outgoing, later, reason)

    def _put_back(
        self, received: Received, outgoing: Outgoing, later: Outgoing, reason: str
    ) -> Publication:
        """Return the publication into the levels; to ``undeliverable`` after the last retry."""
        if later.reroute is None:
            return self.give_up(received, outgoing, reason, later)
        try:
            content = forwarding.encoded(later, self.frame_max)
        except exceptions.UnprocessableMessage as too_long:
            return self.give_up(received, outgoing, f"{reason}; {too_long.reason}")
        self.statistics.redelivered += 1
        return self._publication(received, later, content)


def _reason(error: exceptions.RabbitDelayError, outgoing: Outgoing) -> str:
    """Return the reason why a publication has failed."""
    if isinstance(error, exceptions.MessageNacked | exceptions.ConfirmTimeout):
        return error.reason
    if isinstance(error, exceptions.MessageRefused):
        return f"the broker refuses it: {error.reason}"
    if isinstance(error.__cause__, NotFound):
        return no_exchange(outgoing.address[0])
    if not outgoing.exchange:
        return f"there is no queue {outgoing.routing_key!r}"
    return f"the exchange {outgoing.exchange!r} has no queue for the key {outgoing.routing_key!r}"
