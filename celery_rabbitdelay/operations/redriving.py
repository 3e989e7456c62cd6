"""Converts an undeliverable message into the message that is published again.

Anybody who can publish to an exchange of the levels can put a message into ``undeliverable``, with
any headers. Therefore the destination has to be one that the application allows, whatever the
headers say, and only headers with valid values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, TypeAlias

import amqp
from kombu import Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import destinations
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import MAX_DUE_MS, Delay, Due, milliseconds
from celery_rabbitdelay.levels.headers import (
    UNREADABLE,
    X_DELAY,
    DelayHeaders,
    EarlyHeader,
    shortened,
)
from celery_rabbitdelay.levels.topology import CHECK_IN, Topology
from celery_rabbitdelay.modules import limits
from celery_rabbitdelay.modules.checkin import checked_task
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import OpenedEnvelope, packed
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.modules.limits import AllowedDestinations
from celery_rabbitdelay.operations.conversion import routed
from celery_rabbitdelay.operations.reasons import examine
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import NOT_SIGNED

#: The headers of a message, whoever has written them.
Headers: TypeAlias = Mapping[str, object]


def never_accepted(
    headers: Headers, topology: Topology, routing_key: str, last_stop: str | None
) -> bool:
    """Return whether a message of a client comes from check-in, which has not accepted it.

    Check-in gives each message that it accepts a due time.
    """
    checkin, deaths = topology.module_queues.checkin, headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else None
    left = {"queue": checkin.name, "exchange": checkin.exchange.name}
    if isinstance(newest, Mapping) and left.items() <= newest.items():
        # The broker has taken it out of check-in's queue as its client wrote it.
        return True
    return header_names.DUE not in headers and (
        headers.get(header_names.EXCHANGE) == checkin.exchange.name
        or X_DELAY in headers
        or last_stop == checkin.name
    )


#: How often a message is redriven at most, unless the caller says otherwise.
MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class Redriving:
    """Converts the messages that may leave ``undeliverable``; the others have to stay.

    Attributes:
        producer: Signs the messages and finds their way into the levels; nothing is published with
            it.
        allowed: The allowed destinations.
        checkin_allowed: Those of messages that check-in has never accepted; None: the same.
        trusts_clients: Whether those may be what check-in otherwise refuses; see
            ``rabbitdelay_checkin_trusted``.
        queues: The queues that the application knows, by their names.
        delay_ms: The shortest time that each message waits, in milliseconds; None: until it is due.
        to: The queue for all messages; None: each goes to its own destination. It need not be an
            allowed one, but must not be one that is never allowed.
        max_attempts: How often a message may be redriven, including this time.
        ensure: Called with the name of each queue that a message goes to, to bind it to the levels.
            If the broker cannot be reached or refuses, the message stays.
        vouches: Whether messages without a valid signature are signed as well.
    """

    producer: DelayedProducer
    allowed: AllowedDestinations
    _: KW_ONLY
    checkin_allowed: AllowedDestinations | None = None
    trusts_clients: bool = False
    queues: Mapping[str, Queue] = field(default_factory=dict)
    delay_ms: int | None = None
    to: str | None = None
    max_attempts: int = MAX_ATTEMPTS
    ensure: Callable[[str], None] = lambda queue: None
    vouches: bool = False

    def redriven(self, message: amqp.Message) -> Outgoing:
        """Return what to publish for a message.

        The message waits in the levels until it is due, and at least for the delay. It keeps its
        body, its properties, and all headers except those of the broker and of earlier attempts to
        deliver it.

        Raises:
            UnprocessableMessage: The message has to stay in ``undeliverable``.
            Stay: Likewise: no worker serves the modules that it needs.
        """
        headers, key = headers_of(message), message.delivery_info["routing_key"]
        _refuse_unreadable(message, headers)
        limits.check_depth(headers)
        topology, keys = self.producer.topology, self.producer.signing_keys
        found = examine(headers, topology, key)
        is_new = never_accepted(headers, topology, key, found.last_stop)
        received = WaitingMessage.unopened(message)
        # A client of check-in has no key: its destination is checked, as check-in does it.
        if keys is not None and not (is_new or self.vouches or keys.verifies(*received)):
            raise UnprocessableMessage(NOT_SIGNED)
        given = _as_checked_in(headers) if is_new else headers
        said, problems = header_names.parse(given)
        due_ms, due = self._due(said, given if is_new else {})
        others = {name: each for name, each in said.others.items() if not is_new or name != X_DELAY}
        queue, early = None, EarlyHeader()
        if message.properties.get("content_type") == header_names.ENVELOPE:
            if is_new:
                raise UnprocessableMessage("it is an envelope, which clients may not check in")
            received = self._envelope(received._replace(headers=said))
            said = received.headers
        else:
            queue, exchange, key = self._intended(
                said, problems, found.queue, key if is_new else None
            )
            if queue is not None:
                # A worker publishes a retry of the task to the exchange.
                self._check("", queue.name)
            self._check(exchange, key)
            if queue is None:
                early = self._early(said)
            if said.priority is not None:
                received = received.having(priority=said.priority)
            said = said._replace(exchange=exchange, routing_key=key, priority=None)
        if said.registry and due_ms != due.at_ms:
            # It may be older than the registry's memory; somebody has decided that it may run.
            early = early._replace(until_ms=due.at_ms)
        own = DelayHeaders(
            due_ms,
            said.exchange,
            said.routing_key,
            priority=said.priority,
            expiration=said.expiration,
            early=early,
            registry=said.registry,
            redriven=self._count(said, problems) + 1,
            others=others,
        )
        redriven = received._replace(headers=own).having(expiration=None)
        if is_new and not self.trusts_clients:
            redriven = checked_task(redriven)
        return routed(self.producer, redriven, queue, due)

    def _count(self, said: DelayHeaders, problems: Mapping[str, str]) -> int:
        """Return how often the message was already redriven.

        A client may publish a message anew without the header, which cannot be detected. A value
        that this package never writes counts as exhausted: the message stays.
        """
        if header_names.REDRIVEN in problems:
            raise UnprocessableMessage(problems[header_names.REDRIVEN])
        if said.redriven >= self.max_attempts:
            raise UnprocessableMessage(f"it was redriven {said.redriven:,} times already")
        return said.redriven

    def _due(self, said: DelayHeaders, of_client: Headers) -> tuple[int, Due]:
        """Return the due time in milliseconds for the header, and the end of the new delay.

        If the due time has passed, the header keeps it, unless the message waits again.
        """
        now_ms, was_due_ms, delay_ms = wall_clock.ms(), said.due_ms, self.delay_ms or 0
        try:
            delay_ms = max(delay_ms, header_names.client_delay_ms(of_client))
        except UnprocessableMessage as invalid:
            if self.delay_ms is None:
                raise UnprocessableMessage(f"{invalid.reason}: give a delay") from invalid
        until_ms = min(max(now_ms + delay_ms, was_due_ms or 0), MAX_DUE_MS)
        limits.check_delay("its due time", until_ms, until_ms - now_ms)
        due = Due.until(until_ms)
        return (until_ms if until_ms > now_ms or was_due_ms is None else was_due_ms), due

    def _intended(
        self,
        said: DelayHeaders,
        problems: Mapping[str, str],
        queue_in_key: str | None,
        key_of_client: str | None,
    ) -> Destination:
        """Return where a message was meant to go.

        Args:
            said: What its headers say.
            problems: What is wrong with them.
            queue_in_key: The queue that its routing key names.
            key_of_client: The routing key of a message that check-in has not accepted.
        """
        if self.to is not None:
            return self._destination("", self.to, self.to)
        for name in (header_names.QUEUE, header_names.EXCHANGE, header_names.ROUTING_KEY):
            if name in problems:
                raise UnprocessableMessage(problems[name])
        exchange, key = said.exchange, said.routing_key
        if key_of_client is not None:
            if exchange in (None, self.producer.topology.module_queues.checkin.exchange.name):
                exchange = ""
            key = key_of_client if key is None else key
            if not (self.checkin_allowed or self.allowed).includes(exchange, key):
                raise UnprocessableMessage(
                    f"{limits.where_in_words(exchange, key)} is not one that check-in may reach: "
                    "see rabbitdelay_checkin_allowed"
                )
        elif exchange is None or key is None:
            name = said.queue or (queue_in_key if exchange is None else None) or ""
            return self._destination("", name, name)
        return self._destination(exchange, key, said.queue)

    def _destination(self, exchange: str, key: str, name: str | None) -> Destination:
        if not (exchange or key):
            raise UnprocessableMessage("its destination is unknown")
        queue = None if name is None else self.queues.get(name) or Queue(name)
        return Destination(queue, exchange, key)

    def _check(self, exchange: str, routing_key: str) -> None:
        name, where = exchange or routing_key, limits.where_in_words(exchange, routing_key)
        if self.allowed.forbids(name):
            raise UnprocessableMessage(f"{where} is never published to")
        if name != self.to and not self.allowed.includes(exchange, routing_key):
            raise UnprocessableMessage(f"{where} is not one that the application allows")
        if exchange:
            return
        try:
            self.ensure(name)
        except (OSError, amqp.AMQPError) as error:
            raise UnprocessableMessage(f"{where} cannot be bound to the levels: {error}") from error

    def _early(self, said: DelayHeaders) -> EarlyHeader:
        """Return where a worker publishes a retry of a task that only its exchange can route."""
        early = said.early
        if early.exchange is None or early.routing_key is None:
            return EarlyHeader()
        self._check(early.exchange, early.routing_key)
        return early._replace(times=0)

    def _envelope(self, message: WaitingMessage) -> WaitingMessage:
        """Return an envelope as it is redriven; check where distribution publishes from it."""
        if self.to is not None:
            try:
                body = _redirected(OpenedEnvelope(message.body))
            except exceptions.InvalidEnvelope as invalid:
                raise UnprocessableMessage(f"the envelope cannot be opened: {invalid}") from invalid
            message = message._replace(body=body).saying(exchange="", routing_key=self.to)
        for each in Distribution(self.producer.topology).receive(message.amqp()):
            self._check(each.exchange, each.routing_key)
        return message


def _as_checked_in(headers: Headers) -> dict[str, object]:
    """Return the headers of a message that check-in has not accepted, as far as they are believed.

    Of ours, those that a client may set, and the key that check-in has noted. If the broker took
    the message out of check-in's queue, it has all that its client wrote, and no key is believed.
    """
    names = ["x-death", header_names.REDRIVEN]
    if "x-death" not in headers:
        names.append(header_names.ROUTING_KEY)
    noted = {name: headers[name] for name in names if name in headers}
    return {**header_names.of_client(headers), **noted}


def _refuse_unreadable(message: amqp.Message, headers: Headers) -> None:
    """Refuse a message that this version cannot read, or that has sender-selected queues."""
    if UNREADABLE in headers:
        raise UnprocessableMessage(f"it cannot be read: {shortened(headers[UNREADABLE])}")
    later = header_names.later_version(headers, message.properties.get("content_type"))
    if later is not None:
        raise exceptions.LaterVersion(later)
    header_names.refuse_sender_selected(headers)


def _redirected(envelope: OpenedEnvelope) -> bytes:
    """Return the body of an envelope whose messages name no destination of their own."""
    names = (header_names.EXCHANGE, header_names.ROUTING_KEY)

    def without(given: Headers) -> dict[str, object]:
        return {name: value for name, value in given.items() if name not in names}

    items = (item._replace(headers=without(item.headers)) for item in envelope)
    return packed(items, without(envelope.headers), envelope.properties)


def redriving_for(
    app: DelayingCelery,
    *,
    delay: Delay | None = None,
    allow: Iterable[str] = (),
    vouches: bool = False,
    **options: Any,
) -> Redriving:
    """Return what decides how the undeliverable messages of an application are redriven.

    Args:
        app: The application. The queues of ``task_queues``, ``task_routes`` and the tasks are
            allowed, with their exchanges, and what ``rabbitdelay_checkin_allowed`` names; never
            those of the levels, of the broker and of Celery's remote control and events.
        delay: Seconds, or a timedelta, that each message waits at least. None: not longer than
            until it is due.
        allow: Names of further queues and exchanges that messages may go to; ``*`` and ``?`` stand
            for any characters and for one.
        vouches: Whether messages without a valid signature are redriven, and signed.
        **options: ``to``, ``max_attempts`` and ``ensure`` of :class:`Redriving`.

    Raises:
        InvalidDestination: Nothing is published to the queue ``to``.
        InvalidDelay: The delay has no meaning.
        DelayTooLong: It is above the layout's capacity, and workers do not serve check-in.
    """
    settings = app.rabbitdelay.settings
    delay_ms = None if delay is None else milliseconds(delay)
    if delay_ms is not None and CHECK_IN not in settings.modules:
        settings.topology.layout.check_capacity(delay_ms)
    queues, allow = destinations.configured_queues(app), tuple(allow)
    allowed = destinations.configured_destinations(app).also(allow)
    if (to := options.get("to")) is not None:
        size = len(to.encode(errors="surrogatepass"))
        if allowed.forbids(to) or not 0 < size <= MAX_SHORTSTR_BYTES:
            why = "belongs to the levels, to the broker or to Celery, or is no name"
            raise exceptions.InvalidDestination(to, why)

    return Redriving(
        DelayedProducer(Publisher(app.connection_for_write()), **settings.for_producer),
        allowed,
        checkin_allowed=destinations.checkin_destinations(app).also(allow),
        trusts_clients=settings.checkin_trusted,
        queues=queues,
        delay_ms=delay_ms,
        vouches=vouches or not settings.signing_required,
        **options,
    )
