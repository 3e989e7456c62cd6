"""Recorded messages and definitions, as files and on a broker."""

from __future__ import annotations

import json
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from amqp import method_framing
from kombu import Connection

from celery_rabbitdelay.publishing.wire import (
    BEFORE_PROPERTIES,
    HEADER_FRAME,
    Content,
    Wire,
    publish_frames,
)

#: Where the recordings are, one folder for each version.
FOLDER: Final = Path(__file__).parent / "recorded"

#: Seconds that the broker's socket may take.
TIMEOUT: Final = 30.0

#: How AMQP writes an integer of 64 bits in a table: its type, and its bytes.
_LONG: Final = struct.Struct(">cq")


@dataclass(frozen=True)
class Recorded:
    """A message as it lay in a queue.

    Attributes:
        kind: What it is, in words.
        queue: The queue that it lay in.
        exchange: The exchange that it was published to.
        routing_key: Its routing key.
        numbers: The numbers that its tasks note.
        due_ms: Its due time, in milliseconds since 1970-01-01 UTC; None if it has none.
        due_in_ms: How long after its recording it was due.
        properties: Its properties, headers among them, as AMQP encodes them.
        body: Its body.
    """

    kind: str
    queue: str
    exchange: str
    routing_key: str
    numbers: list[int]
    due_ms: int | None
    due_in_ms: int
    properties: bytes
    body: bytes

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can express it."""
        written = asdict(self)
        for name in ("properties", "body"):
            written[name] = b64encode(written[name]).decode()
        return written

    @classmethod
    def of_json(cls, written: dict[str, Any]) -> Recorded:
        """Return what :meth:`as_json` has written."""
        raw = {name: b64decode(written[name]) for name in ("properties", "body")}
        return cls(**{**written, **raw})

    def due_from_now(self) -> Content:
        """Return its bytes, but due as long from now as it was due from its recording."""
        if self.due_ms is None:
            return Content(self.properties, self.body)
        former = _LONG.pack(b"l", self.due_ms)
        assert former in self.properties, self.kind
        due = int(time.time() * 1000) + self.due_in_ms
        return Content(self.properties.replace(former, _LONG.pack(b"l", due)), self.body)


def write(version: str, messages: list[Recorded], definitions: list[dict[str, Any]]) -> Path:
    """Write the recording of a version.

    Raises:
        FileExistsError: There is one; a recording never changes.
    """
    folder = FOLDER / version
    folder.mkdir(parents=True)
    lines = [each.as_json() for each in messages]
    for name, content in (("messages", lines), ("definitions", definitions)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return folder


def read_messages(folder: Path) -> list[Recorded]:
    """Return the messages of a version."""
    return [Recorded.of_json(each) for each in json.loads((folder / "messages.json").read_text())]


def read_definitions(folder: Path) -> list[dict[str, Any]]:
    """Return the definitions of a version: of some topologies, as a broker exports them."""
    found: list[dict[str, Any]] = json.loads((folder / "definitions.json").read_text())
    return found


def as_read(connection: Connection) -> Iterator[bytes]:
    """Let a connection keep the properties of each message as they are on the wire.

    Args:
        connection: A connection that is not open yet.

    Returns:
        Yields the properties of the messages in the order in which they came.
    """
    kept: list[bytes] = []

    def frame_handler(channels: Any, callback: Callable[..., Any]) -> Callable[..., bool]:
        handle: Callable[..., bool] = method_framing.frame_handler(channels, callback)

        def on_frame(frame: Any) -> bool:
            if frame[0] == HEADER_FRAME:
                kept.append(bytes(frame[2][BEFORE_PROPERTIES:]))
            return handle(frame)

        return on_frame

    connection.transport_options = {"frame_handler": frame_handler}

    def in_order() -> Iterator[bytes]:
        while True:
            yield kept.pop(0)

    return in_order()


def publish_raw(connection: Connection, exchange: str, routing_key: str, content: Content) -> None:
    """Publish bytes, and wait until the broker has them."""
    wire = Wire(connection)
    channel: Any = connection.channel()
    frames = publish_frames(channel.channel_id, exchange, routing_key, content, wire.frame_max)
    wire.write(frames, TIMEOUT)
    # The broker answers after it has routed what came before.
    channel.exchange_declare("amq.topic", "topic", passive=True)
    channel.close()


def declare_recorded(connection: Connection, definitions: dict[str, Any]) -> None:
    """Declare a topology as it was recorded, without a line of the package."""
    channel: Any = connection.channel()
    for each in definitions["exchanges"]:
        channel.exchange_declare(
            each["name"], each["type"], durable=True, auto_delete=False, arguments=each["arguments"]
        )
    for each in definitions["queues"]:
        channel.queue_declare(
            each["name"], durable=True, auto_delete=False, arguments=each["arguments"]
        )
    for each in definitions["bindings"]:
        bind = channel.queue_bind if each["destination_type"] == "queue" else channel.exchange_bind
        bind(each["destination"], each["source"], each["routing_key"])
    channel.close()
