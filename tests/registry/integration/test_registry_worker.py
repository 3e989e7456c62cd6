"""Tasks of the registry in trouble: on real servers, with workers of their own."""

import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError
from kombu import Connection

from celery_rabbitdelay import JobClosed, Outcome, RegistryUnavailable
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.kernel.integration.notes import Notes
from tests.kernel.integration.shop import PATIENCE
from tests.kernel.integration.worker import Worker, run_celery
from tests.kernel.unit.clock import frozen
from tests.redis_servers import ConfiguredRedis, SentinelSetup

#: Seconds; long enough for a test to do something before a task is due.
DELAY = 10.0

#: Seconds until the first task of a fail-over is due.
LEAD = 6.0

#: Options of the registry for a worker whose Redis is suspended.
IMPATIENT = {"socket_timeout": 1}


class SavedRedis(ConfiguredRedis):
    """A Redis that starts with what it had when it was told to save."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--dbfilename", "saved.rdb"]


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """The registry's Redis, for one test to stop and start."""
    with SavedRedis() as server:
        yield server


@pytest.fixture
def configuration(configuration: dict[str, Any], redis: RedisServer) -> dict[str, Any]:
    """The same with a registry."""
    return {**configuration, "task_acks_late": True, "rabbitdelay_registry_url": redis.url}


def first_word(shop: Any, key: str) -> None:
    """Wait until the task ``retry-when`` runs."""
    wait_for(lambda: shop.backend.client.get(key) == b"first", "the task", PATIENCE)


def test_a_task_that_runs_once_is_not_lost_if_redis_is_away_when_it_is_redelivered(
    shop: Any, serve: Any, redis: RedisServer
) -> None:
    worker = serve(rabbitdelay_registry_options=IMPATIENT).worker
    key, results = uuid4().hex, shop.backend.client
    result = shop.tasks["retry-when"].apply_async((key,), delay=0.5, once=True)
    first_word(shop, key)
    worker.kill()
    redis.suspend()
    worker.start()
    # It is put back at least once, and is not RabbitMQ's own redelivery any more.
    wait_for(
        lambda: "go back into the delay levels" in worker.log, "the worker's warning", PATIENCE
    )
    redis.resume()
    wait_for(lambda: results.get(key) == b"again", "the task", PATIENCE)
    results.set(key, "go on")
    assert result.get(timeout=PATIENCE) == "done"


def test_a_commit_that_redis_loses_is_made_again(
    shop: Any, worker: Worker, noted: Notes, redis: ConfiguredRedis
) -> None:
    shop.rabbitdelay.open_job("import", expires=25)
    for number in range(3):
        noted.send(number, delay=0.2, job="import", track=True)
    redis.ask("save")
    shop.rabbitdelay.commit_job("import")
    redis.kill()
    redis.start()
    with pytest.raises(JobClosed, match="is open"):
        shop.rabbitdelay.open_job("import", expires=12)
    wait_for(lambda: len(noted()) == 3, "the tasks of the job", PATIENCE)
    assert sorted(noted()) == [0, 1, 2]


def test_a_task_that_is_older_than_the_registrys_memory_is_undeliverable_until_it_is_redriven(
    configuration: dict[str, Any], serve: Any, noted: Notes, connection: Connection
) -> None:
    settings = {"rabbitdelay_registry_keep": 60.0, "rabbitdelay_retry_for": 0}
    noted.shop = shop = serve(**settings)
    sent = time.time() - 2 * 3600
    with frozen(sent):
        noted.send("old", eta=datetime.fromtimestamp(sent, UTC), once=True)
    wait_until_waiting(connection, shop.rabbitdelay.topology.module_queues.undeliverable.name, 1)
    assert noted.until(0.1) == []
    configured = {**configuration, **settings}
    listed = run_celery(configured, "rabbitdelay undeliverable list").stdout
    assert "late by more than rabbitdelay_registry_keep" in listed
    redriven = run_celery(configured, "rabbitdelay undeliverable redrive")
    assert redriven.returncode == 0, redriven.stderr
    wait_for(lambda: noted() == ["old"], "the task", PATIENCE)


def test_what_celery_sends_for_a_task_goes_out_while_redis_is_away(
    shop: Any, worker: Worker, redis: RedisServer, noted: Notes
) -> None:
    key = uuid4().hex
    retried = shop.tasks["retry-when"].apply_async((key,), delay=0.3, track=True, key=key)
    first_word(shop, key)
    redis.kill()
    with pytest.raises(RegistryUnavailable):
        noted.send("not sent", delay=0.1, track=True)
    note = shop.tasks["note"]
    step = note.si("step", key=noted.key).set(countdown=0.3, track=True)
    called = note.si("callback", key=noted.key).set(countdown=0.3, key="order")
    chained = chain(shop.tasks["look"].si(), step).apply_async(link=called)
    shop.backend.client.set(key, "go on")
    wait_for(lambda: ", sent anyway: " in worker.log, "a chain's step", PATIENCE)
    wait_for(lambda: retried.state == "RETRY", "the retry", PATIENCE)
    redis.start()
    assert retried.get(timeout=PATIENCE) == "done"
    chained.get(timeout=PATIENCE)
    wait_for(lambda: sorted(noted()) == ["callback", "step"], "the callback", PATIENCE)


