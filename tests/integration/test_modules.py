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
from celery_rabbitdelay.modules.undeliverable import examine
from celery_rabbitdelay.testing import wait_for
from tests.integration.arrivals import count, take
from tests.integration.modules import MODULES, OPEN, check_in, put_in_envelope, wait_until_served
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import Worker


@pytest.fixture
def serving(served_shop: Any) -> Any:
    """An application whose worker serves the modules, and lets check-in reach the tests' queues."""
    return served_shop


def test_a_client_that_knows_nothing_of_python_delays_a_message(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    exchange = Exchange(f"{prefix}-news", type="topic")
    queue = make_queue("news", exchange, "paper.#")
    queue(connection.default_channel).declare()
    published = time.time()
    topology = serving.rabbitdelay.topology
    # rabbitmq-c writes the default virtual host so.
    url = connection.as_uri(include_password=True).removesuffix("/") + "%2F"
    command = [
        *("amqp-publish", "-u", url),
        *("-e", topology.module_queues.checkin.exchange.name, "-r", "paper.daily", "-b", "hello"),
        *("-H", "x-delay: 2500", "-H", f"{headers.EXCHANGE}: {exchange.name}"),
    ]
    subprocess.run(command, check=True)
    (arrival,) = take(connection, [queue], 1)
    assert arrival.at >= published + 2.5
    assert arrival.message.delivery_info["exchange"] == exchange.name
    assert arrival.message.delivery_info["routing_key"] == "paper.daily"
    assert set(arrival.message.headers) == {headers.DUE}


@pytest.mark.parametrize("kind", ["fanout", "headers", "topic", "direct"])
def test_every_queue_gets_it_once_that_would_get_it_without_a_delay(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str, kind: str
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
        queue(connection.default_channel).declare()
    published = time.time()
    check_in(
        connection,
        serving,
        "paper.daily",
        headers={"x-delay": 700, headers.EXCHANGE: exchange.name, "colour": "red"},
        priority=7,
        expiration=60,
    )
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
        assert count(connection, other.name) == 0


def test_without_a_delay_it_is_passed_on_at_once(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue], prefix: str
) -> None:
    queue = make_queue("plain")
    queue(connection.default_channel).declare()
    for options in ({}, {"headers": {"x-delay": 0}}, {"headers": {"x-delay": "0"}}):
        check_in(connection, serving, queue.name, **options)
    for arrival in take(connection, [queue], 3):
        assert arrival.body == "hello"
        assert not arrival.message.headers


@pytest.mark.parametrize(
    ("key", "given", "reason"),
    [
        ("{prefix}-q", {"x-delay": "soon"}, "'soon', not a number"),
        ("{prefix}-q", {"x-delay": [1]}, "not a number"),
        ("{prefix}-q", {"x-delay": True}, "not a number"),
        ("{prefix}-q", {"x-delay": -5}, "negative"),
        ("{prefix}-q", {"x-delay": str(2**63)}, "more than the longest delay ahead"),
        ("", {"x-delay": 5}, "no destination"),
        ("celery", {"x-delay": 5}, "may not reach the queue 'celery'"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "amq.topic"}, "may not reach the exchange"),
        ("{prefix}-nobody", {"x-delay": 5}, "no queue for the key"),
        ("a", {"x-delay": 5, headers.EXCHANGE: "{prefix}-none"}, "there is no exchange"),
        ("{prefix}-nobody", {}, "no queue for the key"),
    ],
)
def test_what_cannot_be_read_or_delivered_is_undeliverable_with_its_reason(
    serving: Any, connection: Connection, prefix: str, key: str, given: dict[str, Any], reason: str
) -> None:
    named = {
        name: value.format(prefix=prefix) if isinstance(value, str) else value
        for name, value in given.items()
    }
    check_in(connection, serving, key.format(prefix=prefix), headers={**named, "mine": 1})
    topology = serving.rabbitdelay.topology
    (arrival,) = take(connection, [topology.module_queues.undeliverable], 1)
    assert reason in examine(arrival.message.headers, topology).reason
    assert arrival.message.headers["mine"] == 1
    assert arrival.body == "hello"


