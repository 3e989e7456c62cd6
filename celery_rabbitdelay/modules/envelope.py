"""Write and read envelopes: messages that hold many messages. Pure.

The messages in an envelope share a destination and a due time, and so most of their headers and
properties. The body of an envelope is one zlib stream (RFC 1950), with the preset dictionary
:data:`DICTIONARY` or without one. Uncompressed, it holds these blocks:

* the shared block, a JSON object with ``headers``, ``properties`` and ``copies``. ``copies`` maps
  headers and properties to the header of the same message whose value they repeat, e.g.
  ``{"headers": {"root_id": "id"}}``;
* two blocks per message: a JSON object with its own ``headers`` and ``properties``, which override
  the shared ones, and its body.

A block is its length (4 bytes, big-endian), and that many bytes. JSON is UTF-8. JSON cannot express
bytes, dates and decimals: a message with such a value in a header is sent without an envelope.

A hostile client may write an envelope in which zlib expands one byte to a thousand. So
:class:`OpenedEnvelope` reads the envelope block by block, and never holds more than one message.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, Final, NamedTuple

from celery_rabbitdelay.exceptions import InvalidEnvelope, UnprocessableMessage
from celery_rabbitdelay.levels.headers import ENVELOPE, shortened
from celery_rabbitdelay.modules.limits import MAX_DEPTH, check_depth
from celery_rabbitdelay.publishing.message import MESSAGE_PROPERTIES

#: Maximum messages in an envelope.
MAX_ENVELOPE_MESSAGES: Final = 100_000

#: Maximum bytes in an envelope, uncompressed.
MAX_ENVELOPE_BYTES: Final = 64 * 2**20

#: The preset dictionary: names and usual values of a Celery task. It is part of the format; a
#: different dictionary needs a new version of the format. The most frequent parts stand at the end,
#: where references to them are shortest (RFC 1950, section 2.2).
DICTIONARY: Final = (
    b'{"headers":{"lang":"py","task":"shadow":null,"eta":null,"expires":null,"group":null,'
    b'"group_index":null,"retries":0,"timelimit":[null,null],"root_id":"parent_id":null,'
    b'"origin":"gen@","ignore_result":false,"replaced_task_nesting":0,"stamped_headers":null,'
    b'"stamps":{}},"properties":{"content_type":"application/json","content_encoding":"utf-8",'
    b'"delivery_mode":2,"reply_to":"","priority":0},"copies":{"headers":{"root_id":"id"},'
    b'"properties":{"correlation_id":"id"}}}'
    b'\0\0\0b{"headers":{"id":"","argsrepr":"(,)","kwargsrepr":"{}"}}'
    b'\0\0\0S[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
    b'\0\0\0b{"headers":{"id":"'
)

#: The compression level of envelopes: higher levels cost much time, and save few bytes.
COMPRESSION: Final = 1

#: The properties that a message in an envelope may have, in AMQP's order.
_PROPERTIES: Final = tuple(name for name in MESSAGE_PROPERTIES if name != "application_headers")

#: Maximum bytes of a block of headers and properties. These have to fit into a frame (by default
#: 131,072 bytes), so no valid block is larger. Decoded JSON takes 20 times as much memory.
MAX_HEADER_BLOCK_BYTES: Final = 2**20

#: The number of decompressed bytes, and of compressed bytes, per step.
_CHUNK: Final = 65_536
_COMPRESSED_CHUNK: Final = 16_384

_LENGTH: Final = struct.Struct(">I")


class Item(NamedTuple):
    """A message in an envelope.

    Attributes:
        body: The message's body.
        headers: The message's own headers, which override the shared headers.
        properties: The message's own AMQP properties, which override the shared properties.
    """

    body: bytes
    headers: Mapping[str, object] = {}
    properties: Mapping[str, object] = {}

    def length_prefixed(self) -> bytes:
        """Return the two blocks of the message.

        Raises:
            InvalidEnvelope: A header cannot be written as JSON.
        """
        own = _to_json(headers=self.headers, properties=self.properties)
        return length_prefixed(own) + length_prefixed(self.body)

    def properties_with(self, shared: Mapping[str, object]) -> dict[str, object]:
        """Return the message's shared and own properties; drop names that AMQP does not define."""
        both = {**shared, **self.properties}
        return {name: both[name] for name in _PROPERTIES if name in both}


