"""What a stranger who may write to the levels reaches through the modules: nothing else."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

import pytest
from kombu import Connection, Queue
from kombu.compression import compress, encoders

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.routing_key import DISTRIBUTION
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.operations.undeliverable.messages import undeliverable_messages
from celery_rabbitdelay.publishing.declaration import declare_destination
from celery_rabbitdelay.publishing.destination import Destination
from celery_rabbitdelay.publishing.producer import DelayedProducer
from celery_rabbitdelay.publishing.publisher import Publisher
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import PATIENCE
from tests.integration import trouble
from tests.integration.arrivals import Arrival, count, take
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.modules import MODULES, put_in_envelope, wait_until_served
from tests.integration.shop import make_app, named
from tests.integration.worker import Worker

#: What every reason names.
SETTING: Final = "rabbitdelay_distribution_allowed"


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
    app = make_app(serving[0])
    app.worker = serving[1]
    yield app
    app.close()


@contextmanager
def user(rabbitmq: RabbitMQServer, shop: Any, may_write: str) -> Iterator[Connection]:
    """Connect a user who may write to exchanges of this pattern, and nothing else."""
    confirmed = {"confirm_publish": True}
    with (
        trouble.user(rabbitmq, shop.rabbitdelay.topology.prefix, "^$", may_write, "^$") as url,
        Connection(url, transport_options=confirmed) as connection,
    ):
        yield connection


@pytest.fixture
def stranger(private_rabbitmq: RabbitMQServer, served: Any) -> Iterator[Connection]:
    """A user who may write to the exchanges of the levels, as every producer, and nothing else."""
    with user(private_rabbitmq, served, rf"^{served.rabbitdelay.topology.prefix}\.") as connection:
        yield connection


@pytest.fixture
def secret(connection: Connection, make_queue: Callable[..., Queue]) -> Queue:
    """A queue of somebody else, which nobody has bound to the levels."""
    queue = make_queue("secret")
    queue(connection.default_channel).declare()
    return queue


def forge(
    stranger: Connection, shop: Any, told: dict[str, Any], to: str = DISTRIBUTION, **options: Any
) -> None:
    """Publish a message into the levels that is due now."""
    exchange, routing_key, _ = shop.rabbitdelay.topology.route(0, to)
    channel: Any = stranger.default_channel
    channel.confirm_select()
    stranger.Producer().publish(
        options.pop("body", "forged"),
        exchange=exchange,
        routing_key=routing_key,
        headers={headers.DUE: 5, **told},
        **options,
    )


def to(exchange: str, routing_key: str, **more: Any) -> dict[str, Any]:
    return {headers.EXCHANGE: exchange, headers.ROUTING_KEY: routing_key, **more}


def undeliverable(connection: Connection, shop: Any, number: int = 1) -> list[Arrival]:
    return take(connection, [shop.rabbitdelay.topology.module_queues.undeliverable], number)


def reason(arrival: Arrival) -> str:
    return str(arrival.message.headers[headers.REASON])


def test_a_forged_message_reaches_neither_a_queue_of_somebody_else_nor_the_worker(
    served: Any, stranger: Connection, connection: Connection, secret: Queue
) -> None:
    own, pidbox = named(served, "default"), served.control.mailbox.exchange.name
    command = {"method": "shutdown", "arguments": {}, "destination": None}
    forge(stranger, served, to("", secret.name))
    forge(stranger, served, to("", own, **{headers.QUEUE: secret.name}))
    for destination in (to(pidbox, ""), to("", f"{served.worker.name}.{pidbox}")):
        forge(stranger, served, destination, body=command, serializer="json")
    found = sorted(map(reason, undeliverable(connection, served, 4)))
    assert all(SETTING in each for each in found)
    assert sum(f"may not reach the queue '{secret.name}'" in each for each in found) == 2
    assert sum("celery.pidbox'" in each for each in found) == 2
    assert count(connection, secret.name) == 0
    assert served.tasks["look"].apply_async(delay=0.3).get(timeout=PATIENCE)


def test_further_routing_keys_are_refused_even_before_the_message_is_due(
    served: Any, stranger: Connection, connection: Connection, secret: Queue
) -> None:
    own = to("", named(served, "default"))
    # Without the check, each return into the levels would make another copy, for ever.
    again = served.rabbitdelay.topology.route(0, DISTRIBUTION).routing_key
    ahead = int(time.time() * 1000) + 600_000
    forge(stranger, served, {**own, "CC": [again], headers.DUE: ahead})
    # RabbitMQ removes BCC when a message is published, but not from a message in an envelope.
    put_in_envelope(connection, served, [Item(b"x", {"BCC": [secret.name]})], **own)
    found = sorted(map(reason, undeliverable(connection, served, 2)))
    assert "it has the header BCC" in found[0] + found[1]
    assert "it has the header CC" in found[0] + found[1]
    assert count(connection, secret.name) == 0


def test_a_message_that_finds_no_queue_comes_when_the_queue_is_bound_again(
    served: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    """Of a queue that the worker's application does not know."""
    gone, topology = make_queue("gone"), served.rabbitdelay.topology
    declare_destination(connection, topology, gone)
    gone(connection.default_channel).delete()
    forge(connection, served, {headers.QUEUE: gone.name}, gone.name, body="first")
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


