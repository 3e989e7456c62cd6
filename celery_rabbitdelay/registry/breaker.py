"""A circuit breaker: while Redis does not answer, nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from celery_rabbitdelay.exceptions import RegistryUnavailable

AnswerT = TypeVar("AnswerT")

#: Seconds for which the breaker is open after the first failure in a row; they double with each
#: further one, up to the maximum.
FIRST_PAUSE: Final = 1.0
MAX_PAUSE: Final = 30.0


class Breaker:
    """Says whether a call is worth trying.

    After a failure it is open for some time, in which calls fail at once. Then it lets calls
    through again: the first one that succeeds closes it, and one that fails opens it for longer.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._pause = 0.0
        self._again_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are to be left out."""
        return self._pause > 0 and self._now() < self._again_at

    def call(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """Return what a call returns.

        Raises:
            RegistryUnavailable: Redis did not answer, or the breaker is open.
        """
        if self.is_open:
            raise RegistryUnavailable("Redis did not answer a moment ago")
        try:
            answer = ask()
        except RegistryUnavailable:
            self.failed()
            raise
        self.succeeded()
        return answer

    def succeeded(self) -> None:
        """Note that a call has succeeded."""
        self._pause = 0.0

    def failed(self) -> None:
        """Note that a call has failed."""
        if self.is_open:
            return  # the call began before: it is the same failure
        self._pause = min(self._pause * 2, MAX_PAUSE) if self._pause else FIRST_PAUSE
        self._again_at = self._now() + self._pause