def packed(
    items: Iterable[Item], headers: Mapping[str, object] = {}, properties: Mapping[str, object] = {}
) -> bytes:
    """Return the body of an envelope.

    Args:
        items: The messages.
        headers: The headers that all messages have.
        properties: The AMQP message properties that all messages have.

    Raises:
        InvalidEnvelope: The envelope has too many bytes, or a header cannot be written as JSON.
    """
    blocks = (item.length_prefixed() for item in items)
    return compressed(shared_block(headers, properties) + b"".join(blocks))


class OpenedEnvelope:
    """Reads the messages in an envelope one by one.

    Every iteration reads the messages again, and raises :class:`.InvalidEnvelope` at a message that
    cannot be read or exceeds a limit.

    Args:
        body: The body of the envelope.
        max_body_bytes: The largest body of a message in the envelope.

    Attributes:
        headers: The headers shared by all messages.
        properties: The AMQP message properties shared by all messages.

    Raises:
        InvalidEnvelope: The shared block cannot be read, or exceeds a limit.
    """

    def __init__(self, body: bytes, max_body_bytes: int = MAX_ENVELOPE_BYTES) -> None:
        blocks = io.BufferedReader(_Decompressed(body), _CHUNK)
        shared = _next_block(blocks, MAX_HEADER_BLOCK_BYTES, "header")
        if shared is None:
            raise InvalidEnvelope("it is empty")
        read = _from_json(shared)
        self.headers, self.properties = _parts(read)
        # Names of headers and properties, with the header whose value they repeat.
        self._copied_headers, self._copied_properties = _parts(read.get("copies", {}))
        self._body = body
        self._max_body_bytes = max_body_bytes

    def __iter__(self) -> Iterator[Item]:
        blocks, count = io.BufferedReader(_Decompressed(self._body), _CHUNK), 0
        _next_block(blocks, MAX_HEADER_BLOCK_BYTES, "header")
        while (own := _next_block(blocks, MAX_HEADER_BLOCK_BYTES, "header")) is not None:
            if count == MAX_ENVELOPE_MESSAGES:
                raise InvalidEnvelope(f"it holds more than {MAX_ENVELOPE_MESSAGES} messages")
            count += 1
            content = _next_block(blocks, self._max_body_bytes, "message")
            if content is None:
                raise InvalidEnvelope("its last message is truncated")
            headers, properties = _parts(_from_json(own))
            if self._copied_headers:
                headers |= _copied(self._copied_headers, headers)
            if self._copied_properties:
                properties |= _copied(self._copied_properties, headers)
            yield Item(content, headers, properties)


class _Decompressed(io.RawIOBase):
    """The uncompressed blocks of an envelope, decompressed as they are read."""

    def __init__(self, body: bytes) -> None:
        self._stream = zlib.decompressobj(zdict=DICTIONARY)
        self._compressed = io.BytesIO(body)
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = b""
        while not chunk and not self._stream.eof:
            rest = self._stream.unconsumed_tail or self._compressed.read(_COMPRESSED_CHUNK)
            if not rest:
                raise InvalidEnvelope("its compressed stream is incomplete")
            try:
                chunk = self._stream.decompress(rest, min(len(buffer), _CHUNK))
            except zlib.error as error:
                raise InvalidEnvelope(f"it cannot be decompressed: {error}") from error
        self._size += len(chunk)
        if self._size > MAX_ENVELOPE_BYTES:
            raise InvalidEnvelope(f"it holds more than {MAX_ENVELOPE_BYTES} bytes")
        buffer[: len(chunk)] = chunk
        return len(chunk)


