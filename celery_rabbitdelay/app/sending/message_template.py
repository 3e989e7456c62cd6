"""The message of one call, and how to write others like it fast.

The messages of many calls of one task differ in few places: the id, the arguments, when it is due.
Everything else is written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final

from kombu.utils.json import JSONEncoder

from celery_rabbitdelay.app.celery_internals import (
    celerys_repr,
    repr_limits,
)
from celery_rabbitdelay.app.sending.task_messages import OWN_HEADERS, Call, CapturingProducer
from celery_rabbitdelay.exceptions import InvalidEnvelope
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import Item, compressed, length_prefixed, shared_block
from celery_rabbitdelay.publishing.kombu_internals import is_kombus_json
from celery_rabbitdelay.publishing.message import (
    MESSAGE_PROPERTIES,
    PERSISTENT,
    Content,
    WaitingMessage,
    encoded,
)

#: The headers that say where a message goes when it is due.
DESTINATION_HEADERS: Final = (header_names.EXCHANGE, header_names.ROUTING_KEY, header_names.QUEUE)

#: Headers set on the envelope, not on its items.
RESTORED_HEADERS: Final = (*DESTINATION_HEADERS, header_names.PRIORITY)

#: Headers taken from the envelope if Celery built each message. No others are shared: receivers of
#: signals may have given each message headers of its own.
ENVELOPE_HEADERS: Final = frozenset(
    (*DESTINATION_HEADERS, header_names.DUE, header_names.SIGNATURE)
)

#: If ``repr()`` contains one of these after its first character (quotes, escapes, objects, nested
#: values), Celery's ``saferepr`` may differ from it.
_MAY_DIFFER: Final = re.compile(r'[\\"<\[({]')


class Writer:
    """Writes the messages of calls like that of a first one, of Celery's message protocol 2.

    Args:
        first: The producer that has the message of the first call.
        call: That call.
        options: Further options of ``apply_async``.

    Attributes:
        can_write_again: Whether a call that was written as an item can be written as a message.
    """

    can_write_again = True

    def __init__(self, first: CapturingProducer, call: Call, options: Mapping[str, Any]) -> None:
        self._first = first
        message = first.delayed.message.amqp()
        correlation_id = message.properties.get("correlation_id")
        # The one that the caller has given, for all; None if each message has its task's id.
        self._correlation_id = None if correlation_id == call.task_id else correlation_id
        self._has_root = message.properties["application_headers"]["root_id"] == call.task_id
        sizes, self._repr_depth = repr_limits(first.amqp.app)
        named = zip(("argsrepr", "kwargsrepr"), sizes, strict=True)
        # Those that the caller has given are the same for all.
        self._reprs = {name: size for name, size in named if not options.get(name)}
        own = {"id", header_names.DUE, header_names.SIGNATURE, *OWN_HEADERS, *self._reprs}
        own.update(call.headers, {"root_id"} if self._has_root else ())
        #: The headers and the properties that all messages share. Celery leaves options that AMQP
        #: does not know among a message's properties.
        self._headers = {
            name: value
            for name, value in message.properties["application_headers"].items()
            if name not in own
        }
        self._properties = {
            name: value
            for name, value in message.properties.items()
            if name in MESSAGE_PROPERTIES and name not in ("application_headers", "correlation_id")
        }
        self._json = JSONEncoder().encode
        #: The end of each body, if it is JSON, which is then written faster; otherwise empty.
        self._rest = ""
        if is_kombus_json(first.options.get("serializer")):
            self._rest = f", {self._json(first.body[2])}]"
            # It may be compressed as well.
            if self._body(call) != first.delayed.message.body:
                self._rest = ""

    def _body(self, call: Call) -> bytes:
        if self._rest:
            return f"{self._json((call.args, call.kwargs))[:-1]}{self._rest}".encode()
        options = self._first.options
        return self._first.serialize(
            (call.args, call.kwargs, self._first.body[2]),
            {},
            serializer=options.get("serializer"),
            compression=options.get("compression"),
        )[0]

    def _own_headers(self, call: Call) -> dict[str, Any]:
        """Return the headers in which messages differ, without copies of others."""
        own: dict[str, Any] = {"id": call.task_id}
        for name, max_length in self._reprs.items():
            value = call.args if name == "argsrepr" else call.kwargs
            text = repr(value)  # faster than Celery's, and mostly equal
            if len(text) > max_length or _MAY_DIFFER.search(text, 1):
                text = celerys_repr(value, max_length, self._repr_depth)
            own[name] = text
        own.update(call.headers)
        return own

    def content(self, call: Call, reply_to: str | None = None) -> Content:
        """Return the message of a call; with its own ``reply_to``, unless that is that of all."""
        headers = {**self._headers, **self._own_headers(call), header_names.DUE: call.due.at_ms}
        if self._has_root:
            headers["root_id"] = call.task_id
        properties = {**self._properties, "correlation_id": self._correlation_id or call.task_id}
        if reply_to is not None:
            properties["reply_to"] = reply_to
        return self._content(headers, properties, self._body(call))

    def _content(
        self, headers: dict[str, Any], properties: Mapping[str, Any], body: bytes
    ) -> Content:
        """Return a message, signed if there is a key."""
        keys = self._first.signing_keys
        if keys is not None:
            said, _ = header_names.parse(headers)
            headers[header_names.SIGNATURE] = keys.signature(body, properties, said)
        return Content(encoded({**properties, "application_headers": headers}), body)

    def item(self, call: Call) -> bytes:
        """Return a call as it stands in an envelope: two blocks.

        Raises:
            InvalidEnvelope: An envelope cannot express it, but :meth:`content` can.
        """
        own = self._own_headers(call).items()
        headers = ",".join([f'"{name}":{quoted(value)}' for name, value in own])
        return length_prefixed(f'{{"headers":{{{headers}}}}}'.encode()) + length_prefixed(
            self._body(call)
        )

    def envelope(self, items: bytes, due_ms: int) -> Content:
        """Return the envelope of items that :meth:`item` has returned.

        Raises:
            InvalidEnvelope: An envelope cannot express a header that all calls have.
        """
        shared = self._headers
        destination = {name: shared[name] for name in RESTORED_HEADERS if name in shared}
        properties = {
            "content_type": ENVELOPE,
            "content_encoding": "binary",
            "delivery_mode": PERSISTENT,
            "priority": self._properties.get("priority", 0),
        }
        body = compressed(self._shared + items)
        return self._content({**destination, header_names.DUE: due_ms}, properties, body)

    @cached_property
    def _shared(self) -> bytes:
        """The block with the headers and properties that all tasks of an envelope share."""
        headers, properties = self._headers, self._properties
        shared = {name: value for name, value in headers.items() if name not in RESTORED_HEADERS}
        copied = {"root_id": "id"} if self._has_root else {}
        if self._correlation_id is None:
            return shared_block(shared, properties, copied, {"correlation_id": "id"})
        return shared_block(shared, {**properties, "correlation_id": self._correlation_id}, copied)


class CeleryWriter(Writer):
    """Lets Celery build each message; all go to the destination of the first one.

    For calls of which receivers of the signals of publishing are told. The items of an envelope
    share nothing but the destination: each has all headers and properties.

    Args:
        first: As for :class:`Writer`.
        call: As for :class:`Writer`.
        options: As for :class:`Writer`.
        capture: Sends a call by Celery and returns the producer that has its message.
    """

    can_write_again = False
    _shared = shared_block({}, {})

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
        shared, _ = header_names.parse(self._headers)
        return self._first.sign(
            message.saying(
                exchange=shared.exchange, routing_key=shared.routing_key, queue=shared.queue
            )
        )

    def content(self, call: Call, reply_to: str | None = None) -> Content:
        """Return the message of a call, which Celery makes unless it has already."""
        return Content.of(self._message(call).amqp())

    def item(self, call: Call) -> bytes:
        """Return that message as it stands in an envelope: two blocks."""
        message = self._message(call)
        headers = message.headers.to_headers()
        own = {name: value for name, value in headers.items() if name not in ENVELOPE_HEADERS}
        properties = {
            name: value
            for name, value in message.amqp().properties.items()
            if name in MESSAGE_PROPERTIES and name != "application_headers"
        }
        if header_names.PRIORITY in self._headers:
            own.setdefault(header_names.PRIORITY, properties.get("priority"))
        try:
            return Item(message.body, own, properties).length_prefixed()
        except InvalidEnvelope:
            self._captured[call.task_id] = message
            raise
