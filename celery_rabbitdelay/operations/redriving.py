"""Converts an undeliverable message into the message that is published again.

Anybody who can publish to an exchange of the levels can put a message into ``undeliverable``, with
any headers. Therefore the destination has to be one that the application allows, whatever the
headers say, and only headers with valid values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from kombu import Queue

from celery_rabbitdelay import exceptions
from celery_rabbitdelay.app import destinations
from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import MAX_DUE_MS, Delay, Due, milliseconds
from celery_rabbitdelay.levels.headers import UNREADABLE, DelayHeaders, EarlyHeader, shortened
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import CHECK_IN, DISTRIBUTE, Topology
from celery_rabbitdelay.modules import limits
from celery_rabbitdelay.modules.checkin import checked_task
from celery_rabbitdelay.modules.envelope import Envelope
from celery_rabbitdelay.modules.forwarding import Outgoing, into_levels
from celery_rabbitdelay.modules.limits import AllowedDestinations
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.publishing.destination import may_refuse
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import NOT_SIGNED, SigningKeys, signed

#: The headers of a message, whoever has written them.
Headers: TypeAlias = Mapping[str, object]


class Intended(NamedTuple):
    """Where a message was meant to go.

    Attributes:
        exchange: The exchange that it would have been published to without a delay.
        routing_key: The routing key that it would have been published with.
        queue: The one queue that gets it; None if the exchange routes it.
    """

    exchange: str
    routing_key: str
    queue: str | None = None


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
        or header_names.X_DELAY in headers
        or last_stop == checkin.name
    )


#: How often a message is redriven at most, unless the caller says otherwise.
MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class Redriving:
    """Converts the messages that may leave ``undeliverable``; the others have to stay.

    Attributes:
        topology: The levels that the messages go back into.
        allowed: The allowed destinations.
        checkin_allowed: Those of messages that check-in has never accepted; None: the same.
        trusts_clients: Whether those may be what check-in otherwise refuses; see
            ``rabbitdelay_checkin_trusted``.
        modules: The names of the modules that workers serve; see ``rabbitdelay_modules``.
        refuses: Returns whether a queue may refuse a message; such messages go through
            distribution.
        delay_ms: The shortest time that each message waits, in milliseconds; None: until it is due.
        to: The queue for all messages; None: each goes to its own destination. It need not be an
            allowed one, but must not be one that is never allowed.
        max_attempts: How often a message may be redriven, including this time.
        ensure: Called with the name of each queue that a message goes to, to bind it to the levels.
            If the broker cannot be reached or refuses, the message stays.
        signing_keys: What verifies and signs messages; None: signatures do not matter.
        vouches: Whether messages without a valid signature are signed as well.
    """

    topology: Topology
    allowed: AllowedDestinations
    _: KW_ONLY
    checkin_allowed: AllowedDestinations | None = None
    trusts_clients: bool = False
    modules: Collection[str] = ()
    refuses: Callable[[str], bool] = lambda queue: False
    delay_ms: int | None = None
    to: str | None = None
    max_attempts: int = MAX_ATTEMPTS
    ensure: Callable[[str], None] = lambda queue: None
    signing_keys: SigningKeys | None = None
    vouches: bool = False

    def redriven(self, message: amqp.Message) -> Outgoing:
        """Return what to publish for a message.

        The message waits in the levels until it is due, and at least for the delay. It keeps its
        body, its properties, and all headers except those of the broker and of earlier attempts to
        deliver it.

        Raises:
            UnprocessableMessage: The message has to stay in ``undeliverable``.
        """
        headers, key = headers_of(message), message.delivery_info["routing_key"]
        _refuse_unreadable(message, headers)
        limits.check_depth(headers)
        found = examine(headers, self.topology, key)
        is_new = never_accepted(headers, self.topology, key, found.last_stop)
        keys = self.signing_keys
        received = WaitingMessage.unopened(message)
        # A client of check-in has no key: its destination is checked, as check-in does it.
        if keys is not None and not (is_new or self.vouches or keys.verifies(*received)):
            raise UnprocessableMessage(NOT_SIGNED)
        given = _as_checked_in(headers) if is_new else headers
        said, problems = header_names.parse(given)
        due_ms, due = self._due(said, given if is_new else {})
        others = dict(said.others)
        if is_new:
            others.pop(header_names.X_DELAY, None)
        own = DelayHeaders(
            due_ms=due_ms,
            priority=said.priority,
            expiration=said.expiration,
            registry=said.registry,
            redriven=self._count(said, problems) + 1,
            others=others,
        )
        destination: Intended | None = None
        if message.properties.get("content_type") == header_names.ENVELOPE:
            if is_new:
                raise UnprocessableMessage("it is an envelope, which clients may not check in")
            body, exchange, routing_key = self._envelope(received.body, said)
            received = received._replace(body=body)
            own = own._replace(exchange=exchange, routing_key=routing_key)
        else:
            destination = self._intended(said, problems, found.queue, key if is_new else None)
            self._check(*destination)
            own = own._replace(**destination._asdict())
            if destination.queue is None:
                own = own._replace(early=self._early(said))
        if said.registry and due_ms != due.at_ms:
            # It may be older than the registry's memory; somebody has decided that it may run.
            own = own._replace(early=own.early._replace(until_ms=due.at_ms))
        redriven = received._replace(headers=own).having(expiration=None)
        if is_new and not self.trusts_clients:
            redriven = checked_task(redriven)
        if self.topology.queue_type == "quorum" and own.priority is None:
            redriven = redriven.with_low_priority()
        queue = self._queue(destination, redriven.headers)
        self._check_capacity(due)
        return into_levels(self.topology, signed(redriven, keys), due, queue)

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
    ) -> Intended:
        """Return where a message was meant to go.

        Args:
            said: What its headers say.
            problems: What is wrong with them.
            queue_in_key: The queue that its routing key names.
            key_of_client: The routing key of a message that check-in has not accepted.
        """
        if self.to is not None:
            return Intended("", self.to, self.to)
        for name in (header_names.QUEUE, header_names.EXCHANGE, header_names.ROUTING_KEY):
            if name in problems:
                raise UnprocessableMessage(problems[name])
        exchange, key = said.exchange, said.routing_key
        if key_of_client is not None:
            if exchange in (None, self.topology.module_queues.checkin.exchange.name):
                exchange = ""
            key = key_of_client if key is None else key
            if not (self.checkin_allowed or self.allowed).includes(exchange, key):
                raise UnprocessableMessage(
                    f"{limits.where_in_words(exchange, key)} is not one that check-in may reach: "
                    "see rabbitdelay_checkin_allowed"
                )
        elif exchange is None or key is None:
            queue = said.queue or (queue_in_key if exchange is None else None)
            if not queue:
                raise UnprocessableMessage("its destination is unknown")
            return Intended("", queue, queue)
        if not (exchange or key):
            raise UnprocessableMessage("its destination is unknown")
        return Intended(exchange, key, said.queue)

    def _check(self, exchange: str, routing_key: str, queue: str | None = None) -> None:
        # Even if the message is for one queue: a worker publishes a retry of the task there.
        if queue is not None:
            self._check("", queue)
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

    def _envelope(self, body: bytes, said: DelayHeaders) -> tuple[bytes, str | None, str | None]:
        """Return an envelope with its exchange and key; check where each message in it goes."""
        try:
            envelope = Envelope.unpack(body)
            if self.to is not None:
                envelope = _redirected(envelope)
                said = said._replace(exchange="", routing_key=self.to)
                body = envelope.pack()
        except exceptions.InvalidEnvelope as invalid:
            raise UnprocessableMessage(f"the envelope cannot be opened: {invalid}") from invalid
        for destination in {
            _destination_of({**envelope.headers, **item.headers}, said) for item in envelope.items
        }:
            self._check(*destination)
        return body, said.exchange, said.routing_key

    def _queue(self, destination: Intended | None, own: DelayHeaders) -> str:
        """Return the queue that gets the message from the levels."""
        needs = None
        if destination is None:
            needs = "it is an envelope"
        elif destination.queue is None:
            needs = "only its exchange can route it"
        elif own.priority is not None:
            needs = f"its priority is above {header_names.MAX_PRIORITY}"
        elif DISTRIBUTE not in self.modules or not self.refuses(destination.queue):
            return destination.queue
        if needs is not None and DISTRIBUTE not in self.modules:
            raise UnprocessableMessage(f"no worker serves distribution, and {needs}")
        return DISTRIBUTION

    def _check_capacity(self, due: Due) -> None:
        capacity_ms = self.topology.layout.capacity_ms
        if due.delay_ms > capacity_ms and CHECK_IN not in self.modules:
            raise UnprocessableMessage(
                f"no worker serves check-in, and it would wait for {due.delay_ms / 1000:,.3f} s; "
                f"the levels take {capacity_ms / 1000:,.3f} s"
            )


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


def _destination_of(given: Headers, outer: DelayHeaders) -> Intended:
    """Return the destination to which distribution publishes a message of an envelope."""
    header_names.refuse_sender_selected(given)
    inner, problems = header_names.parse(given)
    exchange = outer.exchange if inner.exchange is None else inner.exchange
    key = outer.routing_key if inner.routing_key is None else inner.routing_key
    if problems or exchange is None or key is None:
        raise UnprocessableMessage(
            "the destination of a message in the envelope is unknown: "
            f"{header_names.EXCHANGE} is {exchange!r}, {header_names.ROUTING_KEY} is {key!r}"
        )
    return Intended(exchange, key)


def _redirected(envelope: Envelope) -> Envelope:
    """Return an envelope whose messages name no destination of their own."""
    names = (header_names.EXCHANGE, header_names.ROUTING_KEY)

    def without(given: Headers) -> dict[str, object]:
        return {name: value for name, value in given.items() if name not in names}

    items = tuple(item._replace(headers=without(item.headers)) for item in envelope.items)
    return Envelope(items, without(envelope.headers), envelope.properties)


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
    settings, connection = app.rabbitdelay.settings, app.connection_for_write()
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

    @cache
    def refuses(name: str) -> bool:
        return may_refuse(queues.get(name) or Queue(name), settings.may_refuse, connection)

    return Redriving(
        settings.topology,
        allowed,
        checkin_allowed=destinations.checkin_destinations(app).also(allow),
        trusts_clients=settings.checkin_trusted,
        modules=settings.modules,
        refuses=refuses,
        delay_ms=delay_ms,
        signing_keys=settings.signing_keys,
        vouches=vouches or not settings.signing_required,
        **options,
    )
