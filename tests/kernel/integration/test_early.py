"""Early tasks are put back: those of a policy, of wrong clocks, and those with an ``eta``."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any
from uuid import uuid4

import amqp
import celery
import pytest
from amqp.exceptions import NotFound
from kombu import Connection, Exchange, Queue, binding

from celery_rabbitdelay import Row
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.shop import PATIENCE, named
from tests.kernel.integration.trouble import virtual_host
from tests.kernel.integration.waited import put_into
from tests.kernel.integration.worker import Worker
from tests.node_control import clear_policy, set_policy

#: Seconds until an early task is due: more than ``rabbitdelay_early_tolerance``.
DELAY = 4

#: Seconds that a task may be early by default, on a slow machine that releases it late too.
TOLERATED = 1

#: What a delay adds to the headers that a task sees.
ADDED = (headers.DUE, headers.QUEUE)

#: What a worker and distribution log of the first early message.
WARNING = "left the delay levels"


def release(connection: Connection, shop: Any) -> Any:
    """Let the only message in the levels go on, as RabbitMQ does when its TTL is over."""
    topology = shop.rabbitdelay.topology
    channel: Any = connection.default_channel
    found: list[tuple[str, Any]] = []

    def look() -> bool:
        for queue in topology.digit_queues:
            message = channel.basic_get(queue.name, no_ack=True)
            if message is not None:
                found.append((queue.name, message))
        return bool(found)

    wait_for(look, "a message in the levels")
    [(name, message)] = found
    own = {**message.headers, "x-death": [{"queue": name, "count": 1}]}
    released = amqp.Message(message.body, **{**message.properties, "application_headers": own})
    key = message.delivery_info["routing_key"]
    channel.basic_publish(released, topology.delivery.name, key)
    return message


def without_delay(seen: dict[str, Any], task_id: str) -> Any:
    """Return what a task saw, without its id and what a delay adds."""
    seen["headers"] = seen["headers"] or {}

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if name not in ADDED}

    return json.loads(json.dumps(seen).replace(task_id, "id"), object_pairs_hook=kept)


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "second", "priority": 3, "compression": "gzip", "headers": {"x-tenant": "a"}},
        {"exchange": "topic", "routing_key": "topic.daily.reports", "priority": 9},
    ],
    ids=["direct", "topic and priority"],
)
def test_a_task_that_the_levels_release_early_is_the_same_task_when_it_is_due(
    served_shop: Any, connection: Connection, options: dict[str, Any]
) -> None:
    for name in ("queue", "exchange"):
        if name in options:
            options = {**options, name: named(served_shop, options[name])}
    send = served_shop.tasks["request"].apply_async
    undelayed = send(**options)
    expected = undelayed.get(timeout=PATIENCE)
    delayed = send(delay=DELAY, **options)
    due_ms = release(connection, served_shop).headers[headers.DUE]
    seen = delayed.get(timeout=PATIENCE)
    assert time.time() >= due_ms / 1000 - TOLERATED
    assert seen["headers"][headers.DUE] == due_ms
    assert without_delay(seen, delayed.id) == without_delay(expected, undelayed.id)


def test_what_only_the_worker_finds_early_comes_back_to_its_queue_and_to_no_other(
    served_shop: Any, connection: Connection, make_queue: Any
) -> None:
    """As if distribution ran on a machine with another clock, and had sent it to both queues."""
    fanout = named(served_shop, "fanout")
    # A binding and not its exchange, which would be deleted with the queue.
    other = make_queue("other", bindings=[binding(Exchange(fanout, type="fanout"))])
    other(connection.default_channel).declare()
    to: dict[str, Any] = {"exchange": fanout, "routing_key": "any", "priority": 9}
    to["content_encoding"] = "utf-16"
    undelayed = put_into(connection, served_shop, time.time(), "request", **to)
    expected = served_shop.AsyncResult(undelayed).get(timeout=PATIENCE)
    assert count(connection, other.name) == 1

    due = time.time() + DELAY
    delayed = put_into(connection, served_shop, due, "request", **to)
    message = release(connection, served_shop)
    assert message.properties["priority"] <= 4
    # Released early once more, it goes back from distribution.
    seen = served_shop.AsyncResult(delayed).get(timeout=PATIENCE)
    assert time.time() >= due - TOLERATED
    assert without_delay(seen, delayed) == without_delay(expected, undelayed)
    assert count(connection, other.name) == 2


@pytest.mark.parametrize("protocol", [1, 2])
def test_what_the_levels_cannot_take_is_held_by_the_worker_and_not_started(
    serve: Any, connection: Connection, protocol: int
) -> None:
    # It came through distribution, which nobody serves any more; and Celery may hold tasks itself.
    shop = serve(rabbitdelay_modules=[], rabbitdelay_takeover=False, task_protocol=protocol)
    task = shop.amqp.create_task_message(uuid4().hex, "look", (), {})
    due = time.time() + DELAY
    own = {**task.headers, headers.DUE: int(due * 1000)}
    to = {"routing_key": named(shop, "second"), "serializer": "json", **task.properties}
    connection.Producer().publish(task.body, headers=own, **to)
    seen = shop.AsyncResult(task.properties["correlation_id"]).get(timeout=PATIENCE)
    assert seen["at"] >= due - 0.001
    assert "cannot wait in the delay levels, so the worker holds it" in shop.worker.log


def test_what_is_early_by_less_than_the_setting_says_starts(
    serve: Any, connection: Connection
) -> None:
    shop = serve(rabbitdelay_early_tolerance=600)
    due = time.time() + 600
    task_id = put_into(connection, shop, due, routing_key=named(shop, "second"))
    assert shop.AsyncResult(task_id).get(timeout=PATIENCE)["at"] < due
    assert WARNING not in shop.worker.log


def test_a_retry_of_a_task_that_was_put_back_returns_to_its_exchange(
    served_shop: Any, connection: Connection
) -> None:
    topic = named(served_shop, "topic")
    to = {"exchange": topic, "routing_key": "topic.reports", "priority": 9}
    given: Any = ([], 1, {"countdown": 0.2})
    retried = served_shop.tasks["retry"].apply_async(given, delay=DELAY, **to)
    release(connection, served_shop)
    for past in retried.get(timeout=PATIENCE):
        assert {name: past[name] for name in to} == to
        assert headers.EARLY not in past["headers"]


@pytest.fixture
def hurried_url(private_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[str]:
    """A virtual host with a policy that shortens every TTL above a second."""
    with virtual_host(private_rabbitmq, prefix) as url:
        set_policy(private_rabbitmq, prefix, ".*", message_ttl=1000)
        yield url


def test_a_policy_that_shortens_every_ttl_makes_no_task_early(
    hurried_url: str, serve: Any, prefix: str
) -> None:
    levels = [("seconds", 60, 1), ("ms", 10, 0.1)]
    shop = serve(broker_url=hurried_url, rabbitdelay_layout=levels, rabbitdelay_early_tolerance=0.1)
    look: Any = shop.tasks["look"]
    sent: dict[str, float] = {}
    for delay, priority, name in ((0.8, 0, "second"), (2.4, 9, "second"), (5, 0, "mirror")):
        due = time.time() + delay
        sent[look.apply_async(delay=delay, queue=f"{prefix}.{name}", priority=priority).id] = due
    due = time.time() + 4
    rows = [Row(delay=4, task_id=uuid4().hex) for _ in range(20)]
    shop.rabbitdelay.send_many(look, rows, queue=f"{prefix}.second")
    sent.update({str(row.task_id): due for row in rows})
    for task_id, due in sent.items():
        assert shop.AsyncResult(task_id).get(timeout=PATIENCE)["at"] >= due - 0.1
    # Once for the worker, once for distribution.
    assert shop.worker.log.count(WARNING) == 2


# Tasks with an `eta` of producers that do not have this package.


@pytest.fixture
def plain(configuration: Any) -> Any:
    """An application of plain Celery, which knows nothing of the levels."""
    urls = {"broker": configuration["broker_url"], "backend": configuration["result_backend"]}
    return celery.Celery("plain", **urls, set_as_current=False)


@pytest.fixture
def send(plain: Any, prefix: str) -> Callable[..., Any]:
    """Sends a task as plain Celery does, to the queue ``second``."""

    def send(name: str = "look", **options: Any) -> Any:
        route = {"exchange": f"{prefix}.direct", "routing_key": "second"}
        return plain.send_task(name, **{**route, **options})

    return send


#: Levels in which a task may wait for a minute.
MINUTE: dict[str, Any] = {"rabbitdelay_layout": [("seconds", 60, 1), ("ms", 10, 0.1)]}

#: What a worker logs of a task that the levels do not take at once.
TRIES_AGAIN = "cannot enter the delay levels yet"


def _waiting(connection: Connection, shop: Any) -> int:
    return sum(count(connection, queue.name) for queue in shop.rabbitdelay.topology.digit_queues)


def test_it_runs_when_it_is_due_as_if_it_had_not_been_delayed(
    serve: Any, plain: Any, send: Any, prefix: str
) -> None:
    serve(**MINUTE)
    due = datetime.now(UTC) + timedelta(seconds=10)
    own = {"headers": {"x-tenant": "shop"}, "compression": "zlib", "serializer": "json"}
    sent = []
    times: list[dict[str, Any]] = [{"countdown": 10}, {"eta": due}]
    for protocol, priority, time_of in product((1, 2), (3, 9), times):
        plain.amqp.create_task_message = plain.amqp.task_protocols[protocol]
        sent.append((protocol, priority, send(priority=priority, **time_of, **own)))
    for protocol, priority, result in sent:
        seen = result.get(timeout=PATIENCE)
        due_ms = seen["headers"][headers.DUE]
        assert due.timestamp() * 1000 - 1 <= due_ms <= seen["at"] * 1000
        assert (seen["exchange"], seen["routing_key"]) == (f"{prefix}.direct", "second")
        assert (seen["priority"], seen["headers"]["x-tenant"]) == (priority, "shop")
        assert headers.EARLY not in seen["headers"]
        assert (seen["correlation_id"], seen["reply_to"]) == (result.id, plain.thread_oid)
        assert protocol == 1 or seen["eta"] is None


def test_a_queue_that_ends_with_the_worker_keeps_its_early_tasks_and_what_is_over_runs_at_once(
    serve: Any, plain: Any, send: Any, connection: Connection, prefix: str
) -> None:
    shop = serve(passing_queue=True)
    message = plain.amqp.create_task_message("passing", "look", (), countdown=1)
    to = {"routing_key": f"{prefix}.passing", "serializer": "json", **message.properties}
    connection.Producer().publish(message.body, headers=message.headers, **to)
    past = datetime.now(UTC) - timedelta(hours=1)
    for result in (shop.AsyncResult("passing"), send(eta=past)):
        assert headers.DUE not in result.get(timeout=PATIENCE)["headers"]


def test_a_task_that_keeps_celery_s_own_behavior_is_held_by_the_worker(
    serve: Any, send: Any, connection: Connection
) -> None:
    shop = serve(**MINUTE, queue_type="classic")
    received = f"Task celery-own[{send('celery-own', countdown=50).id}] received"
    wait_for(lambda: received in shop.worker.log or _waiting(connection, shop), "the task")
    assert received in shop.worker.log
    assert _waiting(connection, shop) == 0


def test_with_quorum_queues_it_waits_in_the_levels_and_keeps_no_other_task_away(
    serve: Any, send: Any
) -> None:
    serve("--prefetch-multiplier", "1")
    for _ in range(4):  # more than the worker prefetches
        send("celery-own", countdown=3600)
    assert send("look").get(timeout=PATIENCE)


def test_a_task_that_was_revoked_does_not_enter_the_levels(
    shop: Any, worker: Worker, send: Any, connection: Connection
) -> None:
    shop.control.revoke("unwanted", destination=[worker.name], reply=True, timeout=PATIENCE)
    send(task_id="unwanted", countdown=5)
    wait_for(lambda: "Discarding revoked task: look[unwanted]" in worker.log, "the revoked task")
    assert _waiting(connection, shop) == 0


def test_a_level_that_takes_nothing_holds_up_no_other_task_and_a_kill_loses_none(
    private_rabbitmq: RabbitMQServer, serve: Any, send: Any, connection: Connection, prefix: str
) -> None:
    transport: Any = connection.connect()
    version = [int(part) for part in transport.server_properties["version"].split(".")]
    shop = serve(
        # Of quorum queues, a worker's consumer cannot ask for more (Celery says so), and from 4.0
        # on of no queue: RabbitMQ takes a higher prefetch count, and delivers no more.
        queue_type="classic",
        worker_prefetch_multiplier=1 if version < [4, 0] else 8,
        rabbitdelay_layout=[("hours", 3, 3600), ("minutes", 60, 60)],
    )
    long = Queue(f"{prefix}.hours.2")
    bound: dict[str, Any] = {"max_length": 1, "overflow": "reject-publish"}
    policy = set_policy(private_rabbitmq, "/", f"^{long.name}$", **bound)
    try:
        # A burst passes before RabbitMQ tells publishers that a queue is full: it is full before.
        for _ in range(2):
            connection.Producer().publish("", routing_key=long.name, headers={"id": "first"})
        wait_for(lambda: count(connection, long.name) == 2, "a full queue")
        # Longer than the test waits for any other task, two hours are left at least.
        ids = {send(countdown=10_740).id for _ in range(6)}
        wait_for(lambda: shop.worker.log.count(TRIES_AGAIN) >= 3, "failed attempts")
        assert send().get(timeout=PATIENCE)
        assert count(connection, long.name) < len(ids)
        # Nothing was acknowledged that is not confirmed.
        shop.worker.kill()
        shop.worker.start()
        # Room is made for one after another.
        taken = take(connection, [long], len(ids) + 2)
        came = {arrival.message.headers["id"] for arrival in taken}
    finally:
        clear_policy(private_rabbitmq, "/", policy)
    assert came == {*ids, "first"}


def test_celery_s_own_delayed_delivery_is_neither_declared_nor_used(
    serve: Any, channel: Any, prefix: str
) -> None:
    # What Celery delays natively: quorum queues, a topic exchange, and no takeover of ours.
    shop = serve(rabbitdelay_takeover=False)
    before = time.time()
    result = shop.tasks["look"].apply_async(countdown=1, queue=f"{prefix}.topic.reports")
    assert result.get(timeout=PATIENCE)["at"] >= before + 1
    assert "native delayed delivery" not in shop.worker.log
    with pytest.raises(NotFound):
        channel.queue_declare("celery_delayed_0", passive=True)
