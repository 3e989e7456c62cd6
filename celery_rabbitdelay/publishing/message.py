"""Parts of a message: body, headers, priority, task id. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import amqp

from celery_rabbitdelay.levels import headers as header_names

#: The ``content_type`` properties of envelopes, messages with many tasks, begin with this.
ENVELOPES: Final = "application/vnd.rabbitdelay.envelope."

#: The largest message that RabbitMQ 4 takes by default (``max_message_size``): 16 MiB.
DEFAULT_MAX_MESSAGE_BYTES: Final = 16 * 2**20

#: ``delivery_mode`` of a message that RabbitMQ writes to disk.
PERSISTENT: Final = 2

#: The highest normal priority of quorum queues (0-4). Up to 4.2 a message above it would block the
#: others of its digit queue (https://www.rabbitmq.com/docs/quorum-queues#priorities).
MAX_PRIORITY: Final = 4

#: AMQP's longest name of an exchange, and its longest routing key, in bytes.
MAX_SHORTSTR_BYTES: Final = 255

#: The properties of a task's message that are kept when it is published again. Not ``user_id``,
#: which must be the user of the connection (https://www.rabbitmq.com/docs/validated-user-id).
KEPT_PROPERTIES: Final = (
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)

#: Maximum characters of a value in an error text.
MAX_SHOWN_LENGTH: Final = 200


def body_of(message: amqp.Message) -> bytes:
    """Return a message's body as the bytes that are sent."""
    body: str | bytes = message.body
    return body.encode() if isinstance(body, str) else body


def task_id_of(message: amqp.Message) -> str:
    """Return the task id: correlation id, message id, or CRC-32 of the body."""
    properties = message.properties
    given = properties.get("correlation_id") or properties.get("message_id")
    return str(given or zlib.crc32(body_of(message)))


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


def split_priority(priority: int | None) -> tuple[int | None, dict[str, int]]:
    """Return the priority that a message waits with, and the headers that keep a higher one."""
    if priority is None or priority <= MAX_PRIORITY:
        return priority, {}
    return MAX_PRIORITY, {header_names.PRIORITY: priority}


def shortened(value: object) -> str:
    """Return what a value looks like, in few characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}..."
