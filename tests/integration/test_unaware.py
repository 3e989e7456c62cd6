"""Tasks with an ``eta`` that producers without our extension send to a worker that has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any

import celery
import pytest
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, take
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker
from tests.node_control import clear_policy, set_policy


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

#: What a worker logs of a task that could not be put into the levels at once.
TRIES_AGAIN = "could not be put into the levels"


def _waiting(connection: Connection, shop: Any) -> int:
    return sum(count(connection, queue.name) for queue in shop.rabbitdelay.topology.digit_queues)


def test_it_runs_when_it_is_due_as_if_it_had_not_been_delayed(
    serve: Any, plain: Any, send: Any, prefix: str
) -> None:
    serve(**MINUTE)
    due = datetime.now(UTC) + timedelta(seconds=10)
    own = {"headers": {"x-tenant": "shop"}, "compression": "zlib", "serializer": "json"}
    sent = []
    for protocol, priority, time_of in product((1, 2), (3, 9), ({"countdown": 10}, {"eta": due})):
        plain.conf.task_protocol = protocol
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


def test_what_cannot_wait_in_the_levels_is_held_and_what_is_over_runs_at_once(
    serve: Any, plain: Any, send: Any, connection: Connection, prefix: str
) -> None:
    # Nobody serves the modules: a delay above the capacity has nowhere to meditate.
    levels = [("ms", 10, 0.1)]
    shop = serve(passing_queue=True, rabbitdelay_modules=[], rabbitdelay_layout=levels)
    past = datetime.now(UTC) - timedelta(hours=1)
    assert headers.DUE not in send(eta=past).get(timeout=PATIENCE)["headers"]
    before = time.time()
    seen = send(countdown=3).get(timeout=PATIENCE)
    assert seen["at"] >= before + 3
    assert headers.DUE not in seen["headers"]
    assert "cannot wait in the levels, so the worker holds it" in shop.worker.log
    # A queue that ends with its worker.
    message = plain.amqp.create_task_message("passing", "look", (), countdown=0.5)
    to = {"routing_key": f"{prefix}.passing", "serializer": "json", **message.properties}
    connection.Producer().publish(message.body, headers=message.headers, **to)
    assert headers.DUE not in shop.AsyncResult("passing").get(timeout=PATIENCE)["headers"]


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
    shop = serve("--prefetch-multiplier", "1")
    for _ in range(4):  # more than the worker prefetches
        send("celery-own", countdown=3600)
    assert send("look").get(timeout=PATIENCE)
    assert shop.worker.log.count("the prefetch count is fixed") == 1


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
