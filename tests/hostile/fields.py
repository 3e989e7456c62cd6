"""AMQP's field values, byte by byte, well-formed or not.

Each letter is that of RabbitMQ (https://www.rabbitmq.com/amqp-0-9-1-errata#section_3).
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from random import Random
from struct import pack
from typing import Any, Final

#: Texts that are none: Latin-1, a lone surrogate, an overlong form, a null, and nothing at all.
BAD_TEXTS: Final = (b"caf\xe9", b"\xed\xa0\x80", b"\xc0\xaf", b"a\0b", b"", b"\xff" * 20)

#: The properties of a message in the order of their flags; and those that are numbers.
_PROPERTIES: Final = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority"),
    *("correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type"),
    *("user_id", "app_id", "cluster_id"),
)
_NUMBERS: Final = {"delivery_mode": ">B", "priority": ">B", "timestamp": ">Q"}

#: The letter, the format and values of each kind of number.
_OF_NUMBERS: Final[Sequence[tuple[bytes, str, Sequence[float]]]] = (
    (b"l", ">q", (0, 1, -1, 2**63 - 1, -(2**63), 2**40)),
    (b"I", ">i", (0, -(2**31), 2**31 - 1)),
    (b"b", ">b", (0, -128, 127)),
    (b"B", ">B", (0, 255)),
    (b"s", ">h", (0, -(2**15), 2**15 - 1)),
    (b"u", ">H", (0, 2**16 - 1)),
    (b"i", ">I", (0, 2**32 - 1)),
    (b"d", ">d", (0.5, -1e308, 5e-324)),
    (b"f", ">f", (0.5, -0.0)),
    (b"T", ">Q", (0, 1_700_000_000, 253_402_300_800, 2**64 - 1)),
    (b"t", ">B", (0, 1)),
)


class Field(bytes):
    """A value that is written as a field already."""


def field(value: Any) -> Field:
    """Write a value of Python as a field; bytes as a long string."""
    match value:
        case Field():
            return value
        case None:
            return Field(b"V")
        case bool():
            return Field(b"t" + bytes((value,)))
        case int():
            return Field(b"l" + pack(">q", value))
        case float() if isfinite(value):  # RabbitMQ takes no others
            return Field(b"d" + pack(">d", value))
        case list():
            return Field(b"A" + _sized(b"".join(map(field, value))))
        case dict():
            return Field(b"F" + _sized(_entries(value)))
    return Field(b"S" + _sized(_text(value)))


def nested(depth: int, in_arrays: bool = False) -> Field:
    """Tables within each other, or arrays."""
    inner = field(None)
    for _ in range(depth):
        inner = field([inner] if in_arrays else {"n": inner})
    return inner


def any_field(random: Random, depth: int = 3) -> Field:
    """A value of any type, as RabbitMQ takes it."""
    if depth and random.random() < 0.3:
        inner = [any_field(random, depth - 1) for _ in range(random.randint(0, 4))]
        return field(inner if random.random() < 0.5 else dict(zip("0123", inner, strict=False)))
    letter, form, values = random.choice(_OF_NUMBERS)
    decimal = pack(">Bi", random.choice((0, 2, 28, 255)), random.choice((0, 7, -(2**31))))
    number = Field(letter + pack(form, random.choice(values)))
    some = (field(random.choice((b"text", *BAD_TEXTS))), Field(b"D" + decimal), field(None))
    return random.choice((*some, Field(b"x" + _sized(random.randbytes(20))), *(number,) * 11))


def properties(headers: Mapping[Any, Any] | None = None, **short: Any) -> bytes:
    """The properties of a message.

    Args:
        headers: Its headers, by names that are texts or bytes.
        **short: Its other properties, by their AMQP names with ``_``.
    """
    flags, parts = 0, b""
    for bit, name in enumerate(_PROPERTIES):
        if name == "headers" and headers is not None:
            parts += _sized(_entries(headers))
        elif name in _NUMBERS and name in short:
            parts += pack(_NUMBERS[name], short[name])
        elif name in short:
            parts += _short(short[name])
        else:
            continue
        flags |= 0x8000 >> bit
    return pack(">H", flags) + parts


def _entries(fields: Mapping[Any, Any]) -> bytes:
    return b"".join(_short(name) + field(value) for name, value in fields.items())


def _short(value: object) -> bytes:
    text = _text(value)
    return bytes((len(text),)) + text


def _sized(content: bytes) -> bytes:
    return pack(">I", len(content)) + content


def _text(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
