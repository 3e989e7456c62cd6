"""Recordings of what a version leaves on a broker: ``python -m tests.upgrade.record`` makes one.

Run it once for each version that is released, before the release. It starts servers of its own,
sends messages of every kind, and writes them as they lie in their queues, with the definitions that
the broker exports. A version that has a recording keeps it.
"""

import json
import struct
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import amqp
from amqp import method_framing
from kombu import Connection

import celery_rabbitdelay
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import forwarding
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.message import BEFORE_PROPERTIES, Content, headers_of
from celery_rabbitdelay.publishing.wire import HEADER_FRAME, Wire, publish_frames
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.shop import make_app, named
from tests.kernel.unit.waiting import waiting
from tests.node_control import add_virtual_host

#: Where the recordings are, one folder for each version.
FOLDER: Final = Path(__file__).parent / "recorded"

#: The prefix of everything that is recorded.
PREFIX: Final = "recorded"

#: The layout: up to 5.9 s.
LEVELS: Final = [("seconds", 6, 1), ("ms", 10, 0.1)]

#: Where the recorded tasks note that they have run.
NOTES_KEY: Final = "recorded-notes"

#: Seconds that most messages wait; those of one are above the capacity.
DELAY: Final = 5.8
ABOVE: Final = 9

#: Seconds until the task that expires does so: a recording is replayed for years.
FORTY_YEARS: Final = 40 * 365 * 86_400

#: How the recorded topologies are declared, besides :data:`PREFIX` and :data:`LEVELS`.
TOPOLOGIES: Final[list[dict[str, Any]]] = [
    {"queue_type": "quorum", "shards": 1},
    {"queue_type": "classic", "shards": 2},
]

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
        properties: Its properties, headers among them, as AMQP encodes them, in base64.
        body: Its body, in base64.
    """

    kind: str
    queue: str
    exchange: str
    routing_key: str
    numbers: list[int]
    due_ms: int | None
    due_in_ms: int
    properties: str
    body: str

    def due_from_now(self) -> Content:
        """Return its bytes, but due as long from now as it was due from its recording."""
        properties, body = b64decode(self.properties), b64decode(self.body)
        if self.due_ms is not None:
            former = _LONG.pack(b"l", self.due_ms)
            assert former in properties, self.kind
            due = int(time.time() * 1000) + self.due_in_ms
            properties = properties.replace(former, _LONG.pack(b"l", due))
        return Content(properties, body)


def read(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return the ``messages`` or the ``definitions`` of a version."""
    found: list[dict[str, Any]] = json.loads((folder / f"{what}.json").read_text())
    return found


def publish_raw(connection: Connection, exchange: str, routing_key: str, content: Content) -> None:
    """Publish bytes, and wait until the broker has them."""
    wire = Wire(connection)
    channel: Any = connection.channel()
    frames = publish_frames(channel.channel_id, exchange, routing_key, content, wire.frame_max)
    wire.write(frames, 30.0)
    # The broker answers after it has routed what came before.
    channel.exchange_declare("amq.topic", "topic", passive=True)
    channel.close()


def configuration(broker_url: str, redis_url: str) -> dict[str, Any]:
    """Return the application's settings, for producers and workers of the recorded messages."""
    return {
        "prefix": PREFIX,
        "broker_url": broker_url,
        "result_backend": redis_url,
        "rabbitdelay_prefix": PREFIX,
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_registry_url": redis_url,
        "rabbitdelay_checkin_allowed": [f"{PREFIX}.*"],
    }


