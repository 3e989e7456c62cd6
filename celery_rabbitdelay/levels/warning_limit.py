"""How often the log says the same. Pure."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Final

#: The warnings of one period that are logged, at most.
LOGGED: Final = 5

#: Seconds in usual periods.
MINUTE: Final = 60.0
HOUR: Final = 3600.0


@dataclass(eq=False, repr=False)
class WarningLimit:
    """Lets the first few warnings of a period through, each once, and logs a count of the others.

    Attributes:
        logger: Where the count goes.
        what: What the warnings are about, in the plural.
        every: The seconds of a period.
    """

    logger: logging.Logger
    what: str
    every: float = MINUTE
    _since: float = -math.inf
    _logged: set[object] = field(default_factory=set)
    _left_out: int = 0

    def allows(self, key: object = None) -> bool:
        """Return whether to log a warning; count it if not.

        Args:
            key: What it is about: a destination, or a reason. The same is logged once in a period.
        """
        now = time.monotonic()
        if now - self._since >= self.every:
            if self._left_out:
                self.logger.warning(
                    "%s: %s more within %.0f s, without a warning each",
                    self.what,
                    f"{self._left_out:,}",
                    now - self._since,
                )
            self.forget()
            self._since = now
        if key in self._logged or len(self._logged) >= LOGGED:
            self._left_out += 1
            return False
        self._logged.add(key)
        return True

    def forget(self) -> None:
        """Begin anew: what was about to be left out is over."""
        self._since, self._left_out = -math.inf, 0
        self._logged.clear()
