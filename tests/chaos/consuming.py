"""The program of a kombu consumer: it notes each message that arrives in its queue."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kombu import Connection, Consumer, Message

from tests.chaos.application import Part, started
from tests.chaos.notes import Notes, now_ms

#: Seconds after which the broker and this program notice that the other one is silent.
HEARTBEAT: Final = 10

#: Seconds before it connects again.
PAUSE: Final = 0.5


class NotingConsumer:
    """Takes the messages of the queue ``part.place``, and connects again whenever it has to."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._notes = Notes(part.folder)
        (self._queue,) = (each.entity() for each in part.queues if each.name == part.place)

    def run(self) -> None:
        """Take messages for ever."""
        while True:
            ssl = self._part.settings.get("broker_use_ssl", False)
            connection = Connection(
                self._part.broker_url, heartbeat=HEARTBEAT, connect_timeout=HEARTBEAT, ssl=ssl
            )
            errors = (*connection.connection_errors, *connection.channel_errors)
            with suppress(*errors):
                self._consume(connection)
            # Without AMQP's handshake, for which a dead connection would let it wait for ever.
            connection.collect(socket_timeout=1)
            time.sleep(PAUSE)

    def _consume(self, connection: Connection) -> None:
        connection.ensure_connection(
            max_retries=len(connection.alt), reraise_as_library_errors=False
        )
        consumer = Consumer(
            connection.default_channel, [self._queue], on_message=self._arrived, prefetch_count=200
        )
        consumer.consume()
        Path(self._part.ready).touch()
        while True:
            with suppress(socket.timeout):
                connection.drain_events(timeout=1)
            connection.heartbeat_check()

    def _arrived(self, message: Message) -> None:
        at_ms, headers, place = now_ms(), message.headers, self._part.place
        self._notes.start(started(headers["id"], place, at_ms, message.delivery_info, headers))
        message.ack()


if __name__ == "__main__":
    NotingConsumer(Part.of(json.loads(os.environ["CHAOS"])["part"])).run()
