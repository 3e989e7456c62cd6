"""How many warnings of a kind a worker logs: anybody may send the messages that they are about."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

#: Warnings of a kind in a minute.
LOGGED: Final = 5

#: Seconds until the same warning is logged again.
WARN_EVERY: Final = 60.0

#: Seconds until a worker logs again that messages of a later version go back into the levels.
WARN_OF_LATER_EVERY: Final = 3600.0


class WarningLimit:
    """Lets the first few warnings of a minute through, each once, and logs a count of the others.

    Args:
        logger: Where the count goes.
        what: What the warnings are about, in the plural.
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    def __init__(
        self, logger: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._what = what
        self._clock = clock
        self._since = 0.0
        self._logged: set[str | None] = set()
        self._left_out = 0

    def allows(self, key: str | None) -> bool:
        """Return whether to log a warning; count it if not.

        Args:
            key: What it is about: a destination, or a reason. The same is logged once a minute.
        """
        self.log_count()
        if key in self._logged or len(self._logged) >= LOGGED:
            self._left_out += 1
            return False
        if not self._logged:
            self._since = self._clock()
        self._logged.add(key)
        return True

    def log_count(self) -> None:
        """Log how many warnings were left out, once the minute is over; called now and then."""
        if not self._logged or self._clock() - self._since < WARN_EVERY:
            return
        if self._left_out:
            self._logger.warning(
                "%s: %s more within %.0f s, without a warning each",
                self._what,
                f"{self._left_out:,}",
                self._clock() - self._since,
            )
        self._logged.clear()
        self._left_out = 0


class LaterVersionWarning:
    """Warns about messages of a later version: once an hour, and not for each message.

    Args:
        logger: Where to.
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._warned_at: float | None = None

    def warn(self, what: str, why: str) -> None:
        """Log that a message goes back into the levels, unless that was logged within the hour.

        Args:
            what: The message, and who has received it.
            why: What :func:`.later_version` has returned.
        """
        now = self._clock()
        if self._warned_at is not None and now - self._warned_at < WARN_OF_LATER_EVERY:
            self._logger.debug("%s goes back into the delay levels: %s.", what, why)
            return
        self._warned_at = now
        self._logger.warning(
            "%s goes back into the delay levels, unopened: %s. A worker of the later version takes "
            "it from there; without one, it is undeliverable after rabbitdelay_retry_for. Upgrade "
            "celery_rabbitdelay on all workers. Others go back without a word for an hour.",
            what,
            why,
        )
