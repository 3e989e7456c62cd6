"""Incoming messages that py-amqp cannot read, or that are too large to be held.

Anybody may have published what a consumer receives, and RabbitMQ passes on what it does not look
at: a header whose timestamp counts milliseconds (a year beyond 9999), a message id in Latin-1,
tables in tables a thousand deep. py-amqp raises in the middle of such a message, its connection
cannot be used any more, and the broker delivers the message again and again. The frame handler of
this file delivers it instead, with what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import amqp
from amqp import method_framing
from kombu import Connection

from celery_rabbitdelay.levels.headers import UNREADABLE, UNREADABLE_PROPERTIES, shortened
from celery_rabbitdelay.publishing.wire import (
    BEFORE_PROPERTIES,
    BODY_FRAME,
    HEADER_FRAME,
    Frame,
)

#: Class and method of ``basic.return``, ``basic.deliver`` and ``basic.get-ok``.
_RETURN: Final = (60, 50)
_DELIVER: Final = (60, 60)
_GET_OK: Final = (60, 71)

#: What stands before the properties: class, weight, and size of the body.
_BEFORE_PROPERTIES: Final = struct.Struct(">HHQ")

#: The body of a message that is too large to be held; py-amqp expects one.
_NO_BODY: Final = b"-"


class Seen(NamedTuple):
    """What the frames of a message said, apart from its contents. A sender cannot forge it.

    Attributes:
        properties_bytes: The size of its properties, headers among them.
        unreadable: Why it cannot be read, in words; None if it can be.
        marks: The headers that it was given for that.
        skipped_bytes: The size of its body, if that is larger than the connection holds: the body
            was not kept. None otherwise.
    """

    properties_bytes: int = 0
    unreadable: str | None = None
    marks: Mapping[str, Any] = MappingProxyType({})
    skipped_bytes: int | None = None


def reading_unreadable_properties(connection: Connection, max_bytes: int | None = None) -> None:
    """Install a frame handler that delivers messages which py-amqp cannot read.

    If the properties of a message cannot be read, they are replaced by two headers: the error
    (:data:`.UNREADABLE`), and the raw bytes (:data:`.UNREADABLE_PROPERTIES`). If its exchange or
    its routing key is not UTF-8, each byte that is not ASCII becomes a question mark, and the first
    of these headers is added. The attribute ``rabbitdelay_seen`` of each message, a :class:`Seen`,
    says the same, and cannot be forged.

    Args:
        connection: A connection that is not open yet.
        max_bytes: The largest body that is kept. A larger one is read and dropped, frame by frame,
            so that it never takes memory; its message can only be rejected. None: any is kept.
    """
    options = connection.transport_options or {}
    handler = partial(_frame_handler, max_bytes=max_bytes)
    connection.transport_options = {**options, "frame_handler": handler}


def read_unreadable_properties(connection: Connection) -> None:
    """Do the same on a connection that is open, as long as it is not opened again."""
    transport: Any = connection.connection
    transport.on_inbound_frame = _frame_handler(transport, transport.on_inbound_method)


def _frame_handler(
    connection: Any, callback: Callable[..., Any], max_bytes: int | None = None
) -> Callable[[Frame], bool]:
    #: Of the message that arrives on each channel: what its frames said, and how many bytes of its
    #: body are still to be dropped.
    seen: dict[int, Seen] = {}
    to_drop: dict[int, int] = {}

    def on_method(channel: int, method: tuple[int, int], payload: Any, content: Any) -> None:
        if content is not None:
            own = seen.pop(channel, Seen())
            if not payload.isascii():
                payload, unreadable = _readable_names(method, payload)
                if unreadable is not None and own.unreadable is None:
                    own = own._replace(unreadable=unreadable, marks={UNREADABLE: unreadable})
                    content.properties.setdefault("application_headers", {}).update(own.marks)
            content.rabbitdelay_seen = own
        callback(channel, method, payload, content)

    handle: Callable[[Frame], bool] = method_framing.frame_handler(connection, on_method)

    def on_frame(frame: Frame) -> bool:
        kind, channel, payload = frame
        if kind == BODY_FRAME and channel in to_drop:
            to_drop[channel] -= len(payload)
            if to_drop[channel] > 0:
                connection.bytes_recv += 1  # py-amqp counts frames, for its heartbeat
                return False
            del to_drop[channel]
            return handle((BODY_FRAME, channel, _NO_BODY))
        if kind != HEADER_FRAME:
            return handle(frame)
        class_id, _, size = _BEFORE_PROPERTIES.unpack_from(payload)
        own = seen[channel] = Seen(len(payload) - BEFORE_PROPERTIES)
        if max_bytes is not None and size > max_bytes:
            own = seen[channel] = own._replace(skipped_bytes=size)
            to_drop[channel] = size
            before = _BEFORE_PROPERTIES.pack(class_id, 0, len(_NO_BODY))
            payload = before + bytes(payload[BEFORE_PROPERTIES:])
        try:
            return handle((HEADER_FRAME, channel, payload))
        except Exception:
            reason = _why_unreadable(payload)
            if reason is None:
                raise  # by a callback
        before, properties = payload[:BEFORE_PROPERTIES], payload[BEFORE_PROPERTIES:]
        marks = {UNREADABLE: reason, UNREADABLE_PROPERTIES: bytes(properties)}
        why = f"its properties cannot be read: {reason}"
        seen[channel] = own._replace(unreadable=why, marks=marks)
        marked: Any = amqp.Message(application_headers=marks)
        return handle((HEADER_FRAME, channel, bytes(before) + marked._serialize_properties()))

    return on_frame


def _why_unreadable(payload: Any) -> str | None:
    message: Any = amqp.Message()
    try:
        message.inbound_header(payload)
    except Exception as error:  # noqa: BLE001 - whatever the bytes make of it
        return shortened(error)
    return None


def _readable_names(method: tuple[int, int], payload: bytes) -> tuple[bytes, str | None]:
    """Return the arguments of a method that carries a message, with names that can be read.

    Returns:
        The arguments, and what was wrong with them, in words; None if nothing was.
    """
    if method == _DELIVER:
        begin = 14 + payload[4]  # after the consumer tag, the delivery tag and a bit
    elif method == _GET_OK:
        begin = 13  # after the delivery tag and a bit
    elif method == _RETURN:
        begin = 7 + payload[6]  # after the reply's code and its text
    else:
        return payload, None
    unreadable = None
    for what in ("exchange", "routing key"):
        end = begin + 1 + payload[begin]
        name = payload[begin + 1 : end]
        try:
            name.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            unreadable = unreadable or f"its {what} is {shortened(name)}, which is not UTF-8"
            readable = bytes(byte if byte < 128 else ord("?") for byte in name)
            payload = payload[: begin + 1] + readable + payload[end:]
        begin = end
    return payload, unreadable
