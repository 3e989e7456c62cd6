"""The answer times of destinations, and which destination may get another message."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

#: Seconds without an answer after which a destination counts as silent.
SILENCE: Final = 1.0

#: Initial limit of messages in flight for one destination. While a quorum queue owes a connection
#: 32 confirms or more (``quorum_commands_soft_limit`` of the application ``rabbit``), RabbitMQ
#: grants the connection no further credit, and stops reading from it after some hundred messages.
#: The messages for all other queues would then wait for that queue (seen on RabbitMQ 3.10.8 and
#: 4.3.6).
MAX_UNANSWERED: Final = 30

#: Upper limit of messages in flight for a destination that answers promptly: every prompt answer
#: raises its limit by one, up to this number. With a limit of 30, distribution's rate drops by a
#: third.
MAX_PROMPT: Final = 300

#: A destination is prompt if it answers within this many seconds. If a destination does not reach
#: its limit for that time, the limit is reset.
PROMPT: Final = 0.1

#: Seconds without any answer after which a connection is closed if a destination has more than
#: :data:`MAX_UNANSWERED` messages in flight on it: the broker has stopped reading from it.
STUCK_AFTER: Final = 3.0

#: Seconds for which a destination that has held up other destinations is limited to
#: :data:`MAX_UNANSWERED` messages in flight.
SLOW_FOR: Final = 10.0

#: The maximum number of remembered names, per purpose, because clients may send messages for any
#: number of names.
MAX_REMEMBERED: Final = 1000

#: Whether a destination may get another message. If the destination is full, the message waits for
#: an answer to an earlier message; if the destination is silent, it goes back into the levels.
State: TypeAlias = Literal["ready", "full", "silent"]


@dataclass(slots=True, eq=False, repr=False)
class _Destination:
    """A destination's messages in flight, and their maximum number.

    Attributes:
        sent: The send time of every message in flight, the oldest first.
        is_silent: Whether its last message timed out; it then gets one message at a time.
        slow_until: Until when it is limited to :data:`MAX_UNANSWERED` messages in flight.
        limit: The maximum number of messages in flight; reset if the maximum was not reached
            lately.
        full_at: When the limit was last reached.
    """

    sent: dict[Hashable, float] = field(default_factory=dict)
    is_silent: bool = False
    slow_until: float = -math.inf
    limit: int = MAX_UNANSWERED
    full_at: float = -math.inf


@dataclass(eq=False, repr=False)
class AnswerTimes:
    """Tracks the messages in flight per destination, and the destinations that do not answer.

    RabbitMQ confirms a message for a quorum queue once a majority of its replicas has the message.
    While a queue has no majority, RabbitMQ sends neither an ack nor a nack, on new connections
    either. So the state of destinations outlives a connection.

    Attributes:
        clock: Returns the time in seconds, like :func:`time.monotonic`.
    """

    clock: Callable[[], float] = time.monotonic
    #: The destinations in the order of their first messages; None stands for the levels.
    _known: dict[str | None, _Destination] = field(default_factory=dict)
    #: The latest send time of all answered messages.
    _answered_until: float = 0.0

    def begin(self) -> None:
        """Forget the messages in flight, on a new connection."""
        for destination in self._known.values():
            destination.sent.clear()

    def sent(self, message: Hashable, destination: str | None) -> None:
        """Record that a message is sent to a destination, or into the levels (None)."""
        if destination not in self._known and len(self._known) >= MAX_REMEMBERED:
            idle = (name for name, known in self._known.items() if not known.sent)
            self._known.pop(next(idle, destination), None)
        self._known.setdefault(destination, _Destination()).sent[message] = self.clock()

    def settled(self, message: Hashable, destination: str | None, in_time: bool = True) -> None:
        """Record that the broker has acked, nacked or returned a message, or that it timed out."""
        known = self._known[destination]
        sent_at = known.sent.pop(message)
        known.is_silent = not in_time
        if in_time:
            self._answered_until = max(self._answered_until, sent_at)
            is_prompt = self.clock() - sent_at < PROMPT
            known.limit = min(known.limit + 1, MAX_PROMPT) if is_prompt else MAX_UNANSWERED

    def state_of(self, destination: str, broker_silent_for: float) -> State:
        """Return the state of a destination: ready, full (at its limit) or silent (no answers).

        If the broker is slow for all destinations, answers come in the order of sending. So a
        destination is silent if a message for another destination, sent a second later, has been
        answered. If the broker sends no answer at all for a second, any destination may be the
        cause, so all destinations count as silent.

        Args:
            destination: The destination.
            broker_silent_for: Seconds since the broker's last answer about any destination.
        """
        known, now = self._known.get(destination), self.clock()
        if known is None or not known.sent:
            return "ready"
        oldest, is_small = next(iter(known.sent.values())), len(known.sent) < MAX_UNANSWERED
        if known.is_silent or (not is_small and now < known.slow_until):
            return "silent"
        if now - oldest >= SILENCE and (
            broker_silent_for >= SILENCE or self._answered_until - oldest >= SILENCE
        ):
            return "silent"
        if now - known.full_at >= PROMPT:
            known.limit = MAX_UNANSWERED
        if is_small or len(known.sent) < known.limit:
            return "ready"
        known.full_at = now
        return "full"

    def note_slow(self, destination: str) -> None:
        """Record that a full destination holds up messages for other destinations."""
        known = self._known.setdefault(destination, _Destination())
        known.slow_until = self.clock() + SLOW_FOR

    def give_up_if_stuck(self, broker_silent_for: float) -> list[str]:
        """Mark destinations as silent if they may have made the broker stop reading; return them.

        Args:
            broker_silent_for: Seconds since the broker's last answer about any destination.
        """
        if broker_silent_for < STUCK_AFTER:
            return []
        stuck = self.overloaded
        for name in stuck:
            self._known[name].is_silent = True
        return stuck

    @property
    def overloaded(self) -> list[str]:
        """The names of destinations with more than :data:`MAX_UNANSWERED` messages in flight.

        If these destinations are silent, the broker may stop reading from this connection.
        """
        return [
            name
            for name, known in self._known.items()
            if name is not None and len(known.sent) > MAX_UNANSWERED
        ]
