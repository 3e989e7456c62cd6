"""The messages of one task's many calls, the same ones that Celery would publish; also stored."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import celery
from kombu import Exchange, Queue

from celery_rabbitdelay.app.delays import DelayingCelery
from celery_rabbitdelay.app.sending.task_producer import DelayedTaskProducer
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import COPY, KEY, LIFE, ORDER, parse
from celery_rabbitdelay.modules.envelope import DICTIONARY
from celery_rabbitdelay.publishing.message import Content, Declaration, WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.publish_loop import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Publisher

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


#: A message without headers of its own for the registry.
NO_HEADERS: Final[Mapping[str, str]] = {}

#: The headers for the registry in which calls differ; all others are the same for all.
OWN_HEADERS: Final = (COPY, LIFE, KEY, ORDER)


class Call(NamedTuple):
    """One call of the task.

    Attributes:
        task_id: Its id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        due: When it may start.
        headers: Those of :data:`OWN_HEADERS` that its message has, for the registry; or the
            ``group_index`` of a group's member.
        has_id: Whether the caller has given the id; otherwise no task had it before.
    """

    task_id: str
    args: Any
    kwargs: Any
    due: Due
    headers: Mapping[str, Any] = NO_HEADERS
    has_id: bool = True


class CapturingProducer(DelayedTaskProducer):
    """Keeps the message of a task that Celery has made and routed, instead of publishing it.

    Attributes:
        policy: How long and how often to try, by Celery's options.
        declares: The functions by which the publisher declares the destination.
    """

    policy: PublishPolicy
    declares: dict[str, Declaration | None]

    def publish_message(
        self,
        delayed: Delayed,
        due: Due,
        policy: PublishPolicy,
        declare: Iterable[Exchange | Queue] = (),
    ) -> None:
        """Keep everything that publishing the message takes."""
        self.policy = policy
        self.declares = self.declarations(delayed.queue, declare)


def capture_message(
    app: DelayingCelery,
    publisher: Publisher,
    task: celery.Task[Any, Any] | str,
    call: Call,
    options: Mapping[str, Any],
    headers: Mapping[str, Any] = NO_HEADERS,
    send: Callable[..., Any] | None = None,
) -> CapturingProducer:
    """Send a task by Celery to a producer that keeps the message; return the producer.

    Args:
        app: The application.
        publisher: The publisher that the message is for.
        task: The task, or its name.
        call: The call.
        options: Further options of ``apply_async``.
        headers: The headers for the registry that all calls have.
        send: Sends the task; None for :func:`function_to_send`.
    """
    producer = CapturingProducer(publisher, app, call.due, options)
    producer.says = {"registry": {**headers, **call.headers}}
    given = {**options, "task_id": call.task_id, "producer": producer}
    send = send or function_to_send(app, task)
    send(call.args, call.kwargs, **given)
    return producer


def function_to_send(app: celery.Celery, task: celery.Task[Any, Any] | str) -> Callable[..., Any]:
    """Return what sends a task: its ``apply_async``, or ``send_task`` with its name."""
    return partial(app.send_task, task) if isinstance(task, str) else task.apply_async
