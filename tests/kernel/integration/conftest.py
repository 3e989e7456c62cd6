"""Connections, names of a test's own, and topologies that are gone when the test is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from amqp.exceptions import ChannelError
from kombu import Connection, Queue

from celery_rabbitdelay.levels.layout import custom
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare, delete
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RedisServer
from tests.kernel.integration.modules import MODULES, OPEN, wait_until_served
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import make_app, named
from tests.kernel.integration.worker import Worker

#: Levels of tenths and seconds, up to 5.9 s: declared in a blink, and all that most tests need.
LEVELS = [("seconds", 6, 1), ("ms", 10, 0.1)]
SHORT = custom(LEVELS)


@pytest.fixture
def connection(broker_url: str) -> Iterator[Connection]:
    """A connection to the broker."""
    with Connection(broker_url) as connection:
        yield connection


@pytest.fixture
def channel(connection: Connection) -> Any:
    """The first channel of that connection."""
    return connection.default_channel


@pytest.fixture
def prefix() -> str:
    """A prefix of this test's own."""
    return own_prefix()


def own_prefix() -> str:
    """Return a prefix that nobody else has."""
    return f"test-{uuid4().hex[:8]}"


@pytest.fixture
def make_topology(connection: Connection, prefix: str) -> Iterator[Callable[..., Topology]]:
    """Makes topologies under this test's prefix; they are deleted when the test is over."""
    made: list[Topology] = []

    def make(layout: Any = SHORT, **options: Any) -> Topology:
        made.append(Topology(prefix, layout, **options))
        return made[-1]

    yield make
    for topology in made:
        with connection.clone() as own:
            delete(own, topology, force=True)


@pytest.fixture
def topology(make_topology: Callable[..., Topology]) -> Topology:
    """A small topology under this test's prefix; not declared."""
    return make_topology()


@pytest.fixture
def make_queue(connection: Connection, prefix: str) -> Iterator[Callable[..., Queue]]:
    """Makes queues whose names begin with this test's prefix; they are deleted with the test."""
    made: list[Queue] = []

    def make(name: str = "queue", *args: Any, **options: Any) -> Queue:
        made.append(Queue(f"{prefix}-{name}", *args, **options))
        return made[-1]

    yield make
    with connection.clone() as own:
        for queue in made:
            delete_queue(own, queue)


def delete_queue(connection: Connection, queue: Queue) -> None:
    """Delete a queue with its exchange."""
    with connection.channel() as channel, suppress(ChannelError):
        queue(channel).delete()
        if queue.exchange and queue.exchange.name:
            queue.exchange(channel).delete()


@pytest.fixture
def queue(make_queue: Callable[..., Queue]) -> Queue:
    """A quorum queue of this test's own; not declared."""
    return make_queue(queue_arguments={"x-queue-type": "quorum"})


@pytest.fixture
def target(connection: Connection, queue: Queue) -> Queue:
    """A quorum queue of this test's own that stands on the broker."""
    queue(connection.default_channel).declare()
    return queue


@pytest.fixture
def make_full(connection: Connection, make_queue: Callable[..., Queue]) -> Callable[[int], Queue]:
    """Declares a queue that refuses messages once it holds so many."""

    def make(most: int) -> Queue:
        full = make_queue("full", max_length=most, queue_arguments={"x-overflow": "reject-publish"})
        full(connection.default_channel).declare()
        return full

    return make


@pytest.fixture
def internal(channel: Any, prefix: str) -> Iterator[str]:
    """An exchange that clients may not publish to; kombu has no option for it."""
    name = f"{prefix}-internal"
    arguments: Any = (0, name, "fanout", False, True, False, True, False, {})
    channel.send_method((40, 10), "BssbbbbbF", arguments, wait=(40, 11))
    yield name
    channel.exchange_delete(name)


@pytest.fixture
def publisher(connection: Connection) -> Iterator[Publisher]:
    """A publisher on a connection of its own."""
    publisher = Publisher(connection.clone())
    yield publisher
    publisher.close()


