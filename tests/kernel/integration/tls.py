"""Servers that take TLS only, and from clients with a certificate only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_rabbitdelay.testing import Certificates, RabbitMQServer, RedisServer
from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.shop import make_app


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, and the certificates of a server and a client."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_node(broker_root: Path | None, certificates: Certificates) -> Iterator[RabbitMQServer]:
    """A node that takes AMQP and HTTP over TLS only."""
    with RabbitMQServer(
        broker_root,
        management=True,
        plugins=["rabbitmq_auth_mechanism_ssl"],
        settings=[
            "auth_mechanisms.1 = PLAIN",
            "auth_mechanisms.2 = EXTERNAL",
            "ssl_cert_login_from = common_name",
        ],
        certificates=certificates,
    ) as node:
        yield node


@pytest.fixture(scope="module")
def tls_redis(certificates: Certificates) -> Iterator[RedisServer]:
    """A Redis for the registry that takes TLS only."""
    with RedisServer(certificates) as server:
        yield server


@pytest.fixture
def tls_configuration(
    tls_node: RabbitMQServer, tls_redis: RedisServer, redis_url: str
) -> dict[str, Any]:
    """The settings of an application whose broker and registry take TLS only."""
    own: dict[str, Any] = {
        "broker_use_ssl": tls_node.ssl,
        "rabbitdelay_registry_url": tls_redis.url,
        "rabbitdelay_registry_options": {"socket_timeout": 10, **(tls_redis.ssl or {})},
    }
    return small_configuration(tls_node.url, redis_url, **own)


@pytest.fixture
def tls_shop(tls_configuration: dict[str, Any]) -> Iterator[Any]:
    """That application."""
    app = make_app(tls_configuration)
    yield app
    app.close()
