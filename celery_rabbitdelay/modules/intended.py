"""Where an undeliverable message was meant to go: read from its headers and its routing key. Pure.

Each kind of message tells it in another way: a task from the levels by its headers, a message of
another client by its routing key, and a message that check-in could not accept by the key that its
client has chosen. Anybody may have written all of these, so the result is a claim to be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.routing_key import (
    DISTRIBUTION,
    decode_destination,
    encode_destination,
)
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.undeliverable import examine


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

    @classmethod
    def straight_to(cls, queue: str) -> Intended:
        """Return the destination of a message for one queue, by the default exchange."""
        return cls("", queue, queue)


def intended(headers: Mapping[str, Any], topology: Topology, routing_key: str) -> Intended:
    """Return where an undeliverable message was meant to go.

    Args:
        headers: The message's headers, as the broker returns them.
        topology: The topology that it was published into.
        routing_key: ``message.delivery_info["routing_key"]``.

    Raises:
        UnprocessableMessage: Nothing tells it, or what does is invalid.
    """
    exchange, key = headers.get(header_names.EXCHANGE), headers.get(header_names.ROUTING_KEY)
    queue = headers.get(header_names.QUEUE)
    if queue is not None:
        if not isinstance(queue, str) or not queue:
            raise UnprocessableMessage(
                f"{header_names.QUEUE} is {shortened(queue)}, not a queue's name"
            )
        if exchange is None or key is None:
            return Intended.straight_to(queue)
    elif never_accepted(headers, topology, routing_key):
        if exchange in (None, topology.module_queues.checkin.exchange.name):
            exchange = ""
        key = routing_key if key is None else key
    elif exchange is None:
        queue = _queue_in_key(headers, topology, routing_key)
        if queue:
            return Intended.straight_to(queue)
    if not isinstance(exchange, str) or not isinstance(key, str) or not (exchange or key):
        raise UnprocessableMessage(
            f"its destination is unknown: {header_names.EXCHANGE} is {shortened(exchange)}, "
            f"{header_names.ROUTING_KEY} is {shortened(key)}"
        )
    return Intended(exchange, key, queue)


def never_accepted(headers: Mapping[str, Any], topology: Topology, routing_key: str) -> bool:
    """Return whether a message of a client comes from check-in, which has not accepted it.

    Check-in gives each message that it accepts a due time.
    """
    checkin = topology.module_queues.checkin
    if _published_to(headers, checkin.name) == checkin.exchange.name:
        # The broker has taken it out of check-in's queue as its client wrote it.
        return True
    if header_names.DUE in headers:
        return False
    return (
        headers.get(header_names.EXCHANGE) == checkin.exchange.name
        or header_names.X_DELAY in headers
        or examine(headers, topology, routing_key).last_stop == checkin.name
    )


def _published_to(headers: Mapping[str, Any], queue: str) -> str | None:
    """Return the exchange by which a message reached the queue that it has left last."""
    deaths = headers.get("x-death")
    newest = deaths[0] if isinstance(deaths, list) and deaths else None
    if not isinstance(newest, Mapping) or newest.get("queue") != queue:
        return None
    exchange = newest.get("exchange")
    return exchange if isinstance(exchange, str) else None


def _queue_in_key(headers: Mapping[str, Any], topology: Topology, routing_key: str) -> str | None:
    """Return the queue that a message's routing key names; None if it names none."""
    stop = examine(headers, topology, routing_key).last_stop
    if stop == topology.module_queues.meditation.name:
        # There, the routing key is the bare destination; see Topology.route.
        return routing_key
    word = routing_key.split(".")[-1]
    if topology.keys.digits(routing_key) is None or word == encode_destination(DISTRIBUTION):
        return None
    return decode_destination(word)
