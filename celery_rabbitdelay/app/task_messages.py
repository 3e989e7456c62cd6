"""The messages of one task's many calls, the same ones that Celery would publish; also stored."""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import celery
from celery import signals
from kombu import Queue

from celery_rabbitdelay.app.celery_internals import repr_depth, repr_sizes
from celery_rabbitdelay.app.message_template import DESTINATION_HEADERS, NO_HEADERS, MessageTemplate
from celery_rabbitdelay.app.task_producer import DelayedTaskProducer, Resending
from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import Due
from celery_rabbitdelay.levels.headers import COPY, KEY, LIFE, ORDER, parse
from celery_rabbitdelay.modules.envelope import DICTIONARY, Item
from celery_rabbitdelay.publishing.kombu_internals import is_kombus_json, serialized
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.producer import Delayed
from celery_rabbitdelay.publishing.publication import PublishPolicy
from celery_rabbitdelay.publishing.publisher import Declaration, Publisher
from celery_rabbitdelay.publishing.wire import MESSAGE_PROPERTIES, Content

#: A deflate stream without a header (RFC 1951); the dictionary is that of envelopes. The window is
#: of 4 KiB: allocating zlib's usual one takes ten times as long as compressing a small message.
RAW: Final = -12
MEMORY: Final = 4


def stored(delayed: Delayed, content: Content | None = None) -> str:
    """Return a message as text.

    Args:
        delayed: The message, and where it goes.
        content: The message as bytes; None for that of ``delayed``.
    """
    properties, body = content or Content.of(delayed.message.amqp())
    queue = delayed.queue.name if delayed.queue is not None else None
    where = _where(delayed.destination, queue)
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
    decoder = zlib.decompressobj(RAW, zdict=DICTIONARY)
    where, size, content = (decoder.decompress(b64decode(text)) + decoder.flush()).split(b"\n", 2)
    destination, queue = json.loads(where)
    message = Content(content[: int(size)], content[int(size) :]).message()
    headers, _ = parse(headers_of(message))
    known = None if queue is None else Queue(queue, no_declare=True)
    return Delayed(WaitingMessage.of(message, headers), destination, task_id, known)


@lru_cache(maxsize=256)
def _where(destination: str, queue: str | None) -> bytes:
    return json.dumps([destination, queue]).encode() + b"\n"


#: Headers taken from the envelope if Celery built each message. No others are shared: receivers of
#: signals may have given each message headers of its own.
ENVELOPE_HEADERS: Final = frozenset(
    (*DESTINATION_HEADERS, header_names.DUE, header_names.SIGNATURE)
)


#: The headers for the registry in which calls differ; all others are the same for all.
OWN_HEADERS: Final = (COPY, LIFE, KEY, ORDER)


class Call(NamedTuple):
    """One call of the task.

    Attributes:
        task_id: Its id.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        due: When it may start.
        headers: Those of :data:`OWN_HEADERS` that its message has, for the registry.
        has_id: Whether the caller has given the id; otherwise no task had it before.
    """

    task_id: str
    args: Any
    kwargs: Any
    due: Due
    headers: Mapping[str, str] = NO_HEADERS
    has_id: bool = True


class CapturingProducer(DelayedTaskProducer):
    """Keeps the message of a task that Celery has made and routed, instead of publishing it.

    Attributes:
        body: The task's body: arguments, keyword arguments, and callbacks, chain and chord.
        options: The options with which kombu serializes the body.
        delayed: The message.
        policy: How long and how often to try, by Celery's options.
        declares: The functions by which the publisher declares the destination.
    """

    body: Any
    options: dict[str, Any]
    delayed: Delayed
    policy: PublishPolicy
    declares: dict[str, Declaration | None]

    def publish_delayed(  # type: ignore[override]
        self,
        body: Any,
        destination: Any,
        due: Any,
        *,
        declare: Iterable[Any] = (),
        resends: int | None,
        backoff: tuple[float, float, float],
        **options: Any,
    ) -> None:
        """Keep the message, and everything that publishing it takes."""
        self.body = body
        self.options = options
        self.delayed = self.delayed_message(body, destination, due, **options)
        self.policy = PublishPolicy(self.timeout, resends, backoff)
        self.declares = self.declarations(self.delayed.queue, declare)


def capture_message(
    app: celery.Celery,
    publisher: Publisher,
    task: celery.Task[Any, Any] | str,
    call: Call,
    options: Mapping[str, Any],
    headers: Mapping[str, Any] = NO_HEADERS,
) -> CapturingProducer:
    """Send a task by Celery to a producer that keeps the message; return the producer.

    Args:
        app: The application.
        publisher: The publisher that the message is for.
        task: The task, or its name.
        call: The call.
        options: Further options of ``apply_async``.
        headers: The headers for the registry that all calls have.
    """
    resending = Resending.of(app, options)
    producer = CapturingProducer(publisher, app, call.due, resending=resending)
    producer.says = {"registry": {**headers, **call.headers}}
    given = {**options, "task_id": call.task_id, "producer": producer}
    function_to_send(app, task)(call.args, call.kwargs, **given)
    return producer


