"""What a stranger who may write to the levels reaches through the modules: nothing else."""

from collections.abc import Callable
from typing import Any

from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.modules import MODULES
from tests.kernel.integration.shop import named


def forge(
    stranger: Connection, shop: Any, told: dict[str, Any], to: str, body: Any, **options: Any
) -> None:
    """Publish a message into the levels that is due now."""
    exchange, routing_key, _ = shop.rabbitdelay.topology.route(0, to)
    told = {headers.DUE: 5, **told}
    stranger.Producer().publish(
        body, exchange=exchange, routing_key=routing_key, headers=told, **options
    )


def test_queues_that_only_their_producers_know_get_what_is_for_them(
    serve: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    """Through distribution, and what finds no queue for a while when it is bound again."""
    shop, gone, name = serve(only="default"), make_queue("gone"), f"{prefix}-own"
    topology = shop.rabbitdelay.topology
    declare_destination(connection, topology, gone)
    gone(connection.default_channel).delete()
    forge(connection, shop, {headers.QUEUE: gone.name}, gone.name, "first")
    # Envelopes, high priorities, and messages for a queue that may refuse them.
    rows = [{"args": (number,), "delay": 0.5} for number in range(20)]
    assert shop.rabbitdelay.send_many("look", rows, queue=name).envelopes
    shop.send_task("look", args=(20,), queue=name, priority=9, delay=0.5)
    # The application deletes the queue at the end.
    arrivals = take(connection, [Queue(name)], 21)
    assert sorted(arrival.body[0][0] for arrival in arrivals) == list(range(21))
    high = next(each for each in arrivals if each.body[0][0] == 20)
    assert high.message.properties["priority"] == 9
    for arrival in arrivals:
        assert headers.DUE in arrival.message.headers
        assert not {headers.ATTEMPTS, headers.REASON} & arrival.message.headers.keys()
    wait_for(lambda: "does not accept a message" in shop.worker.log, "the first attempt")
    # Another producer, which declares and binds the queue.
    with connection.clone() as other:
        producer = DelayedProducer(Publisher(other), topology, modules=MODULES)
        producer.publish_delayed("second", Destination(gone, "", gone.name), 0.1)
    assert {each.body for each in take(connection, [gone], 2)} == {"first", "second"}


def test_a_retry_goes_only_where_distribution_may_go(
    serve: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    """Whatever a message for a queue of the application claims about where it came from."""
    served, secret = serve(only="default"), make_queue("secret")
    queue = named(served, "default")
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
    assert served.worker.log.count("name the exchange and routing key") >= 2
