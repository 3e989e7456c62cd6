"""What a module has done, and how fast."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

#: Seconds over which a rate is taken.
RATE_SPAN: Final = 10.0


class ModuleStatistics:
    """Counts what a module does.

    Attributes:
        received: How many messages the module has received.
        finished: How many of these it has acknowledged.
        published: How many messages it has published, confirmed.
        redelivered: How many messages it has put into the levels because their destination did not
            take them.
        undeliverable: How many messages it has put into ``undeliverable``, confirmed.
        backlog: How many messages were ready in its queue when it was last asked.
    """

    def __init__(self) -> None:
        self.received = 0
        self.finished = 0
        self.published = 0
        self.redelivered = 0
        self.undeliverable = 0
        self.backlog = 0
        self._samples: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])

    def sample(self, backlog: int) -> None:
        """Note how many messages are ready, and all counts; called every few seconds."""
        self.backlog = backlog
        now = time.monotonic()
        self._samples.append((now, self.received, self.published))
        while len(self._samples) > 2 and now - self._samples[1][0] > RATE_SPAN:
            self._samples.popleft()

    def status(self) -> dict[str, float]:
        """Return all counts, and the rates per second over the last ten seconds or so."""
        (begin, received, published), (end, *_) = self._samples[0], self._samples[-1]
        seconds = max(time.monotonic() - begin, 0.001) if end > begin else RATE_SPAN
        return {
            "received": self.received,
            "published": self.published,
            "redelivered": self.redelivered,
            "undeliverable": self.undeliverable,
            "backlog": self.backlog,
            "received_per_second": round((self.received - received) / seconds, 1),
            "published_per_second": round((self.published - published) / seconds, 1),
        }
