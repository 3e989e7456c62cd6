"""The answers of a worker to the health checks of an orchestrator."""

from __future__ import annotations

from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

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
