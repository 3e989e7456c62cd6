"""No password is in Spark's plans, its event log, the errors of its tasks, or its own log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from celery_rabbitdelay.spark import dispatch
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.conftest import delete_what_it_declared, small_configuration
from tests.integration.shop import make_app
from tests.integration.spark import shared_session
from tests.integration.spark_fixtures import write
from tests.node_control import add_user, delete_user
from tests.redis_servers import ConfiguredRedis
from tests.told import told

#: The password of broker and registry, and a part of the wrong ones.
PLANTED: Final = "opensesame"

USER: Final = "planted-spark"


@pytest.fixture(scope="module")
def redis() -> Iterator[ConfiguredRedis]:
    """The registry's Redis."""
    with ConfiguredRedis(password=PLANTED) as server:
        yield server


@pytest.fixture
def options(
    private_rabbitmq: RabbitMQServer, redis: ConfiguredRedis, redis_url: str
) -> Iterator[dict[str, str]]:
    """The options of a write to a broker and with a registry that have that password."""
    prefix = f"test-{uuid4().hex[:8]}"
    settings = small_configuration(private_rabbitmq.url, redis_url, prefix)
    app: Any = make_app({**settings, "rabbitdelay_layout": "binary"})
    with app.connection_for_write() as connection:
        app.amqp.queues[f"{prefix}.default"](connection.default_channel).declare()
        # Not by Spark's own application, whose sends have a limit of 30 s.
        app.rabbitdelay.declare(connection)
    add_user(private_rabbitmq, USER, ".*", ".*", ".*", PLANTED)
    yield {
        "broker": f"amqp://{USER}@127.0.0.1:{private_rabbitmq.port}//",
        "brokerPassword": PLANTED,
        "registry": f"redis://127.0.0.1:{redis.port}/0",
        "registryPassword": PLANTED,
        "prefix": prefix,
        "layout": "binary",  # of few queues
        "queue": f"{prefix}.default",
    }
    delete_user(private_rabbitmq, USER)
    delete_what_it_declared(app)
    app.close()


def test_no_password_is_in_a_plan_an_event_or_an_error(
    spark_folder: Path, options: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    spark = shared_session(spark_folder)
    frame = spark.sql("select array(id) args, double(60) delay from range(4)")
    write(frame, **options)
    shown: list[str] = []
    application = {name: value for name, value in options.items() if name != "queue"}
    for what in ("pending", "undeliverable", "levels"):
        waiting = spark.read.format("rabbitdelay").options(**application, what=what).load()
        waiting.explain(True)
        shown.append(str(waiting.collect()))
    assert options["prefix"] in shown[-1]
    given: dict[str, Any] = {**options}
    report = dispatch(frame, "note", **given)
    assert report.confirmed == 4
    shown.append(repr(report))
    wrong: list[dict[str, str]] = [
        {"brokerPassword": f"{PLANTED}-wrong"},
        {"registryPassword": f"{PLANTED}-wrong"},
        {"broker": f"amqp://{USER}@127.0.0.1:1//"},
        {"registry": "redis://127.0.0.1:1/0"},
        {"queue": "nowhere", "maxRate": "none"},
    ]
    for each in wrong:
        with pytest.raises((PySparkException, Py4JError)) as failed:
            write(frame, **{**options, **each})
        shown.append(told(failed.value))
    text = "\n".join(
        log.read_text() for log in (spark_folder / "events").rglob("*") if log.is_file()
    )
    assert "SparkListenerSQLExecutionStart" in text
    printed = capfd.readouterr()
    assert "== Physical Plan ==" in printed.out
    for each_text in (*shown, text, printed.out, printed.err):
        assert PLANTED not in each_text