def small_configuration(
    broker_url: str, redis_url: str, prefix: str = "", **settings: Any
) -> dict[str, Any]:
    """A small topology under a prefix, by default one of its own, and results in Redis."""
    prefix = prefix or own_prefix()
    return {
        "prefix": prefix,
        "broker_url": broker_url,
        "result_backend": redis_url,
        # The results of a failed test live longer than Redis; by default each of them would then
        # try for 20 s to unsubscribe.
        "result_backend_transport_options": {"retry_policy": {"max_retries": 2}},
        "rabbitdelay_prefix": prefix,
        "rabbitdelay_layout": LEVELS,
        "rabbitdelay_modules": MODULES,
        "rabbitdelay_registry_options": {"socket_timeout": 10},  # a slow machine's Redis
        **settings,
    }


@contextmanager
def application(settings: dict[str, Any]) -> Iterator[Any]:
    """An application, with its ``configuration``; what it declares is deleted in the end."""
    app: Any = make_app(settings)
    app.configuration = settings
    yield app
    with Connection(app.conf.broker_url) as connection:
        delete(connection, app.rabbitdelay.topology, force=True)
        for queue in app.amqp.queues.values():
            delete_queue(connection, queue)
    app.close()


@pytest.fixture
def configuration(broker_url: str, redis_url: str, prefix: str) -> dict[str, Any]:
    """A small topology under the test's prefix, results in Redis."""
    return small_configuration(broker_url, redis_url, prefix)


@pytest.fixture
def make_shop(configuration: Any) -> Iterator[Callable[..., Any]]:
    """Makes applications; what they have declared is deleted when the test is over."""
    with ExitStack() as made:
        yield lambda **settings: made.enter_context(application({**configuration, **settings}))


@pytest.fixture
def shop(make_shop: Any) -> Any:
    """An application with quorum queues on exchanges of every type."""
    return make_shop()


@pytest.fixture
def standing(shop: Any, connection: Connection) -> Topology:
    """The shop's levels, which are declared, as its default queue is."""
    topology: Topology = shop.rabbitdelay.topology
    declare(connection, topology)
    shop.amqp.queues[named(shop, "default")](connection.default_channel).declare()
    return topology


@pytest.fixture
def worker(configuration: Any, shop: Any) -> Iterator[Worker]:
    """A worker that serves all queues of the shop."""
    with Worker(configuration) as worker:
        yield worker


@pytest.fixture(scope="module")
def served_configuration(module_broker_url: str, redis_url: str) -> Iterator[dict[str, Any]]:
    """A configuration whose queues one worker serves for all tests of a module.

    Only for modules whose tests leave broker and worker alone. The worker takes pickle as well, and
    what a destination does not take is undeliverable at once.
    """
    own = {"accept_content": ["json", "pickle"], "rabbitdelay_retry_for": 0, **OPEN}
    configuration = small_configuration(module_broker_url, redis_url, **own)
    with application(configuration), Worker(configuration):
        yield configuration


@pytest.fixture
def served_shop(served_configuration: Any) -> Iterator[Any]:
    """An application whose queues are served by the module's worker."""
    app = make_app(served_configuration)
    yield app
    app.close()


@pytest.fixture
def serve(configuration: Any, make_shop: Any) -> Iterator[Any]:
    """Makes an application and starts its :class:`Worker`, which is its attribute ``worker``.

    It takes settings, options of the worker's command, and with ``only`` the only one of
    :data:`~tests.kernel.integration.shop.QUEUES` that the worker serves.
    """
    with ExitStack() as workers:

        def serve(*options: str, only: str = "", **settings: Any) -> Any:
            shop = make_shop(**settings)
            queues = [named(shop, only)] if only else None
            shop.worker = Worker({**configuration, **settings}, queues, *options)
            workers.enter_context(shop.worker)
            if modules := shop.rabbitdelay.settings.modules:
                wait_until_served(shop.worker, *modules)
            return shop

        yield serve


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A Redis for one test to stop and start."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def noted(shop: Any) -> Iterator[Notes]:
    """The notes of the runs of the task ``note`` that one test has sent."""
    notes = Notes(shop)
    yield notes
    notes.forget()
