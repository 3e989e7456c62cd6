"""Which queues and exchanges messages of strangers may be published to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from kombu import Queue

__all__ = ["AllowedDestinations"]


@dataclass(frozen=True)
class AllowedDestinations:
    """An immutable allow-list, so any thread may read it.

    Attributes:
        queues: The names of queues, reached over the default exchange.
        exchanges: The names of exchanges.
        patterns: Glob patterns for the names of both: ``*`` matches any characters, ``?`` one.
        never: The names of queues and exchanges that are not allowed, whatever the others say.
        never_patterns: Glob patterns for such names.
    """

    queues: frozenset[str] = frozenset()
    exchanges: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    never: frozenset[str] = frozenset()
    never_patterns: tuple[str, ...] = ()

    @classmethod
    def matching(cls, patterns: Iterable[str]) -> Self:
        """Allow the queues and exchanges whose names match a pattern."""
        return cls(patterns=tuple(patterns))

    @classmethod
    def of_queues(cls, queues: Iterable[Queue]) -> Self:
        """Allow these queues and every exchange that one of them is bound to."""
        queues = tuple(queues)
        sources = [
            source
            for queue in queues
            for source in (queue.exchange, *(binding.exchange for binding in queue.bindings))
        ]
        return cls(
            frozenset(queue.name for queue in queues),
            frozenset(source.name for source in sources if source is not None and source.name),
        )

    def includes(self, exchange: str, routing_key: str) -> bool:
        """Return whether a message may go to an exchange (empty: the default one) with a key."""
        names, name = (self.exchanges, exchange) if exchange else (self.queues, routing_key)
        if self.forbids(name):
            return False
        return name in names or any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def forbids(self, name: str) -> bool:
        """Return whether no message may go to a queue or exchange, whoever asks for it."""
        return name in self.never or any(
            fnmatchcase(name, pattern) for pattern in self.never_patterns
        )
