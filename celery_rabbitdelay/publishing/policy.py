"""Timeout, resends and window of publishing. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["BACKOFF", "DEFAULT_POLICY", "RESENDS", "TIMEOUT", "PublishPolicy"]

#: Default timeout of one message in seconds, from connecting to the confirm.
TIMEOUT: Final = 30.0

#: Default maximum of resends.
RESENDS: Final = 3

#: Default seconds before the first resend, the step by which they grow, and their maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: Default maximum of messages in flight.
WINDOW: Final = 1000


class PublishPolicy(NamedTuple):
    """How long, and how often, publishing is tried.

    Attributes:
        timeout: Seconds for everything about one message, from connecting through resends to the
            confirm.
        resends: Maximum resends of one message after a nack, and maximum consecutive lost
            connections. None: no limit but the timeout.
        backoff: Seconds before the first resend, the step by which they grow, and their maximum.
        window: How many messages may be in flight.
    """

    timeout: float = TIMEOUT
    resends: int | None = RESENDS
    backoff: tuple[float, float, float] = BACKOFF
    window: int = WINDOW

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait before a resend, counted from 1."""
        first, step, longest = self.backoff
        return first if attempt == 1 else min(first + step * (attempt - 1), longest)

    def is_over(self, attempt: int) -> bool:
        """Return whether a resend, counted from 1, is one too many."""
        return self.resends is not None and attempt > self.resends


DEFAULT_POLICY: Final = PublishPolicy()
