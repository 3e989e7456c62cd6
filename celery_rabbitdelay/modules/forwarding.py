"""The messages that a module publishes for one that it has received. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import DelayHeaders, is_expiration, shortened
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.message import MAX_SHORTSTR_BYTES, WaitingMessage
from celery_rabbitdelay.publishing.publication import Address
from celery_rabbitdelay.publishing.wire import Content

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
        through: Exchange and routing key by which it reaches the above; None if it is published
            straight there.
        obstacle: Why it is not published now, but tried later straight from the levels; None if it
            is published.
        is_vouched: Whether the module signs what it publishes in its place, if there is a key. Not
            if it is made of a message whose sender has shown no key.
    """

    exchange: str
    routing_key: str
    message: WaitingMessage
    reroute: Address | None = None
    through: tuple[str, str] | None = None
    obstacle: str | None = None
    is_vouched: bool = True

    @property
    def address(self) -> tuple[str, str]:
        """The exchange and the routing key that it is published with."""
        return self.through or (self.exchange, self.routing_key)


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


def with_destination(outgoing: Outgoing) -> WaitingMessage:
    """Return a message whose headers say where distribution publishes it.

    What they say already stays: distribution has left it, because its consumer needs it.
    """
    message, said = outgoing.message, outgoing.message.headers
    return message.saying(
        exchange=outgoing.exchange if said.exchange is None else said.exchange,
        routing_key=outgoing.routing_key if said.routing_key is None else said.routing_key,
        expiration=said.expiration or message.properties.get("expiration"),
    ).having(expiration=None)


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
    if expiration is not None and not is_expiration(expiration):
        # The broker would close the channel, with all that is in flight on it.
        raise UnprocessableMessage(
            f"its expiration is {shortened(expiration)}, not a number of milliseconds"
        )
    try:
        content = Content.of(outgoing.message.amqp())
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


def to_undeliverable(
    undeliverable: str, outgoing: Outgoing, reason: str, redriven: int = 0
) -> Outgoing:
    """Return a message for ``undeliverable``, with its destination and the reason in headers.

    Args:
        undeliverable: The name of the exchange of undeliverable messages.
        outgoing: The message, with the exchange and key that it was meant for.
        reason: Why it cannot be delivered.
        redriven: How often the message was redriven that the module has received for it.
    """
    message = with_destination(outgoing).saying(reason=reason, redriven=redriven)
    return Outgoing(undeliverable, outgoing.routing_key, message)


def without_headers(undeliverable: str, outgoing: Outgoing) -> Outgoing:
    """Return a message for ``undeliverable`` without the headers that do not fit into a frame."""
    said = outgoing.message.headers
    kept = DelayHeaders(reason=said.reason, redriven=said.redriven)
    return Outgoing(undeliverable, "", WaitingMessage(outgoing.message.body, {}, kept))
