"""The message of one task, and how to write others like it fast.

The messages of many calls of one task differ in few places: the id, the arguments, when it is due.
Everything else is written once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final

import amqp
from amqp.serialization import dumps
from celery.utils.saferepr import saferepr
from kombu.utils.json import JSONEncoder

from celery_rabbitdelay import headers as names
from celery_rabbitdelay.envelope import CONTENT_TYPE, framed, sealed
from celery_rabbitdelay.frames import Content
from celery_rabbitdelay.parcel import PERSISTENT

__all__ = ["ADDRESS", "Template"]

#: The headers of a task's message that another call's message has otherwise.
OWN: Final = ("id", "root_id", "argsrepr", "kwargsrepr")

#: How hard an envelope is compressed: higher costs more time than it saves bytes.
COMPRESSION: Final = 1

#: The headers that say where a message goes when it is due.
ADDRESS: Final = (names.EXCHANGE, names.ROUTING_KEY, names.QUEUE, names.PRIORITY)

_LENGTH: Final = struct.Struct(">I")
_TEXT: Final = struct.Struct(">cI")
_NUMBER: Final = struct.Struct(">cq")


class Template:
    """Writes messages like a given one.

    Args:
        message: A task's message of Celery's protocol 2, ready to be published into the levels.
        task_id: The id of its task.
        embedded: The third part of its body: callbacks, errbacks, chain, chord.
        encode: Serializes a body; None for JSON, which is then written faster.
        reprs: The longest representation of the arguments and the keyword arguments in a header.
        told: Whether the caller has said what represents the arguments, the same for all.
    """

    def __init__(
        self,
        message: amqp.Message,
        task_id: str,
        embedded: Mapping[str, Any],
        encode: Callable[[Any], bytes] | None,
        reprs: tuple[int, int],
        told: Sequence[str] = (),
    ) -> None:
        properties = dict(message.properties)
        headers = dict(properties.pop("application_headers"))
        own = {"id", *(name for name in OWN[2:] if name not in told)}
        if headers["root_id"] == task_id:
            own.add("root_id")
        self._own = own
        self._reprs = reprs
        self._embedded = embedded
        self._encode = encode
        self._json = JSONEncoder().encode
        self._rest = f", {self._json(embedded)}]"
        due = headers.pop(names.DUE)
        #: What all messages share.
        self.headers = {name: value for name, value in headers.items() if name not in own}
        self.properties = {n: v for n, v in properties.items() if n != "correlation_id"}
        self._shared: bytes = dumps("F", (self.headers,))[_LENGTH.size :]
        order = [name for name, _ in amqp.Message.PROPERTIES]
        before, after = order.index("application_headers"), order.index("correlation_id")
        all_of_them = {**properties, "application_headers": {names.DUE: due}}
        self._flags = Content.of(amqp.Message(b"", **all_of_them)).properties[:2]
        self._before = self._written(order[:before])
        self._between = self._written(order[before + 1 : after])
        self._after = self._written(order[after + 1 :])

    def _written(self, which: Sequence[str]) -> bytes:
        some = {name: self.properties[name] for name in which if name in self.properties}
        return Content.of(amqp.Message(b"", **some)).properties[2:]

    def body(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the body of a message."""
        if self._encode is not None:
            return self._encode((args, kwargs, self._embedded))
        return f"{self._json((args, kwargs))[:-1]}{self._rest}".encode()

    def own(self, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that are a message's own, but for when it is due."""
        most_of_args, most_of_kwargs = self._reprs
        values = {
            "id": task_id,
            "root_id": task_id,
            "argsrepr": _brief(args, most_of_args),
            "kwargsrepr": _brief(kwargs, most_of_kwargs),
        }
        return {name: value for name, value in values.items() if name in self._own}

    def content(
        self, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], due_ms: int
    ) -> Content:
        """Return the message of a task.

        Args:
            task_id: Its id.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            due_ms: When it is due, in milliseconds since 1970.
        """
        entries = [self._shared]
        for name, value in self.own(task_id, args, kwargs).items():
            text = value.encode("utf-8", "surrogatepass")
            entries += (_NAMES[name], _TEXT.pack(b"S", len(text)), text)
        entries += (_NAMES[names.DUE], _NUMBER.pack(b"L", due_ms))
        table = b"".join(entries)
        correlation_id = task_id.encode()
        properties = (
            self._flags,
            self._before,
            _LENGTH.pack(len(table)),
            table,
            self._between,
            bytes((len(correlation_id),)),
            correlation_id,
            self._after,
        )
        return Content(b"".join(properties), self.body(args, kwargs))

    def item(self, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """Return the two blocks of a task in an envelope."""
        own = ",".join(
            f'"{name}":{quoted(value)}' for name, value in self.own(task_id, args, kwargs).items()
        )
        parts = f'{{"headers":{{{own}}},"properties":{{"correlation_id":{quoted(task_id)}}}}}'
        return framed(parts.encode()) + framed(self.body(args, kwargs))

    def envelope(self, items: bytes, due_ms: int) -> Content:
        """Return a message that holds tasks.

        Args:
            items: What :meth:`item` has returned for each, behind each other.
            due_ms: When all of them are due, in milliseconds since 1970.
        """
        address = {name: self.headers[name] for name in ADDRESS if name in self.headers}
        shared = {name: value for name, value in self.headers.items() if name not in ADDRESS}
        message = amqp.Message(
            sealed(shared, self.properties, items, COMPRESSION),
            content_type=CONTENT_TYPE,
            application_headers={**address, names.DUE: due_ms},
            delivery_mode=PERSISTENT,
            priority=self.properties.get("priority", 0),
        )
        return Content.of(message)


_NAMES: Final = {name: bytes((len(name),)) + name.encode() for name in (*OWN, names.DUE)}


def _brief(value: Any, most: int) -> str:
    text = repr(value)
    return text if len(text) <= most else saferepr(value, most)
