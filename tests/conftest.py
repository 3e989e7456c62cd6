"""The servers that tests run against: private ones, or those that the environment names.

``RABBITDELAY_BROKER_URL`` and ``RABBITDELAY_REDIS_URL`` name servers that already run. Tests that
kill, suspend or starve a broker always do that to a private one. ``RABBITDELAY_BROKER_ROOT`` is
a folder with a Debian system whose RabbitMQ is run instead of the machine's. With
``RABBITDELAY_TLS``, the acceptance tests reach a private RabbitMQ over TLS with client
certificates.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from celery import _state
from celery.signals import before_task_publish
from hypothesis import HealthCheck, Phase, settings
from kombu import pools

from celery_rabbitdelay.app.celery_internals import forget_connections
from celery_rabbitdelay.testing import Certificates, RabbitMQServer, RedisServer, Server
from tests.node_control import add_virtual_host
from tests.private_broker import QUIET

# A busy machine is no error: how long an example takes says nothing.
settings.register_profile(
    "no-deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For tests.mutation: one example that fails is enough, and each run tries the same ones.
settings.register_profile(
    "mutation",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("no-deadline")

# With a receiver of its signals, Celery itself makes the message of each send, and no template of
# ours: RABBITDELAY_WITHOUT_TEMPLATES=1 make test.
if os.environ.get("RABBITDELAY_WITHOUT_TEMPLATES"):
    before_task_publish.connect(lambda **_: None, weak=False)
    collect_ignore = ["unit/test_templates.py", "unit/test_message_template.py"]

#: Characters of each server's log that the report of a failed test shows.
LOG_TAIL: Final = 3000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the logs of brokers and workers to the report of a failed test."""
    report = yield
    if report.failed:
        fixtures = getattr(item, "funcargs", {}).values()
        for server in {each for each in fixtures if isinstance(each, Server)}:
            report.sections.append((f"The log of {server.package}", server.log[-LOG_TAIL:]))
    return report


@pytest.fixture(scope="session")
def broker_root() -> Path | None:
    """The system whose RabbitMQ is run; None for the machine's own."""
    root = os.environ.get("RABBITDELAY_BROKER_ROOT")
    return Path(root) if root else None


@pytest.fixture(scope="session")
def broker_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates | None:
    """The certificates of the session's broker with ``RABBITDELAY_TLS``; None without."""
    if not os.environ.get("RABBITDELAY_TLS"):
        return None
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def session_rabbitmq(
    broker_root: Path | None, broker_certificates: Certificates | None
) -> Iterator[RabbitMQServer]:
    """The RabbitMQ node of this session."""
    with RabbitMQServer(broker_root, QUIET, certificates=broker_certificates) as server:
        yield server


@pytest.fixture
def private_rabbitmq(session_rabbitmq: RabbitMQServer) -> Iterator[RabbitMQServer]:
    """A RabbitMQ node that a test may kill, as long as the next test finds it in working order."""
    if not session_rabbitmq.running:
        session_rabbitmq.start()
    process = session_rabbitmq.pid
    yield session_rabbitmq
    # kombu keeps connections for whoever uses the same URL next; these may be to a killed node.
    pools.reset()
    # Applications that outlive the test hold on to pools, which are closed now. Celery's types do
    # not know its own list of applications.
    for app in _state._get_active_apps():  # type: ignore[attr-defined]
        if getattr(app, "_pool", None) is not None:
            forget_connections(app)
    if not session_rabbitmq.running or session_rabbitmq.pid != process:
        # The test has restarted the node, and deleted its levels maybe at once. RabbitMQ 3.10.8
        # then loses the supervisor of dead-lettering, and all quorum queues with it, until it is
        # started again.
        session_rabbitmq.kill()
        session_rabbitmq.start()


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of the RabbitMQ to test against."""
    url = os.environ.get("RABBITDELAY_BROKER_URL")
    if url:
        return url
    server: RabbitMQServer = request.getfixturevalue("private_rabbitmq")
    return server.url


@pytest.fixture(scope="module")
def module_broker_url(request: pytest.FixtureRequest) -> str:
    """The same, for what lives as long as a module whose tests leave the broker alone."""
    url = os.environ.get("RABBITDELAY_BROKER_URL")
    if url:
        return url
    server: RabbitMQServer = request.getfixturevalue("session_rabbitmq")
    if not server.running:
        server.start()
    return server.url


@pytest.fixture(scope="session")
def private_redis() -> Iterator[RedisServer]:
    """The Redis server of this session."""
    with RedisServer() as server:
        yield server
        # A result of Celery's unsubscribes when it is collected, and would wait for a Redis that
        # is gone.
        gc.collect()


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    """The URL of the Redis to test against."""
    url = os.environ.get("RABBITDELAY_REDIS_URL")
    if url:
        return url
    server: RedisServer = request.getfixturevalue("private_redis")
    return server.url


class InVirtualHost:
    """A server, with the URL of a virtual host of its own.

    Args:
        server: The server.
        name: The name of the virtual host, which is made.
    """

    def __init__(self, server: RabbitMQServer, name: str) -> None:
        self._server = server
        self.url = f"{server.url.rstrip('/')}/{name}"
        add_virtual_host(server, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@pytest.fixture(scope="session")
def rabbitdelay_broker(session_rabbitmq: RabbitMQServer) -> InVirtualHost:
    """The RabbitMQ of the tests that travel in time; their workers answer no other test."""
    return InVirtualHost(session_rabbitmq, "travelling")


@pytest.fixture(scope="session")
def rabbitdelay_redis(private_redis: RedisServer) -> RedisServer:
    """The Redis of the tests that travel in time."""
    return private_redis