def test_a_cancel_while_a_task_runs_stops_its_retry(serve: Any) -> None:
    # Celery's own revoke would stop the retry as well, until its worker ends.
    shop = serve(worker_enable_remote_control=False, rabbitdelay_modules=[])
    key = uuid4().hex
    result = shop.tasks["retry-when"].apply_async((key,), delay=0.2, track=True)
    first_word(shop, key)
    assert shop.rabbitdelay.cancel(result) is Outcome.RELEASED
    shop.backend.client.set(key, "go on")
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE)


def test_an_early_task_that_the_worker_holds_asks_when_it_is_due(
    serve: Any, noted: Notes, connection: Connection
) -> None:
    # It came through distribution, which nobody serves any more, so that it cannot go back.
    shop = serve(rabbitdelay_modules=[])
    ids = [uuid4().hex for _ in range(2)]
    for number, task_id in enumerate(ids):
        message = shop.amqp.create_task_message(task_id, "note", (number,), {"key": noted.key})
        due_ms = int((time.time() + DELAY) * 1000)
        connection.Producer().publish(
            message.body,
            headers={**message.headers, headers.DUE: due_ms},
            routing_key=shop.conf.task_default_queue,
            serializer="json",
            **message.properties,
        )
    wait_for(lambda: shop.worker.log.count("so the worker holds it") == 2, "both", PATIENCE)
    shop.rabbitdelay.registry.cancel([ids[0]])
    wait_for(lambda: noted() == [1], "the task that was not cancelled", PATIENCE)
    with pytest.raises(TaskRevokedError):
        shop.AsyncResult(ids[0]).get(timeout=PATIENCE)
    assert noted() == [1]


def test_a_fail_over_while_tasks_arrive_loses_none_and_runs_no_cancelled_one(
    serve: Any, noted: Notes
) -> None:
    with SentinelSetup(down_after_ms=5000) as servers:
        options = {"socket_timeout": 10, "master_name": servers.master_name}
        noted.shop = shop = serve(
            rabbitdelay_registry_url=servers.url, rabbitdelay_registry_options=options
        )
        for number in range(30):
            # Due over some seconds, of which the fail-over takes several.
            result = noted.send(number, delay=LEAD + number * 0.2, track=True)
            if number % 3 == 0:
                assert shop.rabbitdelay.cancel(result) is Outcome.DONE
        servers.wait_until_copied()
        wait_for(lambda: len(set(noted())) >= 5, "the first tasks", PATIENCE)
        servers.master.kill()
        expected = {number for number in range(30) if number % 3}
        wait_for(lambda: expected <= {*noted()}, "all tasks")
        # Nothing that was cancelled ran, and nothing twice.
        assert Counter(noted()) == Counter(expected)
        wait_for(lambda: "The registry answers again" in shop.worker.log, "its end", PATIENCE)
        shop.worker.stop()


def test_what_cannot_be_read_in_redis_holds_up_no_other_task(
    shop: Any, worker: Worker, noted: Notes
) -> None:
    registry, delays = shop.rabbitdelay.registry, shop.rabbitdelay
    delays.open_job("import", expires=60)
    bad = [noted.send("bad", delay=5.5).id for _ in range(10)]
    noted.send("in a job", delay=5.5, job="import")
    records, job = (
        [registry.names.of("task", each) for each in bad],
        registry.names.of("job", "import"),
    )

    def spoil(pipeline: Any) -> None:
        for record in records:
            pipeline.hset(record, "not_before", "soon")
        pipeline.delete(job)
        pipeline.set(job, "garbage")

    registry.store.commands(spoil)
    for number in range(8):
        noted.send(number, delay=5.5, once=number % 2 == 0)
    wait_for(lambda: sorted(noted()) == [*range(8)], "the others", PATIENCE)
    assert sorted(noted.until(8)) == [*range(8)]  # the bad ones have asked at least twice
    # One warning for all records with one fault.
    assert 1 <= worker.log.count("cannot be read") <= 3
    registry.store.commands(lambda pipe: pipe.delete(*records, job))
    expected = ["bad"] * 10 + ["in a job"]
    wait_for(lambda: sorted(map(str, noted()))[8:] == expected, "the tasks", PATIENCE)
