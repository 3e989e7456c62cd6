"""The message of one task, and how to write others like it fast.

The messages of many calls of one task differ in few places: the id, the arguments, when it is due.
Everything else is written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final

import amqp
from kombu.utils.json import JSONEncoder

from celery_rabbitdelay.app.celery_internals import celerys_repr
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.modules.envelope import compressed, length_prefixed, shared_block
from celery_rabbitdelay.publishing.message import PERSISTENT
from celery_rabbitdelay.publishing.signature import Signer, SigningKeys
from celery_rabbitdelay.publishing.wire import Content, PropertiesEncoder

#: How hard an envelope is compressed: higher costs more time than it saves bytes.
COMPRESSION: Final = 1

#: The headers that say where a message goes when it is due.
DESTINATION_HEADERS: Final = (header_names.EXCHANGE, header_names.ROUTING_KEY, header_names.QUEUE)

#: Headers set on the envelope, not on its items.
RESTORED_HEADERS: Final = (*DESTINATION_HEADERS, header_names.PRIORITY)

#: If ``repr()`` contains one of these after its first character (quotes, escapes, objects, nested
#: values), Celery's ``saferepr`` may differ from it.
_MAY_DIFFER: Final = re.compile(r'[\\"<\[({]')

_NOTHING_SHARED: Final = shared_block({}, {})

#: A message without headers of its own for the registry.
NO_HEADERS: Final[Mapping[str, str]] = {}


class MessageTemplate:
    """Writes messages like a given one.

    Args:
        message: A task's message of Celery's protocol 2, ready to be published into the levels.
        task_id: The id of its task.
        embedded: The third part of its body: callbacks, errbacks, chain, chord.
        encode: Serializes a body; None for JSON, which is then written faster.
        reprs: Maximum characters of the headers ``argsrepr`` and ``kwargsrepr``.
        repr_depth: How deep these headers go into nested values; None for no limit.
        given_reprs: Which of these headers the caller has given; they are the same for all.
        further: The names of further headers that some messages have, with values of their own.
        signing_keys: What signs each message and each envelope; None: nothing is signed.
    """

    def __init__(
        self,
        message: amqp.Message,
        task_id: str,
        embedded: Mapping[str, Any],
        encode: Callable[[Any], bytes] | None,
        reprs: tuple[int, int],
        repr_depth: int | None = 3,
        given_reprs: Collection[str] = (),
        further: Collection[str] = (),
        signing_keys: SigningKeys | None = None,
    ) -> None:
        headers = message.properties["application_headers"]
        # The one that the caller has given, for all; None if each message has its task's id.
        self._correlation_id = None
        if message.properties.get("correlation_id") != task_id:
            self._correlation_id = message.properties.get("correlation_id")
        self._has_root = headers["root_id"] == task_id
        self._reprs = {
            name: max_length
            for name, max_length in zip(("argsrepr", "kwargsrepr"), reprs, strict=True)
            if name not in given_reprs
        }
        self._repr_depth = repr_depth
        own = {"id", header_names.DUE, *(["root_id"] if self._has_root else []), *self._reprs}
        own |= set(further)
        own.add(header_names.SIGNATURE)
        self._signing_keys = signing_keys
        self._encoder = PropertiesEncoder(message, own)
        self._sign = self._signer(self._encoder)
        self._embedded = embedded
        self._encode = encode
        self._json = JSONEncoder().encode
        self._rest = f", {self._json(embedded)}]" if encode is None else ""

    @property
    def headers(self) -> Mapping[str, Any]:
        """The headers that all messages share."""
        return self._encoder.headers

    @property
    def properties(self) -> Mapping[str, Any]:
        """The properties that all messages share."""
        return self._encoder.properties

    def body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the body of a message."""
        if self._encode is not None:
            return self._encode((args, kwargs, self._embedded))
        return f"{self._json((args, kwargs))[:-1]}{self._rest}".encode()

    def _own(self, task_id: str, args: Any, kwargs: Any) -> dict[str, str]:
        own = {"id": task_id}
        if self._has_root:
            own["root_id"] = task_id
        for name, max_length in self._reprs.items():
            own[name] = _brief(args if name == "argsrepr" else kwargs, max_length, self._repr_depth)
        return own

    def content(
        self,
        task_id: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        due_ms: int,
        further: Mapping[str, str] = NO_HEADERS,
    ) -> Content:
        """Return the message of a task.

        Args:
            task_id: Its id.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            due_ms: When it is due, in milliseconds since 1970.
            further: Its further headers.
        """
        own = self._own(task_id, args, kwargs)
        own.update(further)
        body, correlation_id = self.body(args, kwargs), self._correlation_id or task_id
        if self._sign is not None:
            own[header_names.SIGNATURE] = self._sign(due_ms, correlation_id, body)
        return Content(self._encoder.encode(own, due_ms, correlation_id), body)

    def item(
        self,
        task_id: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        further: Mapping[str, str] = NO_HEADERS,
    ) -> bytes:
        """Return the two blocks of a task in an envelope; takes the same as :meth:`content`."""
        own = self._own(task_id, args, kwargs)
        own.update(further)
        own.pop("root_id", None)  # a copy of the id
        headers = ",".join([f'"{name}":{quoted(value)}' for name, value in own.items()])
        return length_prefixed(f'{{"headers":{{{headers}}}}}'.encode()) + length_prefixed(
            self.body(args, kwargs)
        )

    def envelope(self, items: bytes, due_ms: int, *, shares: bool = True) -> Content:
        """Return a message that holds tasks.

        Args:
            items: The concatenated results of :meth:`item`.
            due_ms: When all of them are due, in milliseconds since 1970.
            shares: Whether they share the headers and properties of the given message, except its
                destination. If not, each item has all headers and properties of its message.

        Raises:
            InvalidEnvelope: A shared header cannot be written as JSON.
        """
        encoder = self._envelope
        shared = self._shared if shares else _NOTHING_SHARED
        body = compressed(shared + items, COMPRESSION)
        own = {}
        if self._sign_envelope is not None:
            own[header_names.SIGNATURE] = self._sign_envelope(due_ms, None, body)
        return Content(encoder.encode(own, due_ms, None), body)

    @cached_property
    def _envelope(self) -> PropertiesEncoder:
        """Writes the properties of envelopes."""
        destination = {
            name: self.headers[name] for name in RESTORED_HEADERS if name in self.headers
        }
        message = amqp.Message(
            b"",
            content_type=ENVELOPE,
            content_encoding="binary",
            application_headers={**destination, header_names.DUE: 0},
            delivery_mode=PERSISTENT,
            priority=self.properties.get("priority", 0),
        )
        return PropertiesEncoder(message, {header_names.DUE, header_names.SIGNATURE})

    @cached_property
    def _sign_envelope(self) -> Signer | None:
        return self._signer(self._envelope)

    def _signer(self, encoder: PropertiesEncoder) -> Signer | None:
        """Return what signs the messages of an encoder; None without a key."""
        if self._signing_keys is None:
            return None
        said, _ = header_names.parse(encoder.headers)
        return self._signing_keys.signer(encoder.properties, said)

    @cached_property
    def _shared(self) -> bytes:
        """The block with the headers and properties that all tasks of an envelope share."""
        shared = {
            name: value for name, value in self.headers.items() if name not in RESTORED_HEADERS
        }
        copied = {"root_id": "id"} if self._has_root else {}
        if self._correlation_id is None:
            return shared_block(shared, self.properties, copied, {"correlation_id": "id"})
        properties = {**self.properties, "correlation_id": self._correlation_id}
        return shared_block(shared, properties, copied)


def _brief(value: Any, max_length: int, repr_depth: int | None) -> str:
    """Return how Celery shows a value in a header; by Python's faster ``repr`` if that is equal."""
    text = repr(value)
    if len(text) <= max_length and _MAY_DIFFER.search(text, 1) is None:
        return text
    return celerys_repr(value, max_length, repr_depth)
