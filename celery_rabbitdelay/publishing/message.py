"""A message that waits: its body, its properties, and what its headers say. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

import amqp

from celery_rabbitdelay.levels.headers import MAX_PRIORITY, DelayHeaders, unopened

#: The largest message that RabbitMQ 4 takes by default (``max_message_size``): 16 MiB.
DEFAULT_MAX_MESSAGE_BYTES: Final = 16 * 2**20

#: ``delivery_mode`` of a message that RabbitMQ writes to disk.
PERSISTENT: Final = 2

#: AMQP's longest name of an exchange, and its longest routing key, in bytes.
MAX_SHORTSTR_BYTES: Final = 255

#: The properties that are never published again: ``user_id`` has to be the connection's own user
#: (https://www.rabbitmq.com/docs/validated-user-id), and ``cluster_id`` is deprecated.
DROPPED_PROPERTIES: Final = ("user_id", "cluster_id", "application_headers")

#: The properties of a task's message that are kept when a producer publishes it again.
KEPT_PROPERTIES: Final = (
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)


class WaitingMessage(NamedTuple):
    """A message that waits in the levels, or has waited there.

    Attributes:
        body: Its body.
        properties: Its AMQP message properties, without the headers.
        headers: What its headers say.
    """

    body: bytes
    properties: Mapping[str, Any]
    headers: DelayHeaders

    @classmethod
    def of(cls, message: amqp.Message, headers: DelayHeaders) -> Self:
        """Return a message that was received, with what its headers say."""
        properties = dict(message.properties)
        for name in DROPPED_PROPERTIES:
            properties.pop(name, None)
        return cls(body_of(message), properties, headers)

    @classmethod
    def unopened(cls, message: amqp.Message) -> Self:
        """Return a message that was received and is passed on as it came."""
        return cls.of(message, unopened(headers_of(message)))

    @property
    def task_id(self) -> str:
        """The task's id: correlation id, message id, or CRC-32 of the body."""
        given = self.properties.get("correlation_id") or self.properties.get("message_id")
        return str(given or zlib.crc32(self.body))

    def saying(self, **changes: Any) -> Self:
        """Return the message with changes of what its headers say."""
        return type(self)(self.body, self.properties, self.headers._replace(**changes))

    def having(self, **properties: Any) -> Self:
        """Return the message with other properties; None removes one."""
        return type(self)(self.body, {**self.properties, **properties}, self.headers)

    def with_low_priority(self) -> Self:
        """Return the message with a priority that quorum queues take in the levels.

        A higher one stands in its headers, and distribution gives it back.
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
    """Return a message's body as the bytes that are sent, or were received; never raises.

    py-amqp encodes a text, and decodes a body that it receives, by ``content_encoding``. Anybody
    may have named one: an empty body is a text under any name, and not all encodings can be undone.
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


def kept_properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties with which a producer publishes a task's message again.

    ``priority`` is always among them: a task without a priority would get 0 otherwise.

    Args:
        properties: Those of the message that was received.
    """
    kept = {name: properties[name] for name in KEPT_PROPERTIES if properties.get(name) is not None}
    return {"priority": None, **kept}
