"""Puts messages into ``undeliverable``, as accidents and as strangers do."""

from struct import pack
from typing import Any, Final

import amqp
from kombu import Connection

from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import bind_destination, declare
from tests.kernel.integration.arrivals import count, wait_until_waiting


def straight(queue: Any, **more: Any) -> dict[str, Any]:
    """The headers of a task that was delayed for a queue."""
    return {
        header_names.DUE: 1_700_000_000_000,
        header_names.EXCHANGE: "",
        header_names.ROUTING_KEY: queue,
        header_names.QUEUE: queue,
        **more,
    }


def put(
    connection: Connection, topology: Topology, *messages: amqp.Message, routing_key: str = ""
) -> str:
    """Publish messages to ``undeliverable``; return the queue's name."""
    channel: Any = connection.default_channel
    queue = topology.module_queues.undeliverable
    before = count(connection, queue.name)
    for message in messages:
        channel.basic_publish(message, queue.exchange.name, routing_key)
    wait_until_waiting(connection, queue.name, before + len(messages))
    return queue.name


def message(body: Any, headers: dict[str, Any], **properties: Any) -> amqp.Message:
    """A persistent message."""
    return amqp.Message(
        str(body), application_headers=headers, **{"delivery_mode": 2, **properties}
    )


def declare_with(connection: Connection, topology: Topology, *queues: Any) -> None:
    """Declare the levels, and queues that they deliver to."""
    declare(connection, topology)
    for queue in queues:
        queue(connection.default_channel).declare()
        bind_destination(connection, topology, queue.name)


# Messages that Python cannot read, as another client may publish them.


class Raw(amqp.Message):
    """A message with these bytes for properties."""

    def __init__(self, body: str, properties: bytes) -> None:
        super().__init__(body)
        self._raw = properties

    def _serialize_properties(self) -> bytes:
        return self._raw


def headers_only(table: bytes) -> bytes:
    """The properties of a message that has nothing but these headers, in AMQP's own bytes."""
    return pack(">HI", 0x2000, len(table)) + table


#: A timestamp in milliseconds, as if it were seconds: the year 55,840.
FAR_TIMESTAMP: Final = headers_only(b"\x07sent-atT" + pack(">Q", 1_700_000_000_000))