def test_check_in_reaches_no_queue_that_a_worker_is_told_to_consume_from_later(
    shop: Any, worker: Worker, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    added = make_queue("added")
    shop.control.add_consumer(added.name, destination=[worker.name], reply=True)
    wait_for(lambda: f"Started consuming from {added.name}" in worker.log, "the new consumer")
    check_in(connection, shop, added.name, headers={"x-delay": 5})
    topology = shop.rabbitdelay.topology
    (arrival,) = take(connection, [topology.module_queues.undeliverable], 1)
    reason = examine(arrival.message.headers, topology).reason
    assert f"may not reach the queue '{added.name}'" in reason


def test_a_message_meditates_until_the_levels_can_carry_it(
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    connection: Connection,
    make_queue: Callable[..., Queue],
    prefix: str,
) -> None:
    """The worked example: levels of 8, 4, 2 and 1 s, a delay of 27 s, and the key ``my-key``."""
    settings = {
        "rabbitdelay_layout": {"name": "geometric", "factor": 2, "levels": 4},
        "rabbitdelay_tick": 1,
        "rabbitdelay_checkin_allowed": ["my-key"],
    }
    shop = make_shop(**settings)
    topology = shop.rabbitdelay.topology
    assert topology.layout.capacity_ms == 15_000
    queue = Queue("my-key", durable=True)
    queue(connection.default_channel).declare()
    try:
        with Worker({**configuration, **settings}, [f"{prefix}.default"]):
            published = time.time()
            check_in(connection, shop, "my-key", headers={"x-delay": 27_000})
            wait_for(
                lambda: count(connection, topology.module_queues.meditation.name) == 1, "meditation"
            )
            # 12 s are left, which is 1.1.0.0.
            eight = topology.digit_queues[0].name
            wait_for(lambda: count(connection, eight) == 1, "the first level", timeout=25)
            assert time.time() >= published + 15
            (arrival,) = take(connection, [queue], 1, timeout=40)
    finally:
        queue(connection.default_channel).delete()
    assert arrival.at >= published + 27
    assert arrival.message.delivery_info["routing_key"] == "my-key"


def test_a_task_of_fifty_years_meditates(
    make_shop: Callable[..., Any], connection: Connection
) -> None:
    shop = make_shop(rabbitdelay_layout="clock")
    years = 50 * 365 * 86_400
    result = shop.tasks["look"].apply_async(delay=years)
    (arrival,) = take(connection, [shop.rabbitdelay.topology.module_queues.meditation], 1)
    assert arrival.message.headers["id"] == result.id
    assert arrival.message.headers[headers.DUE] >= (time.time() + years - 60) * 1000


def test_a_task_whose_delay_is_above_the_capacity_runs_when_it_is_due(
    make_shop: Callable[..., Any], configuration: dict[str, Any], prefix: str
) -> None:
    low = {"rabbitdelay_layout": [("ms", 10, 0.1)]}
    shop = make_shop(**low)
    assert shop.rabbitdelay.topology.layout.capacity_ms == 900
    with Worker({**configuration, **low}):
        before = time.time()
        result = shop.tasks["look"].apply_async(delay=2.3, queue=f"{prefix}.second")
        seen = result.get(timeout=PATIENCE)
    assert seen["at"] >= before + 2.3
    assert seen["routing_key"] == f"{prefix}.second"


@pytest.mark.parametrize("priority", [0, 9])
def test_a_task_for_a_fanout_exchange_reaches_all_its_queues(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue], priority: int
) -> None:
    mirror = serving.amqp.queues[named(serving, "mirror")]
    unknown = make_queue("unknown", mirror.exchange)
    unknown(connection.default_channel).declare()
    before = time.time()
    result = serving.tasks["look"].apply_async(delay=0.5, queue=mirror.name, priority=priority)
    (arrival,) = take(connection, [unknown], 1)
    assert arrival.at >= before + 0.5
    assert arrival.message.headers["id"] == result.id
    assert arrival.message.delivery_info["exchange"] == mirror.exchange.name
    assert arrival.message.properties["priority"] == priority
    # The application's own queue, which the worker serves.
    seen = result.get(timeout=PATIENCE)
    assert seen["at"] >= before + 0.5
    assert seen["exchange"] == mirror.exchange.name
    unknown(connection.default_channel).delete()


