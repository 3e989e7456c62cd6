"""The messages that a module publishes for one that it has received. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import amqp

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import headers as module_headers
from celery_rabbitdelay.publishing.message import (
    MAX_SHORTSTR_BYTES,
    PERSISTENT,
    headers_of,
    shortened,
    task_id_of,
)
from celery_rabbitdelay.publishing.publication import Address
from celery_rabbitdelay.publishing.wire import Content

#: The properties that are never forwarded: ``user_id`` has to be the connection's own user
#: (https://www.rabbitmq.com/docs/validated-user-id), and ``cluster_id`` is deprecated.
DROPPED_PROPERTIES: Final = ("user_id", "cluster_id", "application_headers")

#: Of a message that has none.
NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})

#: Bytes of a frame reserved for headers that the broker adds, such as ``x-death``.
FRAME_RESERVE: Final = 2048


#: The longest ``expiration`` of a message that RabbitMQ takes, in milliseconds.
MAX_EXPIRATION_MS: Final = 2**32 - 1

_DIGITS: Final = re.compile("[0-9]{1,10}")


class Outgoing(NamedTuple):
    """A message to publish.

    Attributes:
        exchange: The exchange; empty for the default one.
        routing_key: The routing key.
        message: The message.
        reroute: For a message that goes into the levels, returns exchange and routing key anew at
            each attempt, because they depend on the time that is left; None for any other message.
        through: Exchange and routing key by which it reaches the above; None if it is published
            straight there.
        trouble: Why it is not published now, but tried later straight from the levels; None if it
            is published.
        is_vouched: Whether the module signs what it publishes in its place, if there is a key. Not
            if it is made of a message whose sender has shown no key.
    """

    exchange: str
    routing_key: str
    message: amqp.Message
    reroute: Address | None = None
    through: tuple[str, str] | None = None
    trouble: str | None = None
    is_vouched: bool = True

    @property
    def address(self) -> tuple[str, str]:
        """The exchange and the routing key that it is published with."""
        return self.through or (self.exchange, self.routing_key)


def into_levels(
    topology: Topology, message: amqp.Message, due: Due, destination: str = DISTRIBUTION
) -> Outgoing:
    """Return a message that waits in the levels until it is due.

    Args:
        topology: The topology.
        message: The message, with all headers that its destination needs.
        due: When it is due.
        destination: The queue that gets it then, or :data:`.DISTRIBUTION`.
    """
    task_id = task_id_of(message)

    def reroute() -> tuple[str, str]:
        route = topology.route(due, destination, task_id)
        return route.exchange, route.routing_key

    return Outgoing(*reroute(), message, reroute)


def destination_headers(outgoing: Outgoing) -> dict[str, Any]:
    """Return a message's headers, and those from which distribution restores its destination.

    Where the message has the latter already, they stay: distribution has left them, because its
    consumer needs them.
    """
    headers = without_broker_headers(headers_of(outgoing.message))
    headers.setdefault(header_names.EXCHANGE, outgoing.exchange)
    headers.setdefault(header_names.ROUTING_KEY, outgoing.routing_key)
    expiration = outgoing.message.properties.get("expiration")
    if expiration is not None:
        headers.setdefault(header_names.EXPIRATION, expiration)
    return headers


def without_broker_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers without those that RabbitMQ has added."""
    return {n: value for n, value in headers.items() if n not in header_names.BROKER_HEADERS}


def with_headers(
    message: amqp.Message, headers: Mapping[str, Any], **properties: Any
) -> amqp.Message:
    """Return a persistent message with the same body, other headers, and some other properties.

    Args:
        message: The message.
        headers: All headers that the new one has.
        **properties: Properties that replace the old ones; None removes one.
    """
    kept = {
        name: value for name, value in message.properties.items() if name not in DROPPED_PROPERTIES
    }
    kept = {**kept, "delivery_mode": PERSISTENT, **properties}
    return amqp.Message(message.body, application_headers=dict(headers), **kept)


def encoded(outgoing: Outgoing, frame_max: int) -> Content:
    """Return a message as AMQP writes it.

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
    expiration = outgoing.message.properties.get("expiration")
    if expiration is not None and not _is_expiration(expiration):
        # The broker would close the channel, with all that is in flight on it.
        raise UnprocessableMessage(
            f"its expiration is {shortened(expiration)}, not a number of milliseconds"
        )
    try:
        content = Content.of(outgoing.message)
    except Exception as error:
        # Values of wrong types make py-amqp raise errors of many kinds.
        reason = f"a header or property cannot be written: {shortened(error)}"
        raise UnprocessableMessage(reason) from error
    size = len(content.properties)
    if size > frame_max - FRAME_RESERVE:
        raise UnprocessableMessage(
            f"its headers and properties take {size} bytes, a frame has {frame_max}"
        )
    return content


def _is_expiration(value: object) -> bool:
    is_number = isinstance(value, str) and _DIGITS.fullmatch(value) is not None
    return is_number and int(str(value)) <= MAX_EXPIRATION_MS


def without_headers(
    undeliverable: str, message: amqp.Message, reason: str, received: Mapping[str, Any] = NO_HEADERS
) -> Outgoing:
    """Return a message for ``undeliverable`` without its headers, which do not fit into a frame."""
    headers = {**redriven_header(received), module_headers.REASON: reason}
    left = amqp.Message(message.body, application_headers=headers, delivery_mode=PERSISTENT)
    return Outgoing(undeliverable, "", left)


def redriven_header(received: Mapping[str, Any]) -> dict[str, int]:
    """Return the header that counts how often a message was taken out of ``undeliverable``.

    Args:
        received: The headers of the message that the module has received; anybody may have written
            them. A value that is no count is dropped.
    """
    count = received.get(module_headers.REDRIVEN)
    if isinstance(count, int) and not isinstance(count, bool) and count > 0:
        return {module_headers.REDRIVEN: count}
    return {}


def to_undeliverable(
    undeliverable: str,
    outgoing: Outgoing,
    reason: str,
    received: Mapping[str, Any] = NO_HEADERS,
) -> Outgoing:
    """Return a message for ``undeliverable``, with its destination and the reason in headers.

    Args:
        undeliverable: The name of the exchange of undeliverable messages.
        outgoing: The message, with the exchange and key that it was meant for.
        reason: Why it cannot be delivered.
        received: The headers of the message that the module has received for it.
    """
    headers = {
        **destination_headers(outgoing),
        **redriven_header(received),
        module_headers.REASON: reason,
    }
    message = with_headers(outgoing.message, headers, expiration=None)
    return Outgoing(undeliverable, outgoing.routing_key, message)
