"""Distribution: publishes messages that are due to their final exchange, unchanged. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import amqp

from celery_rabbitdelay.exceptions import InvalidEnvelope, UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope
from celery_rabbitdelay.modules.forwarding import Outgoing, with_headers
from celery_rabbitdelay.publishing.message import body_of, headers_of, shortened

__all__ = ["distribute"]


def distribute(
    message: amqp.Message,
    put_back: Callable[[amqp.Message], Outgoing | None] = lambda message: None,
) -> Iterator[Outgoing]:
    """Return what to publish for a message that is due; for an envelope, each message in it.

    Exchange, routing key, priority and expiration are restored. The due time stays in its header.

    Args:
        message: The message.
        put_back: Returns what to publish instead if the message is not due yet; see
            :class:`.EarlyMessages`.

    Raises:
        UnprocessableMessage: Its destination is missing, or it is an envelope that cannot be read.
    """
    early = put_back(message)
    if early is not None:
        yield early
        return
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
    own = {header_names.DUE: headers.get(header_names.DUE), header_names.EARLY: None}
    for item in envelope.items:
        properties = {**envelope.properties, **item.properties}
        inner = amqp.Message(item.body, **properties)
        effective_headers = {**shared, **item.headers}
        yield _restored(inner, effective_headers, {**envelope.headers, **item.headers, **own})


def _restored(
    message: amqp.Message, effective_headers: Mapping[str, Any], headers: Mapping[str, Any]
) -> Outgoing:
    exchange, routing_key = _destination(effective_headers)
    restored = header_names.strip(headers)
    for name in (header_names.DUE, header_names.EARLY):
        if headers.get(name) is not None:
            restored[name] = headers[name]
    properties = {"expiration": effective_headers.get(header_names.EXPIRATION)}
    if header_names.PRIORITY in effective_headers:
        properties["priority"] = effective_headers[header_names.PRIORITY]
    return Outgoing(exchange, routing_key, with_headers(message, restored, **properties))


def _destination(effective_headers: Mapping[str, Any]) -> tuple[str, str]:
    exchange, routing_key = (
        effective_headers.get(header_names.EXCHANGE),
        effective_headers.get(header_names.ROUTING_KEY),
    )
    if not isinstance(exchange, str) or not isinstance(routing_key, str):
        raise UnprocessableMessage(
            f"its destination is missing: {header_names.EXCHANGE} is {shortened(exchange)}, "
            f"{header_names.ROUTING_KEY} is {shortened(routing_key)}"
        )
    return exchange, routing_key
