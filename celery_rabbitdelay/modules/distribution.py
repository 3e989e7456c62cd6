"""Distribution: publishes messages that are due to their final exchange, unchanged. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import amqp

from celery_rabbitdelay.exceptions import InvalidEnvelope, UnprocessableMessage
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope
from celery_rabbitdelay.modules.forwarding import Outgoing, changed
from celery_rabbitdelay.publishing.message import body_of, headers_of, shortened

__all__ = ["distribute"]


def distribute(message: amqp.Message) -> Iterator[Outgoing]:
    """Return what to publish for a message that is due; for an envelope, each message in it.

    Exchange, routing key, priority and expiration are restored. The due time stays in its header.

    Raises:
        UnprocessableMessage: Its destination is missing, or it is an envelope that cannot be read.
    """
    headers = headers_of(message)
    if message.properties.get("content_type") != CONTENT_TYPE:
        yield _restored(message, headers, headers)
        return
    try:
        envelope = Envelope.unpack(body_of(message))
    except InvalidEnvelope as invalid:
        raise UnprocessableMessage(f"the envelope cannot be opened: {invalid}") from invalid
    shared = {**headers, **envelope.headers}
    # Validate all items first: an invalid envelope goes to undeliverable as a whole, so none of its
    # messages may be published before.
    for item in envelope.items:
        _destination({**shared, **item.headers})
    own = {names.DUE: headers.get(names.DUE)}
    for item in envelope.items:
        properties = {**envelope.properties, **item.properties}
        inner = amqp.Message(item.body, **properties)
        told = {**shared, **item.headers}
        yield _restored(inner, told, {**envelope.headers, **item.headers, **own})


def _restored(
    message: amqp.Message, told: Mapping[str, Any], headers: Mapping[str, Any]
) -> Outgoing:
    exchange, routing_key = _destination(told)
    restored = names.strip(headers)
    if headers.get(names.DUE) is not None:
        restored[names.DUE] = headers[names.DUE]
    properties = {"expiration": told.get(names.EXPIRATION)}
    if names.PRIORITY in told:
        properties["priority"] = told[names.PRIORITY]
    return Outgoing(exchange, routing_key, changed(message, restored, **properties))


def _destination(told: Mapping[str, Any]) -> tuple[str, str]:
    exchange, routing_key = told.get(names.EXCHANGE), told.get(names.ROUTING_KEY)
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        raise UnprocessableMessage(
            f"its destination is missing: {names.EXCHANGE} is {shortened(exchange)}, "
            f"{names.ROUTING_KEY} is {shortened(routing_key)}"
        )
    return exchange, routing_key
