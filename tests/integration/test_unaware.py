"""Tasks with an ``eta`` that producers without our extension send to a worker that has it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import celery
import pytest
from amqp.exceptions import NotFound
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.arrivals import count, find_waiting, take
from tests.integration.shop import PATIENCE
from tests.integration.trouble import alarm
from tests.integration.worker import Worker
from tests.node_control import clear_policy, set_policy


@pytest.fixture
def plain(configuration: dict[str, Any]) -> Any:
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


#: Levels in which tasks wait for a minute: however slow a machine is, all are seen waiting there.
MINUTE: dict[str, Any] = {"rabbitdelay_layout": [("seconds", 60, 1), ("ms", 10, 0.1)]}

#: Nobody serves the modules: a delay above the capacity has nowhere to meditate.
NO_MODULES: dict[str, Any] = {"rabbitdelay_modules": []}

#: What keeps Celery's own behavior: a task, and settings.
OF_CELERY = [("celery-own", {}), ("look", {"rabbitdelay_takeover": False})]

#: What a worker logs of a task that could not be put into the levels at once.
TRIES_AGAIN = "could not be put into the levels"


def _waiting(connection: Connection, shop: Any) -> int:
    return sum(count(connection, queue.name) for queue in shop.rabbitdelay.topology.digit_queues)


def _at_least(connection: Connection, shop: Any, waiting: int) -> bool:
    return _waiting(connection, shop) >= waiting


def test_tasks_of_an_hour_lie_in_the_levels_keep_no_place_and_no_kill_loses_them(
    serve: Any, send: Callable[..., Any], connection: Connection, prefix: str
) -> None:
    levels = [("minutes", 60, 60), ("seconds", 60, 1)]
    shop = serve(rabbitdelay_layout=levels, worker_prefetch_multiplier=1)
    queues = shop.rabbitdelay.topology.digit_queues
    missing = {send(countdown=3540).id for _ in range(200)}
    for waiting in (20, 120):
        wait_for(partial(_at_least, connection, shop, waiting), f"{waiting} tasks in the levels")
        shop.worker.kill()
        shop.worker.start()

    def none_is_missing() -> bool:
        for arrival in take(connection, queues, _waiting(connection, shop)):
            assert arrival.message.headers["eta"] is None
            missing.discard(arrival.message.headers["id"])
        return not missing

    wait_for(none_is_missing, "all tasks in the levels")
    assert count(connection, f"{prefix}.second") == 0
    # And the last worker still runs them.
    assert send(countdown=0.5).get(timeout=PATIENCE)


@pytest.mark.parametrize("protocol", [1, 2])
def test_it_runs_when_it_is_due_as_if_it_had_not_been_delayed(
    serve: Any, plain: Any, send: Callable[..., Any], prefix: str, protocol: int
) -> None:
    serve(**MINUTE)
    plain.conf.task_protocol = protocol
    due = datetime.now(UTC) + timedelta(seconds=10)
    own = {"headers": {"x-tenant": "shop"}, "compression": "zlib", "serializer": "json"}
    times: list[dict[str, Any]] = [{"countdown": 10, "priority": 9}, {"eta": due, "priority": 3}]
    for sent, result in [(each, send(**each, **own)) for each in times]:
        seen = result.get(timeout=PATIENCE)
        due_ms = seen["headers"][headers.DUE]
        assert due.timestamp() * 1000 - 1 <= due_ms <= seen["at"] * 1000
        assert (seen["exchange"], seen["routing_key"]) == (f"{prefix}.direct", "second")
        assert seen["priority"] == sent["priority"]
        assert seen["headers"]["x-tenant"] == "shop"
        assert headers.EARLY not in seen["headers"]
        assert (seen["correlation_id"], seen["reply_to"]) == (result.id, plain.thread_oid)
        if protocol == 2:
            assert seen["eta"] is None


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent", "eventlet"])
def test_every_pool_leaves_early_tasks_to_the_levels(
    serve: Any, send: Callable[..., Any], connection: Connection, prefix: str, pool: str
) -> None:
    shop = serve("-P", pool, **MINUTE)
    # More than the worker fetches at once, which is four for each task that it runs.
    for _ in range(20):
        send(countdown=59)
    wait_for(partial(_at_least, connection, shop, 20), "all tasks in the levels")
    assert count(connection, f"{prefix}.second") == 0
    before = time.time()
    assert send(countdown=2).get(timeout=PATIENCE)["at"] >= before + 2


def test_what_the_levels_cannot_carry_is_held_and_what_is_over_runs_at_once(
    serve: Any, send: Callable[..., Any]
) -> None:
    shop = serve(**NO_MODULES, rabbitdelay_layout=[("ms", 10, 0.1)])
    past = datetime.now(UTC) - timedelta(hours=1)
    assert headers.DUE not in send(eta=past).get(timeout=PATIENCE)["headers"]
    before = time.time()
    seen = send(countdown=5).get(timeout=PATIENCE)
    assert seen["at"] >= before + 5
    assert headers.DUE not in seen["headers"]
    assert "cannot wait in the levels, so the worker holds it" in shop.worker.log


@pytest.mark.parametrize(("name", "settings"), OF_CELERY)
def test_a_task_that_keeps_celery_s_own_behavior_is_held_by_the_worker(
    serve: Any,
    send: Callable[..., Any],
    connection: Connection,
    name: str,
    settings: dict[str, Any],
) -> None:
    shop = serve(**settings, **MINUTE, queue_type="classic")
    received = f"Task {name}[{send(name, countdown=50).id}] received"
    wait_for(lambda: received in shop.worker.log or _waiting(connection, shop), "the task")
    assert received in shop.worker.log
    assert _waiting(connection, shop) == 0


@pytest.mark.parametrize(("name", "settings"), OF_CELERY)
def test_with_quorum_queues_it_waits_in_the_levels_and_keeps_no_other_task_away(
    serve: Any, send: Callable[..., Any], name: str, settings: dict[str, Any]
) -> None:
    shop = serve("--concurrency", "2", "--prefetch-multiplier", "1", **settings)
    for _ in range(4):  # as many as the worker prefetches, and more
        send(name, countdown=3600)
    assert send("look").get(timeout=PATIENCE)
    assert shop.worker.log.count("the prefetch count is fixed") == 1


def test_a_task_that_was_revoked_does_not_enter_the_levels(
    shop: Any, worker: Worker, send: Callable[..., Any], connection: Connection
) -> None:
    shop.control.revoke("unwanted", destination=[worker.name], reply=True, timeout=PATIENCE)
    send(task_id="unwanted", countdown=5)
    wait_for(lambda: "Discarding revoked task: look[unwanted]" in worker.log, "the revoked task")
    assert _waiting(connection, shop) == 0


def test_a_broker_that_takes_nothing_for_a_while_gets_the_task_later(
    private_rabbitmq: RabbitMQServer,
    make_shop: Callable[..., Any],
    configuration: dict[str, Any],
    plain: Any,
    send: Callable[..., Any],
    prefix: str,
) -> None:
    here = {
        "broker_url": private_rabbitmq.url,
        "rabbitdelay_confirm_timeout": 5,
        "rabbitdelay_layout": [("minutes", 60, 60)],
    }
    shop = make_shop(**here)
    plain.conf.broker_url = private_rabbitmq.url
    with Connection(private_rabbitmq.url) as connection:
        shop.amqp.queues[f"{prefix}.second"](connection.default_channel).declare()
    result = send(countdown=3540)
    # The broker reads nothing any more from a connection that publishes.
    silent = ("--without-mingle", "--without-gossip", "--without-heartbeat")
    worker = Worker({**configuration, **here}, [f"{prefix}.second"], *silent)
    with ExitStack() as stack:
        with alarm(private_rabbitmq):
            stack.enter_context(worker)
            wait_for(lambda: TRIES_AGAIN in worker.log, "a failed attempt")
        with Connection(private_rabbitmq.url) as connection:
            queues = shop.rabbitdelay.topology.digit_queues
            waiting = find_waiting(connection, queues, PATIENCE, copies=True)
    assert waiting.message.headers["id"] == result.id
    assert headers.DUE in waiting.message.headers


def test_a_level_that_takes_nothing_holds_up_no_other_task_and_a_kill_loses_none(
    private_rabbitmq: RabbitMQServer,
    serve: Any,
    send: Callable[..., Any],
    connection: Connection,
    prefix: str,
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


def test_a_queue_that_ends_with_the_worker_keeps_its_early_tasks(
    serve: Any, plain: Any, connection: Connection, prefix: str
) -> None:
    shop = serve(passing_queue=True)
    message = plain.amqp.create_task_message("passing", "look", (), countdown=2)
    to = {"routing_key": f"{prefix}.passing", "serializer": "json", **message.properties}
    connection.Producer().publish(message.body, headers=message.headers, **to)
    wait_for(lambda: "look[passing] received" in shop.worker.log, "the task")
    assert _waiting(connection, shop) == 0
    assert shop.AsyncResult("passing").get(timeout=PATIENCE)


def test_celery_s_own_delayed_delivery_is_neither_declared_nor_used(
    serve: Any, connection: Connection, prefix: str
) -> None:
    # What Celery delays natively: quorum queues, a topic exchange, and no takeover of ours.
    shop = serve(rabbitdelay_takeover=False)
    before, look = time.time(), shop.tasks["look"]
    result = look.apply_async(countdown=2, queue=f"{prefix}.topic.reports")
    assert result.get(timeout=PATIENCE)["at"] >= before + 2
    assert "native delayed delivery" not in shop.worker.log
    channel: Any = connection.default_channel
    with pytest.raises(NotFound):
        channel.queue_declare("celery_delayed_0", passive=True)
