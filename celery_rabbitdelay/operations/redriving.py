"""Converts an undeliverable message into the message that is published again.

Any client that can publish to an exchange of the levels can put a message with any headers into
``undeliverable``. Therefore a message is only redriven to a destination that the application
allows, and only headers with valid values are kept.
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
from celery_rabbitdelay.levels.topology import CHECK_IN, Topology
from celery_rabbitdelay.modules import limits
from celery_rabbitdelay.modules.checkin import checked_task
from celery_rabbitdelay.modules.distribution import Distribution
from celery_rabbitdelay.modules.envelope import OpenedEnvelope, packed
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.operations.conversion import refuse_unreadable, routed
from celery_rabbitdelay.operations.reasons import examine
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.publishing.signature import NOT_SIGNED

#: The untrusted headers of a message.
Headers: TypeAlias = Mapping[str, object]


def never_accepted(
    headers: Headers, topology: Topology, routing_key: str, last_stop: str | None
) -> bool:
    """Return whether a client published the message to check-in, which never accepted it.

    Check-in adds a due time to every message that it accepts.
    """
    checkin, deaths = topology.module_queues.checkin, headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else None
    left = {"queue": checkin.name, "exchange": checkin.exchange.name}
    if isinstance(newest, Mapping) and left.items() <= newest.items():
        # The broker dead-lettered the message from check-in's queue, with the client's headers.
        return True
    return header_names.DUE not in headers and (
        headers.get(header_names.EXCHANGE) == checkin.exchange.name
        or header_names.X_DELAY in headers
        or last_stop == checkin.name
    )


#: The end of the reason why a message for another destination stays.
NOT_ALLOWED: Final = "is not a destination that the application allows"

#: The end of the reason why a reserved destination is refused.
RESERVED: Final = "is reserved for the delay levels, the broker or Celery"

#: The default limit of redrives of one message.
MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class Redriving:
    """Converts the messages that may leave ``undeliverable``.

    Attributes:
        producer: Signs the messages and computes their routes; does not publish them.
        allowed: The allowed destinations.
        checkin_allowed: The allowed destinations of messages that check-in never accepted; None for
            the same as ``allowed``.
        trusts_clients: Whether to skip check-in's checks of task messages; see
            ``rabbitdelay_checkin_trusted``.
        queues: The queues that the application knows, keyed by name.
        delay_ms: The minimum delay of a message, in milliseconds; None to wait until it is due.
        to: The queue for all messages; None to send every message to its own destination. The queue
            need not be an allowed destination, but must not belong to the levels, to the broker or
            to Celery.
        max_attempts: How often a message may be redriven, including this time.
        ensure: Binds the destination queue with a given name to the levels. If the broker cannot be
            reached or refuses, the message stays.
        vouches: Whether to redrive and sign messages without a valid signature.
    """

    producer: DelayedProducer
    allowed: limits.AllowedDestinations
    _: KW_ONLY
    checkin_allowed: limits.AllowedDestinations | None = None
    trusts_clients: bool = False
    queues: Mapping[str, Queue] = field(default_factory=dict)
    delay_ms: int | None = None
    to: str | None = None
    max_attempts: int = MAX_ATTEMPTS
    ensure: Callable[[str], None] = lambda queue: None
    vouches: bool = False

    def redriven(self, message: amqp.Message) -> Outgoing:
        """Convert a message to the publication that replaces it.

        The message waits in the levels until it is due, and at least for the delay. The message
        keeps its body, its properties, and all headers except the headers of the broker and of
        earlier attempts to deliver it.

        Raises:
            UnprocessableMessage: The message has to stay in ``undeliverable``.
            Stay: The message has to stay, because it needs a module that no worker serves.
        """
        headers, key = headers_of(message), message.delivery_info["routing_key"]
        later = header_names.later_version(headers, message.properties.get("content_type"))
        if later is not None:
            raise exceptions.LaterVersion(later)
        refuse_unreadable(headers)
        limits.check_depth(headers)
        topology, keys = self.producer.topology, self.producer.signing_keys
        found = examine(headers, topology, key)
        is_new = never_accepted(headers, topology, key, found.last_stop)
        received = WaitingMessage.unopened(message)
        # A client of check-in has no signing key, so check the destination instead, as check-in
        # does.
        if keys is not None and not (is_new or self.vouches or keys.verifies(*received)):
            raise UnprocessableMessage(NOT_SIGNED)
        given = _as_checked_in(headers) if is_new else headers
        parsed, problems = header_names.parse(given)
        due_ms, due = self._due(parsed, headers if is_new else {})
        queue, early = None, header_names.EarlyHeader()
        if message.properties.get("content_type") == header_names.ENVELOPE:
            if is_new:
                raise UnprocessableMessage("clients may not send envelopes to check-in")
            received = self._envelope(received._replace(headers=parsed))
            parsed = received.headers
        else:
            queue, exchange, key = self._intended(
                parsed, problems, found.queue, key if is_new else None
            )
            if queue is not None:
                # A worker publishes a retry of the task to the exchange.
                self._check("", queue.name)
            self._check(exchange, key)
            if queue is None:
                early = self._early(parsed)
            if parsed.priority is not None:
                received = received.having(priority=parsed.priority)
            parsed = parsed._replace(exchange=exchange, routing_key=key, priority=None)
        if parsed.registry and due_ms != due.at_ms:
            # The registry may have forgotten the task; the operator has decided that it runs.
            early = early._replace(until_ms=due.at_ms)
        own = header_names.DelayHeaders(
            due_ms,
            parsed.exchange,
            parsed.routing_key,
            priority=parsed.priority,
            expiration=parsed.expiration,
            early=early,
            registry=parsed.registry,
            redriven=self._count(parsed, problems) + 1,
            others=parsed.others,
        )
        redriven = received._replace(headers=own).having(expiration=None)
        if is_new and not self.trusts_clients:
            redriven = checked_task(redriven)
        return routed(self.producer, redriven, queue, due)

    def _count(self, parsed: header_names.DelayHeaders, problems: Mapping[str, str]) -> int:
        """Return how often the message was already redriven.

        A client can publish a copy of the message without the header; this cannot be detected. If
        the header has a value that this package never writes, the message stays.
        """
        if header_names.REDRIVEN in problems:
            raise UnprocessableMessage(problems[header_names.REDRIVEN])
        if parsed.redriven >= self.max_attempts:
            raise UnprocessableMessage(f"it was redriven {parsed.redriven:,} times already")
        return parsed.redriven

    def _due(self, parsed: header_names.DelayHeaders, of_client: Headers) -> tuple[int, Due]:
        """Return the due time for the header, in milliseconds, and the end of the new delay.

        A due time in the past stays in the header, unless the message gets a new delay.
        """
        now_ms, was_due_ms, delay_ms = wall_clock.ms(), parsed.due_ms, self.delay_ms or 0
        try:
            delay_ms = max(delay_ms, header_names.client_delay_ms(of_client))
        except UnprocessableMessage as invalid:
            if self.delay_ms is None:
                raise UnprocessableMessage(f"{invalid.reason}: pass a delay") from invalid
        until_ms = min(max(now_ms + delay_ms, was_due_ms or 0), MAX_DUE_MS)
        limits.check_delay("its due time", until_ms, until_ms - now_ms)
        due = Due.until(until_ms)
        return (until_ms if until_ms > now_ms or was_due_ms is None else was_due_ms), due

    def _intended(
        self,
        parsed: header_names.DelayHeaders,
        problems: Mapping[str, str],
        queue_in_key: str | None,
        key_of_client: str | None,
    ) -> Destination:
        """Return the destination that a message was meant for.

        Args:
            parsed: The message's headers.
            problems: The problems of the message's headers.
            queue_in_key: The queue in the message's routing key.
            key_of_client: The routing key of a message that check-in has not accepted.
        """
        if self.to is not None:
            return self._destination("", self.to, self.to)
        for name in (header_names.QUEUE, header_names.EXCHANGE, header_names.ROUTING_KEY):
            if name in problems:
                raise UnprocessableMessage(problems[name])
        exchange, key = parsed.exchange, parsed.routing_key
        if key_of_client is not None:
            if exchange in (None, self.producer.topology.module_queues.checkin.exchange.name):
                exchange = ""
            key = key_of_client if key is None else key
            if not (self.checkin_allowed or self.allowed).includes(exchange, key):
                raise UnprocessableMessage(
                    f"{limits.where_in_words(exchange, key)} is not a destination that check-in "
                    "may reach: see rabbitdelay_checkin_allowed"
                )
        elif exchange is None or key is None:
            name = parsed.queue or (queue_in_key if exchange is None else None) or ""
            return self._destination("", name, name)
        return self._destination(exchange, key, parsed.queue)

    def _destination(self, exchange: str, key: str, name: str | None) -> Destination:
        if not (exchange or key):
            raise UnprocessableMessage("its destination is unknown")
        queue = None if name is None else self.queues.get(name) or Queue(name)
        return Destination(queue, exchange, key)

    def _check(self, exchange: str, routing_key: str) -> None:
        name, where = exchange or routing_key, limits.where_in_words(exchange, routing_key)
        if self.allowed.forbids(name):
            raise UnprocessableMessage(f"{where} {RESERVED}")
        if name != self.to and not self.allowed.includes(exchange, routing_key):
            raise UnprocessableMessage(f"{where} {NOT_ALLOWED}")
        if exchange:
            return
        try:
            self.ensure(name)
        except (OSError, amqp.AMQPError) as error:
            why = f"{where} cannot be bound to the delay levels: {error}"
            raise UnprocessableMessage(why) from error

    def _early(self, parsed: header_names.DelayHeaders) -> header_names.EarlyHeader:
        """Return the header with the exchange and routing key for retries; empty without them."""
        early = parsed.early
        if early.exchange is None or early.routing_key is None:
            return header_names.EarlyHeader()
        self._check(early.exchange, early.routing_key)
        return early._replace(times=0)

    def _envelope(self, message: WaitingMessage) -> WaitingMessage:
        """Return the envelope to publish; check the destinations of the messages in it."""
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
    """Return the headers of a message that check-in never accepted, without untrusted ones.

    The result has the headers that a client may set, except the delay, and the routing key that
    check-in has added. If the broker dead-lettered the message from check-in's queue, its client
    may have written the routing key, which is then dropped.
    """
    names = ["x-death", header_names.REDRIVEN]
    if "x-death" not in headers:
        names.append(header_names.ROUTING_KEY)
    noted = {name: headers[name] for name in names if name in headers}
    kept = {**header_names.of_client(headers), **noted}
    kept.pop(header_names.X_DELAY, None)
    return kept


def _redirected(envelope: OpenedEnvelope) -> bytes:
    """Return an envelope's body without the destinations of the messages in it."""
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
    """Return the conversion for an application's undeliverable messages.

    Args:
        app: The application. The conversion allows the queues of ``task_queues``, ``task_routes``
            and the tasks, with their exchanges, and the names in ``rabbitdelay_checkin_allowed``.
            The conversion never allows the queues and exchanges of the levels, of the broker, and
            of Celery's remote control and events.
        delay: The shortest delay of a message: seconds, or a timedelta. None to wait until the
            message is due.
        allow: Names of further queues and exchanges that messages may go to; ``*`` stands for any
            characters, ``?`` for one.
        vouches: Whether messages without a valid signature are redriven, and signed.
        **options: ``to``, ``max_attempts`` and ``ensure`` of :class:`Redriving`.

    Raises:
        InvalidDestination: The queue ``to`` is never allowed, or its name is invalid.
        InvalidDelay: The delay is invalid.
        DelayTooLong: The delay is above the layout's capacity, and workers do not serve check-in.
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
            raise exceptions.InvalidDestination(to, f"{RESERVED}, or is not a valid name")

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