def function_to_send(app: celery.Celery, task: celery.Task[Any, Any] | str) -> Callable[..., Any]:
    """Return what sends a task: its ``apply_async``, or ``send_task`` with its name."""
    return partial(app.send_task, task) if isinstance(task, str) else task.apply_async


def writer_for(
    first: CapturingProducer,
    call: Call,
    options: Mapping[str, Any],
    capture: Callable[[Call], CapturingProducer],
) -> Writer:
    """Return the writer of that call and of further ones.

    If a receiver is connected to one of the signals of publishing, or the event that a task was
    sent is on, each call goes through all of Celery.

    Args:
        first: The producer that has the message of one call.
        call: That call.
        options: Further options of ``apply_async``.
        capture: Sends a call by Celery and returns the producer that has its message.
    """
    signals_of_publishing = (
        signals.before_task_publish,
        signals.after_task_publish,
        signals.task_sent,
    )
    sends_event = first.amqp.app.conf.task_send_sent_event
    if sends_event or any(signal.receivers for signal in signals_of_publishing):
        return _CeleryWriter(first, call, options, capture)
    return Writer(first, call, options)


class Writer:
    """Writes the messages of calls by a template, which is the message of one call.

    Attributes:
        can_write_again: Whether a call that was written as an item can be written as a message.
    """

    can_write_again = True

    def __init__(self, first: CapturingProducer, call: Call, options: Mapping[str, Any]) -> None:
        self._first = first
        amqp = first.amqp

        def template(encode: Callable[[Any], bytes] | None) -> MessageTemplate:
            return MessageTemplate(
                first.delayed.message.amqp(),
                call.task_id,
                first.body[2],
                encode,
                repr_sizes(amqp),
                repr_depth(amqp.app),
                [name for name in ("argsrepr", "kwargsrepr") if options.get(name)],
                OWN_HEADERS,
                first.signing_keys,
            )

        self._template = template(self._encode)
        if is_kombus_json(first.options.get("serializer")):
            faster = template(None)
            # It may be compressed as well.
            if faster.body(call.args, call.kwargs) == first.delayed.message.body:
                self._template = faster

    def _encode(self, body: Any) -> bytes:
        given = self._first.options
        serializer, compression = given.get("serializer"), given.get("compression")
        encoded, *_ = serialized(
            self._first, body, {}, serializer=serializer, compression=compression
        )
        return encoded.encode() if isinstance(encoded, str) else encoded

    def content(self, call: Call) -> Content:
        """Return the message of a call."""
        return self._template.content(
            call.task_id, call.args, call.kwargs, call.due.at_ms, call.headers
        )

    def item(self, call: Call) -> bytes:
        """Return a call as it stands in an envelope.

        Raises:
            InvalidEnvelope: An envelope cannot express it, but :meth:`content` can.
        """
        return self._template.item(call.task_id, call.args, call.kwargs, call.headers)

    def envelope(self, items: bytes, due_ms: int) -> Content:
        """Return the envelope of items that :meth:`item` has returned.

        Raises:
            InvalidEnvelope: An envelope cannot express a header that all calls have.
        """
        return self._template.envelope(items, due_ms)


class _CeleryWriter(Writer):
    """Lets Celery build each message; all go to the destination of the first one."""

    can_write_again = False

    def __init__(
        self,
        first: CapturingProducer,
        call: Call,
        options: Mapping[str, Any],
        capture: Callable[[Call], CapturingProducer],
    ) -> None:
        super().__init__(first, call, options)
        self._capture = capture
        # The messages that Celery has made and that are not written yet. To make one again would
        # send the signals again.
        self._captured = {call.task_id: first.delayed.message}

    def _message(self, call: Call) -> WaitingMessage:
        message = self._captured.pop(call.task_id, None) or self._capture(call).delayed.message
        shared, _ = header_names.parse(self._template.headers)
        return self._first.sign(
            message.saying(
                exchange=shared.exchange, routing_key=shared.routing_key, queue=shared.queue
            )
        )

    def content(self, call: Call) -> Content:
        return Content.of(self._message(call).amqp())

    def item(self, call: Call) -> bytes:
        message = self._message(call)
        headers = message.headers.to_headers()
        own = {name: value for name, value in headers.items() if name not in ENVELOPE_HEADERS}
        properties = {
            name: value
            for name, value in message.amqp().properties.items()
            if name in MESSAGE_PROPERTIES and name != "application_headers"
        }
        if header_names.PRIORITY in self._template.headers:
            own.setdefault(header_names.PRIORITY, properties.get("priority"))
        try:
            return Item(message.body, own, properties).length_prefixed()
        except InvalidEnvelope:
            self._captured[call.task_id] = message
            raise

    def envelope(self, items: bytes, due_ms: int) -> Content:
        return self._template.envelope(items, due_ms, shares=False)
