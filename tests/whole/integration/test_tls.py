"""Everything works over TLS with client certificates: AMQP, the registry, the management API."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import celery
import pytest
from kombu import Connection, Queue

from celery_rabbitdelay.exceptions import ConfirmTimeout, ConnectionLost
from celery_rabbitdelay.publishing.publisher import Publisher
from tests.certificates import Certificates
from tests.json_schemas import checked
from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.publishing import publish
from tests.kernel.integration.shop import PATIENCE, make_app, named
from tests.kernel.integration.worker import Worker, run_celery
from tests.operations.integration.management import wait_until_managed
from tests.rabbitmq_node import RabbitMQNode, TLSRedis

#: Levels in which tasks wait for long enough that none is due before it is moved.
LONG: Final = {"rabbitdelay_layout": [("minutes", 6, 60), ("seconds", 60, 1)]}


# Servers that take TLS only, and from clients with a certificate only.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority, and the certificates of a server and a client."""
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls_node(broker_root: Path | None, certificates: Certificates) -> Iterator[RabbitMQNode]:
    """A node that takes AMQP and HTTP over TLS only."""
    with RabbitMQNode(
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
def tls_redis(certificates: Certificates) -> Iterator[TLSRedis]:
    """A Redis for the registry that takes TLS only."""
    with TLSRedis(certificates) as server:
        yield server


@pytest.fixture
def tls_configuration(
    tls_node: RabbitMQNode, tls_redis: TLSRedis, redis_url: str
) -> dict[str, Any]:
    """The settings of an application whose broker and registry take TLS only."""
    own: dict[str, Any] = {
        "broker_use_ssl": tls_node.ssl,
        "rabbitdelay_registry_url": tls_redis.url,
        "rabbitdelay_registry_options": {"socket_timeout": 10, **tls_redis.ssl},
    }
    return small_configuration(tls_node.url, redis_url, **own)


@pytest.fixture
def tls_shop(tls_configuration: dict[str, Any]) -> Iterator[Any]:
    """That application."""
    app = make_app(tls_configuration)
    yield app
    app.close()


def connection_to(node: RabbitMQNode, **options: Any) -> Connection:
    return Connection(node.url, ssl=node.ssl, **options)


@pytest.mark.parametrize("of_another_authority", [False, True], ids=["no certificate", "another"])
def test_who_is_not_trusted_is_refused_and_the_error_has_no_password(
    tls_configuration: dict[str, Any], tmp_path: Path, of_another_authority: bool
) -> None:
    """A client without a certificate; a server of an authority that the client does not know.

    The first is refused by the server, the second by the client.
    """
    told = tls_configuration["broker_use_ssl"]
    if of_another_authority:
        told = {**told, "ca_certs": str(Certificates.make(tmp_path).authority)}
    else:
        told = {"ca_certs": told["ca_certs"], "cert_reqs": int(ssl.CERT_REQUIRED)}
    app: Any = make_app({**tls_configuration, "broker_use_ssl": told})
    with pytest.raises(ConnectionLost) as caught:
        app.tasks["look"].apply_async(delay=1, confirm_timeout=10)
    assert "guest:guest" not in str(caught.value)
    assert ("CERTIFICATE_VERIFY_FAILED" in str(caught.value)) is of_another_authority
    app.close()


def test_tasks_envelopes_and_unaware_producers_reach_a_worker(
    tls_configuration: dict[str, Any], tls_shop: Any, tls_node: RabbitMQNode
) -> None:
    look, default = tls_shop.tasks["look"], named(tls_shop, "default")
    with Worker(tls_configuration, None) as worker, connection_to(tls_node) as connection:
        before = time.time()
        # By the levels, by distribution, and above the capacity of 5.9 s by meditation.
        results = {
            1.5: look.apply_async((1,), delay=1.5, key="alone"),
            1: look.apply_async((2,), delay=1, priority=9),
            7: look.apply_async((3,), delay=7),
        }
        rows = [{"args": (number,), "delay": 1, "task_id": f"{uuid4()}"} for number in range(50)]
        assert tls_shop.rabbitdelay.send_many(look, rows).envelopes > 0
        plain = celery.Celery("plain", broker=tls_node.url, set_as_current=False)
        plain.conf.task_queues = [Queue(default, no_declare=True)]
        # The pools of kombu before 5.6 do not tell connections apart by their certificates.
        unaware = plain.send_task(
            "look", (4,), countdown=2, queue=default, connection=connection.clone()
        )
        results[2] = tls_shop.AsyncResult(unaware.id)
        for delay, result in results.items():
            assert result.get(timeout=PATIENCE)["at"] >= before + delay
        for row in rows:
            tls_shop.AsyncResult(row["task_id"]).get(timeout=PATIENCE)
        assert ": reconnecting" not in worker.log
    plain.close()


def test_the_commands_of_an_operator(
    tls_configuration: dict[str, Any], tls_node: RabbitMQNode, make_shop: Any, broker_url: str
) -> None:
    def run(schema: str, command: str, settings: dict[str, Any]) -> dict[str, Any]:
        done = run_celery(settings, f"rabbitdelay {command} --json")
        assert done.returncode == 0, done.stderr
        return checked(schema, done.stdout)

    own, prefix = {**tls_configuration, **LONG}, tls_configuration["prefix"]
    other = {**own, "rabbitdelay_registry_prefix": prefix, "rabbitdelay_prefix": f"{prefix}-new"}
    assert run("declare", "declare --queues", own)
    assert run("status", "status", own)
    wait_until_managed(tls_node)
    assert run("verify", f"verify --management {tls_node.management_url}", own)
    assert run("undeliverable_list", "undeliverable list", own)["messages"] == []
    app: Any = make_app(own)
    without = make_shop(**LONG)
    for number in range(40):
        (app, without)[number % 2].tasks["look"].apply_async((number,), delay=300)
    app.close()
    assert run("moved", f"migrate --from-prefix {prefix}", other)["moved"] == 20
    # From a broker without TLS.
    former = without.conf.rabbitdelay_prefix
    settings = {name: each for name, each in own.items() if "registry" not in name}
    settings |= {"prefix": former, "rabbitdelay_prefix": former}
    assert run("moved", f"transfer --from {broker_url}", settings)["moved"] == 20


def test_a_frozen_broker_costs_a_producer_no_more_than_its_timeout(
    tls_node: RabbitMQNode,
) -> None:
    queue = f"test-{uuid4().hex[:8]}"
    with connection_to(tls_node, connect_timeout=30) as connection:
        Queue(queue)(connection.default_channel).declare()
        publisher = Publisher(connection.clone())
        publish(publisher, queue)
        tls_node.suspend()
        try:
            began = time.monotonic()
            with pytest.raises(ConfirmTimeout):
                publish(publisher, queue, timeout=1)
            # Not for the 30 s of connecting, which py-amqp gives to TLS's closing handshake too.
            assert time.monotonic() - began < 25
        finally:
            tls_node.resume()


def test_the_certificate_alone_authenticates_the_user(
    tls_configuration: dict[str, Any], tls_node: RabbitMQNode
) -> None:
    settings = {
        **tls_configuration,
        "broker_url": tls_node.url.replace("guest:guest@", "nobody:wrong@"),
        "broker_login_method": "EXTERNAL",
    }
    app: Any = make_app(settings)
    with Worker(settings):
        assert app.tasks["look"].apply_async((1,), delay=0.5).get(timeout=PATIENCE)["given"] == [1]
    app.close()
