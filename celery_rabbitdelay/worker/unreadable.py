"""Messages whose properties py-amqp cannot read: they arrive all the same, and say so.

RabbitMQ passes on what it does not look at, such as a header whose timestamp counts milliseconds
(a year beyond 9999) or a message id in Latin-1. py-amqp raises in the middle of the message, and
the connection is of no use any more: the broker would deliver the message again and again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import amqp
from amqp import method_framing

from celery_rabbitdelay import headers as names
from celery_rabbitdelay.parcel import shortened

__all__ = ["frame_handler"]

#: The type of a frame that holds a message's size and properties.
HEADER: Final = 2

#: Bytes of such a frame before the properties: class, weight and size of the body.
BEFORE_PROPERTIES: Final = 12

#: Type, channel and payload.
Frame: TypeAlias = tuple[int, int, Any]


def frame_handler(connection: Any, callback: Callable[..., Any]) -> Callable[[Frame], bool]:
    """Take in frames as py-amqp does, for the argument ``frame_handler`` of its connection.

    In place of properties that cannot be read, a message gets two headers: why they cannot
    (:data:`~celery_rabbitdelay.headers.UNREADABLE`), and the bytes that they are
    (:data:`~celery_rabbitdelay.headers.PROPERTIES`).
    """
    handle: Callable[[Frame], bool] = method_framing.frame_handler(connection, callback)

    def on_frame(frame: Frame) -> bool:
        try:
            return handle(frame)
        except Exception:
            kind, channel, payload = frame
            reason = _unreadable(payload) if kind == HEADER else None
            if reason is None:
                raise  # by whoever was told of the frame
            start, properties = payload[:BEFORE_PROPERTIES], payload[BEFORE_PROPERTIES:]
            told: Any = amqp.Message(
                application_headers={names.UNREADABLE: reason, names.PROPERTIES: bytes(properties)}
            )
            return handle((kind, channel, bytes(start) + told._serialize_properties()))

    return on_frame


def _unreadable(payload: Any) -> str | None:
    message: Any = amqp.Message()
    try:
        message.inbound_header(payload)
    except Exception as error:  # noqa: BLE001 - whatever the bytes make of it
        return shortened(error)
    return None