def retried_task(connection: Connection, shop: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Send a task that is retried once and take it out of the levels.

    Returns:
        Its result, its message, and the properties that it was sent with.
    """
    result = shop.tasks["retry"].apply_async(([], 1, {"countdown": 0.2}), delay=600)
    waiting = [each for each in shop.rabbitdelay.topology.queues if count(connection, each.name)]
    (taken,) = take(connection, waiting, 1)
    own = {name: taken.message.properties[name] for name in ("correlation_id", "reply_to")}
    return result, taken.message, {"body": taken.body, "serializer": "json", **own}


def test_a_retry_goes_only_where_distribution_may_go(
    served: Any, connection: Connection, secret: Queue
) -> None:
    """Whatever a message for a queue of the application claims about where it came from."""
    queue = named(served, "default")
    for claimed in (to("", secret.name), to("celery.pidbox", "")):
        result, message, sent = retried_task(connection, served)
        assert message.headers[headers.QUEUE] == queue
        told = {**message.headers, **claimed, headers.DUE: 5}
        forge(connection, served, told, queue, **sent)
        past = result.get(timeout=PATIENCE)
        assert [(each["exchange"], each["routing_key"]) for each in past] == [("", queue)] * 2
    assert count(connection, secret.name) == 0
    assert served.worker.log.count("claims the origin") >= 2


def check_in_canvas(
    rabbitmq: RabbitMQServer, connection: Connection, shop: Any, secret: Queue
) -> list[str]:
    """Check in a task in each way that has a worker publish to a queue; return their ids.

    The client may write to check-in, and nothing else.
    """
    secret(connection.default_channel).bind_to("amq.direct", routing_key=secret.name)
    options = {"exchange": "amq.direct", "routing_key": secret.name}
    evil: dict[str, Any] = {"task": "stolen", "args": [], "kwargs": {}, "options": options}
    protocol_1 = {"task": "look", "id": "1", "args": [], "kwargs": {}, "callbacks": [evil]}
    retry, taken_over = [[[], 1, {"countdown": 0}], {}, {}], {"headers": {"CC": [secret.name]}}
    bodies: list[tuple[str | None, Any, str]] = [
        ("retry", retry, "utf-8"),
        ("look", [[], {}, {"chain": [evil]}], "utf-8"),
        ("celery.group", [[[evil], ["0", []], "g", []], {}, {}], "utf-8"),
        # py-amqp decodes a body for the worker.
        (None, protocol_1, "utf-16"),
    ]
    exchange = shop.rabbitdelay.topology.module_queues.checkin.exchange.name
    with user(rabbitmq, shop, f"^{re.escape(exchange)}$") as client:
        for number, (task, body, encoding) in enumerate(bodies, 1):
            client.Producer().publish(
                json.dumps(body).encode(encoding),
                exchange=exchange,
                routing_key=named(shop, "default"),
                headers={"x-delay": 10}
                | ({"task": task, "id": str(number)} if task else {})
                | (taken_over if task == "retry" else {}),
                correlation_id=str(number),
                reply_to=secret.name,
                content_type="application/json",
                content_encoding=encoding,
            )
    return [str(number) for number in range(1, len(bodies) + 1)]


def test_a_client_of_check_in_reaches_nothing_by_what_follows_a_task(
    private_rabbitmq: RabbitMQServer, served: Any, connection: Connection, secret: Queue
) -> None:
    sent = check_in_canvas(private_rabbitmq, connection, served, secret)
    found = undeliverable(connection, served, len(sent))
    assert sorted(each.message.properties["correlation_id"] for each in found) == sent
    assert all("rabbitdelay_checkin_trusted" in reason(each) for each in found)
    assert count(connection, secret.name) == 0


def test_a_trusted_client_sends_what_a_producer_may(
    private_rabbitmq: RabbitMQServer, serve: Any, connection: Connection, secret: Queue
) -> None:
    shop = serve(only="default", rabbitdelay_checkin_trusted=True)
    sent = check_in_canvas(private_rabbitmq, connection, shop, secret)
    take(connection, [secret], len(sent), 60)


#: The bytes of a body that is compressed to some hundred KiB at most.
LARGE: Final = 256 * 2**20


def test_no_compressed_body_that_left_the_levels_is_opened_beyond_the_bound(
    served: Any, stranger: Connection, connection: Connection
) -> None:
    queue, topology = named(served, "default"), served.rabbitdelay.topology
    look, before = served.tasks["look"], served.worker.peak_bytes
    bodies: Counter[bytes] = Counter()
    honest = []
    for name in encoders():
        bomb, compression = compress(b"\0" * LARGE, name)
        told: dict[str, Any] = {"task": "look", "id": name, "compression": compression}
        sent: dict[str, Any] = {"content_type": "application/json", "content_encoding": "utf-8"}
        forge(stranger, served, told, queue, body=bomb, **sent)
        # Nothing tells the worker where these come from.
        unmarked = {**to("", queue), headers.DUE: None}
        forge(stranger, served, {**told, **unmarked}, body=bomb, **sent)
        put_in_envelope(stranger, served, [Item(bomb, told, sent)], **unmarked)
        # kombu reads one stream behind the other with some of them.
        streams = compress(b"[]", name)[0] + bomb
        reads_both = compression in ("application/x-bz2", "application/x-lzma", "application/zstd")
        stranger.Producer().publish(
            streams if reads_both else bomb,
            exchange=topology.delivery.name,
            routing_key=topology.keys.key_without_digits(queue),
            headers=told,
            **sent,
        )
        bodies.update([bomb] * 3 + [streams if reads_both else bomb])
        honest.append(look.apply_async(("x" * 2**20,), compression=name, delay=0.3))
    for result in honest:
        assert result.get(timeout=PATIENCE)["given"] == ["x" * 2**20]
    undeliverable_queue = topology.module_queues.undeliverable.name
    wait_for(lambda: count(connection, undeliverable_queue) == bodies.total(), "the bombs")
    found = list(undeliverable_messages(connection, topology))
    assert Counter(each.body for each in found) == bodies
    assert all("rabbitdelay_max_message_bytes" in each.found.reason for each in found)
    assert all("compression" in each.headers for each in found)
    assert served.worker.peak_bytes - before < LARGE // 2
    assert count(connection, queue) == 0
    connection.default_channel.queue_purge(undeliverable_queue)  # type: ignore[attr-defined]
