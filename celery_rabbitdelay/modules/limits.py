"""The limits of a message: allowed destinations, nesting and delay. Pure.

Any client of check-in writes messages that a worker reads in Celery's main process. A message
beyond a limit is refused at once, and goes to ``undeliverable`` with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from typing import Any, Final, Self, TypeAlias

from kombu import Queue

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels.delay import MAX_DELAY
from celery_rabbitdelay.levels.headers import shortened
from celery_rabbitdelay.publishing.destination import bindings_of

#: Maximum nesting of tables and arrays in the headers of a message. py-amqp reads and writes them
#: recursively: nesting some 300 tables raises a RecursionError in a worker.
MAX_DEPTH: Final = 32

#: Matches a name; returns None if the name does not match.
Matches: TypeAlias = Callable[[str], "re.Match[str] | None"]

#: The Python types of AMQP's tables and arrays.
_CONTAINERS: Final = (dict, list, tuple)


@dataclass(frozen=True)
class AllowedDestinations:
    """An immutable list of allowed destinations, which any thread may read.

    Attributes:
        queues: The names of allowed queues, reached through the default exchange.
        exchanges: The names of allowed exchanges.
        patterns: Glob patterns for the names of allowed queues and exchanges.
        never: The names of forbidden queues and exchanges, which take precedence.
        never_patterns: Glob patterns for forbidden names.
        is_list: Whether nothing else is allowed, because ``rabbitdelay_distribution_allowed`` is a
            list.
    """

    queues: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    never: frozenset[str] = frozenset()
    never_patterns: tuple[str, ...] = ()
    is_list: bool = True

    @classmethod
    def matching(cls, patterns: Iterable[str]) -> Self:
        """Make a list that allows the queues and exchanges whose names match a pattern."""
        return cls(patterns=tuple(patterns))

    @classmethod
    def of_queues(cls, queues: Iterable[Queue]) -> Self:
        """Make a list that allows these queues, and the exchanges that they are bound to."""
        queues = tuple(queues)
        sources = {source.name for queue in queues for source, _ in bindings_of(queue)}
        return cls(frozenset(queue.name for queue in queues), frozenset(sources - {""}))

    def also(self, patterns: Iterable[str]) -> Self:
        """Return a copy that also allows the names that match these patterns."""
        return replace(self, patterns=(*self.patterns, *patterns))

    def includes(self, exchange: str, routing_key: str) -> bool:
        """Return whether a message may go to an exchange (empty: the default one) with a key."""
        return not self.forbids(exchange or routing_key) and self._lists(exchange, routing_key)

    def _lists(self, exchange: str, routing_key: str) -> bool:
        names, name = (self.exchanges, exchange) if exchange else (self.queues, routing_key)
        return name in names or self._matches(name) is not None

    def names(self, exchange: str, routing_key: str) -> bool:
        """Return whether distribution publishes to a destination directly.

        A queue of the configuration is reached through the default exchange. Without a list, two
        more kinds of destination are allowed. First, any other exchange, because a producer may use
        an exchange that the worker's application does not know. Second, a queue that is bound to
        the delivery exchange: distribution reaches it through that exchange, so the answer here is
        False. A client that may publish into the levels also reaches such a queue without
        distribution.

        Args:
            exchange: The exchange; empty for the default one.
            routing_key: The routing key.

        Raises:
            UnprocessableMessage: Distribution may not publish there.
        """
        name = exchange or routing_key
        if not name:
            raise UnprocessableMessage(
                "its destination is missing: it names neither an exchange nor a queue"
            )
        if self.forbids(name):
            why = ", which is reserved for the broker, Celery or the delay levels"
            raise UnprocessableMessage(not_allowed(exchange, routing_key, why))
        if self._lists(exchange, routing_key):
            return True
        if self.is_list:
            raise UnprocessableMessage(not_allowed(exchange, routing_key))
        return exchange != ""

    def forbids(self, name: str) -> bool:
        """Return whether a queue or an exchange is forbidden to all senders."""
        return name in self.never or self._matches_never(name) is not None

    @cached_property
    def _matches(self) -> Matches:
        return _any_of(self.patterns)

    @cached_property
    def _matches_never(self) -> Matches:
        return _any_of(self.never_patterns)


def _any_of(patterns: Iterable[str]) -> Matches:
    """Return a function that matches a name with all patterns at once, for speed."""
    return re.compile("|".join(map(translate, patterns)) or "(?!)").match


#: The limits for a program without settings: all destinations are allowed.
ANYWHERE: Final = AllowedDestinations.matching(["*"])


def where_in_words(exchange: str, routing_key: str) -> str:
    """Return the description of a destination for an error text."""
    return (
        f"the exchange {shortened(exchange)}" if exchange else f"the queue {shortened(routing_key)}"
    )


def not_allowed(exchange: str, routing_key: str, why: str = "") -> str:
    """Return the error text for a message that distribution may not publish."""
    where = f"{where_in_words(exchange, routing_key)}{why}"
    return f"distribution may not reach {where}: see rabbitdelay_distribution_allowed"


def check_delay(what: str, value: object, delay_ms: int) -> None:
    """Refuse a delay that is too long.

    Args:
        what: Where the delay comes from, such as the name of a header.
        value: The value from which the delay was read, shown in the error.
        delay_ms: The delay, in milliseconds.

    Raises:
        UnprocessableMessage: The delay exceeds :data:`.MAX_DELAY`.
    """
    if delay_ms > MAX_DELAY * 1000:
        raise UnprocessableMessage(
            f"{what} is {shortened(value)}: the delay exceeds the maximum of {MAX_DELAY:,.0f} s"
        )


def check_depth(headers: Mapping[str, object]) -> None:
    """Refuse headers that are nested too deep.

    Raises:
        UnprocessableMessage: The nesting exceeds :data:`MAX_DEPTH`.
    """
    layer: list[Any] = [headers]
    for _ in range(MAX_DEPTH + 1):
        layer = [
            inner
            for table in layer
            for inner in (table.values() if isinstance(table, dict) else table)
            if isinstance(inner, _CONTAINERS)
        ]
        if not layer:
            return
    raise UnprocessableMessage(f"its headers nest tables and arrays more than {MAX_DEPTH} deep")
