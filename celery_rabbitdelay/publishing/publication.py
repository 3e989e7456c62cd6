"""A message in flight: its bytes, its address and its outcome. Opens no connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["Address", "Publication"]

#: Returns the exchange and the routing key of a message.
Address: TypeAlias = Callable[[], tuple[str, str]]


class Publication:
    """A message to publish, and its outcome.

    Args:
        content: The message as bytes; it should be persistent.
        address: Returns the exchange and the routing key. It is called for each attempt, because
            those of a delayed message depend on the time that is left.
        subject: The caller's context, for example row numbers.

    Attributes:
        exchange: The exchange of the last attempt.
        routing_key: The routing key of the last attempt.
        error: Why the broker has not confirmed the message; None if it has.
        resent: How often the message was sent again.
        deadline: When to give up, on the clock of :func:`time.monotonic`. A publisher sets it for
            all attempts together, and a module for each of them.
        resends_nacks: Whether the message is sent again after a nack, as the policy says.
        redeclared: Whether what the message needs was declared again because no queue took it.
        unanswered: Whether it was written at least once without any answer: the connection was
            lost, or time was up.
        suspected: Whether it was in flight when the broker closed the channel for another message;
            the broker may have taken those before that one.
    """

    __slots__ = (
        "address",
        "content",
        "deadline",
        "error",
        "exchange",
        "redeclared",
        "resends_nacks",
        "resent",
        "routing_key",
        "subject",
        "suspected",
        "unanswered",
    )

    def __init__(self, content: Content, address: Address, subject: Any = None) -> None:
        self.content = content
        self.address = address
        self.subject = subject
        self.exchange = ""
        self.routing_key = ""
        self.error: PublishError | None = None
        self.resent = 0
        self.deadline = math.inf
        self.resends_nacks = True
        self.redeclared = False
        self.unanswered = False
        self.suspected = False

    @property
    def may_have_arrived(self) -> bool:
        """Whether the broker may have the message although it did not confirm."""
        return self.unanswered or self.suspected
