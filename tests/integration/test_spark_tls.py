"""Spark's driver and executors reach RabbitMQ over TLS with client certificates."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from kombu import Connection, Queue
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from celery_rabbitdelay.testing import Certificates, RabbitMQServer
from tests.integration.conftest import LEVELS
from tests.integration.notes import Notes
from tests.integration.spark_apps import app_of
from tests.integration.spark_fixtures import shop, spark
from tests.integration.spark_fixtures import write as write_to
from tests.integration.tls import certificates, tls_node

__all__ = ["certificates", "shop", "spark", "tls_node"]

#: Where Spark's Python processes find the application.
APP = app_of(__name__)


@pytest.fixture(scope="module")
def settings(tls_node: RabbitMQServer, redis_url: str) -> dict[str, Any]:
    """The settings of the application; the levels are those of Spark's option ``layout``."""
    prefix = f"test-{uuid4().hex[:8]}"
    return {
        "prefix": prefix,
        "broker_url": tls_node.url,
        "broker_use_ssl": tls_node.ssl,
        "result_backend": redis_url,
        "rabbitdelay_prefix": prefix,
        "rabbitdelay_layout": LEVELS,
    }


def test_an_imported_application_brings_its_certificates(
    spark: SparkSession, shop: Any, noted: Notes
) -> None:
    frame = spark.sql(
        f"select array(id) args, named_struct('key', '{noted.key}') kwargs, 0.5 delay "
        "from range(0, 200, 1, 4)"
    )
    write_to(frame, app=APP)
    noted.wait(200)
    assert sorted(noted()) == list(range(200))
    for what, number in (
        ("levels", len(shop.rabbitdelay.topology.digit_queues)),
        ("undeliverable", 0),
    ):
        read = spark.read.format("rabbitdelay").options(app=APP, what=what)
        assert read.load().count() == number


def test_an_application_of_a_url_takes_the_files_as_options(
    spark: SparkSession, tls_node: RabbitMQServer, certificates: Certificates
) -> None:
    given = {
        "broker": tls_node.url.replace(":guest@127.0.0.1", "@localhost"),
        "brokerPassword": "guest",
        "prefix": f"test-{uuid4().hex[:8]}",
        "layout": "binary",  # of few queues, which a slow machine declares in time
        "brokerCaFile": str(certificates.authority),
        "brokerCertFile": str(certificates.client),
        "brokerKeyFile": str(certificates.client_key),
    }
    queue = f"{given['prefix']}-queue"
    with Connection(tls_node.url, ssl=tls_node.ssl) as connection:
        Queue(queue)(connection.default_channel).declare()
    frame = spark.sql("select array(id) args, 900 delay from range(0, 100, 1, 4)")
    write_to(frame, queue=queue, **given)
    read = spark.read.format("rabbitdelay").options(what="levels", **given).load()
    assert read.agg({"messages": "sum"}).collect()[0][0] >= 1
    wrong = {**given, "brokerCaFile": str(certificates.client)}
    with pytest.raises(PySparkException, match="CERTIFICATE_VERIFY_FAILED"):
        spark.read.format("rabbitdelay").options(what="levels", **wrong).load().collect()
