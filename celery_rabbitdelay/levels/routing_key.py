"""Routing keys: the digits of a delay and the destination, a word each. Pure.

A message keeps its key on the whole way, and each exchange of the levels looks at its own word
alone. With several shards, the shard's word comes first::

    0.0.0.3.7.45.30.0.celery       3 days, 7:45:30, to the queue ``celery``
    s2.0.0.0.3.7.45.30.0.celery    the same in the third of several shards
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

__all__ = ["DISTRIBUTION", "RoutingKeys", "decode_destination", "encode_destination"]

#: The word of a routing key that stands for the module that distributes, and for no queue:
#: :func:`encode_destination` never makes it.
DISTRIBUTION: Final = "%distribution"

#: The longest queue name that stands in the routing key as it is; a longer one is hashed.
MAX_WORD_LENGTH: Final = 120

_SPECIAL = re.compile(r"[.*#%]")


class RoutingKeys(NamedTuple):
    """How the routing keys of one topology are written, matched and read.

    Attributes:
        levels: How many digits a key has.
        shards: How many shards there are.
    """

    levels: int
    shards: int = 1

    def key(self, shard: int, digits: Iterable[int], destination: str) -> str:
        """Return the key of a message.

        Args:
            shard: Its shard.
            digits: The digits of its delay, those of all levels.
            destination: The name of the queue that gets it, or :data:`DISTRIBUTION`.
        """
        return ".".join((*self.shard_words(shard), *map(str, digits), _word(destination)))

    def pattern(self, shard: int, level: int, *digits: int) -> str:
        """Return the topic pattern of a shard's keys that have ``digits`` from a level on."""
        return ".".join((*self.shard_words(shard), *"*" * level, *map(str, digits), "#"))

    def destination_pattern(self, destination: str) -> str:
        """Return the exact pattern of all keys of a destination."""
        words = ["*"] * (len(self.shard_words(0)) + self.levels)
        return ".".join((*words, _word(destination)))

    def digits(self, key: str) -> tuple[str, ...] | None:
        """Return the digits in a key; None where it is none of these."""
        shard, digits = self.shard_words(0), key.split(".")[:-1]
        digits = digits[len(shard) :]
        return tuple(digits) if len(digits) == self.levels else None

    def shard(self, task_id: str) -> int:
        """Return the shard of a task, always the same one."""
        # Half a character is no UTF-8, but an id may have it all the same.
        written = task_id.encode("utf-8", "surrogatepass")
        return zlib.crc32(written) % self.shards if self.shards > 1 else 0

    def shard_words(self, shard: int) -> tuple[str, ...]:
        """Return what names a shard, in keys and in names: nothing where there is only one."""
        return (f"s{shard}",) if self.shards > 1 else ()


@lru_cache(maxsize=10_000)
def encode_destination(name: str) -> str:
    """Return a queue's name as one word of a routing key, different for different names.

    Dots would make several words of it, ``*`` and ``#`` are wildcards, and AMQP allows a routing
    key 255 bytes: ``daily.reports`` becomes ``daily%2Ereports``, a name of more than 120 bytes
    becomes ``%~`` and its SHA-256.
    """
    word = _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", name)
    if len(word.encode()) <= MAX_WORD_LENGTH:
        return word
    return f"%~{hashlib.sha256(name.encode()).hexdigest()}"


def decode_destination(word: str) -> str | None:
    """Return the queue's name that :func:`encode_destination` encoded, None where it was hashed."""
    return None if word.startswith("%~") else unquote(word)


def _word(destination: str) -> str:
    return destination if destination == DISTRIBUTION else encode_destination(destination)
