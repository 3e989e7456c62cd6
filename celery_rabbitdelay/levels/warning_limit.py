"""How often the log says the same. Pure."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

#: Warnings of a kind in a minute.
LOGGED: Final = 5

#: Seconds until the same warning is logged again.
WARN_EVERY: Final = 60.0


@dataclass(eq=False, repr=False)
class WarningLimit:
    """Lets the first few warnings of a minute through, each once, and logs a count of the others.

    Attributes:
        logger: Where the count goes.
        what: What the warnings are about, in the plural.
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    logger: logging.Logger
    what: str
    clock: Callable[[], float] = time.monotonic
    _since: float = 0.0
    _logged: set[str | None] = field(default_factory=set)
    _left_out: int = 0

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
            self._since = self.clock()
        self._logged.add(key)
        return True

    def log_count(self) -> None:
        """Log how many warnings were left out, once the minute is over; called now and then."""
        if not self._logged or self.clock() - self._since < WARN_EVERY:
            return
        if self._left_out:
            self.logger.warning(
                "%s: %s more within %.0f s, without a warning each",
                self.what,
                f"{self._left_out:,}",
                self.clock() - self._since,
            )
        self._logged.clear()
        self._left_out = 0
