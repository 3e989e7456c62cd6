"""What a stranger who may write to the levels reaches through the modules: nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration.arrivals import count, take
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.modules import MODULES, wait_until_served
from tests.integration.shop import make_app, named
from tests.integration.worker import Worker


@pytest.fixture(scope="module")
def serving(module_broker_url: str, redis_url: str) -> Iterator[tuple[dict[str, Any], Worker]]:
    """A worker that serves the modules with all settings as they are by default."""
    configuration = small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}")
    app = make_app(configuration)
    with Worker(configuration, [named(app, "default")]) as worker:
        wait_until_served(worker)
        yield configuration, worker
    delete_what_it_declared(app)
    app.close()


@pytest.fixture
def served(serving: tuple[dict[str, Any], Worker]) -> Iterator[Any]:
    """Its application."""
    app: Any = make_app(serving[0])
    app.worker = serving[1]
    yield app
    app.close()


def forge(
    stranger: Connection, shop: Any, told: dict[str, Any], to: str, body: Any, **options: Any
) -> None:
    """Publish a message into the levels that is due now."""
    exchange, routing_key, _ = shop.rabbitdelay.topology.route(0, to)
    told = {headers.DUE: 5, **told}
    stranger.Producer().publish(
        body, exchange=exchange, routing_key=routing_key, headers=told, **options
    )


def test_a_message_that_finds_no_queue_comes_when_the_queue_is_bound_again(
    served: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    """Of a queue that the worker's application does not know."""
    gone, topology = make_queue("gone"), served.rabbitdelay.topology
    declare_destination(connection, topology, gone)
    gone(connection.default_channel).delete()
    forge(connection, served, {headers.QUEUE: gone.name}, gone.name, "first")
    wait_for(lambda: "does not take a message" in served.worker.log, "the first attempt")
    # Another producer, which declares and binds the queue.
    with connection.clone() as other:
        producer = DelayedProducer(Publisher(other), topology, modules=MODULES)
        producer.publish_delayed("second", Destination(gone, "", gone.name), 0.1)
    arrivals = take(connection, [gone], 2)
    assert {arrival.body for arrival in arrivals} == {"first", "second"}


def test_a_queue_that_only_its_producer_knows_gets_what_goes_through_distribution(
    served: Any, connection: Connection, prefix: str
) -> None:
    """Envelopes, high priorities, and messages for a queue that may refuse them."""
    name = f"{prefix}-own"
    rows = [{"args": (number,), "delay": 0.5} for number in range(20)]
    assert served.rabbitdelay.send_many("look", rows, queue=name).envelopes
    served.send_task("look", args=(20,), queue=name, priority=9, delay=0.5)
    # The application deletes the queue at the end.
    arrivals = take(connection, [Queue(name)], 21)
    assert sorted(arrival.body[0][0] for arrival in arrivals) == list(range(21))
    high = next(each for each in arrivals if each.body[0][0] == 20)
    assert high.message.properties["priority"] == 9
    for arrival in arrivals:
        told = {each for each in arrival.message.headers if each.startswith("rabbitdelay-")}
        assert headers.DUE in told
        assert not {headers.ATTEMPTS, headers.REASON} & told


def test_a_retry_goes_only_where_distribution_may_go(
    served: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    """Whatever a message for a queue of the application claims about where it came from."""
    secret, queue = make_queue("secret"), named(served, "default")
    secret(connection.default_channel).declare()
    for exchange, routing_key in (("", secret.name), ("celery.pidbox", "")):
        result = served.tasks["retry"].apply_async(([], 1, {"countdown": 0.2}), delay=600)
        levels = served.rabbitdelay.topology.queues
        (taken,) = take(connection, [each for each in levels if count(connection, each.name)], 1)
        sent = taken.message.headers
        assert sent[headers.QUEUE] == queue
        claims = {headers.EXCHANGE: exchange, headers.ROUTING_KEY: routing_key, headers.DUE: 5}
        own = {name: taken.message.properties[name] for name in ("correlation_id", "reply_to")}
        forge(connection, served, {**sent, **claims}, queue, taken.body, serializer="json", **own)
        past = result.get(timeout=PATIENCE)
        assert [(each["exchange"], each["routing_key"]) for each in past] == [("", queue)] * 2
    assert count(connection, secret.name) == 0
    assert served.worker.log.count("claims the origin") >= 2
