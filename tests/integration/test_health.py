"""The answers of a worker to the health checks of an orchestrator."""

from __future__ import annotations

import os
import signal
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen
from uuid import uuid4

import pytest

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.testing.servers import free_port
from tests.integration.shop import PATIENCE
from tests.integration.worker import Worker


class Probes:
    """Asks a worker as an orchestrator does."""

    def __init__(self) -> None:
        self.port = free_port()

    def ask(self, path: str) -> tuple[int, str]:
        """Return the status, and the text; the status is 0 if nobody listens."""
        try:
            with urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except URLError as error:
            return 0, str(error)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.ask("readyz") == (200, "ok\n"), "a worker that is ready", PATIENCE)

    def wait_until_not_ready(self, why: str) -> None:
        def is_unready() -> bool:
            status, text = self.ask("readyz")
            return status == 503 and text.startswith(why)

        wait_for(is_unready, f"a worker that is not ready: {why}", PATIENCE)
        assert self.ask("healthz") == (200, "ok\n")


@pytest.fixture
def probes() -> Probes:
    return Probes()


@pytest.fixture
def configuration(configuration: dict[str, Any], probes: Probes) -> dict[str, Any]:
    return {
        **configuration,
        "rabbitdelay_metrics_port": probes.port,
        "broker_connection_max_retries": None,
    }


def test_a_worker_is_ready_while_it_is_connected(
    worker: Worker, probes: Probes, private_rabbitmq: RabbitMQServer
) -> None:
    probes.wait_until_ready()
    assert probes.ask("healthz") == (200, "ok\n")
    assert "celery_rabbitdelay_" in probes.ask("metrics")[1]
    # Not killed: RabbitMQ 3.10 may never serve a quorum queue again that is a moment old then.
    private_rabbitmq.ctl("stop_app")
    try:
        probes.wait_until_not_ready("not connected to the broker")
    finally:
        private_rabbitmq.ctl("start_app")
    probes.wait_until_ready()


def test_a_worker_that_ends_is_alive_and_not_ready_until_its_task_has_ended(
    shop: Any, configuration: dict[str, Any], probes: Probes
) -> None:
    key = uuid4().hex
    redis: Any = shop.backend.client
    with Worker(configuration) as worker:
        shop.tasks["retry-when"].apply_async((key,))
        wait_for(lambda: redis.get(key) == b"first", "a task that runs", PATIENCE)
        os.kill(worker.pid, signal.SIGTERM)
        probes.wait_until_not_ready("consuming from no queue")
        redis.set(key, "go on")
        wait_for(lambda: not worker.running, "the worker's end", PATIENCE)
    assert probes.ask("healthz")[0] == 0
    redis.delete(key)
