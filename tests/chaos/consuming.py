"""The program of a kombu consumer: it notes each message that arrives in its queue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kombu import Connection, Message
from kombu.mixins import ConsumerMixin

from tests.chaos.application import USUAL, Part
from tests.chaos.ledger import Start
from tests.chaos.notes import Notes, now_ms

__all__ = ["NotingConsumer"]


class NotingConsumer(ConsumerMixin):
    """Takes the messages of the queue ``part.place``, and connects again whenever it has to."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._notes = Notes(part.folder)
        ssl = part.settings.get("broker_use_ssl", False)
        self.connection = Connection(part.broker_url, heartbeat=10, ssl=ssl)

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        """Return the one consumer."""
        (queue,) = (each.entity() for each in self._part.queues if each.name == self._part.place)
        return [consumer([queue], on_message=self._arrived, prefetch_count=200)]

    def on_consume_ready(self, connection: Any, channel: Any, consumers: Any, **_: Any) -> None:
        """Say that it takes messages."""
        Path(self._part.ready).touch()

    def _arrived(self, message: Message) -> None:
        at_ms = now_ms()
        headers: dict[str, Any] = message.headers
        own = {
            key: value
            for key, value in headers.items()
            if key.startswith("rabbitdelay-") and key not in USUAL
        }
        redelivered = bool(message.delivery_info.get("redelivered"))
        self._notes.start(Start(headers["id"], self._part.place, at_ms, redelivered, own))
        message.ack()


if __name__ == "__main__":
    NotingConsumer(Part.of(json.loads(os.environ["CHAOS"])["part"])).run()
