"""The servers that tests run against: private ones, or those that the environment names.

``RABBITDELAY_BROKER_URL`` and ``RABBITDELAY_REDIS_URL`` name servers that already run. Tests that
kill, suspend or starve a broker always do that to a private one. ``RABBITDELAY_BROKER_ROOT`` is
a folder with a Debian system whose RabbitMQ is run instead of the machine's. With
``RABBITDELAY_TLS``, the acceptance tests reach a private RabbitMQ over TLS with client
certificates.
"""

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
from celery import _state
from kombu import pools

from celery_rabbitdelay.app.celery_internals import forget_connections
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, Server
from celery_rabbitdelay.testing.plugin import LONG_TRAVELS
from tests.certificates import Certificates
from tests.node_control import add_virtual_host
from tests.private_broker import QUIET
from tests.rabbitmq_node import RabbitMQNode
from tests.shared_servers import leave, shared

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


def pytest_sessionfinish() -> None:
    """Leave the servers that the processes of this run share."""
    leave()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def process_name() -> str:
    """The name of this process among those of the run; "master", if it is the only one."""
    return os.environ.get("PYTEST_XDIST_WORKER", "master")


@pytest.fixture(scope="session")
def session_rabbitmq(
    run_folder: Path,
    process_name: str,
    broker_root: Path | None,
    broker_certificates: Certificates | None,
) -> RabbitMQServer:
    """A virtual host of this process, on the node of this run, which no test may kill."""

    def make() -> RabbitMQServer:
        settings = (*QUIET, LONG_TRAVELS)
        return RabbitMQNode(
            broker_root, settings, management=True, certificates=broker_certificates
        )

    node: Any = InVirtualHost(shared(run_folder / "rabbitmq", make), process_name)
    return cast("RabbitMQServer", node)


@pytest.fixture(scope="session")
def own_rabbitmq(
    broker_root: Path | None, broker_certificates: Certificates | None
) -> Iterator[RabbitMQServer]:
    """A RabbitMQ node of this process."""
    with RabbitMQNode(broker_root, QUIET, certificates=broker_certificates) as server:
        yield server


@pytest.fixture
def private_rabbitmq(
    request: pytest.FixtureRequest, own_rabbitmq: RabbitMQServer
) -> Iterator[RabbitMQServer]:
    """A RabbitMQ node that a test may kill, as long as the next test finds it in working order."""
    others = {"session_rabbitmq", "module_broker_url"}.intersection(request.fixturenames)
    assert not others, "the test would kill one broker, and look at another one"
    if not own_rabbitmq.running:
        own_rabbitmq.start()
    process = own_rabbitmq.pid
    yield own_rabbitmq
    # kombu keeps connections for whoever uses the same URL next; these may be to a killed node.
    pools.reset()
    # Applications that outlive the test hold on to pools, which are closed now. Celery's types do
    # not know its own list of applications.
    for app in _state._get_active_apps():  # type: ignore[attr-defined]
        if getattr(app, "_pool", None) is not None:
            forget_connections(app)
    if not own_rabbitmq.running or own_rabbitmq.pid != process:
        # The test has restarted the node, and deleted its levels maybe at once. RabbitMQ 3.10.8
        # then loses the supervisor of dead-lettering, and all quorum queues with it, until it is
        # started again.
        own_rabbitmq.kill()


@pytest.fixture
def broker_url(request: pytest.FixtureRequest) -> str:
    """The URL of the RabbitMQ to test against: the private one, if the test has it."""
    is_private = "private_rabbitmq" in request.fixturenames
    return _url(request, "BROKER", "private_rabbitmq" if is_private else "session_rabbitmq")


@pytest.fixture(scope="module")
def module_broker_url(request: pytest.FixtureRequest) -> str:
    """The same, for what lives as long as a module: never the private one."""
    return _url(request, "BROKER", "session_rabbitmq")


def _url(request: pytest.FixtureRequest, kind: str, fixture: str) -> str:
    """Return the URL of the server that the environment names, or of that of a fixture."""
    url: str = os.environ.get(f"RABBITDELAY_{kind}_URL") or request.getfixturevalue(fixture).url
    return url


@pytest.fixture(scope="session")
def private_redis(run_folder: Path, process_name: str) -> RedisServer:
    """A database of this process, on the Redis of this run."""
    server: Any = InDatabase(shared(run_folder / "redis", RedisServer), process_name)
    return cast("RedisServer", server)


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    """The URL of the Redis to test against."""
    return _url(request, "REDIS", "private_redis")


class InVirtualHost:
    """A server, with the URL of a virtual host of its own.

    Args:
        server: The server.
        name: The name of the virtual host, which is made.
    """

    def __init__(self, server: RabbitMQServer, name: str) -> None:
        self._server = server
        self.virtual_host = name
        self.url = f"{server.url.removesuffix('//')}/{name}"
        add_virtual_host(server, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class InDatabase:
    """A server, with the URL of a database of a process's own.

    Args:
        server: The server.
        process: The name of the process.
    """

    def __init__(self, server: RedisServer, process: str) -> None:
        self._server = server
        number = "".join(filter(str.isdigit, process)) or "0"
        self.url = f"{server.url.removesuffix('/0')}/{number}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


@pytest.fixture(scope="session")
def rabbitdelay_broker(session_rabbitmq: InVirtualHost, process_name: str) -> InVirtualHost:
    """The RabbitMQ of the tests that travel in time; their workers answer no other test."""
    return InVirtualHost(session_rabbitmq._server, f"travelling-{process_name}")


@pytest.fixture(scope="session")
def rabbitdelay_redis(private_redis: RedisServer) -> RedisServer:
    """The Redis of the tests that travel in time."""
    return private_redis
