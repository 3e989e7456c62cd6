"""Delayed Celery tasks on real brokers, taken by real worker processes; and what ends a worker."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any

import pytest
from celery.app import trace
from kombu import Connection, Queue

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.publishing.declaration import is_declared, missing
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests import node_control
from tests.kernel.integration.arrivals import count, take
from tests.kernel.integration.modules import wait_until_served
from tests.kernel.integration.shop import PATIENCE, make_app
from tests.kernel.integration.trouble import alarm, virtual_host
from tests.kernel.integration.worker import Worker, run_celery


def test_no_delay_takes_celery_s_own_path(shop: Any, connection: Connection, prefix: str) -> None:
    look = shop.tasks["look"]
    for options in ({}, {"delay": 0}, {"delay": -5}, {"countdown": -5}, {"countdown": 0}):
        look.apply_async(**options)
    past = datetime.now(UTC) - timedelta(hours=1)
    look.apply_async(eta=past)
    arrivals = take(connection, [shop.amqp.queues[f"{prefix}.default"]], 6)
    found = [arrival.message.headers for arrival in arrivals]
    assert not any(headers.DUE in each for each in found)
    # As without this package.
    assert [each["eta"] is None for each in found] == [True, True, True, False, True, False]
    assert found[-1]["eta"] == past.isoformat()
    assert not is_declared(connection, shop.rabbitdelay.topology)


def test_with_a_tolerance_a_delay_lies_in_the_queue_of_a_rounder_one(
    make_shop: Any, connection: Connection, prefix: str
) -> None:
    shop = make_shop(
        rabbitdelay_layout=[("hours", 3, 3600), ("minutes", 60, 60), ("seconds", 60, 1)]
    )
    look, due = shop.tasks["look"], datetime.now(UTC) + timedelta(seconds=3570)
    for options in (
        {"delay": 3570, "tolerance": 60},
        {"eta": due, "tolerance": timedelta(minutes=1)},
    ):
        look.apply_async(**options)
    look.s().set(countdown=3570, tolerance=60.5).apply_async()
    for arrival in take(connection, [Queue(f"{prefix}.hours.1")], 3):
        # It is due when it was said to be: the tolerance is not a longer delay.
        told = arrival.message.headers[headers.DUE]
        assert due.timestamp() * 1000 <= told + 1 <= (due.timestamp() + 20) * 1000
    look.apply_async(delay=3570, tolerance=20)
    assert len(take(connection, [Queue(f"{prefix}.minutes.59")], 1)) == 1


def test_a_task_that_keeps_celery_s_own_behavior_has_an_eta(
    make_shop: Any, connection: Connection, prefix: str
) -> None:
    levels = [("hours", 6, 3600), ("tenths", 10, 360)]
    shop = make_shop(rabbitdelay_takeover=False, rabbitdelay_layout=levels)
    shop.tasks["look"].apply_async(countdown=50)
    shop.tasks["celery-own"].apply_async(delay=50)
    shop.send_task("celery-own", countdown=50)
    arrivals = take(connection, [shop.amqp.queues[f"{prefix}.default"]], 3)
    assert all(arrival.message.headers["eta"] for arrival in arrivals)
    # Without takeover, only a delay waits in the levels.
    shop.tasks["look"].apply_async(delay=3600)
    waiting = [count(connection, queue.name) for queue in shop.rabbitdelay.topology.digit_queues]
    assert sum(waiting) == 1


@pytest.mark.parametrize("give", ["connection", "producer"])
def test_the_caller_s_own_connection_is_used_and_stays_usable(
    shop: Any, connection: Connection, prefix: str, give: str
) -> None:
    with shop.connection_for_write() as own:
        producer = shop.amqp.Producer(own)
        options = {"connection": own} if give == "connection" else {give: producer}
        # The application's own broker is out of reach.
        shop.conf.broker_write_url = "amqp://guest:guest@127.0.0.1:1//"
        for _ in range(3):
            shop.tasks["look"].apply_async(delay=0.3, **options)
        transport: Any = own.connection
        # Channel 0 is the connection itself; a producer of kombu's takes at most one more.
        assert len(transport.channels) <= 2
        shop.tasks["look"].apply_async(**options)
    assert len(take(connection, [shop.amqp.queues[f"{prefix}.default"]], 4)) == 4


def test_tasks_are_still_restored_after_the_pool_is_restarted(serve: Any, prefix: str) -> None:
    shop = serve(worker_pool_restarts=True)
    name = shop.worker.name
    answers = shop.control.pool_restart(destination=[name], reply=True, timeout=PATIENCE)
    assert "ok" in answers[0][name]
    arrived = shop.tasks["look"].apply_async(delay=0.2).get(timeout=PATIENCE)
    assert arrived["routing_key"] == f"{prefix}.default"


def test_a_retry_that_cannot_be_sent_does_not_drop_the_task(
    private_rabbitmq: RabbitMQServer, serve: Any
) -> None:
    here = {"broker_url": private_rabbitmq.url, "rabbitdelay_confirm_timeout": 5}
    shop = serve(**here, task_acks_late=True)
    redis = shop.backend.client
    result = shop.tasks["retry-when"].apply_async(("blocked",))
    wait_for(lambda: redis.get("blocked"), "the first attempt")
    with alarm(private_rabbitmq):
        redis.set("blocked", "go on")
        wait_for(lambda: redis.get("blocked") == b"again", "the message, again")
    # It may come a third time, and must then still find the word.
    assert result.get(timeout=PATIENCE) == "done"
    redis.delete("blocked")


def test_a_task_whose_callback_or_retry_nobody_can_deliver_fails_and_is_not_tried_for_ever(
    serve: Any,
) -> None:
    shop = serve(rabbitdelay_modules=[], task_acks_late=True)
    look, nowhere = shop.tasks["look"], {"countdown": 1, "priority": 9}
    called = look.apply_async(link=look.si().set(**nowhere))
    retried = shop.tasks["retry"].apply_async(([], 1, nowhere))
    for result in (called, retried):
        wait_for(result.ready, "the outcome")
        assert result.state == "FAILURE"
        assert type(result.result).__name__ == "NeedsDistribution"
        assert shop.worker.log.count(f"[{result.id}] received") == 1
    if "OperationalError" in vars(trace):
        # Celery's words for an error that it does not expect there; before 5.7, any is one.
        assert "raised outside body" not in shop.worker.log


@pytest.fixture
def own_host(session_rabbitmq: RabbitMQServer, prefix: str) -> Iterator[str]:
    """The URL of a virtual host of the test's own."""
    with virtual_host(session_rabbitmq, prefix) as url:
        yield url