def test_a_task_of_a_high_priority_keeps_it(serving: Any) -> None:
    before = time.time()
    seen = serving.tasks["look"].apply_async(countdown=0.5, priority=9).get(timeout=30)
    assert seen["at"] >= before + 0.5
    assert seen["priority"] == 9
    assert seen["routing_key"] == named(serving, "default")
    assert headers.DUE in seen["headers"]


def test_a_module_whose_queue_is_deleted_declares_it_again_and_goes_on(
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    connection: Connection,
    make_queue: Callable[..., Queue],
) -> None:
    shop = make_shop(**OPEN)
    queue = make_queue("plain")
    queue(connection.default_channel).declare()
    topology = shop.rabbitdelay.topology
    with Worker({**configuration, **OPEN}) as worker:
        wait_until_served(worker)
        for module in (topology.module_queues.checkin, topology.module_queues.distribution):
            module(connection.default_channel).delete()
        wait_until_served(worker, times=2)
        check_in(connection, shop, queue.name, headers={"x-delay": 300})
        assert take(connection, [queue], 1)


def test_the_status_of_the_modules_can_be_asked(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    queue = make_queue("plain")
    queue(connection.default_channel).declare()

    def status() -> Any:
        (answer,) = serving.control.broadcast("rabbitdelay_status", reply=True, timeout=5, limit=1)
        (of_worker,) = answer.values()
        return of_worker

    before = status()
    for _ in range(5):
        check_in(connection, serving, queue.name, headers={"x-delay": 200})
    take(connection, [queue], 5)
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
        assert now["backlog"] == 0


@pytest.mark.parametrize(
    ("option", "served"), [("distribution", ["distribution"]), ("", []), (None, ["check-in"])]
)
def test_the_command_line_says_which_modules_a_worker_serves_or_else_the_setting(
    configuration: dict[str, Any],
    make_shop: Callable[..., Any],
    option: str | None,
    served: list[str],
) -> None:
    settings = {"rabbitdelay_modules": ["check-in"]}
    make_shop(**settings)
    options = [] if option is None else [f"--rabbitdelay-modules={option}"]
    with Worker({**configuration, **settings}, None, *options) as worker:
        for name in served:
            wait_until_served(worker, name)
        others = set(MODULES) - set(served)
        assert not [name for name in others if f"{name}: serving" in worker.log]


def test_all_messages_of_an_envelope_reach_their_queue(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    queue = make_queue("plain", queue_arguments={"x-queue-type": "quorum"})
    queue(connection.default_channel).declare()
    items = [Item(b"x", {"id": number}) for number in range(3000)]
    told = {headers.EXCHANGE: "", headers.ROUTING_KEY: queue.name}
    put_in_envelope(connection, serving, items, **told)
    arrivals = take(connection, [queue], 3000)
    assert {arrival.message.headers["id"] for arrival in arrivals} == set(range(3000))
    assert count(connection, queue.name) == 0


def test_an_envelope_whose_queue_is_gone_is_undeliverable_to_the_last_message(
    serving: Any, connection: Connection
) -> None:
    items = [Item(b"x", {"id": number}) for number in range(3000)]
    told = {headers.EXCHANGE: "", headers.ROUTING_KEY: "test-nobody"}
    put_in_envelope(connection, serving, items, **told)
    topology = serving.rabbitdelay.topology
    arrivals = take(connection, [topology.module_queues.undeliverable], 3000, timeout=60)
    assert {arrival.message.headers["id"] for arrival in arrivals} == set(range(3000))


def test_one_message_that_amqp_cannot_carry_takes_no_other_with_it(
    serving: Any, connection: Connection, make_queue: Callable[..., Queue]
) -> None:
    queue = make_queue("plain")
    queue(connection.default_channel).declare()
    wrong = Item(b"x", {"id": 1}, {"priority": "high"})
    items = [Item(b"x", {"id": 0}), wrong, Item(b"x", {"id": 2})]
    put_in_envelope(
        connection, serving, items, **{headers.EXCHANGE: "", headers.ROUTING_KEY: queue.name}
    )
    arrivals = take(connection, [queue], 2)
    assert [arrival.message.headers["id"] for arrival in arrivals] == [0, 2]
    topology = serving.rabbitdelay.topology
    (refused,) = take(connection, [topology.module_queues.undeliverable], 1)
    assert "cannot be written" in examine(refused.message.headers, topology).reason
