"""The messages of tracked tasks as the registry stores them: as text, to be sent anew."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from functools import lru_cache
from typing import Final

from kombu import Queue

from celery_rabbitdelay.levels.headers import parse
from celery_rabbitdelay.modules.envelope import DICTIONARY
from celery_rabbitdelay.publishing.message import Content, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import Delayed

#: A deflate stream without a header (RFC 1951); the dictionary is that of envelopes. The window is
#: of 4 KiB: allocating zlib's usual one takes ten times as long as compressing a small message.
RAW: Final = -12
MEMORY: Final = 4


def stored(delayed: Delayed, content: Content | None = None, tolerance_ms: int = 0) -> str:
    """Return a message as text.

    Args:
        delayed: The message, and where it goes.
        content: The message as bytes; None for that of ``delayed``.
        tolerance_ms: How many milliseconds later it may arrive.
    """
    properties, body = content or Content.of(delayed.message.amqp())
    queue = delayed.queue.name if delayed.queue is not None else None
    where = _where(delayed.destination, queue, tolerance_ms)
    encoder = zlib.compressobj(1, zlib.DEFLATED, RAW, MEMORY, zdict=DICTIONARY)
    compressed = encoder.compress(b"%s%d\n%s%s" % (where, len(properties), properties, body))
    return b64encode(compressed + encoder.flush()).decode()


def restored(text: str, task_id: str) -> Delayed:
    """Return the message of a text that :func:`stored` has returned.

    Its queue is the name alone: nothing is known about its arguments.

    Args:
        text: The text.
        task_id: The id of its task.
    """
    where, size, content = _parts(text)
    destination, queue, _ = json.loads(where)
    message = Content(content[: int(size)], content[int(size) :]).message()
    headers, _ = parse(headers_of(message))
    known = None if queue is None else Queue(queue, no_declare=True)
    return Delayed(WaitingMessage.of(message, headers), destination, task_id, known)


def tolerance_of(text: str) -> int:
    """Return how many milliseconds later the message of such a text may arrive."""
    return int(json.loads(_parts(text)[0])[2])


def _parts(text: str) -> list[bytes]:
    decoder = zlib.decompressobj(RAW, zdict=DICTIONARY)
    return (decoder.decompress(b64decode(text)) + decoder.flush()).split(b"\n", 2)


@lru_cache(maxsize=256)
def _where(destination: str, queue: str | None, tolerance_ms: int) -> bytes:
    return json.dumps([destination, queue, tolerance_ms]).encode() + b"\n"
