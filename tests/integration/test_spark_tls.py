"""Spark's driver and executors reach RabbitMQ over TLS with client certificates."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection, Queue
from pyspark.errors import PySparkException

from celery_rabbitdelay.testing import Certificates, RabbitMQServer
from tests.integration.spark import shared_session
from tests.integration.spark_fixtures import write
from tests.integration.tls import certificates, tls_node

__all__ = ["certificates", "tls_node"]


def test_an_application_of_a_url_takes_the_files_as_options(
    spark_folder: Path, tls_node: RabbitMQServer, certificates: Certificates
) -> None:
    spark = shared_session(spark_folder)
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
    write(frame, queue=queue, **given)
    read = spark.read.format("rabbitdelay").options(what="levels", **given).load()
    assert read.agg({"messages": "sum"}).collect()[0][0] >= 1
    wrong = {**given, "brokerCaFile": str(certificates.client)}
    with pytest.raises(PySparkException, match="CERTIFICATE_VERIFY_FAILED"):
        spark.read.format("rabbitdelay").options(what="levels", **wrong).load().collect()
