"""Messages that leave the levels before they are due, and go back into them. Opens no connection.

The levels release a message early if a policy gives their queues a shorter ``message-ttl`` than
their own, because RabbitMQ applies the lower one (https://www.rabbitmq.com/docs/ttl). If the clocks
of producer and worker differ, a message only looks early. Nobody can tell these cases apart, so it
goes back in both: a task never starts early, and wrong clocks delay it by their difference, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import amqp

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import MAX_DUE_MS, NS_PER_MS, Due
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import headers as module_headers
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    into_levels,
    with_headers,
    without_broker_headers,
)
from celery_rabbitdelay.publishing.message import headers_of, task_id_of

#: The longest time, in milliseconds, for which a message is put back at once. A clock that is years
#: behind, on a machine that has just booted for example, then costs a day and not those years.
MAX_PAUSE_MS: Final = 86_400_000


#: A count above this one is none that a worker has written.
MAX_TIMES: Final = 2**31


class PutBack(NamedTuple):
    """The contents of the header ``rabbitdelay-early``.

    Attributes:
        times: How often the message was put back.
        until_ms: Until when it was put back last, in milliseconds since 1970-01-01 UTC; 0 if that
            is its due time. It may have to wait for longer than the levels take at once.
        exchange: The exchange that the task's consumer is to see; None for that of the message.
        routing_key: The routing key that it is to see, likewise.
    """

    times: int = 0
    until_ms: int = 0
    exchange: str | None = None
    routing_key: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> PutBack:
        """Read it from a message's headers; unreadable values count as missing."""
        table = headers.get(module_headers.EARLY)
        if not isinstance(table, Mapping):
            return cls()
        times, until_ms, exchange, routing_key = map(
            table.get, ("times", "until", "exchange", "routing-key")
        )
        if not isinstance(times, int) or not 0 <= times <= MAX_TIMES:
            times = 0
        if not isinstance(until_ms, int) or not 0 <= until_ms <= MAX_DUE_MS:
            until_ms = 0
        if not isinstance(exchange, str) or not isinstance(routing_key, str):
            return cls(times, until_ms)
        return cls(times, until_ms, exchange, routing_key)

    def expects(self, now_ms: int, tolerated_ms: int) -> bool:
        """Return whether the message is early because it could not wait for longer at once."""
        return 0 < self.until_ms <= now_ms + tolerated_ms

    def header(self) -> dict[str, dict[str, Any]]:
        """Return the header."""
        table = {
            "times": self.times,
            "until": self.until_ms or None,
            "exchange": self.exchange,
            "routing-key": self.routing_key,
        }
        return {module_headers.EARLY: {k: value for k, value in table.items() if value is not None}}


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

    def put_back(self, message: amqp.Message) -> Outgoing | None:
        """Return the message as it goes back into the levels; None if it is not early.

        An envelope goes back as a whole. Body, headers and properties stay, and distribution gets
        the message again, when it is due.
        """
        headers = headers_of(message)
        now_ms, earlier = self._now_ms(), PutBack.of(headers)
        by_ms = early_ms(headers.get(header_names.DUE), now_ms, self._tolerated_ms)
        if by_ms is None:
            return None
        if not earlier.expects(now_ms, self._tolerated_ms):
            self.warning.warn(f"Distribution: message {task_id_of(message)}", by_ms)
            if self._on_early is not None:
                self._on_early()
        pause = pause_ms(by_ms, self._topology)
        until_ms = now_ms + pause if pause < by_ms else 0
        again = earlier._replace(times=earlier.times + 1, until_ms=until_ms)
        kept = {**without_broker_headers(headers), **again.header()}
        due = Due.after(pause / 1000)
        return into_levels(self._topology, with_headers(message, kept), due)


def early_ms(due_ms: object, now_ms: int, tolerated_ms: int) -> int | None:
    """Return how many milliseconds early a message is; None if it is not, or is by too little.

    Args:
        due_ms: The value of its header ``rabbitdelay-due``.
        now_ms: The time in milliseconds since 1970-01-01 UTC.
        tolerated_ms: How many milliseconds early it may be.
    """
    if not isinstance(due_ms, int) or isinstance(due_ms, bool):
        return None
    return due_ms - now_ms if due_ms - now_ms > tolerated_ms else None


def pause_ms(by_ms: int, topology: Topology) -> int:
    """Return for how many milliseconds to put a message back that is early by ``by_ms``.

    That is the rest, or if it is longer, :data:`MAX_PAUSE_MS` or the capacity of the levels: then
    the message arrives early once more.
    """
    return min(by_ms, MAX_PAUSE_MS, topology.layout.capacity_ms)
