"""Routing keys: a word for each digit of the delay, then a word for the destination.

A message keeps its key until it is delivered; the exchange of a level matches only its own digit.
With several shards, the shard's word comes first::

    0.0.0.3.7.45.30.0.celery       3 days, 7:45:30, to the queue ``celery``
    s2.0.0.0.3.7.45.30.0.celery    the same in the third of several shards
    -.-.-.-.-.-.-.-.celery         no delay: from distribution to the delivery exchange
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

#: The destination that stands for the distribution module: no queue has an empty name.
DISTRIBUTION: Final = ""

#: The destination that stands for the queue of probes: a queue's name has at most 255 bytes.
PROBES: Final = "-" * 256

#: The words of both destinations in routing keys; no queue's name is encoded as such a word.
_RESERVED: Final = {DISTRIBUTION: "%distribution", PROBES: "%probe"}

#: Replaces every digit in the key of a message that distribution publishes to the delivery
#: exchange. A destination's binding matches any digits; no binding of a level matches this word.
NO_DIGIT: Final = "-"

#: The maximum bytes of a queue's word; a longer word is hashed.
MAX_DESTINATION_BYTES: Final = 120

_SPECIAL = re.compile(r"[.*#%]")


class RoutingKeys(NamedTuple):
    """Writes, matches and reads the routing keys of one topology.

    Attributes:
        levels: The number of levels, which is the number of digits in a key.
        shards: The number of shards.
    """

    levels: int
    shards: int = 1

    def key(self, shard: int, digits: Iterable[int | str], destination: str) -> str:
        """Return the key of a message to a queue, or to :data:`DISTRIBUTION`."""
        words = (*self.shard_words(shard), *map(str, digits), encode_destination(destination))
        return ".".join(words)

    def pattern(self, shard: int, level: int, *digits: int) -> str:
        """Return the topic pattern of the keys of a shard that have ``digits`` from a level on."""
        return ".".join((*self.shard_words(shard), *"*" * level, *map(str, digits), "#"))

    def destination_pattern(self, destination: str) -> str:
        """Return the exact pattern of all keys of a destination."""
        words = ["*"] * (len(self.shard_words(0)) + self.levels)
        return ".".join((*words, encode_destination(destination)))

    def digits(self, key: str) -> tuple[str, ...] | None:
        """Return the digits in a key; None if it is not a key of this topology."""
        digits = key.split(".")[len(self.shard_words(0)) : -1]
        return tuple(digits) if len(digits) == self.levels else None

    def key_without_digits(self, destination: str) -> str:
        """Return the key with which distribution reaches a queue bound to the delivery exchange."""
        return self.key(0, [NO_DIGIT] * self.levels, destination)

    def has_no_digits(self, key: str) -> bool:
        """Return whether a key was made by :meth:`key_without_digits`."""
        return self.digits(key) == (NO_DIGIT,) * self.levels

    def shard(self, task_id: str) -> int:
        """Return the shard of a task, which depends only on the task's id."""
        if self.shards == 1:
            return 0
        # An id may contain half of a surrogate pair, which strict UTF-8 refuses.
        return zlib.crc32(task_id.encode("utf-8", "surrogatepass")) % self.shards

    def shard_words(self, shard: int) -> tuple[str, ...]:
        """Return the word for a shard in keys and names; empty if there is only one shard."""
        return (f"s{shard}",) if self.shards > 1 else ()


@lru_cache(maxsize=10_000)
def encode_destination(name: str) -> str:
    """Encode a queue's name as one word of a routing key; different names get different words.

    ``daily.reports`` becomes ``daily%2Ereports``; the wildcards ``*`` and ``#`` are encoded too. A
    long name becomes ``%~`` and its SHA-256: an AMQP routing key has at most 255 bytes.
    """
    if name in _RESERVED:
        return _RESERVED[name]
    word = _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", name)
    # A name from an untrusted message may contain half of a surrogate pair.
    if len(word.encode("utf-8", "surrogatepass")) <= MAX_DESTINATION_BYTES:
        return word
    return f"%~{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"


def decode_destination(word: str) -> str | None:
    """Decode the queue's name from a word; None if the name was hashed."""
    return None if word.startswith("%~") else unquote(word)
