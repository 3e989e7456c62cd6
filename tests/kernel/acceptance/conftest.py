"""The nodes of pytest-celery's ``celery_setup``, which are processes of this machine.

pytest-celery takes its nodes for containers; see :class:`ProcessAsContainer`.
"""

import os
from collections.abc import Iterator
from signal import Signals
from typing import Any
from uuid import uuid4

import pytest
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestSetup, CeleryTestWorker

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server
from tests.certificates import Certificates
from tests.kernel.integration.conftest import application
from tests.kernel.integration.worker import Worker


class ProcessAsContainer:
    """What pytest-celery asks of a Docker container, answered by a server process."""

    def __init__(self, server: Server) -> None:
        self._server = server

    @property
    def status(self) -> str:
        """``running`` or ``exited``, as Docker calls it."""
        return "running" if self._server.running else "exited"

    @property
    def celeryconfig(self) -> dict[str, str]:
        """The URL for workers and for tests."""
        return {"url": self._server.url, "host_url": self._server.url}

    def kill(self, signal: str) -> None:
        """Send a signal; as in a container, SIGKILL ends all processes."""
        if signal == "SIGKILL":
            self._server.kill()
        else:
            os.kill(self._server.pid, Signals[signal])

    def restart(self, timeout: float) -> None:
        """Start the process, which has ended."""
        self._server.start()

    def reload(self) -> None:
        """Do nothing: the state is always that of now."""


@pytest.fixture(scope="session")
def broker_use_ssl(broker_certificates: Certificates | None) -> dict[str, Any] | bool:
    """Celery's setting for all applications of the tests; False without ``RABBITDELAY_TLS``."""
    return False if broker_certificates is None else broker_certificates.for_amqp()


@pytest.fixture
def celery_broker(private_rabbitmq: RabbitMQServer) -> CeleryTestBroker:
    return CeleryTestBroker(ProcessAsContainer(private_rabbitmq))


@pytest.fixture
def celery_backend(private_redis: RedisServer) -> CeleryTestBackend:
    return CeleryTestBackend(ProcessAsContainer(private_redis))


@pytest.fixture
def celery_setup_config(
    celery_worker_cluster_config: dict[str, Any], broker_use_ssl: dict[str, Any] | bool
) -> dict[str, Any]:
    """What a user would set for tasks that must not be lost; the levels are the default ones."""
    urls = CeleryTestSetup.config(celery_worker_cluster_config)
    prefix = f"test-{uuid4().hex[:8]}"
    own = {"prefix": prefix, "rabbitdelay_prefix": prefix, "task_acks_late": True}
    return {**urls, **own, "broker_use_ssl": broker_use_ssl}


@pytest.fixture
def celery_setup_app(celery_setup_config: dict[str, Any]) -> Iterator[Any]:
    with application(celery_setup_config) as app:
        yield app


@pytest.fixture
def celery_worker(
    celery_setup_app: Any, celery_setup_config: dict[str, Any]
) -> Iterator[CeleryTestWorker]:
    with Worker(celery_setup_config) as worker:
        yield CeleryTestWorker(ProcessAsContainer(worker), celery_setup_app)
