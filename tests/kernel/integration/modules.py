"""What tests of the modules share: what they publish, and when a worker serves it.

A test module that uses the fixture imports it and names it in its ``__all__``.
"""

from typing import Any, Final

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.kombu import examine
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.headers import ENVELOPE
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules.envelope import Item, packed
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.kernel.integration.arrivals import Arrival, count, take
from tests.kernel.integration.worker import Worker

#: The modules that a worker serves where nothing else is said; without probes, so that the levels
#: hold what a test puts into them.
MODULES: Final = ("check-in", "distribution")

#: What lets check-in reach the tests' queues.
OPEN: Final[dict[str, Any]] = {"rabbitdelay_checkin_allowed": ["test-*"]}


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
        packed(items),
        exchange=exchange,
        routing_key=routing_key,
        headers={headers.DUE: 5, **told},
        content_type=ENVELOPE,
        content_encoding="binary",
    )


class Client:
    """A client beside the modules of an application: what it publishes, and what becomes of it.

    Attributes:
        shop: The application.
        topology: Its levels.
        channel: The channel that it publishes on.
    """

    def __init__(self, connection: Connection, shop: Any) -> None:
        self.shop = shop
        self.topology: Topology = shop.rabbitdelay.topology
        self.channel: Any = connection.default_channel
        self._connection = connection

    def check_in(self, key: str, told: dict[str, Any] | None = None, **options: Any) -> None:
        """Publish to check-in's exchange, with these headers."""
        check_in(self._connection, self.shop, key, headers=told, **options)

    def put_in_envelope(self, queue: str, *items: Item) -> None:
        """Publish an envelope for a queue that is due now."""
        told = {headers.EXCHANGE: "", headers.ROUTING_KEY: queue}
        put_in_envelope(self._connection, self.shop, list(items), **told)

    def take(self, queue: Queue, number: int = 1, timeout: float = PATIENCE) -> list[Arrival]:
        """Take so many messages from a queue."""
        return take(self._connection, [queue], number, timeout)

    def count(self, queue: Queue) -> int:
        """Return how many messages are ready in a queue."""
        return count(self._connection, queue.name)

    def undeliverable(self, number: int = 1) -> list[tuple[str, Any]]:
        """Take so many undeliverable messages with their reasons; there must be no others."""
        queue = self.topology.module_queues.undeliverable
        arrivals = self.take(queue, number)
        assert self.count(queue) == 0
        return [(self._reason(arrival.message), arrival.message) for arrival in arrivals]

    def _reason(self, message: Any) -> str:
        key = message.delivery_info["routing_key"]
        return examine(message.headers, self.topology, key).reason


@pytest.fixture
def client(served_shop: Any, connection: Connection) -> Client:
    """A client of the modules that the worker of all tests of a file serves."""
    return Client(connection, served_shop)


def wait_until_served(worker: Worker, *modules: str, times: int = 1) -> None:
    """Wait until the worker has begun so many times to serve modules, by default all of them."""
    lines = [f"{name}: serving" for name in modules or MODULES]
    wait_for(lambda: all(worker.log.count(line) >= times for line in lines), " and ".join(lines))
