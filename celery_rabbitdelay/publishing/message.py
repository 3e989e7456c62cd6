"""Waiting messages, encoded messages, and messages in flight. Pure.

The modules transform a :class:`WaitingMessage`; :class:`Content` has the bytes that are sent; a
:class:`Publication` is a message in flight, with its outcome.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self, TypeAlias

import amqp
from amqp.exceptions import FrameSyntaxError
from amqp.serialization import dumps
from kombu import Connection
from kombu.utils.uuid import uuid

from celery_rabbitdelay.exceptions import PublishError, RabbitDelayError
from celery_rabbitdelay.levels.headers import MAX_PRIORITY, DelayHeaders, unopened

#: The largest message that RabbitMQ 4 accepts by default (``max_message_size``): 16 MiB.
DEFAULT_MAX_MESSAGE_BYTES: Final = 16 * 2**20

#: The ``delivery_mode`` of a message that RabbitMQ writes to disk.
PERSISTENT: Final = 2

#: AMQP's longest name of an exchange, and its longest routing key, in bytes.
MAX_SHORTSTR_BYTES: Final = 255

#: The properties that are never published again: ``user_id`` must be the connection's user
#: (https://www.rabbitmq.com/docs/validated-user-id), and ``cluster_id`` is deprecated.
DROPPED_PROPERTIES: Final = ("user_id", "cluster_id", "application_headers")

#: The properties of a message, in AMQP's order.
MESSAGE_PROPERTIES: Final = tuple(name for name, _ in amqp.Message.PROPERTIES)

#: The fields before the properties in a header frame: class, weight and size of the body.
BEFORE_PROPERTIES: Final = struct.Struct(">HHQ")


class WaitingMessage(NamedTuple):
    """A message that waits in the levels, or has waited there.

    Attributes:
        body: The body.
        properties: The AMQP properties, without the headers.
        headers: The parsed headers.
    """

    body: bytes
    properties: Mapping[str, Any]
    headers: DelayHeaders

    @classmethod
    def of(cls, message: amqp.Message, headers: DelayHeaders) -> Self:
        """Convert a received message, and set its parsed headers."""
        properties = dict(message.properties)
        for name in DROPPED_PROPERTIES:
            properties.pop(name, None)
        return cls(body_of(message), properties, headers)

    @classmethod
    def unopened(cls, message: amqp.Message) -> Self:
        """Convert a received message that is passed on unchanged."""
        return cls.of(message, unopened(headers_of(message)))

    @property
    def task_id(self) -> str:
        """The task's id: correlation id, message id, or CRC-32 of the body."""
        given = self.properties.get("correlation_id") or self.properties.get("message_id")
        return str(given or zlib.crc32(self.body))

    def saying(self, **changes: Any) -> Self:
        """Return the message with changed headers."""
        return type(self)(self.body, self.properties, self.headers._replace(**changes))

    def having(self, **properties: object) -> Self:
        """Return the message with changed properties; None removes a property."""
        return type(self)(self.body, {**self.properties, **properties}, self.headers)

    def with_low_priority(self) -> Self:
        """Return the message with a priority that the levels' quorum queues treat as normal.

        A higher priority goes into a header, and distribution restores it.
        """
        priority = self.properties.get("priority")
        if priority is None or priority <= MAX_PRIORITY:
            return self
        return self.having(priority=MAX_PRIORITY).saying(priority=priority)

    def amqp(self) -> amqp.Message:
        """Return the message as py-amqp publishes it, persistent."""
        properties = {**self.properties, "delivery_mode": PERSISTENT}
        return amqp.Message(self.body, application_headers=self.headers.to_headers(), **properties)


def body_of(message: amqp.Message) -> bytes:
    """Return a message's body as the bytes that are sent or were received; never raises.

    py-amqp encodes a string, and decodes a received body, with the untrusted ``content_encoding``.
    An empty body is a string whatever the encoding, and decoding cannot always be reversed.
    """
    body: str | bytes = message.body
    if isinstance(body, bytes):
        return body
    try:
        return body.encode(message.properties.get("content_encoding") or "utf-8")
    except (LookupError, ValueError):
        return body.encode("utf-8", "surrogatepass")


