"""Distribution: what is due goes to any exchange, as if it had been published there now. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import amqp

from celery_rabbitdelay.exceptions import InvalidEnvelope, Refused
from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.modules.envelope import CONTENT_TYPE, Envelope
from celery_rabbitdelay.modules.forwarding import Outgoing, changed
from celery_rabbitdelay.publishing.message import body_of, headers_of

__all__ = ["distribute"]


def distribute(message: amqp.Message) -> Iterator[Outgoing]:
    """Say what becomes of a message that is due; of an envelope, all that it holds.

    Exchange, routing key, priority and expiration are restored. When it was due stays readable.

    Raises:
        Refused: It does not say where it goes, or is an envelope that cannot be read.
    """
    headers = headers_of(message)
    if message.properties.get("content_type") != CONTENT_TYPE:
        yield _restored(message, headers, headers)
        return
    try:
        envelope = Envelope.unpack(body_of(message))
    except InvalidEnvelope as invalid:
        raise Refused(f"it is no envelope that can be opened: {invalid}") from invalid
    shared = {**headers, **envelope.headers}
    # All before the first is published: an envelope that is refused is refused whole, or what was
    # delivered already would be in undeliverable as well.
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
        raise Refused(
            f"it does not say where it goes: {names.EXCHANGE} is {exchange!r}, "
            f"{names.ROUTING_KEY} is {routing_key!r}"
        )
    return exchange, routing_key
