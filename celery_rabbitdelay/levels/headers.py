"""The message headers by which a destination is restored, and what is stripped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: The instant at which the task may start: int, milliseconds since 1970-01-01 UTC.
DUE: Final = "rabbitdelay-due"

#: The exchange that the message would have been published to without a delay.
EXCHANGE: Final = "rabbitdelay-exchange"

#: The routing key that it would have been published with.
ROUTING_KEY: Final = "rabbitdelay-routing-key"

#: The name of the queue that the message was delayed for.
QUEUE: Final = "rabbitdelay-queue"

#: The priority that distribution gives back to the message: int, above 4.
PRIORITY: Final = "rabbitdelay-priority"

#: The ``expiration`` property that distribution gives back to the message: str, milliseconds.
EXPIRATION: Final = "rabbitdelay-expiration"

#: Marks a message that left the levels before it was due and was put back: a table with ``times``
#: (how often) and, if distribution gives it back to one queue, the ``exchange`` and the
#: ``routing-key`` that its consumer is to see.
EARLY: Final = "rabbitdelay-early"

#: The signature of what these headers say, if the sender has a key: str.
SIGNATURE: Final = "rabbitdelay-signature"

#: The prefix of all our own headers.
OWN_PREFIX: Final = "rabbitdelay-"

#: If a message has this header, which tracers and users set, Celery exposes only its value as
#: ``task.request.headers`` (https://github.com/celery/celery/issues/4875).
NESTED_HEADERS: Final = "headers"

#: Headers with further routing keys, by which RabbitMQ routes a message past any check of a module
#: (https://www.rabbitmq.com/docs/sender-selected). In the levels, whose keys are digits, they can
#: only do harm.
SENDER_SELECTED: Final = ("CC", "BCC")

#: What RabbitMQ adds to a dead-lettered or redelivered message
#: (https://www.rabbitmq.com/docs/dlx#effects). Up to 3.13 it trusts an ``x-death`` that a client
#: publishes, and drops the message as a cycle when the queue is in it already.
BROKER_HEADERS: Final = frozenset(
    {"x-death", "x-delivery-count", "x-acquired-count"}
    | {f"x-first-death-{what}" for what in ("exchange", "queue", "reason")}
    | {f"x-last-death-{what}" for what in ("exchange", "queue", "reason")}
)


def strip(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers without those that the broker and this package added.

    The user's own ``x-*`` stay. Nested headers, to which tracers copy the others, are stripped too.
    A name that is not UTF-8 is given in bytes, by py-amqp.
    """
    stripped = inner = _kept(headers)
    # Not by recursion: anybody may have nested them a thousand deep.
    while isinstance(nested := inner.get(NESTED_HEADERS), Mapping):
        inner[NESTED_HEADERS] = inner = _kept(nested)
    return stripped


def _kept(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in headers.items()
        if name not in BROKER_HEADERS and not is_own(name)
    }


def is_own(name: str | bytes) -> bool:
    """Return whether a header has one of the names that are reserved for this package."""
    if isinstance(name, bytes):
        return name.startswith(OWN_PREFIX.encode())
    return name.startswith(OWN_PREFIX)