def headers_of(message: amqp.Message) -> dict[str, Any]:
    """Return a message's headers; empty if it has none."""
    return dict(message.properties.get("application_headers") or {})


class Content(NamedTuple):
    """A message as bytes.

    Attributes:
        properties: The flags of the properties that are set, then the properties and headers.
        body: The body.
    """

    properties: bytes
    body: bytes

    @classmethod
    def of(cls, message: amqp.Message) -> Content:
        """Encode a message.

        Raises:
            amqp.exceptions.FrameSyntaxError: AMQP has no type for one of its headers.
            struct.error: A number is too large, or a string too long, for its field.
        """
        if isinstance(message.body, str):
            message.properties.setdefault("content_encoding", "utf-8")
        return cls(encoded(message.properties), body_of(message))

    def message(self) -> amqp.Message:
        """Decode the message."""
        message = amqp.Message(self.body)
        header = BEFORE_PROPERTIES.pack(amqp.Message.CLASS_ID, 0, len(self.body))
        message.inbound_header(header + self.properties)  # type: ignore[attr-defined]
        return message


def encoded(properties: Mapping[str, object]) -> bytes:
    """Encode the properties of a message: first the flags of the set properties, then the values.

    The result equals py-amqp's, and takes half the time.

    Args:
        properties: The properties, by name; names that AMQP does not define are left out.

    Raises:
        amqp.exceptions.FrameSyntaxError: AMQP has no type for one of the headers.
        struct.error: A number is too large, or a string too long, for its field.
    """
    flags, parts = 0, [b""]
    for flag, name, kind in _PROPERTIES:
        value: Any = properties.get(name)
        if value is None:
            continue
        flags |= flag
        if kind == "s" and type(value) is str:
            parts.append(short_string(value))
        elif kind == "o":
            parts.append(_BYTE.pack(value))
        elif type(value) is dict:
            parts.append(_item(value)[1:])
        else:
            parts.append(dumps(kind, (value,)))
    parts[0] = flags.to_bytes(2, "big")
    return b"".join(parts)


#: The flag of each property, its name, and its type for py-amqp.
_PROPERTIES: Final = [
    (1 << 15 - place, name, kind) for place, (name, kind) in enumerate(amqp.Message.PROPERTIES)
]

#: Placeholders for the headers and the correlation id, at which the encoded properties are split.
_MARK: Final = uuid()
_MARKED: Final = {_MARK: True}

#: The bytes of a table's length, before the table.
_SIZE: Final = 4

#: The largest integer that py-amqp encodes in four bytes; due times take eight.
_MAX_INT: Final = 2**31 - 1

_BYTE: Final = struct.Struct(">B")
_SIZED: Final = struct.Struct(">cI")
_INT: Final = struct.Struct(">ci")
_LONG: Final = struct.Struct(">cq")


def short_string(text: str | bytes) -> bytes:
    """Encode a string as an AMQP short string.

    Raises:
        struct.error: The text has more than 255 bytes.
    """
    # For a text that it cannot decode, py-amqp returns bytes.
    value = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return _BYTE.pack(len(value)) + value


_short_name: Final = lru_cache(maxsize=512)(short_string)


def _item(value: Any) -> bytes:
    """Encode the type and the value of a header."""
    kind = type(value)
    if kind is str:
        text: bytes = value.encode("utf-8", "surrogatepass")
        return _SIZED.pack(b"S", len(text)) + text
    if value is None:
        return b"V"
    if kind is int:
        is_long = abs(value) > _MAX_INT
        return _LONG.pack(b"L", value) if is_long else _INT.pack(b"I", value)
    if kind is list:
        inner = b"".join(map(_item, value))
        return _SIZED.pack(b"A", len(inner)) + inner
    if kind is dict:
        inner = b"".join([_short_name(name) + _item(each) for name, each in value.items()])
        return _SIZED.pack(b"F", len(inner)) + inner
    entry: bytes = dumps("F", ({"": value},))
    return entry[_SIZE + 1 :]


