"""A limit for repeated warnings in the log. Pure."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import Final

#: The maximum number of warnings that are logged in one period.
LOGGED: Final = 5

#: Usual periods, in seconds.
MINUTE: Final = 60.0
HOUR: Final = 3600.0


@dataclass(eq=False, repr=False)
class WarningLimit:
    """Lets the first few different warnings of a period through, and logs how many were left out.

    Attributes:
        logger: Logs how many warnings were left out.
        what: The subject of the warnings, in the plural.
        every: The period, in seconds.
    """

    logger: logging.Logger
    what: str
    every: float = MINUTE
    _since: float = -math.inf
    _logged: set[object] = field(default_factory=set)
    _left_out: int = 0

    def allows(self, key: object = None) -> bool:
        """Return whether to log a warning; if not, count the warning.

        Args:
            key: The warning's subject: a destination, or a reason. Each subject is logged at most
                once per period.
        """
        now = time.monotonic()
        if now - self._since >= self.every:
            if self._left_out:
                self.logger.warning(
                    "%s: %s more within %.0f s, not logged individually",
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
        """Start a new period, and drop the number of warnings that were left out."""
        self._since, self._left_out = -math.inf, 0
        self._logged.clear()
