"""Generations: the sets of arguments with which the levels are declared, one after the other. Pure.

RabbitMQ does not let an exchange or a queue change its arguments. So a version of this package that
needs other ones declares exchanges and queues with other names, a new generation, beside those that
are there, and what waits in the former generation still arrives from there.

A generation never changes once it is released. :data:`DIGESTS` says what each one declares: where
the code declares anything else under its number, the fingerprint differs, and RabbitMQ refuses to
mix the two; see :class:`.Identity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from celery_rabbitdelay.exceptions import InvalidLayout

#: How often a message may be given back to its queue. From 4.0 on, RabbitMQ's default is 20, after
#: which it dead-letters the message; up to 3.13 "no limit" cannot be written.
NO_DELIVERY_LIMIT: Final = 2**31 - 1

#: The generation whose names have no word of their own: :file:`rabbitdelay.hours.7`.
UNNAMED: Final = 2


@dataclass(frozen=True)
class Generation:
    """What sets the exchanges and queues of one generation apart from those of the others.

    Attributes:
        number: Its number, which all names after the second generation contain:
            ``rabbitdelay.v3.hours.7``.
        waiting_delivery_limit: How often a message may be given back to a quorum queue that it
            waits in, of a digit or of meditation; then it goes to the next level, early. None:
            RabbitMQ's default, 20 from 4.0 on. Workers never take messages from these queues, but
            ``migrate`` does.
    """

    number: int
    waiting_delivery_limit: int | None = None

    @classmethod
    def of(cls, number: int) -> Generation:
        """Return a generation that this version can declare.

        Raises:
            InvalidLayout: There is none with this number.
        """
        if number not in GENERATIONS:
            known = ", ".join(map(str, GENERATIONS))
            raise InvalidLayout(f"there is no generation {number!r} of the levels, only {known}")
        return GENERATIONS[number]

    @property
    def word(self) -> str:
        """The word for it in names and fingerprints."""
        return f"v{self.number}"

    def name_prefix(self, prefix: str) -> str:
        """Return what all names under a prefix begin with, before a dot."""
        return prefix if self.number == UNNAMED else f"{prefix}.{self.word}"

    def fingerprint_word(self, digest: str) -> str:
        """Return the last word of a fingerprint.

        Args:
            digest: The digest of what is declared. One that is not that of the generation is part
                of the word.
        """
        return self.word if digest == DIGESTS.get(self.number) else f"{self.word}-{digest}"


#: All generations that this version of the package can declare, by their numbers.
GENERATIONS: Final[Mapping[int, Generation]] = MappingProxyType(
    {each.number: each for each in (Generation(2), Generation(3, NO_DELIVERY_LIMIT))}
)

#: The digest of what each generation declares; see :func:`.topology.reference_digest`.
DIGESTS: Final[Mapping[int, str]] = MappingProxyType({2: "8dd9ebba22", 3: "06ac8de111"})
