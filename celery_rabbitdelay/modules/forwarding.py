"""What becomes of a message that a module has received: messages to publish, and where. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import amqp

from celery_rabbitdelay.exceptions import Refused
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.message import MAX_WORD, PERSISTENT, headers_of, shortened
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["Outgoing", "bare", "changed", "undeliverable", "written"]

#: The properties of a message that are never sent on: ``user_id`` has to be the connection's own
#: user (https://www.rabbitmq.com/docs/validated-user-id), ``cluster_id`` is out of use.
DROPPED: Final = ("user_id", "cluster_id", "application_headers")

#: Bytes of a frame that are left for what the broker adds to the headers on the way.
FRAME_RESERVE: Final = 2048


class Outgoing(NamedTuple):
    """A message to publish.

    Attributes:
        exchange: Where to; empty for the default exchange.
        routing_key: With which key.
        message: The message.
    """

    exchange: str
    routing_key: str
    message: amqp.Message


def changed(message: amqp.Message, headers: Mapping[str, Any], **properties: Any) -> amqp.Message:
    """Return a persistent message with the same body, other headers, and some other properties.

    Args:
        message: The message.
        headers: All headers that the new one has.
        **properties: Those that it has instead of the old ones; None for none.
    """
    kept = {name: value for name, value in message.properties.items() if name not in DROPPED}
    kept = {**kept, "delivery_mode": PERSISTENT, **properties}
    return amqp.Message(message.body, application_headers=dict(headers), **kept)


def written(outgoing: Outgoing, frame_max: int) -> Content:
    """Return a message as AMQP writes it.

    Args:
        outgoing: The message, and where it goes.
        frame_max: The bytes of a frame, which headers and properties have to fit into.

    Raises:
        Refused: AMQP cannot carry it.
    """
    for what, word in (("exchange", outgoing.exchange), ("routing key", outgoing.routing_key)):
        if len(word.encode(errors="surrogatepass")) > MAX_WORD:
            raise Refused(f"the {what} {shortened(word)} has more than {MAX_WORD} bytes")
    try:
        content = Content.of(outgoing.message)
    except Exception as error:
        # Whatever a value of the wrong type makes of it.
        reason = f"a header or property cannot be written: {shortened(error)}"
        raise Refused(reason) from error
    size = len(content.properties)
    if size > frame_max - FRAME_RESERVE:
        raise Refused(
            f"its headers have {size} bytes, which do not fit into a frame of {frame_max}"
        )
    return content


def bare(topology: Topology, message: amqp.Message, reason: str) -> Outgoing:
    """Return how to put a message into ``undeliverable`` whose headers no frame holds: without."""
    left = amqp.Message(
        message.body, application_headers={names.REASON: reason}, delivery_mode=PERSISTENT
    )
    return Outgoing(topology.modules.undeliverable.exchange.name, "", left)


def undeliverable(topology: Topology, outgoing: Outgoing, reason: str) -> Outgoing:
    """Return how to put a message into ``undeliverable``.

    Args:
        topology: The topology.
        outgoing: The message, and where it was to go.
        reason: Why it cannot.
    """
    headers = {
        name: value
        for name, value in headers_of(outgoing.message).items()
        if name not in names.BROKER_HEADERS
    }
    headers.setdefault(names.EXCHANGE, outgoing.exchange)
    headers.setdefault(names.ROUTING_KEY, outgoing.routing_key)
    headers[names.REASON] = reason
    expiration = outgoing.message.properties.get("expiration")
    if expiration is not None:
        headers.setdefault(names.EXPIRATION, expiration)
    message = changed(outgoing.message, headers, expiration=None)
    return Outgoing(topology.modules.undeliverable.exchange.name, outgoing.routing_key, message)