class SharedProperties:
    """Encodes the properties of messages that differ in a few headers and in the correlation id.

    Shared properties are encoded only once. py-amqp would encode all properties of every message,
    which takes more time than all other steps of publishing a copy.

    Args:
        headers: The headers that all messages share.
        properties: The other properties. If they include a correlation id, it is replaced by each
            message's own.
    """

    def __init__(self, headers: Mapping[str, object], properties: Mapping[str, object]) -> None:
        self.headers = headers
        self.properties = properties
        marked = {**properties, "application_headers": _MARKED}
        if "correlation_id" in properties:
            marked["correlation_id"] = _MARK
        self._before, behind = encoded(marked).split(dumps("F", (_MARKED,)))
        self._between, _, self._behind = behind.partition(dumps("s", (_MARK,)))
        self._table = _item({**headers})[1 + _SIZE :]

    def encode(self, headers: dict[str, object], correlation_id: str | None = None) -> bytes:
        """Encode the properties of one message.

        Args:
            headers: The message's own headers.
            correlation_id: The message's correlation id; None if the messages have none.

        Raises:
            amqp.exceptions.FrameSyntaxError: AMQP has no type for one of the headers.
            struct.error: A number is too large, or a string too long, for its field.
        """
        table = self._table + _item(headers)[1 + _SIZE :]
        parts = self._before, len(table).to_bytes(_SIZE, "big"), table, self._between
        own_id = b"" if correlation_id is None else short_string(correlation_id)
        return b"".join((*parts, own_id, self._behind))


#: Returns the exchange and the routing key of a message.
Address: TypeAlias = Callable[[], tuple[str, str]]

#: Called with a connection, to declare missing exchanges, queues and bindings.
Declaration: TypeAlias = Callable[[Connection], None]


@dataclass(slots=True, eq=False, repr=False)
class Publication:
    """A message to publish, and its outcome.

    Args:
        content: The message as bytes; should be persistent.
        address: Returns the exchange and the routing key. Called for each attempt, because the key
            of a delayed message depends on the remaining time.
        context: The caller's context, for example row numbers.
        declare: Declares the destination's queue before each attempt; used if the messages of a
            loop have different destinations.

    Attributes:
        exchange: The exchange of the last attempt.
        routing_key: The routing key of the last attempt.
        error: Why the broker has not confirmed the message; None if there is no error.
        resent: The number of resends.
        deadline: When to give up, by :func:`time.monotonic`. The publish loop sets it for all
            attempts together, a module for a single attempt.
        single_attempt: Whether the message is not sent again after a nack or a timeout, because its
            source then publishes a replacement. Other messages are not affected.
        redeclared: Whether the topology was declared again because the message was returned.
        unanswered: Whether an attempt was written but not answered before the connection was lost
            or the timeout passed.
        suspected: Whether the message was in flight when the broker closed the channel for another
            message: the broker may have accepted the messages before that one.
    """

    content: Content
    address: Address
    context: Any = None
    declare: Declaration | None = None
    exchange: str = ""
    routing_key: str = ""
    error: RabbitDelayError | None = None
    resent: int = 0
    deadline: float = math.inf
    single_attempt: bool = False
    redeclared: bool = False
    unanswered: bool = False
    suspected: bool = False

    @classmethod
    def of(cls, message: amqp.Message, address: Address, context: object = None) -> Publication:
        """Encode a message, and make it persistent.

        Raises:
            PublishError: AMQP cannot encode one of the message's headers or properties.
        """
        message.properties["delivery_mode"] = PERSISTENT
        try:
            content = Content.of(message)
        except (FrameSyntaxError, struct.error) as error:
            raise PublishError(*address(), f"message cannot be written in AMQP: {error}") from error
        return cls(content, address, context)

    @property
    def may_have_arrived(self) -> bool:
        """Whether the broker may have the message although it did not confirm."""
        return self.unanswered or self.suspected
