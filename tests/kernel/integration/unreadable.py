"""Messages that Python cannot read, as another client may publish them."""

from struct import pack
from typing import Final

import amqp


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