def test_a_worker_declares_once_at_its_start_and_once_after_all_its_connections_are_lost(
    own_host: str, session_rabbitmq: RabbitMQServer, serve: Any, prefix: str
) -> None:
    """They were lost with all that the broker had."""
    shop = serve(broker_url=own_host)
    assert shop.worker.log.count("are in place") == 1
    node_control.delete_virtual_host(session_rabbitmq, prefix)
    node_control.add_virtual_host(session_rabbitmq, prefix)
    wait_until_served(shop.worker, times=2)
    with Connection(own_host) as connection:
        assert missing(connection, shop.rabbitdelay.topology) == ()
    assert shop.tasks["look"].apply_async(delay=0.2).get(timeout=PATIENCE)
    assert shop.worker.log.count("are in place") == 2


@pytest.fixture
def on_redis(redis_url: str, prefix: str) -> dict[str, Any]:
    """The configuration of a shop whose broker is Redis."""
    return {"prefix": prefix, "broker_url": redis_url, "result_backend": redis_url}


@pytest.fixture
def redis_shop(on_redis: Any) -> Iterator[Any]:
    """A shop whose broker is Redis."""
    shop = make_app(on_redis)
    yield shop
    with shop.connection_for_write() as connection:
        for queue in shop.amqp.queues.values():
            queue(connection.default_channel).delete()
    shop.close()


def test_on_redis_a_worker_holds_the_task_until_it_is_due(
    redis_shop: Any, on_redis: Any, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    look, retry = redis_shop.tasks["look"], redis_shop.tasks["retry"]
    with Worker(on_redis, [f"{prefix}.default"], "-c", "4") as worker:
        before = time.time()
        delayed = [
            look.apply_async(delay=timedelta(seconds=1.5)),
            look.s().set(delay=1.5).apply_async(),
            redis_shop.send_task("look", delay=1.5),
        ]
        retried = retry.apply_async(([], 1, {"delay": 1}))
        for result in delayed:
            seen = result.get(timeout=PATIENCE)
            assert seen["at"] >= before + 1.5
            assert seen["eta"]
            assert headers.DUE not in seen["headers"]
        first, second = retried.get(timeout=PATIENCE)
        assert second["at"] >= first["at"] + 1
        assert "Delay levels" not in worker.log
    assert caplog.text.count("treated as Celery's own countdown") == 1


REFUSED = "RESOURCE_LOCKED"


def test_a_wrong_setting_ends_the_command_with_one_line(configuration: Any) -> None:
    ended = run_celery(configuration, "worker -P solo --rabbitdelay-modules chek")
    assert ended.returncode == 1
    (line,) = (line for line in ended.stderr.splitlines() if "rabbitdelay_" in line)
    assert line.startswith("Error: ")
    assert "takes a list of any of check-in, distribution, probe" in line
    assert "\nSee reference/settings in the documentation" in ended.stderr
    assert "Traceback" not in ended.stderr + ended.stdout


def test_with_channel_errors_retried_it_waits_for_its_control_queue_and_works(
    shop: Any, configuration: Any, connection: Connection
) -> None:
    """A former connection of its own has the queue, which the broker still takes for alive."""
    worker = Worker({**configuration, "broker_channel_error_retry": True})
    name = f"{worker.name}.celery.pidbox"
    queue = Queue(name, durable=False, exclusive=True, auto_delete=True)
    holder = connection.clone()
    queue(holder.default_channel).queue_declare()

    def release() -> None:
        wait_for(lambda: worker.log.count(REFUSED) >= 2, "the second attempt")
        holder.release()

    broker = Thread(target=release)
    broker.start()
    try:
        worker.start()
        assert shop.tasks["look"].apply_async(delay=0.5).get(timeout=PATIENCE)
    finally:
        worker.stop()
        broker.join()