def _next_block(file: BinaryIO, most: int, what: str) -> bytes | None:
    """Return the next block of a file; None at the end.

    Args:
        file: The uncompressed blocks.
        most: The limit, in bytes.
        what: The kind of block, for the error.

    Raises:
        InvalidEnvelope: The block is too large or incomplete, or the file cannot be read.
    """
    length = file.read(_LENGTH.size)
    if not length:
        return None
    if len(length) < _LENGTH.size:
        raise InvalidEnvelope("its last length prefix is truncated")
    (size,) = _LENGTH.unpack(length)
    if size > most:
        raise InvalidEnvelope(f"it has a {what} of {size} bytes, more than {most}")
    block = file.read(size)
    if len(block) < size:
        raise InvalidEnvelope("its last block is truncated")
    return block


def length_prefixed(block: bytes) -> bytes:
    """Return a block with its length before it."""
    return _LENGTH.pack(len(block)) + block


def shared_block(
    headers: Mapping[str, object],
    properties: Mapping[str, object],
    copied_headers: Mapping[str, str] = {},
    copied_properties: Mapping[str, str] = {},
) -> bytes:
    """Return the block that all messages share.

    Args:
        headers: The headers that all messages have.
        properties: The AMQP message properties that all messages have.
        copied_headers: Maps a header's name to the header whose value it repeats.
        copied_properties: Maps a property's name to the header whose value it repeats.

    Raises:
        InvalidEnvelope: A value cannot be written as JSON.
    """
    copies = _without_empty(headers=copied_headers, properties=copied_properties)
    return length_prefixed(_to_json(headers=headers, properties=properties, copies=copies))


def compressed(blocks: bytes) -> bytes:
    """Return the body of an envelope from its encoded blocks.

    Args:
        blocks: The shared block, then two blocks per message.

    Raises:
        InvalidEnvelope: The envelope has too many bytes.
    """
    if len(blocks) > MAX_ENVELOPE_BYTES:
        raise InvalidEnvelope(f"{len(blocks)} bytes exceed the maximum of {MAX_ENVELOPE_BYTES}")
    stream = zlib.compressobj(COMPRESSION, zdict=DICTIONARY)
    return stream.compress(blocks) + stream.flush()


def blocks_of(data: bytes) -> Iterator[bytes]:
    """Yield the blocks of an uncompressed envelope, without their lengths.

    Raises:
        InvalidEnvelope: The data is truncated.
    """
    blocks = io.BytesIO(data)
    while (block := _next_block(blocks, len(data), "block")) is not None:
        yield block


def _without_empty(**parts: Mapping[str, object]) -> dict[str, dict[str, object]]:
    return {name: dict(part) for name, part in parts.items() if part}


def _to_json(**parts: Mapping[str, object]) -> bytes:
    written = _without_empty(**parts)
    try:
        return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidEnvelope(f"{written!r} cannot be written as JSON: {error}") from error


def _finite(literal: str) -> float:
    """Return a finite number; RabbitMQ closes the connection for NaN and infinity."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(literal)} is not finite")
    return number


#: Created once, because creating a decoder takes longer than decoding a block.
_JSON: Final = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _from_json(block: bytes) -> Any:
    try:
        read = _JSON.decode(block.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidEnvelope(f"a block is not JSON: {error}") from error
    # Nearly all blocks have so few brackets that they cannot be nested too deep.
    if block.count(b"{") + block.count(b"[") > MAX_DEPTH and isinstance(read, dict):
        try:
            check_depth(read)
        except UnprocessableMessage as too_deep:
            raise InvalidEnvelope(f"a block is nested too deeply: {too_deep.reason}") from too_deep
    return read


def _parts(read: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    is_object = isinstance(read, dict)
    headers = read.get("headers", {}) if is_object else None
    properties = read.get("properties", {}) if is_object else None
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise InvalidEnvelope("a block is not a JSON object of headers and properties")
    if properties.get("content_type") == ENVELOPE:
        raise InvalidEnvelope("it contains an envelope")
    return headers, properties


def _copied(copies: Mapping[str, object], headers: Mapping[str, object]) -> dict[str, object]:
    return {
        name: headers[source]
        for name, source in copies.items()
        if isinstance(source, str) and source in headers
    }
