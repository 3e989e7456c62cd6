"""What tests of the modules share: what they publish, and when a worker serves it."""

from __future__ import annotations

from typing import Any, Final

from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Envelope, Item
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import Arrival, count, take
from tests.integration.worker import Worker

#: The modules that a worker serves where nothing else is said.
MODULES: Final = ("check-in", "distribution")

#: What lets check-in reach the tests' queues.
OPEN: Final = {"rabbitdelay_checkin_allowed": ["test-*"]}


def check_in(connection: Connection, shop: Any, key: str, **options: Any) -> None:
    """Publish as any client would, to check-in's exchange."""
    connection.Producer().publish(
        "hello",
        exchange=shop.rabbitdelay.topology.module_queues.checkin.exchange.name,
        routing_key=key,
        **options,
    )


def put_in_envelope(connection: Connection, shop: Any, items: list[Item], **told: Any) -> None:
    """Publish an envelope that is due now."""
    topology = shop.rabbitdelay.topology
    exchange, routing_key = topology.route(0, DISTRIBUTION)[:2]
    connection.Producer().publish(
        Envelope(tuple(items)).pack(),
        exchange=exchange,
        routing_key=routing_key,
        headers={headers.DUE: 5, **told},
        content_type=ENVELOPE,
        content_encoding="binary",
    )


def take_undeliverable(
    connection: Connection, topology: Topology, number: int = 1
) -> list[tuple[str, Arrival]]:
    """Take so many undeliverable messages, each with its reason; there must be no others."""
    queue = topology.module_queues.undeliverable
    arrivals = take(connection, [queue], number)
    assert count(connection, queue.name) == 0
    return [(_reason(arrival.message, topology), arrival) for arrival in arrivals]


def _reason(message: Any, topology: Topology) -> str:
    key = message.delivery_info["routing_key"]
    return examine(message.headers, topology, key).reason


def wait_until_served(worker: Worker, *modules: str, times: int = 1) -> None:
    """Wait until the worker has begun so many times to serve modules, by default all of them."""
    lines = [f"{name}: serving" for name in modules or MODULES]
    wait_for(lambda: all(worker.log.count(line) >= times for line in lines), " and ".join(lines))
