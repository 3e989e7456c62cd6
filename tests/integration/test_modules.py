"""Check-in, meditation and distribution: modules that a worker serves, and any AMQP client uses."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue, binding

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.modules.envelope import Item
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import take
from tests.integration.modules import MODULES, OPEN, Client, client, wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import Worker

__all__ = ["client"]


def test_a_client_that_knows_nothing_of_python_delays_a_message(
    client: Client, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-news", type="topic")
    queue = make_queue("news", exchange, "paper.#")
    queue(client.channel).declare()
    published = time.time()
    topology = client.topology
    # rabbitmq-c writes the default virtual host so.
    url = connection.as_uri(include_password=True).removesuffix("/") + "%2F"
    command = [
        *("amqp-publish", "-u", url),
        *("-e", topology.module_queues.checkin.exchange.name, "-r", "paper.daily", "-b", "hello"),
        *("-H", "x-delay: 2500", "-H", f"{headers.EXCHANGE}: {exchange.name}"),
    ]
    subprocess.run(command, check=True)
    (arrival,) = client.take(queue)
    assert arrival.at >= published + 2.5
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert arrival.message.delivery_info["routing_key"] == "paper.daily"
    assert set(arrival.message.headers) == {headers.DUE}


@pytest.mark.parametrize("kind", ["fanout", "headers", "topic", "direct"])
def test_every_queue_gets_it_once_that_would_get_it_without_a_delay(
    client: Client, connection: Connection, make_queue: Callable[..., Queue], prefix: str, kind: str
) -> None:
    exchange = Exchange(f"{prefix}-{kind}", type=kind)
    patterns = {"topic": ["paper.#", "*.daily"], "direct": ["paper.daily"] * 2}
    keys = patterns.get(kind, ["", ""])
    matching = {"x-match": "all", "colour": "red"} if kind == "headers" else None
    queues = [
        make_queue(f"{kind}-{number}", bindings=[binding(exchange, key, matching)])
        for number, key in enumerate(keys)
    ]
    other = make_queue(
        f"{kind}-other", bindings=[binding(exchange, "else", {"x-match": "all", "colour": "blue"})]
    )
    for queue in [*queues, other] if kind != "fanout" else queues:
        queue(client.channel).declare()
    published = time.time()
    told = {"x-delay": 700, headers.EXCHANGE: exchange.name, "colour": "red"}
    client.check_in("paper.daily", told, priority=7, expiration=60)
    arrivals = take(connection, queues, len(queues))
    assert {arrival.queue for arrival in arrivals} == {queue.name for queue in queues}
    for arrival in arrivals:
        message = arrival.message
        assert arrival.at >= published + 0.7
        assert message.delivery_info["exchange"] == exchange.name
        assert message.delivery_info["routing_key"] == "paper.daily"
        assert message.properties["priority"] == 7
        assert message.properties["expiration"] == "60000"
        assert message.headers["colour"] == "red"
        assert not [name for name in message.headers if "death" in name or name == "x-delay"]
    if kind != "fanout":
        assert client.count(other) == 0


def test_without_a_delay_it_is_passed_on_at_once(client: Client, target: Queue) -> None:
    for told in (None, {"x-delay": 0}, {"x-delay": "0"}, {"x-delay": -5}):
        client.check_in(target.name, told)
    for arrival in client.take(target, 4):
        assert arrival.body == "hello"
        assert not arrival.message.headers


@pytest.mark.parametrize(
    ("key", "given", "reason"),
    [
        ("test-q", {"x-delay": "soon"}, "'soon', not a number"),
        ("test-q", {"x-delay": [1]}, "not a number"),
        ("test-q", {"x-delay": True}, "not a number"),
        ("test-q", {"x-delay": str(2**63)}, "more than the longest delay ahead"),
        ("", {"x-delay": 5}, "no destination"),
        ("celery", {"x-delay": 5}, "may not reach the queue 'celery'"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "amq.topic"}, "may not reach the exchange"),
        ("test-nobody", {"x-delay": 5}, "no queue for the key"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "test-none"}, "there is no exchange"),
        ("test-nobody", {}, "no queue for the key"),
    ],
)
def test_what_cannot_be_read_or_delivered_is_undeliverable_with_its_reason(
    client: Client, key: str, given: dict[str, Any], reason: str
) -> None:
    client.check_in(key, {**given, "mine": 1})
    ((told, message),) = client.undeliverable()
    assert reason in told
    assert message.headers["mine"] == 1
    assert message.payload == "hello"


def test_check_in_reaches_no_queue_that_a_worker_is_told_to_consume_from_later(
    shop: Any, worker: Worker, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    added, client = make_queue("added"), Client(connection, shop)
    shop.control.add_consumer(added.name, destination=[worker.name], reply=True)
    wait_for(lambda: f"Started consuming from {added.name}" in worker.log, "the new consumer")
    client.check_in(added.name, {"x-delay": 5})
    ((reason, _),) = client.undeliverable()
    assert f"may not reach the queue '{added.name}'" in reason


def test_a_message_meditates_until_the_levels_can_carry_it(
    serve: Callable[..., Any], connection: Connection
) -> None:
    """The worked example: levels of 8, 4, 2 and 1 s, a delay of 27 s, and the key ``my-key``."""
    shop = serve(
        rabbitdelay_layout={"name": "geometric", "factor": 2, "levels": 4},
        rabbitdelay_tick=1,
        rabbitdelay_checkin_allowed=["my-key"],
    )
    client, queue = Client(connection, shop), Queue("my-key", durable=True)
    assert client.topology.layout.capacity_ms == 15_000
    queue(client.channel).declare()
    try:
        published = time.time()
        client.check_in("my-key", {"x-delay": 27_000})
        meditation = client.topology.module_queues.meditation
        wait_for(lambda: client.count(meditation) == 1, "meditation")
        # 12 s are left, which is 1.1.0.0.
        eight = client.topology.digit_queues[0]
        wait_for(lambda: client.count(eight) == 1, "the first level")
        assert time.time() >= published + 15
        (arrival,) = client.take(queue, timeout=PATIENCE)
    finally:
        queue(client.channel).delete()
    assert arrival.at >= published + 27
    assert arrival.message.delivery_info["routing_key"] == "my-key"


def test_a_task_whose_delay_is_above_the_capacity_runs_when_it_is_due(
    serve: Callable[..., Any], prefix: str
) -> None:
    shop = serve(rabbitdelay_layout=[("ms", 10, 0.1)])
    assert shop.rabbitdelay.topology.layout.capacity_ms == 900
    before = time.time()
    result = shop.tasks["look"].apply_async(delay=2.3, queue=f"{prefix}.second")
    seen = result.get(timeout=PATIENCE)
    assert seen["at"] >= before + 2.3
    assert seen["routing_key"] == f"{prefix}.second"


@pytest.mark.parametrize("priority", [0, 9])
def test_a_task_for_a_fanout_exchange_reaches_all_its_queues(
    client: Client, make_queue: Callable[..., Queue], priority: int
) -> None:
    shop = client.shop
    mirror = shop.amqp.queues[named(shop, "mirror")]
    unknown = make_queue("unknown", mirror.exchange)
    unknown(client.channel).declare()
    before = time.time()
    result = shop.tasks["look"].apply_async(delay=0.5, queue=mirror.name, priority=priority)
    (arrival,) = client.take(unknown)
    assert arrival.at >= before + 0.5
    assert arrival.message.headers["id"] == result.id
    assert arrival.message.delivery_info["exchange"] == mirror.exchange.name
    assert arrival.message.properties["priority"] == priority
    # The application's own queue, which the worker serves.
    seen = result.get(timeout=PATIENCE)
    assert seen["at"] >= before + 0.5
    assert seen["exchange"] == mirror.exchange.name
    unknown(client.channel).delete()


def test_a_task_of_a_high_priority_keeps_it(served_shop: Any) -> None:
    before = time.time()
    seen = served_shop.tasks["look"].apply_async(countdown=0.5, priority=9).get(timeout=PATIENCE)
    assert seen["at"] >= before + 0.5
    assert seen["priority"] == 9
    assert seen["routing_key"] == named(served_shop, "default")
    assert headers.DUE in seen["headers"]


def test_a_module_whose_queue_is_deleted_declares_it_again_and_goes_on(
    serve: Callable[..., Any], connection: Connection, target: Queue
) -> None:
    client = Client(connection, serve(**OPEN))
    queues = client.topology.module_queues
    for module in (queues.checkin, queues.distribution):
        module(client.channel).delete()
    wait_until_served(client.shop.worker, times=2)
    client.check_in(target.name, {"x-delay": 300})
    assert client.take(target)


def test_the_status_of_the_modules_can_be_asked(client: Client, target: Queue) -> None:
    broadcast = client.shop.control.broadcast

    def status() -> Any:
        (answer,) = broadcast("rabbitdelay_status", reply=True, timeout=PATIENCE, limit=1)
        (of_worker,) = answer.values()
        return of_worker

    before = status()
    for _ in range(5):
        client.check_in(target.name, {"x-delay": 200})
    client.take(target, 5)
    # The last confirm may come after the message itself.
    wait_for(
        lambda: all(status()[n]["published"] == before[n]["published"] + 5 for n in MODULES),
        "what was published",
    )
    after = status()
    assert set(after) == {*MODULES, "tasks"}
    for name in MODULES:
        now = after[name]
        assert now["received"] == before[name]["received"] + 5
        assert now["undeliverable"] == before[name]["undeliverable"]
    # It is looked up every few seconds, and may have been when the messages had just come.
    wait_for(lambda: not any(status()[name]["backlog"] for name in MODULES), "an empty backlog")


@pytest.mark.parametrize(
    ("option", "served"), [("distribution", ["distribution"]), ("", []), (None, ["check-in"])]
)
def test_the_command_line_says_which_modules_a_worker_serves_or_else_the_setting(
    configuration: dict[str, Any], shop: Any, option: str | None, served: list[str]
) -> None:
    settings = {**configuration, "rabbitdelay_modules": ["check-in"]}
    options = [] if option is None else [f"--rabbitdelay-modules={option}"]
    with Worker(settings, None, *options) as worker:
        for name in served:
            wait_until_served(worker, name)
        others = set(MODULES) - set(served)
        assert not [name for name in others if f"{name}: serving" in worker.log]


def test_all_messages_of_an_envelope_reach_their_queue(client: Client, target: Queue) -> None:
    client.put_in_envelope(target.name, *(Item(b"x", {"id": number}) for number in range(3000)))
    arrivals = client.take(target, 3000)
    assert {arrival.message.headers["id"] for arrival in arrivals} == set(range(3000))
    assert client.count(target) == 0


def test_an_envelope_whose_queue_is_gone_is_undeliverable_to_the_last_message(
    client: Client,
) -> None:
    client.put_in_envelope("test-nobody", *(Item(b"x", {"id": number}) for number in range(3000)))
    found = client.undeliverable(3000)
    assert {message.headers["id"] for _, message in found} == set(range(3000))


def test_one_message_that_amqp_cannot_carry_takes_no_other_with_it(
    client: Client, target: Queue
) -> None:
    wrong = Item(b"x", {"id": 1}, {"priority": "high"})
    client.put_in_envelope(target.name, Item(b"x", {"id": 0}), wrong, Item(b"x", {"id": 2}))
    assert [arrival.message.headers["id"] for arrival in client.take(target, 2)] == [0, 2]
    ((reason, _),) = client.undeliverable()
    assert "cannot be written" in reason
