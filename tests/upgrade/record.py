"""Record what this version leaves on a broker: ``python -m tests.upgrade.record``.

Run it once for each version that is released, before the release. It starts servers of its own,
sends messages of every kind, and writes them as they lie in their queues, with the definitions that
the broker exports. A version that has a recording keeps it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import uuid4

import amqp
from kombu import Connection

import celery_rabbitdelay
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.delay import NS_PER_MS
from celery_rabbitdelay.levels.headers import DelayHeaders
from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.forwarding import (
    EarlyMessages,
    Outgoing,
    Redelivery,
    to_undeliverable,
)
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.publishing.message import headers_of
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.integration.arrivals import count
from tests.integration.shop import make_app, named
from tests.node_control import add_virtual_host
from tests.unit.waiting import waiting
from tests.upgrade.recording import Recorded, as_read, publish_raw, write

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


class Recorder:
    """Sends messages of each kind, and takes them out of the queues that they come to lie in.

    Args:
        shop: The application.
        connection: The broker; not open yet.

    Attributes:
        messages: What is recorded so far.
    """

    def __init__(self, shop: Any, connection: Connection) -> None:
        self.messages: list[Recorded] = []
        self._shop = shop
        self._raw = as_read(connection)
        self._connection = connection
        self._topology: Topology = shop.rabbitdelay.topology
        self._number = 0

    def record(self, kind: str, queue: str, send: Callable[[int], None], tasks: int = 1) -> None:
        """Send something, and take it out of the queue that it comes to lie in.

        Args:
            kind: What it is, in words.
            queue: The queue, without the prefix.
            send: Sends it; is given the first number that its tasks note.
            tasks: How many tasks it has.
        """
        name, numbers = f"{PREFIX}.{queue}", range(self._number, self._number + tasks)
        self._number += tasks
        send(numbers[0])
        wait_for(lambda: count(self._connection, name) == 1, f"{kind} in {name}")
        channel: Any = self._connection.channel()
        channel.auto_decode = False
        message = channel.basic_get(name, no_ack=True)
        channel.close()
        due_ms = headers_of(message).get(header_names.DUE)
        now_ms = time.time_ns() // NS_PER_MS
        info, body = message.delivery_info, bytes(message.body)
        self.messages.append(
            Recorded(
                kind,
                name,
                info["exchange"],
                info["routing_key"],
                list(numbers),
                due_ms,
                0 if due_ms is None else due_ms - now_ms,
                next(self._raw),
                body,
            )
        )

    def record_all(self) -> None:
        """Record each kind of message."""
        straight = "seconds.5"
        self.record("a task", straight, self._task())
        self.record("a compressed task", straight, self._task(compression="gzip"))
        self.record("a task that expires", straight, self._task(expires=FORTY_YEARS))
        self.record("a task with a registry key", straight, self._task(key="recorded"))
        self.record("a tracked task", straight, self._task(track=True))
        self.record("a task that runs once", straight, self._task(once=True))
        self.record("a task with a high priority", straight, self._task(priority=9))
        self.record("a task of a fanout exchange", straight, self._task(queue="mirror"))
        self.record("a task above the capacity", "meditation", self._task(delay=ABOVE))
        self.record("an envelope", straight, self._envelope, tasks=5)
        self.record("a message of a client", "checkin", self._client)
        self.record("a task without a queue", "distribution", self._without_queue)
        self.record("a task that is tried again", "ms.900", self._tried_again)
        self.record("a task that was early", "seconds.5", self._early)
        self.record("an undeliverable task", "undeliverable", self._undeliverable)

    def _task(self, **options: Any) -> Callable[[int], None]:
        queue = named(self._shop, options.pop("queue", "default"))
        options = {"delay": DELAY, "queue": queue, **options}

        def send(number: int) -> None:
            self._shop.tasks["note"].apply_async((number,), {"key": NOTES_KEY}, **options)

        return send

    def _envelope(self, first: int) -> None:
        due = datetime.now(UTC) + timedelta(seconds=DELAY)
        rows = [
            {"args": (first + each,), "kwargs": {"key": NOTES_KEY}, "eta": due} for each in range(5)
        ]
        self._shop.rabbitdelay.send_many(self._shop.tasks["note"], rows, envelopes=True)

    def _message(self, number: int, **headers: Any) -> amqp.Message:
        """Return a task as it waits for its own queue; due in an hour of long ago."""
        task_id = str(uuid4())
        made = self._shop.amqp.as_task_v2(task_id, "note", (number,), {"key": NOTES_KEY})
        message = amqp.Message(
            json.dumps(made.body),
            content_type="application/json",
            content_encoding="utf-8",
            correlation_id=task_id,
            delivery_mode=2,
            application_headers={**made.headers, **headers},
        )
        message.delivery_info = {"exchange": "", "routing_key": ""}
        return message

    def _restorable(self, number: int) -> amqp.Message:
        queue = named(self._shop, "default")
        own = {header_names.DUE: time.time_ns() // NS_PER_MS, header_names.QUEUE: queue}
        return self._message(
            number, **own, **{header_names.EXCHANGE: "", header_names.ROUTING_KEY: queue}
        )

    def _publish(self, outgoing: Outgoing) -> None:
        content = Content.of(outgoing.message.amqp())
        publish_raw(self._connection, outgoing.exchange, outgoing.routing_key, content)

    def _client(self, number: int) -> None:
        exchange, key = f"{PREFIX}.checkin", named(self._shop, "default")
        self._publish(Outgoing(exchange, key, waiting(self._message(number, **{"x-delay": 1000}))))

    def _without_queue(self, number: int) -> None:
        # Nobody has bound it, so it comes to distribution with the broker's own headers.
        route = self._topology.route(0.2, f"{PREFIX}.topic.reports")
        message = self._restorable(number)
        headers = message.properties["application_headers"]
        for name in (header_names.QUEUE, header_names.ROUTING_KEY):
            headers[name] = f"{PREFIX}.topic.reports"
        self._publish(Outgoing(route.exchange, route.routing_key, waiting(message)))

    def _tried_again(self, number: int) -> None:
        redelivery = Redelivery(self._topology, 86_400, lambda least, most: 0.9)
        outgoing = Outgoing("", named(self._shop, "default"), waiting(self._restorable(number)))
        self._publish(redelivery.after_failure(outgoing, DelayHeaders(), "the broker nacked it"))

    def _early(self, number: int) -> None:
        message = self._restorable(number)
        message.properties["application_headers"][header_names.DUE] += int(DELAY * 1000)
        early = EarlyMessages(self._topology, 1000).put_back(waiting(message))
        assert early is not None
        self._publish(early)

    def _undeliverable(self, number: int) -> None:
        outgoing = Outgoing("", named(self._shop, "default"), waiting(self._restorable(number)))
        self._publish(to_undeliverable(f"{PREFIX}.undeliverable", outgoing, "the queue is full"))


def _definitions(broker: RabbitMQServer) -> list[dict[str, Any]]:
    """Declare each of :data:`TOPOLOGIES` and return what the broker exports of them."""
    found = []
    for number, kind in enumerate(TOPOLOGIES):
        host = f"host-{number}"
        add_virtual_host(broker, host)
        topology = Topology(PREFIX, custom(LEVELS), **kind)
        with Connection(broker.url).clone(virtual_host=host) as connection:
            declare(connection, topology)
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
    """Write the recording of this version."""
    with RabbitMQServer() as broker, RedisServer() as redis:
        shop = make_app(configuration(broker.url, redis.url))
        connection = Connection(broker.url)
        recorder = Recorder(shop, connection)
        with connection:
            for queue in shop.amqp.queues.values():
                if queue.name != f"{PREFIX}.topic.reports":
                    queue(connection.default_channel).declare()
            # So that everything is declared before a delay begins.
            for task_queue in ("default", "mirror"):
                options: dict[str, Any] = {"queue": named(shop, task_queue), "delay": 0.1}
                shop.tasks["note"].apply_async((0,), {"key": NOTES_KEY}, **options)
            for queue_name in (named(shop, "default"), f"{PREFIX}.distribution"):
                wait_for(partial(count, connection, queue_name), f"a message in {queue_name}")
                channel: Any = connection.default_channel
                channel.queue_purge(queue_name)
            recorder.record_all()
        definitions = _definitions(broker)
        shop.close()
    folder = write(celery_rabbitdelay.__version__, recorder.messages, definitions)
    sys.stdout.write(f"{len(recorder.messages)} messages and definitions: {folder}\n")


if __name__ == "__main__":
    main()
