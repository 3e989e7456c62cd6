"""Timeout, resends and window of publishing. Opens no connection."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

#: Default timeout of one message in seconds, from connecting to the confirm.
TIMEOUT: Final = 30.0

#: Default maximum of resends: none, so the timeout alone ends them.
RESENDS: Final = None

#: Default seconds before the first resend, the step by which they grow, and their maximum.
BACKOFF: Final = (0.0, 0.2, 1.0)

#: Default maximum of messages in flight.
WINDOW: Final = 1000

#: Default part of a pause that is random, so that the producers that lost the same node do not all
#: come back at the same instant.
JITTER: Final = 0.25

#: Minimum seconds before the second resend and later ones, whatever the backoff: a port that
#: refuses connections answers thousands of times a second.
MIN_PAUSE: Final = 0.01


class PublishPolicy(NamedTuple):
    """How long, and how often, publishing is tried.

    Attributes:
        timeout: Seconds for everything about one message, from connecting through resends to the
            confirm.
        resends: Maximum resends of one message after a nack, and maximum consecutive lost
            connections. None: no limit but the timeout.
        backoff: Seconds before the first resend, the step by which they grow, and their maximum.
        window: How many messages may be in flight.
        jitter: The part of a pause, from 0 to 1, that is random: it may be shorter by so much.
    """

    timeout: float = TIMEOUT
    resends: int | None = RESENDS
    backoff: tuple[float, float, float] = BACKOFF
    window: int = WINDOW
    jitter: float = JITTER

    def pause(self, attempt: int) -> float:
        """Return the seconds to wait before a resend, counted from 1."""
        first, step, longest = self.backoff
        seconds = first if attempt == 1 else min(first + step * (attempt - 1), longest)
        seconds *= 1 - self.jitter * random.random()  # noqa: S311 - jitter is no secret
        return seconds if attempt == 1 else max(seconds, MIN_PAUSE)

    def is_over(self, attempt: int) -> bool:
        """Return whether a resend, counted from 1, is one too many."""
        return self.resends is not None and attempt > self.resends


DEFAULT_POLICY: Final = PublishPolicy()