def _kinds(shop: Any, connection: Connection) -> list[tuple[str, str, Callable[[int], object]]]:
    """Return each kind of message, its queue, and what sends it with the first of its numbers."""
    topology, queue = shop.rabbitdelay.topology, named(shop, "default")
    straight, reports, checkin = "seconds.5", f"{PREFIX}.topic.reports", f"{PREFIX}.checkin"
    note: Any = shop.tasks["note"]

    def task(number: int, to: str = "default", **more: Any) -> None:
        options = {"delay": DELAY, "queue": named(shop, to), **more}
        note.apply_async((number,), {"key": NOTES_KEY}, **options)

    def envelope(first: int) -> None:
        due = datetime.now(UTC) + timedelta(seconds=DELAY)
        rows = [{"args": (first + each,), "kwargs": {"key": NOTES_KEY}} for each in range(5)]
        shop.rabbitdelay.send_many(note, [{**row, "eta": due} for row in rows], envelopes=True)

    def made(
        number: int, to: str = queue, late: float = 0, more: dict[str, Any] | None = None
    ) -> Any:
        """A task as it waits for its own queue."""
        message = shop.amqp.as_task_v2(str(uuid4()), "note", (number,), {"key": NOTES_KEY})
        due = {header_names.DUE: int((time.time() + late) * 1000), header_names.EXCHANGE: ""}
        due |= {header_names.QUEUE: to, header_names.ROUTING_KEY: to}
        found = amqp.Message(
            json.dumps(message.body),
            content_type="application/json",
            content_encoding="utf-8",
            correlation_id=message.properties["correlation_id"],
            delivery_mode=2,
            application_headers={**message.headers, **(more or due)},
        )
        found.delivery_info = {"exchange": "", "routing_key": ""}
        return waiting(found)

    def publish(exchange: str, routing_key: str, message: Any) -> None:
        publish_raw(connection, exchange, routing_key, Content.of(message.amqp()))

    def moved(outgoing: forwarding.Outgoing | None) -> None:
        assert outgoing is not None
        publish(outgoing.exchange, outgoing.routing_key, outgoing.message)

    def client(number: int) -> None:
        publish(checkin, queue, made(number, more={"x-delay": 1000}))

    def without_queue(number: int) -> None:
        # Nobody has bound it, so it comes to distribution with the broker's own headers.
        exchange, key, _ = topology.route(0.2, reports)
        publish(exchange, key, made(number, reports))

    def tried_again(number: int) -> None:
        redelivery = forwarding.Redelivery(topology, 86_400, lambda least, most: 0.9)
        outgoing = forwarding.Outgoing("", queue, made(number))
        moved(redelivery.after_failure(outgoing, DelayHeaders(), "the broker nacked it"))

    def early(number: int) -> None:
        moved(forwarding.EarlyMessages(topology, 1000).put_back(made(number, late=DELAY)))

    def undeliverable(number: int) -> None:
        outgoing = forwarding.Outgoing("", queue, made(number))
        moved(forwarding.to_undeliverable(topology, outgoing, "the queue is full"))

    return [
        ("a task", straight, task),
        ("a compressed task", straight, partial(task, compression="gzip")),
        ("a task that expires", straight, partial(task, expires=FORTY_YEARS)),
        ("a task with a registry key", straight, partial(task, key="recorded")),
        ("a tracked task", straight, partial(task, track=True)),
        ("a task that runs once", straight, partial(task, once=True)),
        ("a task with a high priority", straight, partial(task, priority=9)),
        ("a task of a fanout exchange", straight, partial(task, to="mirror")),
        ("a task above the capacity", "meditation", partial(task, delay=ABOVE)),
        ("an envelope", straight, envelope),
        ("a message of a client", "checkin", client),
        ("a task without a queue", "distribution", without_queue),
        ("a task that is tried again", "ms.900", tried_again),
        ("a task that was early", straight, early),
        ("an undeliverable task", "undeliverable", undeliverable),
    ]


def _messages(shop: Any, connection: Connection) -> list[Recorded]:
    """Send each kind, and take it out of the queue that it comes to lie in."""
    properties: list[bytes] = []

    def frame_handler(*given: Any) -> Callable[[Any], bool]:
        handle = method_framing.frame_handler(*given)

        def on_frame(frame: Any) -> bool:
            if frame[0] == HEADER_FRAME:
                properties.append(bytes(frame[2][BEFORE_PROPERTIES.size :]))
            return bool(handle(frame))

        return on_frame

    found: list[Recorded] = []
    # It keeps the properties of each message as they are on the wire.
    with connection.clone(transport_options={"frame_handler": frame_handler}) as reading:
        channel: Any = reading.channel()
        channel.auto_decode = False
        first = 0
        for kind, short, send in _kinds(shop, connection):
            queue, tasks = f"{PREFIX}.{short}", 5 if kind == "an envelope" else 1
            numbers = [*range(first, first + tasks)]
            first += len(numbers)
            send(numbers[0])
            wait_until_waiting(connection, queue, 1)
            message = channel.basic_get(queue, no_ack=True)
            due_ms, now_ms = headers_of(message).get(header_names.DUE), int(time.time() * 1000)
            info = message.delivery_info
            place = (queue, info["exchange"], info["routing_key"], numbers)
            due = (due_ms, 0 if due_ms is None else due_ms - now_ms)
            raw = (properties[-1], bytes(message.body))
            found.append(Recorded(kind, *place, *due, *(b64encode(each).decode() for each in raw)))
    return found


def _definitions(broker: RabbitMQServer) -> list[dict[str, Any]]:
    """Declare each of :data:`TOPOLOGIES` and return what the broker exports of them."""
    found = []
    for number, kind in enumerate(TOPOLOGIES):
        host = f"host-{number}"
        add_virtual_host(broker, host)
        with Connection(broker.url).clone(virtual_host=host) as connection:
            declare(connection, Topology(PREFIX, custom(LEVELS), **kind))
        exported = json.loads(broker.ctl("export_definitions", "-", "--format", "json"))
        parts = {
            name: [
                {key: value for key, value in each.items() if key != "vhost"}
                for each in exported[name]
                if each["vhost"] == host
            ]
            for name in ("exchanges", "queues", "bindings")
        }
        found.append({"topology": kind, **parts})
    return found


def main() -> None:
    """Write the recording of this version; an error, if it has one."""
    folder = FOLDER / celery_rabbitdelay.__version__
    folder.mkdir(parents=True)
    with RabbitMQServer() as broker, RedisServer() as redis, Connection(broker.url) as connection:
        shop = make_app(configuration(broker.url, redis.url))
        for queue in shop.amqp.queues.values():
            if queue.name != f"{PREFIX}.topic.reports":
                queue(connection.default_channel).declare()
        # So that everything is declared before a delay begins.
        note: Any = shop.tasks["note"]
        note.apply_async((0,), {"key": NOTES_KEY}, delay=0.1)
        messages = [asdict(each) for each in _messages(shop, connection)]
        shop.close()
        for name, content in (("messages", messages), ("definitions", _definitions(broker))):
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    sys.stdout.write(f"{len(messages)} messages and definitions: {folder}\n")


if __name__ == "__main__":
    main()
