"""AMQP's field values, byte by byte, well-formed or not.

Each letter is that of RabbitMQ (https://www.rabbitmq.com/amqp-0-9-1-errata#section_3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from struct import pack
from typing import Final

#: Texts that are none: Latin-1, a lone surrogate, an overlong form, a null, and nothing at all.
BAD_TEXTS: Final = (b"caf\xe9", b"\xed\xa0\x80", b"\xc0\xaf", b"a\0b", b"", b"\xff" * 20)

#: The properties of a message in the order of their flags; and those that are numbers.
_PROPERTIES: Final = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority"),
    *("correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type"),
    *("user_id", "app_id", "cluster_id"),
)
_NUMBERS: Final = frozenset({"delivery_mode", "priority", "timestamp"})

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


def text(value: bytes) -> bytes:
    """A long string."""
    return b"S" + _sized(value)


def integer(value: int) -> bytes:
    """A signed integer of 64 bits."""
    return b"l" + pack(">q", value)


def double(value: float) -> bytes:
    """A floating-point number of 64 bits."""
    return b"d" + pack(">d", value)


def boolean(value: bool) -> bytes:
    """A truth value."""
    return b"t" + bytes((value,))


def table(fields: Mapping[bytes, bytes]) -> bytes:
    """A table, as a field."""
    return b"F" + _sized(_entries(fields))


def array(values: list[bytes]) -> bytes:
    """An array."""
    return b"A" + _sized(b"".join(values))


def nested(depth: int, in_arrays: bool = False) -> bytes:
    """Tables within each other, or arrays."""
    field = b"V"
    for _ in range(depth):
        field = array([field]) if in_arrays else table({b"n": field})
    return field


def any_field(random: Random, depth: int = 3) -> bytes:
    """A value of any type, as RabbitMQ takes it."""
    if depth and random.random() < 0.3:
        inner = [any_field(random, depth - 1) for _ in range(random.randint(0, 4))]
        return (
            array(inner) if random.random() < 0.5 else table(dict(zip(_KEYS, inner, strict=False)))
        )
    letter, form, values = random.choice(_OF_NUMBERS)
    decimal = pack(">Bi", random.choice((0, 2, 28, 255)), random.choice((0, 7, -(2**31))))
    number = letter + pack(form, random.choice(values))
    some = (text(random.choice((b"text", *BAD_TEXTS))), b"D" + decimal, b"V")
    return random.choice((*some, b"x" + _sized(random.randbytes(20)), *(number,) * 11))


_KEYS: Final = (b"0", b"1", b"2", b"3")


def properties(headers: Mapping[bytes, bytes] | None = None, **short: bytes) -> bytes:
    """The properties of a message.

    Args:
        headers: Its headers, as fields.
        **short: Its other properties, by their AMQP names with ``_``: bytes of a short string; of
            ``delivery_mode``, ``priority`` and ``timestamp``, the number's bytes.
    """
    flags, parts = 0, b""
    for bit, name in enumerate(_PROPERTIES):
        if name == "headers" and headers is not None:
            parts += _sized(_entries(headers))
        elif name in short:
            parts += short[name] if name in _NUMBERS else _short(short[name])
        else:
            continue
        flags |= 0x8000 >> bit
    return pack(">H", flags) + parts


def _entries(fields: Mapping[bytes, bytes]) -> bytes:
    return b"".join(_short(name) + field for name, field in fields.items())


def _short(value: bytes) -> bytes:
    return bytes((len(value),)) + value


def _sized(content: bytes) -> bytes:
    return pack(">I", len(content)) + content
