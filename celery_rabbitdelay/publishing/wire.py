"""Messages as AMQP writes them: bytes that are made once, however often they are sent.

The format is that of AMQP 0-9-1 (https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 2.3.5 and
4.2): a method frame, a header frame with the properties, and as many frames as the body takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp import method_framing
from amqp.exceptions import FrameSyntaxError

from celery_rabbitdelay.levels import headers as names
from celery_rabbitdelay.publishing.message import shortened

__all__ = ["METHOD", "Content", "acknowledging", "frame_handler", "publishing"]

#: The type of a frame that holds a method.
METHOD: Final = 1

#: The bytes of a frame besides what it holds: type, channel, size, and the byte at its end.
OVERHEAD: Final = 8

#: The bytes of a header frame before the properties.
HEADER_OVERHEAD: Final = 12

_END: Final = b"\xce"
_PUBLISH: Final = struct.Struct(">HHHB")
_WORD: Final = struct.Struct(">B")
_FRAME: Final = struct.Struct(">BHI")
_ACK: Final = struct.Struct(">BHIHHQB")
_HEADER: Final = struct.Struct(">BHIHHQ")


class Content(NamedTuple):
    """A message as AMQP writes it.

    Attributes:
        properties: Its properties, headers among them, with the flags that say which there are.
        body: Its body.
    """

    properties: bytes
    body: bytes

    @classmethod
    def of(cls, message: amqp.Message) -> Content:
        """Write a message.

        Raises:
            amqp.exceptions.FrameSyntaxError: AMQP has no type for one of its headers.
            struct.error: A number is too large, or a text too long, for its place.
        """
        written: Any = message
        body = written.body
        if isinstance(body, str):
            body = body.encode(written.properties.setdefault("content_encoding", "utf-8"))
        return cls(written._serialize_properties(), body)


def acknowledging(channel: int, tags: Iterable[int]) -> bytes:
    """Return the frames that acknowledge messages.

    Args:
        channel: The number of the channel that they came by.
        tags: Their delivery tags.
    """
    return b"".join([_ACK.pack(METHOD, channel, 13, 60, 80, tag, 0) + _END for tag in tags])


def publishing(
    channel: int, exchange: str, routing_key: str, content: Content, frame_max: int
) -> bytes:
    """Return the frames that publish a message, mandatory.

    Args:
        channel: The channel's number.
        exchange: Where to; empty for the default exchange.
        routing_key: With which key.
        content: The message.
        frame_max: The bytes that a frame of the connection may have.

    Raises:
        amqp.exceptions.FrameSyntaxError: Headers and properties do not fit into a frame.
        struct.error: The exchange's name or the routing key has more than 255 bytes.
    """
    properties, body = content
    if len(properties) > frame_max - OVERHEAD - HEADER_OVERHEAD:
        raise FrameSyntaxError(
            f"headers and properties have {len(properties)} bytes, a frame {frame_max}"
        )
    # Half a character is no UTF-8, but py-amqp writes it all the same.
    name, key = (word.encode("utf-8", "surrogatepass") for word in (exchange, routing_key))
    parts = [
        _FRAME.pack(METHOD, channel, 9 + len(name) + len(key)),
        _PUBLISH.pack(60, 40, 0, len(name)),
        name,
        _WORD.pack(len(key)),
        key,
        b"\x01",  # mandatory
        _END,
        _HEADER.pack(2, channel, 12 + len(properties), 60, 0, len(body)),
        properties,
        _END,
    ]
    most = frame_max - OVERHEAD
    for begin in range(0, len(body), most):
        chunk = body[begin : begin + most]
        parts += (_FRAME.pack(3, channel, len(chunk)), chunk, _END)
    return b"".join(parts)


#: The type of a frame that holds a message's size and properties.
HEADER: Final = 2

#: Bytes of such a frame before the properties: class, weight and size of the body.
BEFORE_PROPERTIES: Final = 12

#: Type, channel and payload.
Frame: TypeAlias = tuple[int, int, Any]


def frame_handler(connection: Any, callback: Callable[..., Any]) -> Callable[[Frame], bool]:
    """Take in frames as py-amqp does, for the argument ``frame_handler`` of its connection.

    In place of properties that cannot be read, a message gets two headers: why they cannot
    (:data:`~celery_rabbitdelay.levels.headers.UNREADABLE`), and the bytes that they are
    (:data:`~celery_rabbitdelay.levels.headers.UNREADABLE_PROPERTIES`).
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
                application_headers={
                    names.UNREADABLE: reason,
                    names.UNREADABLE_PROPERTIES: bytes(properties),
                }
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
