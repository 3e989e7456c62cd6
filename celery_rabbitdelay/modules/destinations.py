"""Which destinations of a module do not answer, and which do not exist. Opens no connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from celery_rabbitdelay.levels.headers import shortened

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

#: Seconds until the broker is asked again for an exchange that did not exist.
ASK_AGAIN: Final = 1.0

#: Exchanges in a second of which the broker says that they do not exist. Each answer takes a
#: channel and some milliseconds, in which the module publishes nothing.
MAX_MISSING: Final = 20

#: Names that are remembered, for each purpose: anybody may send messages for others.
MAX_REMEMBERED: Final = 1000

#: Whether a destination may get another message: if it is full, that one has to wait until others
#: are answered; if it is silent, it should not be published at all.
State: TypeAlias = Literal["ready", "full", "silent"]


@dataclass(eq=False, repr=False)
class AnswerTimes:
    """The messages in flight, and which destinations do not answer.

    RabbitMQ confirms a message for a quorum queue once a majority of its replicas has it. If a
    queue has no majority, there is neither an ack nor a nack until it has one again.

    Attributes:
        clock: Returns seconds, as :func:`time.monotonic`.
        silent: Destinations that have not answered until time was up, also on former connections:
            they get one message at a time. The set is updated.
    """

    clock: Callable[[], float] = time.monotonic
    silent: set[str | None] = field(default_factory=set)
    #: For destinations that had as many messages as they may have: when, and how many.
    _limits: dict[str | None, tuple[float, int]] = field(default_factory=dict)
    #: When each message was sent, by its destination and the message, the oldest first.
    _sent: dict[str | None, dict[Hashable, float]] = field(default_factory=dict)
    #: Until when destinations are slow.
    _slow_until: dict[str, float] = field(default_factory=dict)
    #: The latest time of sending of all messages that were answered.
    _answered_until: float = 0.0

    def sent(self, message: Hashable, destination: str | None) -> None:
        """Note that a message is sent to a destination; None if it goes into the levels."""
        self._sent.setdefault(destination, {})[message] = self.clock()

    def settled(self, message: Hashable, destination: str | None, in_time: bool = True) -> None:
        """Note that the broker has acked, nacked or returned a message; or that time is up."""
        in_flight = self._sent[destination]
        sent_at = in_flight.pop(message)
        if not in_flight:
            del self._sent[destination]
        if not in_time:
            self._note_silent(destination)
            return
        self._answered_until = max(self._answered_until, sent_at)
        self.silent.discard(destination)
        if destination in self._limits:
            full_at, limit = self._limits[destination]
            if self.clock() - sent_at < PROMPT:
                self._limits[destination] = full_at, min(limit + 1, MAX_PROMPT)
            else:
                del self._limits[destination]

    def state_of(self, destination: str, broker_silent_for: float) -> State:
        """Return whether a destination may get another message.

        If the broker is slow for all, answers come in the order of sending. So a destination is
        silent if a message that was sent a second later is answered; or if nothing at all was
        answered for a second, when it is unknown which destination is the cause.

        Args:
            destination: The destination.
            broker_silent_for: For how many seconds the broker has answered nothing at all.
        """
        in_flight, now = self._sent.get(destination), self.clock()
        if not in_flight:
            return "ready"
        oldest, is_small = next(iter(in_flight.values())), len(in_flight) < MAX_UNANSWERED
        is_slow = not is_small and now < self._slow_until.get(destination, 0.0)
        if destination in self.silent or is_slow:
            return "silent"
        if now - oldest >= SILENCE and (
            broker_silent_for >= SILENCE or self._answered_until - oldest >= SILENCE
        ):
            return "silent"
        if is_small:
            return "ready"
        full_at, limit = self._limits.get(destination, (now, MAX_UNANSWERED))
        if now - full_at >= PROMPT:
            limit = MAX_UNANSWERED
        if len(in_flight) < limit:
            return "ready"
        if destination not in self._limits and len(self._limits) >= MAX_REMEMBERED:
            _keep(self._limits, lambda entry: now - entry[0] < PROMPT)
        self._limits[destination] = now, limit
        return "full"

    def note_slow(self, destination: str) -> None:
        """Note that others wait for a destination, which has as many messages as it may have."""
        now = self.clock()
        if len(self._slow_until) >= MAX_REMEMBERED:
            _keep(self._slow_until, lambda until: now < until)
        self._slow_until[destination] = now + SLOW_FOR

    def give_up_if_stuck(self, broker_silent_for: float) -> list[str]:
        """Return the destinations for which the broker may read nothing more; they count as silent.

        Args:
            broker_silent_for: For how many seconds the broker has answered nothing at all.
        """
        if broker_silent_for < STUCK_AFTER:
            return []
        stuck = self.overloaded
        for name in stuck:
            self._note_silent(name)
        return stuck

    @property
    def overloaded(self) -> list[str]:
        """Destinations with more messages in flight than :data:`MAX_UNANSWERED`.

        If they are silent, the broker may answer nothing at all on this connection.
        """
        return [
            name
            for name, in_flight in self._sent.items()
            if name is not None and len(in_flight) > MAX_UNANSWERED
        ]

    def _note_silent(self, destination: str | None) -> None:
        if destination not in self.silent and len(self.silent) >= MAX_REMEMBERED:
            # Any other: if it is still silent, that is noted again after its next message.
            self.silent.pop()
        self.silent.add(destination)


@dataclass(eq=False, repr=False)
class MissingExchanges:
    """Which exchanges exist, as far as the broker was asked.

    Publishing to an exchange that does not exist closes the channel, with all that is in flight.

    Attributes:
        ask: Asks the broker whether an exchange exists.
        always: Exchanges that exist, and are never asked for.
        clock: Returns seconds, as :func:`time.monotonic`.
    """

    ask: Callable[[str], bool]
    always: Collection[str]
    clock: Callable[[], float] = time.monotonic
    _known: set[str] = field(default_factory=set)
    #: Until when exchanges count as missing, the earliest first.
    _missing: dict[str, float] = field(default_factory=dict)

    def why_missing(self, exchange: str, is_limited: bool = True) -> str | None:
        """Return why not to publish to an exchange; None if it exists.

        The broker is asked again after a second. If it has said of many others that they do not
        exist, within a second, it is not asked: it is unknown then whether this one does.

        Args:
            exchange: Its name.
            is_limited: Whether a stranger may have chosen the name.
        """
        if exchange in self.always or exchange in self._known:
            return None
        self._forget()
        if exchange in self._missing:
            return no_exchange(exchange)
        if is_limited and len(self._missing) >= MAX_MISSING:
            return (
                f"the broker was not asked for the exchange {shortened(exchange)}: in one second, "
                f"it was asked for {len(self._missing)} others that do not exist"
            )
        if not self.ask(exchange):
            self._note(exchange)
            return no_exchange(exchange)
        if len(self._known) >= MAX_REMEMBERED:
            self._known.pop()
        self._known.add(exchange)
        return None

    def add(self, exchange: str) -> None:
        """Note that the broker has just said that an exchange is missing."""
        self._known.discard(exchange)
        self._forget()
        if len(self._missing) < MAX_REMEMBERED:
            self._note(exchange)

    def _note(self, exchange: str) -> None:
        self._missing.pop(exchange, None)
        self._missing[exchange] = self.clock() + ASK_AGAIN

    def _forget(self) -> None:
        """Forget the exchanges that may be asked for again."""
        now = self.clock()
        while self._missing and now >= next(iter(self._missing.values())):
            del self._missing[next(iter(self._missing))]


def no_exchange(exchange: str) -> str:
    """Say that an exchange does not exist."""
    return f"there is no exchange {exchange!r}"


def _keep(entries: dict[Any, Any], is_valid: Callable[[Any], bool]) -> None:
    """Drop the entries that mean nothing any more; if none is left out, the oldest one."""
    for key in [key for key, entry in entries.items() if not is_valid(entry)]:
        del entries[key]
    if len(entries) >= MAX_REMEMBERED:
        del entries[next(iter(entries))]
