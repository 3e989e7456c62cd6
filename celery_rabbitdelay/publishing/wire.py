"""AMQP's frames, as py-amqp writes and reads them.

Only this file knows how py-amqp writes and reads frames. A message is encoded once for all its
resends, and many frames go into one write; py-amqp has no public function for either. A message is
a method frame, a header frame with the properties, and frames for its body, as defined by AMQP
0-9-1 (https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 2.3.5 and 4.2).

A received message is not trusted, and RabbitMQ does not check all of it: a header may have a
timestamp in milliseconds (a year beyond 9999), a message id in Latin-1, or tables nested a thousand
deep. py-amqp raises in the middle of such a message, its connection becomes unusable, and the
broker redelivers the message again and again. The frame handler at the end of this file delivers
the message instead, marked with the error, and drops bodies that are too large.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import amqp
from amqp import method_framing, spec
from amqp.exceptions import FrameSyntaxError, RecoverableConnectionError
from kombu import Connection

from celery_rabbitdelay.levels.headers import UNREADABLE, UNREADABLE_PROPERTIES, shortened
from celery_rabbitdelay.publishing.message import BEFORE_PROPERTIES, Content, encoded, short_string

#: Frame types: a method; a message's size and properties; a part of its body.
METHOD_FRAME: Final = 1
HEADER_FRAME: Final = 2
BODY_FRAME: Final = 3

#: The bytes of a frame without its payload: type, channel, size, and the end byte.
FRAME_OVERHEAD: Final = 8

#: The position of a payload's size in a frame: after type and channel.
PAYLOAD_SIZE: Final = slice(3, 7)

#: The maximum seconds for reopening a channel that the broker has closed.
REOPEN_TIMEOUT: Final = 5.0

#: The minimum timeout of a wait for an answer, in seconds, after the deadline has passed.
MIN_WAIT: Final = 0.001

#: The maximum bytes that are received ahead. More would cost time, because py-amqp copies the
#: remaining bytes with every part of a frame.
RECEIVED_AT_ONCE: Final = 4096

_END: Final = b"\xce"
_PUBLISH: Final = struct.Struct(">HHH")
_FRAME: Final = struct.Struct(">BHI")
_SETTLE: Final = struct.Struct(">BHIHHQB")
_HEADER: Final = struct.Struct(">BHIHHQ")
_ACKED: Final = struct.Struct(">Q?")

#: How a consumer settles a message: the class, the method, and the method's bits.
Settlement: TypeAlias = tuple[int, int, int]

ACK: Final[Settlement] = (60, 80, 0)

#: Rejects a message: the broker dead-letters it.
REJECT: Final[Settlement] = (60, 90, 0)

#: Requeues a message. This is ``basic.nack``, which py-amqp cannot send; see
#: :data:`.ONLY_REJECT_COUNTS`.
REQUEUE: Final[Settlement] = (60, 120, 2)

_ACK_BYTES: Final = struct.pack(">HH", *ACK[:2])
_CLOSE_BYTES: Final = struct.pack(">HH", *spec.Channel.Close)

#: A callback of py-amqp, for example for a blocked connection.
Callback: TypeAlias = Callable[..., object]

#: Type, channel and payload.
Frame: TypeAlias = tuple[int, int, bytes]


def publish_frames(
    channel: int, exchange: str, routing_key: str, content: Content, frame_max: int
) -> bytes:
    """Return the frames that publish a message with the flag ``mandatory``.

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
    if len(properties) > frame_max - FRAME_OVERHEAD - BEFORE_PROPERTIES.size:
        raise FrameSyntaxError(
            f"headers and properties ({len(properties)} bytes) exceed a frame of {frame_max} bytes"
        )
    address = short_string(exchange) + short_string(routing_key)
    parts = [
        _FRAME.pack(METHOD_FRAME, channel, _PUBLISH.size + len(address) + 1),
        _PUBLISH.pack(60, 40, 0),
        address,
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
        how: The method that settles the messages: ack, nack or reject.
        tags: The messages' delivery tags.
        multiple: Whether a tag also settles all earlier messages; not possible with a reject.
    """
    class_id, method, bits = how
    return b"".join(
        [
            _SETTLE.pack(METHOD_FRAME, channel, 13, class_id, method, tag, bits | multiple) + _END
            for tag in tags
        ]
    )


class Wire:
    """Reads and writes the socket of an open connection, frame by frame.

    Args:
        connection: A kombu connection over py-amqp; opened if needed.

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
        """Receive more bytes than py-amqp requests, from now on.

        py-amqp requests every frame in three parts, and small frames arrive by the hundred. Use
        this only if nothing else polls the connection's socket.
        """
        transport = self._amqp.transport
        receive, _ = transport._quick_recv.args
        transport._quick_recv = partial(_receive, receive, RECEIVED_AT_ONCE)

    def write(self, frames: bytes, timeout: float) -> None:
        """Write frames.

        Args:
            frames: The frames' bytes.
            timeout: Maximum seconds for the write.
        """
        transport = self._amqp.transport
        with transport.having_timeout(timeout):
            transport.write(frames)
        self._amqp.bytes_sent += 1  # py-amqp counts writes, for its heartbeat

    def read(self, timeout: float, channel: int) -> tuple[int, bool] | None:
        """Read a frame; return a channel's ``basic.ack``, and let py-amqp handle other frames.

        Nearly every frame is a ``basic.ack``; handling it here avoids py-amqp's slow dispatch.

        Args:
            timeout: Seconds to wait for a frame; 0: no wait.
            channel: The channel's number.

        Returns:
            The delivery tag of the ack, and whether all messages up to it are acknowledged; None
            for any other frame.

        Raises:
            TimeoutError: No frame arrived.
            amqp.exceptions.RecoverableConnectionError: The broker has closed a channel, and did not
                reopen it within :data:`REOPEN_TIMEOUT` seconds.
        """
        transport = self._amqp.transport
        received: bytes = transport._read_buffer
        frame: Frame
        if len(received) >= FRAME_OVERHEAD + int.from_bytes(received[PAYLOAD_SIZE], "big"):
            frame = transport.read_frame()  # the whole frame has arrived
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
            # py-amqp reopens the channel, and waits for the answer.
            with self.answers_within(REOPEN_TIMEOUT):
                self._amqp.on_inbound_frame(frame)
        except TimeoutError as slow:
            raise RecoverableConnectionError("a closed channel did not reopen in time") from slow
        return None

    @contextmanager
    def answers_within(self, seconds: float) -> Iterator[None]:
        """Limit every wait for an answer on this connection, which is unlimited otherwise."""
        own: socket.socket = self._amqp.transport.sock
        former = own.gettimeout()
        own.settimeout(seconds)
        try:
            yield
        finally:
            with suppress(OSError):  # the socket may be closed
                own.settimeout(former)

    @contextmanager
    def all_answers_by(self, deadline: float) -> Iterator[None]:
        """Limit the total time of all waits for answers on this connection.

        Args:
            deadline: The end of the waits, on the clock of :func:`time.monotonic`.
        """
        seconds = max(deadline - time.monotonic(), MIN_WAIT)
        read = self._amqp.blocking_read

        def read_in_time(timeout: float | None = None) -> object:
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

    @property
    def on_blocked(self) -> tuple[Callback | None, ...]:
        """The callbacks for blocked and unblocked."""
        return self._amqp.on_blocked, self._amqp.on_unblocked

    @on_blocked.setter
    def on_blocked(self, callbacks: tuple[Callback | None, ...]) -> None:
        self._amqp.on_blocked, self._amqp.on_unblocked = callbacks


def _receive(receive: Callable[[int], bytes], at_once: int, size: int) -> bytes:
    """Receive bytes for py-amqp: at most ``size``, or ``at_once`` if that is more.

    On a non-blocking socket, py-amqp retries the remaining bytes of a frame in a loop, which is
    endless if the broker is frozen. After a TimeoutError, py-amqp keeps the received bytes, also
    over TLS.
    """
    try:
        return receive(max(size, at_once))
    except (BlockingIOError, ssl.SSLWantReadError) as nothing:
        raise TimeoutError from nothing


#: Class and method of ``basic.return``, ``basic.deliver`` and ``basic.get-ok``.
_RETURN: Final = (60, 50)
_DELIVER: Final = (60, 60)
_GET_OK: Final = (60, 71)

#: Replaces a body that is too large; py-amqp expects a body.
_NO_BODY: Final = b"-"


class Seen(NamedTuple):
    """Facts about a received message from its frames, which a sender cannot forge.

    Attributes:
        properties_bytes: The size of the properties, with the headers.
        unreadable: Why the message cannot be read; None if it can be read.
        marks: The headers that were added to an unreadable message.
        skipped_bytes: The size of a body that was dropped because it is too large; None otherwise.
    """

    properties_bytes: int = 0
    unreadable: str | None = None
    marks: Mapping[str, object] = MappingProxyType({})
    skipped_bytes: int | None = None


def read_unreadable_properties(connection: Connection, max_bytes: int | None = None) -> None:
    """Let a connection deliver messages that py-amqp cannot read, until the connection is lost.

    If the properties of a message cannot be read, they are replaced by two headers: the error
    (:data:`.UNREADABLE`), and the raw bytes (:data:`.UNREADABLE_PROPERTIES`). If its exchange or
    its routing key is not UTF-8, every byte that is not ASCII becomes a question mark, and the
    first of these headers is added. The attribute ``rabbitdelay_seen`` of every message, a
    :class:`Seen`, has the same facts, and cannot be forged.

    Args:
        connection: The connection, which is open.
        max_bytes: The largest body that is kept. A larger body is dropped frame by frame, so that
            it takes no memory; its message can only be rejected. None: every body is kept.
    """
    own: Any = connection.connection
    own.on_inbound_frame = _frame_handler(own, own.on_inbound_method, max_bytes)


def _frame_handler(
    connection: Any, callback: Callback, max_bytes: int | None = None
) -> Callable[[Frame], bool]:
    #: By channel, about the message that is arriving on it: the facts from the message's frames,
    #: and the number of bytes of its body that are still to be dropped.
    seen: dict[int, Seen] = {}
    to_drop: dict[int, int] = {}

    def on_method(channel: int, method: tuple[int, int], payload: bytes, content: Any) -> None:
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
        class_id, _, size = BEFORE_PROPERTIES.unpack_from(payload)
        own = seen[channel] = Seen(len(payload) - BEFORE_PROPERTIES.size)
        if max_bytes is not None and size > max_bytes:
            own = seen[channel] = own._replace(skipped_bytes=size)
            to_drop[channel] = size
            before = BEFORE_PROPERTIES.pack(class_id, 0, len(_NO_BODY))
            payload = before + bytes(payload[BEFORE_PROPERTIES.size :])
        try:
            return handle((HEADER_FRAME, channel, payload))
        except Exception:
            reason = _why_unreadable(payload)
            if reason is None:
                raise  # an error of a callback
        before, properties = payload[: BEFORE_PROPERTIES.size], payload[BEFORE_PROPERTIES.size :]
        marks = {UNREADABLE: reason, UNREADABLE_PROPERTIES: bytes(properties)}
        why = f"its properties cannot be read: {reason}"
        seen[channel] = own._replace(unreadable=why, marks=marks)
        marked = encoded({"application_headers": marks})
        return handle((HEADER_FRAME, channel, bytes(before) + marked))

    return on_frame


def _why_unreadable(payload: bytes) -> str | None:
    try:
        amqp.Message().inbound_header(payload)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - invalid bytes raise many kinds
        return shortened(error)
    return None


def _readable_names(method: tuple[int, int], payload: bytes) -> tuple[bytes, str | None]:
    """Make the exchange and the routing key in a method's arguments readable.

    Returns:
        The arguments, and a description of the problem, which is None if there was no problem.
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
