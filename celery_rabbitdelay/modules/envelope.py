"""Many messages in one: the envelope's format, written and read. Pure.

The messages of an envelope share a destination and a due time, and so most of their headers and
properties. The body of an envelope is one zlib stream (RFC 1950), with the preset dictionary
:data:`DICTIONARY` or without one. Uncompressed, it holds these blocks:

* what all messages share, a JSON object: ``headers``, ``properties``, and ``copies`` of both: names
  whose value repeats another header of the same item, e.g. ``{"headers": {"root_id": "id"}}``;
* for each message two blocks: a JSON object with its own ``headers`` and ``properties``, which
  override the shared ones, and its body.

A block is its length in bytes, 4 bytes big-endian, and that many bytes. JSON is UTF-8. It cannot
express bytes, dates and decimals: a message that has one in a header is sent by itself.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.publishing.message import ENVELOPES

__all__ = [
    "CONTENT_TYPE",
    "DICTIONARY",
    "ENVELOPES",
    "MAX_ENVELOPE_BYTES",
    "MAX_ENVELOPE_MESSAGES",
    "Envelope",
    "Item",
    "blocks_of",
    "compressed",
    "length_prefixed",
    "shared_block",
]

#: The ``content_type`` property of an envelope; the number is the format's version.
CONTENT_TYPE: Final = f"{ENVELOPES}1"

#: Maximum messages in an envelope.
MAX_ENVELOPE_MESSAGES: Final = 100_000

#: Maximum bytes in an envelope, uncompressed.
MAX_ENVELOPE_BYTES: Final = 64 * 2**20

#: The preset dictionary: names and usual values of a Celery task. It is part of the format; another
#: one would be the format's next version. The parts that most envelopes repeat stand at its end,
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

_LENGTH: Final = struct.Struct(">I")


class Item(NamedTuple):
    """A message in an envelope.

    Attributes:
        body: Its body.
        headers: Its own headers, which override the shared ones.
        properties: Its own AMQP message properties, likewise.
    """

    body: bytes
    headers: Mapping[str, Any] = {}
    properties: Mapping[str, Any] = {}

    def length_prefixed(self) -> bytes:
        """Return the two blocks of the message.

        Raises:
            InvalidEnvelope: A header cannot be written as JSON.
        """
        return length_prefixed(_to_json(self.headers, self.properties)) + length_prefixed(self.body)


class Envelope(NamedTuple):
    """Messages with what they share.

    Attributes:
        items: The messages.
        headers: The headers that all of them have.
        properties: The AMQP message properties that all of them have.
    """

    items: tuple[Item, ...]
    headers: Mapping[str, Any] = {}
    properties: Mapping[str, Any] = {}

    def pack(self, level: int = 6) -> bytes:
        """Return the body of a message that holds all of these.

        Args:
            level: How hard to compress, 0 (not at all) to 9.

        Raises:
            InvalidEnvelope: There are too many, or a header cannot be written as JSON.
        """
        if len(self.items) > MAX_ENVELOPE_MESSAGES:
            raise InvalidEnvelope(
                f"{len(self.items)} messages are more than {MAX_ENVELOPE_MESSAGES}"
            )
        blocks = [shared_block(self.headers, self.properties)]
        blocks += [item.length_prefixed() for item in self.items]
        return compressed(b"".join(blocks), level)

    @classmethod
    def unpack(cls, body: bytes) -> Envelope:
        """Read the body of a message.

        At most :data:`MAX_ENVELOPE_BYTES` are decompressed.

        Raises:
            InvalidEnvelope: It cannot be read, or exceeds a limit.
        """
        blocks = blocks_of(_decompressed(body))
        shared = next(blocks, None)
        if shared is None:
            raise InvalidEnvelope("it is empty")
        shared_parts = _from_json(shared)
        shared_headers, shared_properties = _parts(shared_parts)
        copies = _parts(shared_parts.get("copies", {}))
        items: list[Item] = []
        for own in blocks:
            if len(items) == MAX_ENVELOPE_MESSAGES:
                raise InvalidEnvelope(f"it holds more than {MAX_ENVELOPE_MESSAGES} messages")
            content = next(blocks, None)
            if content is None:
                raise InvalidEnvelope("it ends in the middle of a message")
            headers, properties = _parts(_from_json(own))
            headers |= _copied(copies[0], headers)
            properties |= _copied(copies[1], headers)
            items.append(Item(bytes(content), headers, properties))
        return cls(tuple(items), shared_headers, shared_properties)


def length_prefixed(block: bytes) -> bytes:
    """Return a block with its length before it."""
    return _LENGTH.pack(len(block)) + block


def shared_block(
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    copied_headers: Mapping[str, str] = {},
    copied_properties: Mapping[str, str] = {},
) -> bytes:
    """Return the block that all messages share.

    Args:
        headers: The headers that all of them have.
        properties: The AMQP message properties that all of them have.
        copied_headers: Maps a header's name to the header whose value it repeats.
        copied_properties: Maps a property's name to the header whose value it repeats.

    Raises:
        InvalidEnvelope: A value cannot be written as JSON.
    """
    copies = _written(copied_headers, copied_properties)
    return length_prefixed(_to_json(headers, properties, **({"copies": copies} if copies else {})))


def compressed(blocks: bytes, level: int) -> bytes:
    """Return the body of an envelope whose blocks are written already.

    Args:
        blocks: The shared block, then the two blocks of each message.
        level: How hard to compress, 0 (not at all) to 9.

    Raises:
        InvalidEnvelope: There are too many bytes.
    """
    if len(blocks) > MAX_ENVELOPE_BYTES:
        raise InvalidEnvelope(f"{len(blocks)} bytes are more than {MAX_ENVELOPE_BYTES}")
    stream = zlib.compressobj(level, zdict=DICTIONARY)
    return stream.compress(blocks) + stream.flush()


def blocks_of(data: bytes) -> Iterator[memoryview]:
    """Yield the blocks of an envelope, without their lengths.

    Raises:
        InvalidEnvelope: It ends in the middle of a block.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        begin = at + _LENGTH.size
        if begin > len(view):
            raise InvalidEnvelope("it ends in the middle of a length")
        at = begin + _LENGTH.unpack_from(view, at)[0]
        if at > len(view):
            raise InvalidEnvelope("it ends in the middle of a block")
        yield view[begin:at]


