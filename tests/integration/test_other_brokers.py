"""On another broker than RabbitMQ a delay is Celery's countdown: held by the worker, never lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from kombu import Connection

from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.publishing.declaration import declare
from tests.integration.arrivals import take
from tests.integration.shop import PATIENCE, make_app
from tests.integration.worker import Worker


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


def test_by_a_connection_to_rabbitmq_many_rows_wait_in_its_levels(
    redis_shop: Any, topology: Topology, connection: Connection
) -> None:
    declare(connection, topology)
    redis_shop.conf.update(rabbitdelay_prefix=topology.prefix, rabbitdelay_layout=topology.layout)
    rows = [{"delay": 2.03 + number * 0.04} for number in range(20)]
    report = redis_shop.rabbitdelay.send_many("look", rows, tolerance=1, connection=connection)
    # All have the same tick within their tolerances, and eight ticks without it.
    assert (report.confirmed, report.messages < 8) == (20, True)
    default = redis_shop.amqp.queues[f"{topology.prefix}.default"]
    # A row that shares its tick with none is a message of its own.
    take(connection, [default, topology.module_queues.distribution], report.messages)
    default(connection.default_channel).delete()
