"""Messages that leave the levels before they are due, and go back into them. Opens no connection.

The levels release a message early if a policy gives their queues a shorter ``message-ttl`` than
their own, because RabbitMQ applies the lower one (https://www.rabbitmq.com/docs/ttl). If the clocks
of producer and worker differ, a message only looks early. Nobody can tell these cases apart, so it
goes back in both: a task never starts early, and wrong clocks delay it by their difference, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import Outgoing, into_levels
from celery_rabbitdelay.publishing.message import WaitingMessage

#: The longest time, in milliseconds, for which a message is put back at once. A clock that is years
#: behind, on a machine that has just booted for example, then costs a day and not those years.
MAX_PAUSE_MS: Final = 86_400_000


class EarlyWarning:
    """Warns about early messages: once for each connection, and not for each message.

    Args:
        logger: Where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._has_warned = False

    def reset(self) -> None:
        """Warn again: there is a new connection."""
        self._has_warned = False

    def warn(self, what: str, by_ms: int) -> None:
        """Log what arrived early, unless another message was logged already.

        Args:
            what: The task or message that arrived early, with its id.
            by_ms: How many milliseconds early it is.
        """
        if self._has_warned:
            self._logger.debug("%s is %.1f s early and goes back.", what, by_ms / 1000)
            return
        self._has_warned = True
        self._logger.warning(
            "%s left the delay levels %.1f s before it is due, by the clock of this machine, and "
            "goes back into them for the rest. Others that are early will do so without a word on "
            "this connection. The likely causes: a policy whose message-ttl is shorter than the "
            "TTL of a level's queue (see `rabbitmqctl list_policies`; with it, a task goes around "
            "the levels until it is due), or clocks of producers, brokers and workers that differ "
            "(see `date -u` on each).",
            what,
            by_ms / 1000,
        )


class EarlyMessages:
    """Puts messages back that reach distribution before they are due.

    Args:
        topology: The levels.
        tolerated_ms: How many milliseconds early a message may be: the setting
            ``rabbitdelay_early_tolerance``.
        now_ms: Returns the time in milliseconds since 1970-01-01 UTC.
        on_early: Called for each message that goes back.
    """

    def __init__(
        self,
        topology: Topology,
        tolerated_ms: int,
        now_ms: Callable[[], int] = lambda: time.time_ns() // NS_PER_MS,
        on_early: Callable[[], None] | None = None,
    ) -> None:
        self.warning = EarlyWarning(logging.getLogger(__name__))
        self._topology = topology
        self._tolerated_ms = tolerated_ms
        self._now_ms = now_ms
        self._on_early = on_early

    def put_back(self, message: WaitingMessage) -> Outgoing | None:
        """Return the message as it goes back into the levels; None if it is not early.

        An envelope goes back as a whole. Body, headers and properties stay, and distribution gets
        the message again, when it is due.
        """
        now_ms, earlier = self._now_ms(), message.headers.early
        by_ms = early_ms(message.headers.due_ms, now_ms, self._tolerated_ms)
        if by_ms is None:
            return None
        if not earlier.expects(now_ms, self._tolerated_ms):
            self.warning.warn(f"Distribution: message {message.task_id}", by_ms)
            if self._on_early is not None:
                self._on_early()
        pause = pause_ms(by_ms, self._topology)
        until_ms = now_ms + pause if pause < by_ms else 0
        again = earlier._replace(times=earlier.times + 1, until_ms=until_ms)
        return into_levels(self._topology, message.saying(early=again), Due.after(pause / 1000))


def early_ms(due_ms: int | None, now_ms: int, tolerated_ms: int) -> int | None:
    """Return how many milliseconds early a message is; None if it is not, or is by too little.

    Args:
        due_ms: When it is due, in milliseconds since 1970-01-01 UTC; None if nothing says it.
        now_ms: The time in milliseconds since 1970-01-01 UTC.
        tolerated_ms: How many milliseconds early it may be.
    """
    if due_ms is None:
        return None
    return due_ms - now_ms if due_ms - now_ms > tolerated_ms else None


def pause_ms(by_ms: int, topology: Topology) -> int:
    """Return for how many milliseconds to put a message back that is early by ``by_ms``.

    That is the rest, or if it is longer, :data:`MAX_PAUSE_MS` or the capacity of the levels: then
    the message arrives early once more.
    """
    return min(by_ms, MAX_PAUSE_MS, topology.layout.capacity_ms)
