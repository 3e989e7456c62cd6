"""A message's properties as bytes, headers among them: what py-amqp writes, in a third of its time.

The format is that of AMQP 0-9-1 (https://www.rabbitmq.com/resources/specs/amqp0-9-1.pdf, 4.2.5 and
4.2.6), with the types that RabbitMQ reads (https://www.rabbitmq.com/docs/amqp-0-9-1-errata, 3).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import amqp
from amqp.serialization import dumps

from celery_rabbitdelay.levels import headers as header_names

#: The properties of a message, in AMQP's order.
MESSAGE_PROPERTIES: Final = tuple(name for name, _ in amqp.Message.PROPERTIES)

_BYTE: Final = struct.Struct(">B")
_FLAGS: Final = struct.Struct(">H")
_LENGTH: Final = struct.Struct(">I")
_TEXT: Final = struct.Struct(">cI")
_INT: Final = struct.Struct(">ci")
_LONG: Final = struct.Struct(">cq")
_FLOAT: Final = struct.Struct(">cd")
_TIMESTAMP: Final = struct.Struct(">Q")

#: The largest number that py-amqp writes in four bytes, with either sign.
_MAX_INT: Final = 2**31 - 1


def encoded(properties: Mapping[str, Any]) -> bytes:
    """Return the properties of a message as bytes, behind the flags that say which there are.

    Args:
        properties: The properties, by name; others than AMQP's are left out.

    Raises:
        amqp.exceptions.FrameSyntaxError: AMQP has no type for one of the headers.
        struct.error: A number is too large, or a text too long, for its field.
    """
    flags, parts = 0, [b""]
    for flag, name, encode in _PROPERTIES:
        value = properties.get(name)
        if value is not None:
            flags |= flag
            parts.append(encode(value))
    parts[0] = _FLAGS.pack(flags)
    return b"".join(parts)


def short_string(text: str | bytes) -> bytes:
    """Return a text as AMQP's short string.

    Raises:
        struct.error: It has more than 255 bytes.
    """
    # Some other value that counts as false is empty, as in py-amqp.
    text = text or b""
    # A lone surrogate is invalid UTF-8; py-amqp encodes it, and so does this file.
    value = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return _BYTE.pack(len(value)) + value


#: Names of headers come again and again. A stranger's may not, hence the limit.
_name: Final = lru_cache(maxsize=1024)(short_string)


def _table(table: Mapping[Any, Any]) -> bytes:
    parts = []
    for name, value in (table or {}).items():
        encode = _VALUES.get(type(value))
        if encode is None:
            # Subclasses, and what is rare or refused, with py-amqp's words.
            parts.append(dumps("F", ({name: value},))[_LENGTH.size :])
        else:
            parts += (_name(name), encode(value))
    entries = b"".join(parts)
    return _LENGTH.pack(len(entries)) + entries


def _array(values: Sequence[Any]) -> bytes:
    parts = []
    for value in values:
        encode = _VALUES.get(type(value))
        parts.append(dumps("A", ([value],))[_LENGTH.size :] if encode is None else encode(value))
    entries = b"".join(parts)
    return b"A" + _LENGTH.pack(len(entries)) + entries


def _text(text: str) -> bytes:
    value = text.encode("utf-8", "surrogatepass")
    return _TEXT.pack(b"S", len(value)) + value


def _int(number: int) -> bytes:
    if -_MAX_INT <= number <= _MAX_INT:
        return _INT.pack(b"I", number)
    return _LONG.pack(b"L", number)


#: How a value of a header is encoded, by its exact type, behind the letter that names its type.
_VALUES: Final[Mapping[type, Callable[[Any], bytes]]] = {
    str: _text,
    bytes: lambda value: _TEXT.pack(b"S", len(value)) + value,
    int: _int,
    type(None): lambda _: b"V",
    bool: lambda value: b"t\x01" if value else b"t\x00",
    float: lambda value: _FLOAT.pack(b"d", value),
    dict: lambda value: b"F" + _table(value),
    list: _array,
    tuple: _array,
}

#: How a property is encoded, by the letter that py-amqp has for its type.
_TYPES: Final[Mapping[str, Callable[[Any], bytes]]] = {
    "s": short_string,
    "F": _table,
    "o": _BYTE.pack,
    "L": _TIMESTAMP.pack,
}

#: The flag, the name and the encoder of each property.
_PROPERTIES: Final = [
    (1 << 15 - place, name, _TYPES[letter])
    for place, (name, letter) in enumerate(amqp.Message.PROPERTIES)
]


class PropertiesEncoder:
    """Encodes the properties of messages that differ in some headers and two properties.

    Args:
        message: One of the messages.
        own: The names of the headers that each message has with a value of its own.

    Attributes:
        headers: The headers that all messages share.
        properties: The properties that all messages share.
    """

    def __init__(self, message: amqp.Message, own: Collection[str]) -> None:
        properties = dict(message.properties)
        headers = properties.pop("application_headers")
        self.headers = {name: value for name, value in headers.items() if name not in own}
        # Celery leaves non-AMQP options among a message's properties.
        self.properties = {
            name: value
            for name, value in properties.items()
            if name in MESSAGE_PROPERTIES and name != "correlation_id"
        }
        self._table = _table(self.headers)[_LENGTH.size :]
        self._names = {name: bytes((len(name),)) + name.encode() for name in own}
        before, after = map(MESSAGE_PROPERTIES.index, ("application_headers", "correlation_id"))
        self._flags = encoded(message.properties)[: _FLAGS.size]
        self._before = self._encoded(MESSAGE_PROPERTIES[:before])
        self._between = self._encoded(MESSAGE_PROPERTIES[before + 1 : after])
        self._reply_to = self._encoded(["reply_to"])
        self._after = self._encoded(MESSAGE_PROPERTIES[after + 2 :])

    def _encoded(self, which: Sequence[str]) -> bytes:
        some = {name: self.properties[name] for name in which if name in self.properties}
        return encoded(some)[_FLAGS.size :]

    def encode(
        self,
        own: Mapping[str, Any],
        due_ms: int,
        correlation_id: str | None,
        reply_to: str | None = None,
    ) -> bytes:
        """Return the properties of a message.

        Args:
            own: Its own headers, except its due time: texts and numbers.
            due_ms: When it is due, in milliseconds since 1970.
            correlation_id: Its correlation id; None if the messages have none.
            reply_to: Its ``reply_to``, if the messages have one; None for that of them all.

        Raises:
            ValueError: The correlation id is longer than 255 bytes.
        """
        names_of, entries = self._names, [self._table]
        for name, value in own.items():
            entries += (names_of[name], _VALUES[type(value)](value))
        entries += (names_of[header_names.DUE], _LONG.pack(b"L", due_ms))
        table = b"".join(entries)
        parts = [self._flags, self._before, _LENGTH.pack(len(table)), table, self._between]
        if correlation_id is not None:
            text = correlation_id.encode("utf-8", "surrogatepass")
            parts += (bytes((len(text),)), text)
        parts += (self._reply_to if reply_to is None else short_string(reply_to), self._after)
        return b"".join(parts)
