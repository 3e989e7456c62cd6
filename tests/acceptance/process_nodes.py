"""pytest-celery's nodes as processes: one RabbitMQ and one Redis for all tests, a worker each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from pytest_celery import CeleryWorkerContainer, RabbitMQContainer, RedisContainer
from redis import Redis

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server
from tests.acceptance.journal_task import JOURNAL
from tests.acceptance.names import QUEUE
from tests.acceptance.process_container import (
    RabbitMQProcess,
    RedisProcess,
    ServerAsContainer,
    WorkerProcess,
    WorkerProcessContainer,
)

REPOSITORY: Final = Path(__file__).resolve().parents[2]


@pytest.fixture
def default_rabbitmq_broker(private_rabbitmq: RabbitMQServer) -> Iterator[RabbitMQContainer]:
    """The broker: a node of our own, always in working order."""
    container = RabbitMQProcess(_node_of_the_session(private_rabbitmq, "rabbitmq", "5672/tcp"))
    _delete_queue(container)
    yield container
    # A node that the test has left dead is started by the next test and cleaned then.
    with contextlib.suppress(OSError):
        _delete_queue(container)


def _node_of_the_session(server: Server, kind: str, port: str) -> ServerAsContainer:
    return ServerAsContainer(server, kind, port, log_from=len(server.log))


def _delete_queue(container: RabbitMQContainer) -> None:
    with container.client as connection:
        connection.connect()  # tries once, where the default channel would try for ever
        channel: Any = connection.default_channel
        channel.queue_delete(QUEUE)


@pytest.fixture(scope="session")
def own_redis() -> Iterator[RedisServer]:
    """A Redis that is a process of this one's own, as a container is."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def default_redis_backend(own_redis: RedisServer) -> Iterator[RedisContainer]:
    """The result backend: a server of our own."""
    container = RedisProcess(_node_of_the_session(own_redis, "redis", "6379/tcp"))
    with Redis.from_url(container.url) as client:
        client.delete(JOURNAL)
        yield container
        client.delete(JOURNAL)


@pytest.fixture
def default_worker_container_cls() -> type[CeleryWorkerContainer]:
    """The class of the worker's wrapper."""
    return WorkerProcessContainer


@pytest.fixture(scope="session")
def default_worker_container_session_cls() -> type[CeleryWorkerContainer]:
    """The class of the worker's wrapper, where pytest-celery asks for it once."""
    return WorkerProcessContainer


@pytest.fixture
def default_worker_container(
    default_worker_container_cls: type[CeleryWorkerContainer],
    default_worker_command: list[str],
    default_worker_env: dict[str, str],
    default_worker_initial_content: dict[str, bytes],
) -> Iterator[CeleryWorkerContainer]:
    """A worker of this test's own."""
    process = WorkerProcess(
        command=default_worker_command,
        environment=default_worker_env,
        content=default_worker_initial_content,
        paths=[REPOSITORY],
    )
    with process:
        container = ServerAsContainer(process, "worker", environment=default_worker_env)
        yield default_worker_container_cls(container)
        # As `docker rm --force` does: what the worker still holds is of no interest any more.
        process.kill()
