"""Reads the messages in ``undeliverable`` as copies; the messages stay in the queue."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import amqp
from kombu import Connection

from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.undeliverable import Undeliverable, examine
from celery_rabbitdelay.operations.undeliverable_reader import reading
from celery_rabbitdelay.publishing.message import body_of, headers_of

#: How many messages are read at most by default. The broker needs some 200 bytes for each one until
#: it is requeued (measured on 3.10.8, 4.0.5 and 4.3.6).
LIMIT: Final = 1_000_000


class UndeliverableMessage(NamedTuple):
    """A copy of a message that could not be delivered.

    Attributes:
        found: Its task, its queue and due time, and why it could not be delivered.
        headers: Its headers.
        body: Its body.
        exchange: The exchange that it was last published to.
        routing_key: The routing key that it was last published with.
        properties: Its other properties.
    """

    found: Undeliverable
    headers: Mapping[str, Any]
    body: bytes
    exchange: str
    routing_key: str
    properties: Mapping[str, Any] = MappingProxyType({})


def undeliverable_messages(
    connection: Connection, topology: Topology, limit: int = LIMIT
) -> Generator[UndeliverableMessage, None, None]:
    """Yield a copy of each message in ``undeliverable``, oldest first; the messages stay there.

    Messages that another consumer holds at this moment are left out.

    Args:
        connection: A connection to the broker; another one like it is opened.
        topology: The topology whose messages are read.
        limit: The most messages that are read.

    Raises:
        ReadTooLong: Reading took so long that the broker may have requeued messages.
        amqp.exceptions.NotFound: The queue does not exist.
        OSError: The broker cannot be reached, or the connection was lost.
    """
    with reading(connection, topology) as reader:
        for message in reader.messages(limit):
            yield copy_of(message, topology)


def copy_of(message: amqp.Message, topology: Topology) -> UndeliverableMessage:
    """Return a copy of a message that was read."""
    headers, information = headers_of(message), message.delivery_info
    exchange, key = information["exchange"], information["routing_key"]
    found = examine(headers, topology, key)
    others = {k: value for k, value in message.properties.items() if k != "application_headers"}
    return UndeliverableMessage(found, headers, body_of(message), exchange, key, others)


def headers_as_json(headers: Mapping[str, Any]) -> str:
    """Return headers as the text of a JSON object, whatever they hold.

    Instants are written as in ISO 8601, bytes as text with escapes, and what JSON cannot express
    as Python shows it.
    """
    try:
        return json.dumps(as_json(headers))
    except RecursionError:
        return json.dumps(_types(headers))


def as_json(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers, or properties, as :func:`headers_as_json` writes them."""
    try:
        plain: dict[str, Any] = _plain(headers)
    except RecursionError:
        return _types(headers)
    return plain


def _types(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): shortened(type(value)) for name, value in headers.items()}


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(name): _plain(each) for name, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
        case bytes():
            return value.decode("utf-8", "backslashreplace")
        case datetime():
            return (value if value.tzinfo else value.replace(tzinfo=UTC)).isoformat()
    return str(value)
