"""AMQP's field values, byte by byte, well-formed or not.

Each letter is that of RabbitMQ (https://www.rabbitmq.com/amqp-0-9-1-errata#section_3).
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from struct import pack
from typing import Final

#: Texts that are none: Latin-1, a lone surrogate, an overlong form, a null, and nothing at all.
BAD_TEXTS: Final = (b"caf\xe9", b"\xed\xa0\x80", b"\xc0\xaf", b"a\0b", b"", b"\xff" * 20)


def text(value: bytes) -> bytes:
    """A long string."""
    return b"S" + pack(">I", len(value)) + value


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
    kinds = (
        lambda: text(random.choice((b"text", *BAD_TEXTS))),
        lambda: integer(random.choice((0, 1, -1, 2**63 - 1, -(2**63), random.getrandbits(40)))),
        lambda: b"I" + pack(">i", random.choice((0, -(2**31), 2**31 - 1))),
        lambda: b"b" + pack(">b", random.randint(-128, 127)),
        lambda: b"B" + pack(">B", random.randint(0, 255)),
        lambda: b"s" + pack(">h", random.randint(-(2**15), 2**15 - 1)),
        lambda: b"u" + pack(">H", random.randint(0, 2**16 - 1)),
        lambda: b"i" + pack(">I", random.getrandbits(32)),
        lambda: b"d" + pack(">d", random.choice((0.5, -1e308, 5e-324))),
        lambda: b"f" + pack(">f", random.choice((0.5, -0.0))),
        lambda: b"D" + pack(">Bi", random.choice((0, 2, 28, 255)), random.choice((0, 7, -(2**31)))),
        lambda: b"T" + pack(">Q", random.choice((0, 1_700_000_000, 253_402_300_800, 2**64 - 1))),
        lambda: b"t" + pack(">B", random.randint(0, 1)),
        lambda: b"x" + _sized(random.randbytes(random.randint(0, 20))),
        lambda: b"V",
    )
    if depth and random.random() < 0.3:
        inner = [any_field(random, depth - 1) for _ in range(random.randint(0, 4))]
        if random.random() < 0.5:
            return array(inner)
        return table({b"%d" % number: field for number, field in enumerate(inner)})
    return random.choice(kinds)()


def properties(headers: Mapping[bytes, bytes] | None = None, **short: bytes) -> bytes:
    """The properties of a message.

    Args:
        headers: Its headers, as fields.
        **short: Its other properties, by their AMQP names with ``_``: bytes of a short string; of
            ``delivery_mode``, ``priority`` and ``timestamp``, the number's bytes.
    """
    flags, parts = 0, []
    for bit, name in enumerate(_NAMES):
        if name == "headers" and headers is not None:
            parts.append(_sized(_entries(headers)))
        elif name in short and name in _NUMBERS:
            parts.append(short[name])
        elif name in short:
            parts.append(bytes((len(short[name]),)) + short[name])
        else:
            continue
        flags |= 0x8000 >> bit
    return pack(">H", flags) + b"".join(parts)


_NAMES: Final = (
    *("content_type", "content_encoding", "headers", "delivery_mode", "priority"),
    *("correlation_id", "reply_to", "expiration", "message_id", "timestamp", "type"),
    *("user_id", "app_id", "cluster_id"),
)

_NUMBERS: Final = frozenset({"delivery_mode", "priority", "timestamp"})


def _entries(fields: Mapping[bytes, bytes]) -> bytes:
    return b"".join(bytes((len(name),)) + name + field for name, field in fields.items())


def _sized(content: bytes) -> bytes:
    return pack(">I", len(content)) + content