def _decompressed(body: bytes) -> bytes:
    stream = zlib.decompressobj(zdict=DICTIONARY)
    try:
        data = stream.decompress(body, MAX_ENVELOPE_BYTES + 1)
    except zlib.error as error:
        raise InvalidEnvelope(f"it cannot be decompressed: {error}") from error
    if len(data) > MAX_ENVELOPE_BYTES:
        raise InvalidEnvelope(f"it holds more than {MAX_ENVELOPE_BYTES} bytes")
    if not stream.eof:
        raise InvalidEnvelope("it ends before its compressed stream does")
    return data


def _written(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    parts = {"headers": headers, "properties": properties}
    return {name: dict(part) for name, part in parts.items() if part}


def _to_json(headers: Mapping[str, Any], properties: Mapping[str, Any], **more: Any) -> bytes:
    written = {**_written(headers, properties), **more}
    try:
        return json.dumps(written, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidEnvelope(f"{written!r} cannot be written as JSON: {error}") from error


def _from_json(block: memoryview) -> Any:
    try:
        return json.loads(bytes(block))
    except ValueError as error:
        raise InvalidEnvelope(f"a block is not JSON: {error}") from error


def _parts(read: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    headers, properties = (
        (read.get(name, {}) if isinstance(read, dict) else None)
        for name in ("headers", "properties")
    )
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        raise InvalidEnvelope("a block is not a JSON object of headers and properties")
    return headers, properties


def _copied(copies: Mapping[str, Any], headers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: headers[source]
        for name, source in copies.items()
        if isinstance(source, str) and source in headers
    }
