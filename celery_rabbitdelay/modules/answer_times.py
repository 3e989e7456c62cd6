"""The answer times of destinations: which of them may get another message."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

#: Seconds without an answer after which a destination gets no further messages until it answers.
SILENCE: Final = 1.0

#: Messages in flight for one destination, at first. While a quorum queue owes a connection 32
#: answers or more (``quorum_commands_soft_limit`` of the application ``rabbit``), RabbitMQ grants
#: the connection no further credit, and reads nothing more from it after some hundred messages. All
#: others would wait for that queue then (seen on 3.10.8 and 4.3.6).
MAX_UNANSWERED: Final = 30

#: The same for a destination that answers promptly while it has as many as it may have: each answer
#: allows one more, up to this number. With 30, distribution publishes two thirds as many a second.
MAX_PROMPT: Final = 300

#: Seconds in which a prompt destination answers, and after which it is forgotten that it did.
PROMPT: Final = 0.1

#: Seconds without any answer after which a connection is given up on which a destination has more
#: than :data:`MAX_UNANSWERED` messages in flight: the broker reads nothing more from it.
STUCK_AFTER: Final = 3.0

#: Seconds for which a destination that held up others gets no more messages than it answers.
SLOW_FOR: Final = 10.0

#: Names that are remembered, for each purpose: anybody may send messages for others.
MAX_REMEMBERED: Final = 1000

#: Whether a destination may get another message: if it is full, that one has to wait until others
#: are answered; if it is silent, it should not be published at all.
State: TypeAlias = Literal["ready", "full", "silent"]


@dataclass(slots=True, eq=False, repr=False)
class _Destination:
    """The messages that were sent to a destination, and how it has answered.

    Attributes:
        sent: When each message in flight was sent, the oldest first.
        is_silent: Whether it has not answered until time was up: it gets one message at a time.
        slow_until: Until when it gets no more messages than it answers.
        limit: How many messages it may have, if it has had as many lately.
        full_at: When it had as many.
    """

    sent: dict[Hashable, float] = field(default_factory=dict)
    is_silent: bool = False
    slow_until: float = -math.inf
    limit: int = MAX_UNANSWERED
    full_at: float = -math.inf


@dataclass(eq=False, repr=False)
class AnswerTimes:
    """The messages in flight, and which destinations do not answer.

    RabbitMQ confirms a message for a quorum queue once a majority of its replicas has it. If a
    queue has no majority, there is neither an ack nor a nack until it has one again. So what is
    known of destinations outlives a connection.

    Attributes:
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    clock: Callable[[], float] = time.monotonic
    #: The destinations that have got messages, the oldest first; None stands for the levels.
    _known: dict[str | None, _Destination] = field(default_factory=dict)
    #: The latest time of sending of all messages that were answered.
    _answered_until: float = 0.0

    def begin(self) -> None:
        """Forget the messages in flight: there is another connection."""
        for destination in self._known.values():
            destination.sent.clear()

    def sent(self, message: Hashable, destination: str | None) -> None:
        """Note that a message is sent to a destination; None if it goes into the levels."""
        if destination not in self._known and len(self._known) >= MAX_REMEMBERED:
            idle = (name for name, known in self._known.items() if not known.sent)
            self._known.pop(next(idle, destination), None)
        self._known.setdefault(destination, _Destination()).sent[message] = self.clock()

    def settled(self, message: Hashable, destination: str | None, in_time: bool = True) -> None:
        """Note that the broker has acked, nacked or returned a message; or that time is up."""
        known = self._known[destination]
        sent_at = known.sent.pop(message)
        known.is_silent = not in_time
        if in_time:
            self._answered_until = max(self._answered_until, sent_at)
            is_prompt = self.clock() - sent_at < PROMPT
            known.limit = min(known.limit + 1, MAX_PROMPT) if is_prompt else MAX_UNANSWERED

    def state_of(self, destination: str, broker_silent_for: float) -> State:
        """Return whether a destination may get another message.

        If the broker is slow for all, answers come in the order of sending. So a destination is
        silent if a message that was sent a second later is answered; or if nothing at all was
        answered for a second, when it is unknown which destination is the cause.

        Args:
            destination: The destination.
            broker_silent_for: For how many seconds the broker has answered nothing at all.
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
        """Note that others wait for a destination, which has as many messages as it may have."""
        known = self._known.setdefault(destination, _Destination())
        known.slow_until = self.clock() + SLOW_FOR

    def give_up_if_stuck(self, broker_silent_for: float) -> list[str]:
        """Return the destinations for which the broker may read nothing more; they count as silent.

        Args:
            broker_silent_for: For how many seconds the broker has answered nothing at all.
        """
        if broker_silent_for < STUCK_AFTER:
            return []
        stuck = self.overloaded
        for name in stuck:
            self._known[name].is_silent = True
        return stuck

    @property
    def overloaded(self) -> list[str]:
        """Destinations with more messages in flight than :data:`MAX_UNANSWERED`.

        If they are silent, the broker may answer nothing at all on this connection.
        """
        return [
            name
            for name, known in self._known.items()
            if name is not None and len(known.sent) > MAX_UNANSWERED
        ]
