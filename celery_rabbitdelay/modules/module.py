"""A module, as a worker serves it, and what is counted of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import amqp
from kombu import Queue

from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing
from celery_rabbitdelay.publishing.message import DEFAULT_MAX_MESSAGE_BYTES
from celery_rabbitdelay.publishing.signature import SigningKeys

#: Seconds over which a rate is taken.
RATE_SPAN: Final = 10.0


@dataclass(frozen=True)
class Module:
    """A module, as a worker serves it.

    Attributes:
        name: Its name.
        topology: The topology that its queue belongs to.
        queue: The queue.
        receive: Takes a message; returns the messages to publish for it.
        prefetch: How many messages are taken from the queue before the first is acknowledged.
        max_unconfirmed: How many messages may be in flight, unconfirmed.
        timeout: Seconds without any confirm until the connection is given up; and without the
            confirm of one message until that one is put into the levels, to be tried again.
        retry_for: Seconds during which a message that its destination does not take is tried
            again; after that, it is undeliverable.
        signing_keys: What signs the messages that wait to be tried again; None: nothing does.
        max_bytes: The largest message that is read. The broker dead-letters a larger one to
            ``undeliverable``; it never takes memory here.
        admit: Removes from a received message what its sender may not say; None: it may say all.
    """

    name: str
    topology: Topology
    queue: Queue
    receive: Callable[[amqp.Message], Iterator[Outgoing]]
    prefetch: int
    max_unconfirmed: int
    timeout: float
    retry_for: float
    signing_keys: SigningKeys | None = None
    max_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    admit: Callable[[amqp.Message], None] | None = None


@dataclass(eq=False)
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

    received: int = 0
    finished: int = 0
    published: int = 0
    redelivered: int = 0
    undeliverable: int = 0
    backlog: int = 0
    _samples: deque[tuple[float, int, int]] = field(
        default_factory=lambda: deque([(time.monotonic(), 0, 0)]), repr=False
    )

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
