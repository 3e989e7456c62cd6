"""AMQP's bytes: messages and frames as py-amqp writes and reads them.

Only this file and ``incoming`` know how py-amqp writes and reads frames. A message is encoded once,
however often it is sent, and many frames go into one write, for which py-amqp has no public
function. The format is that of AMQP 0-9-1
(https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 2.3.5 and 4.2): a method frame, a header
frame with the properties, and as many frames as the body takes.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp import spec
from amqp.exceptions import FrameSyntaxError, RecoverableConnectionError
from kombu import Connection

from celery_rabbitdelay.publishing.message import body_of
from celery_rabbitdelay.publishing.properties import encoded, short_string

#: Frame types: a method; a message's size and properties; a part of its body.
METHOD_FRAME: Final = 1
HEADER_FRAME: Final = 2
BODY_FRAME: Final = 3

#: The bytes of a frame without its payload: type, channel, size, and the byte at its end.
FRAME_OVERHEAD: Final = 8

#: Where the size of a frame's payload stands: behind type and channel.
PAYLOAD_SIZE: Final = slice(3, 7)

#: Seconds that a broker which has closed a channel may take to open it again.
REOPEN_TIMEOUT: Final = 5.0

#: Bytes that are received ahead, if there are as many. More would cost time: with each part of a
#: frame, py-amqp copies what is left of them.
RECEIVED_AT_ONCE: Final = 4096

#: The bytes of a header frame before the properties: class, weight and size of the body.
BEFORE_PROPERTIES: Final = 12

_END: Final = b"\xce"
_PUBLISH: Final = struct.Struct(">HHH")
_FRAME: Final = struct.Struct(">BHI")
_SETTLE: Final = struct.Struct(">BHIHHQB")
_HEADER: Final = struct.Struct(">BHIHHQ")
_CONTENT_HEADER: Final = struct.Struct(">HHQ")
_ACKED: Final = struct.Struct(">Q?")

#: The class of all methods that carry messages.
BASIC: Final = 60

#: How a consumer settles a message: class and method of what it sends, and its bits.
Settlement: TypeAlias = tuple[int, int, int]

ACK: Final[Settlement] = (60, 80, 0)

#: The broker dead-letters the message.
REJECT: Final[Settlement] = (60, 90, 0)

#: The message goes back to its queue. With ``basic.nack``, which py-amqp cannot send; see
#: :data:`.ONLY_REJECT_COUNTS`.
REQUEUE: Final[Settlement] = (60, 120, 2)

_ACK_BYTES: Final = struct.pack(">HH", *ACK[:2])
_CLOSE_BYTES: Final = struct.pack(">HH", *spec.Channel.Close)

#: Type, channel and payload.
Frame: TypeAlias = tuple[int, int, Any]


class Content(NamedTuple):
    """A message as bytes.

    Attributes:
        properties: Its properties, headers among them, with the flags that say which there are.
        body: Its body.
    """

    properties: bytes
    body: bytes

    @classmethod
    def of(cls, message: amqp.Message) -> Content:
        """Encode a message.

        Raises:
            amqp.exceptions.FrameSyntaxError: AMQP has no type for one of its headers.
            struct.error: A number is too large, or a text too long, for its field.
        """
        if isinstance(message.body, str):
            message.properties.setdefault("content_encoding", "utf-8")
        return cls(encoded(message.properties), body_of(message))

    def message(self) -> amqp.Message:
        """Return the message again."""
        message: Any = amqp.Message(self.body)
        message.inbound_header(_CONTENT_HEADER.pack(BASIC, 0, len(self.body)) + self.properties)
        return message  # type: ignore[no-any-return]


def publish_frames(
    channel: int, exchange: str, routing_key: str, content: Content, frame_max: int
) -> bytes:
    """Return the frames that publish a message, mandatory.

    Args:
        channel: The channel's number.
        exchange: The exchange's name; empty for the default exchange.
        routing_key: The routing key.
        content: The message.
        frame_max: The largest frame of the connection, in bytes.

    Raises:
        amqp.exceptions.FrameSyntaxError: Headers and properties do not fit into a frame.
        struct.error: The exchange's name or the routing key has more than 255 bytes.
    """
    properties, body = content
    if len(properties) > frame_max - FRAME_OVERHEAD - BEFORE_PROPERTIES:
        raise FrameSyntaxError(
            f"headers and properties have {len(properties)} bytes, a frame {frame_max}"
        )
    name, key = short_string(exchange), short_string(routing_key)
    parts = [
        _FRAME.pack(METHOD_FRAME, channel, _PUBLISH.size + len(name) + len(key) + 1),
        _PUBLISH.pack(60, 40, 0),
        name,
        key,
        b"\x01",  # mandatory
        _END,
        _HEADER.pack(HEADER_FRAME, channel, 12 + len(properties), 60, 0, len(body)),
        properties,
        _END,
    ]
    max_chunk = frame_max - FRAME_OVERHEAD
    for begin in range(0, len(body), max_chunk):
        chunk = body[begin : begin + max_chunk]
        parts += (_FRAME.pack(BODY_FRAME, channel, len(chunk)), chunk, _END)
    return b"".join(parts)


def settle_frames(
    channel: int, how: Settlement, tags: Iterable[int], multiple: bool = False
) -> bytes:
    """Return the frames that settle messages.

    Args:
        channel: The channel's number.
        how: How they are settled.
        tags: Their delivery tags.
        multiple: Whether each tag stands for all messages up to it; they cannot be rejected so.
    """
    class_id, method, bits = how
    return b"".join(
        [
            _SETTLE.pack(METHOD_FRAME, channel, 13, class_id, method, tag, bits | multiple) + _END
            for tag in tags
        ]
    )


class Wire:
    """The socket of an open connection, read and written frame by frame.

    Args:
        connection: A kombu connection by py-amqp; it is opened if it is not.

    Attributes:
        frame_max: The largest frame, in bytes.
    """

    def __init__(self, connection: Connection) -> None:
        self._amqp: Any = connection.connection
        self.frame_max: int = self._amqp.frame_max
        transport = self._amqp.transport
        if not isinstance(transport._quick_recv, partial):
            transport._quick_recv = partial(_receive, transport._quick_recv, 0)

    def receive_ahead(self) -> None:
        """Receive more than py-amqp asks for, from now on.

        It asks for each frame in three parts, and small frames arrive by the hundred. Only for a
        connection of which nobody else looks whether its socket has something to read.
        """
        transport = self._amqp.transport
        receive, _ = transport._quick_recv.args
        transport._quick_recv = partial(_receive, receive, RECEIVED_AT_ONCE)

    def write(self, frames: bytes, timeout: float) -> None:
        """Write frames.

        Args:
            frames: Their bytes.
            timeout: Seconds that it may take.
        """
        transport = self._amqp.transport
        with transport.having_timeout(timeout):
            transport.write(frames)
        self._amqp.bytes_sent += 1  # py-amqp counts writes, for its heartbeat

    def read(self, timeout: float, channel: int) -> tuple[int, bool] | None:
        """Read a frame and handle it as py-amqp does, unless it is a ``basic.ack`` on a channel.

        Nearly every frame is a ``basic.ack``; handling it here avoids py-amqp's slow dispatch.

        Args:
            timeout: Seconds to wait for a frame; 0 for not at all.
            channel: The channel's number.

        Returns:
            The delivery tag of the ack, and whether all up to it are acknowledged; None if the
            frame was another one.

        Raises:
            TimeoutError: No frame arrived.
            amqp.exceptions.RecoverableConnectionError: The broker has closed a channel, and then
                does not answer for :data:`REOPEN_TIMEOUT` seconds.
        """
        transport = self._amqp.transport
        received: bytes = transport._read_buffer
        frame: Frame
        if len(received) >= FRAME_OVERHEAD + int.from_bytes(received[PAYLOAD_SIZE], "big"):
            frame = transport.read_frame()  # all of it has arrived
        else:
            with transport.having_timeout(timeout):
                frame = transport.read_frame()
        kind, number, payload = frame
        method = payload[:4] if kind == METHOD_FRAME else None
        if method == _ACK_BYTES and number == channel:
            self._amqp.bytes_recv += 1  # py-amqp counts frames, for its heartbeat
            tag, multiple = _ACKED.unpack_from(payload, 4)
            return tag, multiple
        if method != _CLOSE_BYTES:
            self._amqp.on_inbound_frame(frame)
            return None
        try:
            # py-amqp opens the channel again, and waits for the answer.
            with self.answers_within(REOPEN_TIMEOUT):
                self._amqp.on_inbound_frame(frame)
        except TimeoutError as slow:
            raise RecoverableConnectionError("a closed channel did not open again") from slow
        return None

    @contextmanager
    def answers_within(self, seconds: float) -> Iterator[None]:
        """Bound every wait for an answer on this connection, which has no bound otherwise."""
        own: socket.socket = self._amqp.transport.sock
        former = own.gettimeout()
        own.settimeout(seconds)
        try:
            yield
        finally:
            with suppress(OSError):  # it is closed by now
                own.settimeout(former)

    @contextmanager
    def all_answers_within(self, seconds: float) -> Iterator[None]:
        """Bound all waits for answers on this connection together."""
        deadline = time.monotonic() + seconds
        read = self._amqp.blocking_read

        def read_in_time(timeout: float | None = None) -> Any:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:.3f} s")
            return read(left if timeout is None else min(timeout, left))

        with self.answers_within(seconds):
            self._amqp.blocking_read = read_in_time
            try:
                yield
            finally:
                del self._amqp.blocking_read

    def set_on_blocked(self, on_blocked: Any, on_unblocked: Any) -> tuple[Any, Any]:
        """Set the callbacks for blocked and unblocked; return the former ones."""
        former = self._amqp.on_blocked, self._amqp.on_unblocked
        self._amqp.on_blocked, self._amqp.on_unblocked = on_blocked, on_unblocked
        return former


def _receive(receive: Callable[[int], bytes], at_once: int, size: int) -> bytes:
    """Receive bytes, for py-amqp: at most ``size``, or ``at_once`` if that is more.

    Where a socket does not block, py-amqp itself asks again and again for the rest of a frame,
    without end if the broker is frozen. After a TimeoutError it keeps what it has, over TLS too.
    """
    try:
        return receive(max(size, at_once))
    except (BlockingIOError, ssl.SSLWantReadError) as nothing:
        raise TimeoutError from nothing
