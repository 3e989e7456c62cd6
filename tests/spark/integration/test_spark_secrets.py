"""A write by URLs over TLS; no password is in Spark's plans, events, errors or its own log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from kombu import Connection, Queue
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from celery_rabbitdelay.kombu import Topology, binary
from celery_rabbitdelay.publishing.declaration import declare
from celery_rabbitdelay.spark import dispatch
from tests.certificates import Certificates
from tests.node_control import add_user
from tests.rabbitmq_node import RabbitMQNode
from tests.redis_servers import ConfiguredRedis
from tests.spark.integration.spark_fixtures import write
from tests.told import told
from tests.whole.integration.test_tls import certificates, tls_node

__all__ = ["certificates", "tls_node"]

#: The password of broker and registry, and a part of the wrong ones.
PLANTED: Final = "opensesame"

USER: Final = "planted-spark"


@pytest.fixture
def options(tls_node: RabbitMQNode, certificates: Certificates) -> Iterator[dict[str, str]]:
    """The options of a write to a broker and with a registry that have that password."""
    prefix = f"test-{uuid4().hex[:8]}"
    with Connection(tls_node.url, ssl=tls_node.ssl) as connection:
        Queue(f"{prefix}.default")(connection.default_channel).declare()
        # Not by Spark's own application, whose sends have a limit of 30 s.
        declare(connection, Topology(prefix, binary()))
    add_user(tls_node, USER, ".*", ".*", ".*", PLANTED)
    with ConfiguredRedis(password=PLANTED) as redis:
        yield {
            "broker": tls_node.url.replace("guest:guest@127.0.0.1", f"{USER}@localhost"),
            "brokerPassword": PLANTED,
            "brokerCaFile": str(certificates.authority),
            "brokerCertFile": str(certificates.client),
            "brokerKeyFile": str(certificates.client_key),
            "registry": f"redis://127.0.0.1:{redis.port}/0",
            "registryPassword": PLANTED,
            "prefix": prefix,
            "layout": "binary",  # of few queues
            "queue": f"{prefix}.default",
        }


def test_no_password_is_in_a_plan_an_event_or_an_error(
    spark: SparkSession,
    spark_folder: Path,
    certificates: Certificates,
    options: dict[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    frame = spark.sql("select array(id) args, double(600) delay from range(0, 4, 1, 2)")
    write(frame, **options)
    given: dict[str, Any] = {**options}
    report = dispatch(frame, "note", **given)
    assert report.confirmed == 4
    shown = [repr(report)]
    application = {name: value for name, value in options.items() if name != "queue"}
    for what in ("pending", "undeliverable", "levels"):
        waiting = spark.read.format("rabbitdelay").options(**application, what=what).load()
        waiting.explain(True)
        shown.append(str(waiting.collect()))
    assert sum(row.messages for row in waiting.collect()) >= 1
    wrong: list[tuple[str, str, dict[str, str]]] = [
        ("ACCESS_REFUSED", "levels", {"brokerPassword": f"{PLANTED}-wrong"}),
        ("CERTIFICATE_VERIFY_FAILED", "levels", {"brokerCaFile": str(certificates.client)}),
        ("Connection ?refused", "levels", {"broker": f"amqps://{USER}@127.0.0.1:1//"}),
        ("password", "pending", {"registryPassword": f"{PLANTED}-wrong"}),
    ]
    # Reads, as a write tries for half a minute.
    for error, what, each in wrong:
        refused = spark.read.format("rabbitdelay").options(**{**application, **each}, what=what)
        with pytest.raises((PySparkException, Py4JError), match=error) as failed:
            refused.load().collect()
        shown.append(told(failed.value))
    with pytest.raises((PySparkException, Py4JError), match="maxRate") as failed:
        write(frame, **{**options, "maxRate": "none"})
    shown.append(told(failed.value))
    logs = [each for each in (spark_folder / "events").rglob("*") if each.is_file()]
    text = "\n".join(log.read_text() for log in logs)
    assert "SparkListenerSQLExecutionStart" in text
    printed = capfd.readouterr()
    assert "== Physical Plan ==" in printed.out
    for each_text in (*shown, text, printed.out, printed.err):
        assert PLANTED not in each_text
