"""A message that is to be published, and how long that is tried. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from celery_rabbitdelay.exceptions import PublishError
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["BACKOFF", "PATIENCE", "RESENDS", "TIMEOUT", "Address", "Patience", "Posting"]

#: Seconds for everything about one message, unless the caller says.
TIMEOUT: Final = 30.0

#: How often a message is sent again after the connection was lost, unless the caller says.
RESENDS: Final = 3

#: Seconds before the first resend, and how many more before each further one, up to the maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: How many messages may be in flight.
WINDOW: Final = 1000

#: Returns the exchange and the routing key of a message.
Address: TypeAlias = Callable[[], tuple[str, str]]


class Patience(NamedTuple):
    """How long, and how often, publishing is tried.

    Attributes:
        timeout: Seconds for everything about one message, from connecting over resends to the
            confirm.
        resends: How often a message is sent again after the broker has refused it, and after how
            many lost connections in a row publishing is given up; None for as the time allows.
        backoff: Seconds before the first resend, the step by which they grow, their maximum.
        window: How many messages may be in flight.
    """

    timeout: float = TIMEOUT
    resends: int | None = RESENDS
    backoff: tuple[float, float, float] = BACKOFF
    window: int = WINDOW

    def pause(self, attempt: int) -> float:
        """Return the seconds before the resend of this number, from 1."""
        first, step, longest = self.backoff
        return first if attempt == 1 else min(first + step * (attempt - 1), longest)

    def is_over(self, attempt: int) -> bool:
        """Return whether the resend of this number is one too many."""
        return self.resends is not None and attempt > self.resends


PATIENCE: Final = Patience()


class Posting:
    """A message to publish, and what becomes of it.

    Args:
        content: The message; it should be persistent.
        address: Returns the exchange and the routing key. Asked at each attempt, since those of a
            delayed message depend on the time that is left.
        subject: Whatever the caller wants to find again.

    Attributes:
        error: Why it is not confirmed; None where it is.
        resent: How often it was sent again.
    """

    __slots__ = ("address", "content", "deadline", "error", "resent", "returned", "subject")

    def __init__(self, content: Content, address: Address, subject: Any = None) -> None:
        self.content = content
        self.address = address
        self.subject = subject
        self.deadline = 0.0
        self.error: PublishError | None = None
        self.resent = 0
        self.returned = False
