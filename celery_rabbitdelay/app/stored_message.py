"""A delayed message as text, for the registry: what it takes to send a task anew."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from typing import Any

from kombu import Queue

from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.wire import Content

__all__ = ["restored", "stored"]


def stored(delayed: Delayed, content: Content | None = None) -> str:
    """Return a message as text.

    Args:
        delayed: The message, and where it goes.
        content: The message as bytes; None for that of ``delayed``.
    """
    properties, body = content or Content.of(delayed.message)
    queue = delayed.queue.name if delayed.queue is not None else None
    about = json.dumps([delayed.destination, delayed.task_id, queue, len(properties)])
    return b64encode(zlib.compress(about.encode() + b"\n" + properties + body)).decode()


def restored(text: str) -> Delayed:
    """Return the message of a text that :func:`stored` has returned.

    Its queue is the name alone: nothing is known about its arguments.
    """
    about, _, content = zlib.decompress(b64decode(text)).partition(b"\n")
    fields: Any = json.loads(about)
    destination, task_id, queue, size = fields
    message = Content(content[:size], content[size:]).message()
    return Delayed(
        message, destination, task_id, None if queue is None else Queue(queue, no_declare=True)
    )
