"""What a worker serves to Prometheus, and what a producer counts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection
from prometheus_client import CollectorRegistry

from celery_rabbitdelay import PublishError, RegistryUnavailable, Row, RowsNotConfirmed
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.metrics import Scraped, is_served
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, named
from tests.integration.worker import Worker, run_celery


@pytest.fixture
def port() -> int:
    return free_port()


def scraped(port: int, condition: Callable[[Scraped], object], what: str) -> Scraped:
    """Read a worker's metrics until they say what is expected, and return them."""
    latest: list[Scraped] = []

    def is_true() -> object:
        latest[:] = [Scraped.of_port(port)]
        return condition(latest[0])

    wait_for(is_true, what, PATIENCE, interval=0.2)
    return latest[0]


def of_process(shop: Any) -> Scraped:
    """Return what the process of the test counts."""
    return Scraped(shop.rabbitdelay.metrics.collect())


def test_nothing_is_served_and_nothing_counted_unless_a_port_is_set(
    shop: Any, worker: Worker, port: int
) -> None:
    assert shop.tasks["look"].apply_async(delay=0.3).get(timeout=PATIENCE)
    assert "metrics" not in vars(shop.rabbitdelay)
    assert "Metrics are served" not in worker.log
    # Without Redis: redis-py imports OpenTelemetry's SDK, if it is installed.
    settings = {k: v for k, v in worker._settings.items() if k != "result_backend"}
    program = (
        "import sys, tests.integration.shop as shop; shop.app.send_task('look', delay=60); "
        "print(*sys.modules)"
    )
    imported = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **Worker.environment(settings)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "celery_rabbitdelay.app.metrics" in imported
    assert {"prometheus_client", "opentelemetry.sdk.metrics"}.isdisjoint(imported)


def test_processes_of_the_pool_tell_what_they_send_also_when_they_are_killed(
    shop: Any, configuration: dict[str, Any], port: int, noted: Notes
) -> None:
    key = uuid4().hex
    with Worker(
        {**configuration, "rabbitdelay_metrics_port": port, "worker_max_tasks_per_child": 2}
    ):
        # Two of them send and live on; one retries, and its process is killed by its first run.
        for number in range(5):
            shop.tasks["send"].apply_async(
                ("note", {"args": [number], "kwargs": {"key": noted.key}, "delay": 0.3})
            ).get(timeout=PATIENCE)
        shop.tasks["retry"].apply_async(([], 2, {"countdown": 0.3})).get(timeout=PATIENCE)
        shop.tasks["lost-retry"].apply_async((key,)).get(timeout=PATIENCE)
        found = scraped(
            port, lambda now: now.total("lateness_seconds_count") >= 8, "eight arrivals"
        )
    default = named(shop, "default")
    assert found.values("sent_total") == {
        (default, "note"): 5,
        (default, "retry"): 2,
        (default, "lost-retry"): 1,
    }
    assert found.values("confirmed_total") == found.values("sent_total")
    assert found.values("lateness_seconds_count") == found.values("sent_total")
    assert found.total("refused_total") == 0
    assert not is_served(port)
