"""Messages that Python cannot read, as another client may publish them."""

from __future__ import annotations

from struct import pack
from typing import Any, Final

import amqp
from kombu import Connection

from celery_rabbitdelay.publishing.wire import Content, Wire, publish_frames


class Raw(amqp.Message):
    """A message with these bytes for properties."""

    def __init__(self, body: str, properties: bytes) -> None:
        super().__init__(body)
        self._raw = properties

    def _serialize_properties(self) -> bytes:
        return self._raw


def headers_only(table: bytes) -> bytes:
    """The properties of a message that has nothing but these headers, in AMQP's own bytes."""
    return pack(">HI", 0x2000, len(table)) + table


#: A timestamp in milliseconds, as if it were seconds: the year 55,840.
FAR_TIMESTAMP: Final = headers_only(b"\x07sent-atT" + pack(">Q", 1_700_000_000_000))

#: A message id in Latin-1.
LATIN_ID: Final = pack(">H", 0x0080) + b"\x04caf\xe9"

#: A routing key in Latin-1.
LATIN_KEY: Final = b"caf\xe9"


def publish_with_key(
    connection: Connection, exchange: str, key: bytes, message: amqp.Message
) -> None:
    """Publish a message whose routing key has these bytes."""
    channel: Any = connection.default_channel
    wire = Wire(connection)
    stand_in = "k" * len(key)
    raw: Any = message
    content = Content(raw._serialize_properties(), raw.body.encode())
    frames = publish_frames(channel.channel_id, exchange, stand_in, content, wire.frame_max)
    assert frames.count(stand_in.encode()) == 1
    wire.write(frames.replace(stand_in.encode(), key), 30)
