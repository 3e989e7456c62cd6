"""Why messages are undeliverable, counted by reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from celery_rabbitdelay.operations.undeliverable import UndeliverableMessage

#: How many reasons are counted each for itself: anybody can make up reasons.
MOST_REASONS: Final = 200

#: Stands for all further ones.
OTHER_REASONS: Final = "other reasons"

#: What differs from message to message in the reason of one that was tried for too long.
_ATTEMPTS: Final = re.compile(r" \(\d+ attempts since [^;)]*(?:; the first time: .*)?\)")


@dataclass
class ReasonCount:
    """The messages with one reason.

    Attributes:
        count: How many there are.
        oldest: Since when the first of them is undeliverable; None if none of them tells.
        newest: Since when the last of them is, likewise.
    """

    count: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None


@dataclass
class UndeliverableSummary:
    """Counts messages by their reasons.

    Attributes:
        count: How many messages there are.
        reasons: Those with each reason, without the number of attempts and their time.
    """

    count: int = 0
    reasons: dict[str, ReasonCount] = field(default_factory=dict)

    def add(self, message: UndeliverableMessage) -> None:
        """Count a message."""
        self.count += 1
        reason, since = _ATTEMPTS.sub("", message.found.reason), message.found.since
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = OTHER_REASONS
        group = self.reasons.setdefault(reason, ReasonCount())
        group.count += 1
        if since is not None:
            group.oldest = min(group.oldest or since, since)
            group.newest = max(group.newest or since, since)

    def by_count(self) -> list[tuple[str, ReasonCount]]:
        """Return the reasons with their counts, the most frequent one first."""
        return sorted(self.reasons.items(), key=lambda each: -each[1].count)
