"""Redelivery: what a destination does not take goes back into the levels, and is tried again. Pure.

The pauses grow from a second to ten minutes, so that a destination in trouble costs little, however
long that lasts and however many messages are due for it. No message waits in a module for it. A
message that only a worker of a later version can read goes back in the same way.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import amqp

from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.headers import DelayHeaders, Failures
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.early import early_ms, pause_ms
from celery_rabbitdelay.modules.forwarding import (
    Outgoing,
    into_levels,
    to_undeliverable,
    with_destination,
)
from celery_rabbitdelay.publishing.message import WaitingMessage
from celery_rabbitdelay.publishing.signature import SigningKeys

#: Seconds before the second attempt; each further pause is twice as long as the one before it.
FIRST_PAUSE: Final = 1.0

#: The longest pause, in seconds.
LONGEST_PAUSE: Final = 600.0

#: Each pause is multiplied by a random number in this range, so that messages which were refused
#: together do not come back together.
JITTER: Final = (0.75, 1.25)

_MS_PER_S: Final = 1000


class Redelivery:
    """Decides when a message is tried again, and when it is given up.

    Args:
        topology: The levels that it waits in.
        seconds: How long a message is tried again; 0 for not at all.
        jitter: Returns a random number between two others.
        now_ns: The time, in nanoseconds since 1970.
        signing_keys: What signs the message that waits; None: nothing does.
    """

    def __init__(
        self,
        topology: Topology,
        seconds: float,
        jitter: Callable[[float, float], float] = random.uniform,
        now_ns: Callable[[], int] = time.time_ns,
        signing_keys: SigningKeys | None = None,
    ) -> None:
        self._topology = topology
        self._ms = seconds * _MS_PER_S
        self._jitter = jitter
        self._now_ns = now_ns
        self._signing_keys = signing_keys

    def after_failure(self, outgoing: Outgoing, received: DelayHeaders, reason: str) -> Outgoing:
        """Return what to publish for a message that its destination has not taken.

        Args:
            outgoing: The message, with its destination.
            received: What the headers say of the message that the module has received for it.
            reason: Why the destination has not taken it.

        Returns:
            The message for the levels; for ``undeliverable`` if it has been tried for too long.
        """
        now_ms = self._now_ns() // NS_PER_MS
        failures = _after(received.failures, reason, now_ms)
        if now_ms - failures.since_ms >= self._ms:
            undeliverable = self._topology.module_queues.undeliverable.exchange.name
            explained = _explained(failures, reason)
            return to_undeliverable(undeliverable, outgoing, explained, received.redriven)
        message = with_destination(outgoing).saying(
            failures=failures, reason=reason, redriven=received.redriven
        )
        # Only distribution gives a priority back, and one of classic levels need not go there.
        if outgoing.trouble is None or self._topology.queue_type == "quorum":
            message = message.with_low_priority()
        if outgoing.is_vouched:
            message = self.sign(message)
        destination = outgoing.routing_key if outgoing.trouble else DISTRIBUTION
        due = Due.after(self._pause(failures.attempts))
        return into_levels(self._topology, message, due, destination)

    def sign(self, message: WaitingMessage) -> WaitingMessage:
        """Sign a message that the module has made, if there is a key."""
        return message if self._signing_keys is None else self._signing_keys.sign(message)

    def until_upgraded(
        self, message: amqp.Message, reason: str, destination: str = DISTRIBUTION
    ) -> Outgoing:
        """Return what to publish for a message that only a later version can read.

        Its body, its properties and all its headers stay; those that count the attempts are added.
        Quorum queues in the levels take no priority above :data:`.MAX_PRIORITY`. The header that
        keeps a higher one is added if the message is not signed: a signature covers that header,
        and whoever cannot read a message does not sign it.
        If it is not due yet, which every version tells by the same header, it waits until then,
        and that is no attempt.

        Args:
            message: The message, as it was received.
            reason: Why this version cannot read it.
            destination: The queue that it came from, or :data:`.DISTRIBUTION`.

        Returns:
            The message for the levels; for ``undeliverable`` if it has been tried for too long.
        """
        left = WaitingMessage.unopened(message).having(expiration=None)
        waiting = left
        if self._topology.queue_type == "quorum":
            waiting = left.with_low_priority()
            if left.headers.signature is not None or left.headers.priority is not None:
                waiting = waiting._replace(headers=left.headers)
        now_ms = self._now_ns() // NS_PER_MS
        by_ms = early_ms(left.headers.due_ms, now_ms, 0)
        if by_ms is not None:
            due = Due.after(pause_ms(by_ms, self._topology) / _MS_PER_S)
            return into_levels(self._topology, waiting, due, destination)
        failures = _after(left.headers.failures, reason, now_ms)
        if now_ms - failures.since_ms >= self._ms:
            undeliverable = self._topology.module_queues.undeliverable.exchange.name
            key = (message.delivery_info or {}).get("routing_key", "")
            left = left.saying(failures=failures, reason=_explained(failures, reason))
            return Outgoing(undeliverable, key, left)
        waiting = waiting.saying(failures=failures, reason=reason)
        due = Due.after(self._pause(failures.attempts))
        return into_levels(self._topology, waiting, due, destination)

    def _pause(self, attempts: int) -> float:
        """The seconds until the next attempt."""
        doublings = min(attempts - 1, 20)
        pause: float = min(FIRST_PAUSE * 2**doublings, LONGEST_PAUSE) * self._jitter(*JITTER)
        # Above the capacity, it would wait in meditation, which needs check-in.
        return min(pause, self._topology.layout.capacity_ms / _MS_PER_S)


def _after(former: Failures | None, reason: str, now_ms: int) -> Failures:
    """Return the failed attempts with one more.

    Args:
        former: Those before it.
        reason: Why it has failed.
        now_ms: The time, in milliseconds since 1970-01-01 UTC.
    """
    if former is None:
        return Failures(1, now_ms, reason)
    return Failures(former.attempts + 1, min(former.since_ms, now_ms), former.first_reason)


def _explained(failures: Failures, reason: str) -> str:
    """Return a text with the first and the last reason."""
    if failures.attempts == 1:
        return reason
    since = datetime.fromtimestamp(failures.since_ms / _MS_PER_S, UTC)
    first = "" if failures.first_reason == reason else f"; the first time: {failures.first_reason}"
    return f"{reason} ({failures.attempts} attempts since {since:%Y-%m-%d %H:%M:%S} UTC{first})"
