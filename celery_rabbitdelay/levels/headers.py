"""Every message header that we write, read or strip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = [
    "DUE",
    "EXCHANGE",
    "EXPIRATION",
    "NESTED",
    "PRIORITY",
    "PROPERTIES",
    "QUEUE",
    "REASON",
    "RESTORABLE",
    "ROUTING_KEY",
    "SENTRY_ENQUEUED",
    "UNREADABLE",
    "X_DELAY",
    "strip",
]

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

#: The delay that a client checks a message in with: milliseconds, an integer or a numeric string.
#: It is the header of the delayed-message-exchange plugin.
X_DELAY: Final = "x-delay"

#: Why a module of ours put the message into ``undeliverable``, in words. The broker writes none.
REASON: Final = "rabbitdelay-reason"

#: Why the properties of a message cannot be read, in words, and the bytes that they are, as AMQP
#: writes them. Such a message lies in ``undeliverable`` and has no other headers.
UNREADABLE: Final = "rabbitdelay-unreadable"
PROPERTIES: Final = "rabbitdelay-properties"

#: What every message that comes out of the levels has.
RESTORABLE: Final = frozenset({DUE, EXCHANGE, ROUTING_KEY, QUEUE})

#: The beginning of all our own headers.
OWN_PREFIX: Final = "rabbitdelay-"

#: A header that holds headers. Where a tracer or a user sets it, it is what Celery shows as
#: ``task.request.headers``, in place of all others (https://github.com/celery/celery/issues/4875).
NESTED: Final = "headers"

#: When the task was published, as Sentry's Celery integration notes it: float, seconds since
#: 1970-01-01 UTC. The time from then to the start is its ``messaging.message.receive.latency``.
SENTRY_ENQUEUED: Final = "sentry-task-enqueued-time"

#: What RabbitMQ adds to a dead-lettered or redelivered message
#: (https://www.rabbitmq.com/docs/dlx#effects). Up to 3.13 it trusts an ``x-death`` that a client
#: publishes, and drops the message as a cycle when the queue is in it already.
BROKER_HEADERS: Final = frozenset(
    {
        "x-death",
        *(
            f"x-{which}-death-{what}"
            for which in ("first", "last")
            for what in ("exchange", "queue", "reason")
        ),
        "x-delivery-count",
        "x-acquired-count",
    }
)


def strip(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers without what the broker and what we added; the user's own ``x-*`` stay.

    Nested headers are stripped as well: tracers copy there what stands beside them.
    """
    kept = {
        name: value
        for name, value in headers.items()
        if name not in BROKER_HEADERS and not name.startswith(OWN_PREFIX)
    }
    if isinstance(kept.get(NESTED), Mapping):
        kept[NESTED] = strip(kept[NESTED])
    return kept
