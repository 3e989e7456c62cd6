"""Writes that fail, or have to wait, because of the broker, the queues or the rows."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.integration.conftest import small_configuration
from tests.integration.shop import make_app
from tests.integration.spark import QUICK_JAVA, spark_session
from tests.integration.spark_apps import environment
from tests.integration.spark_fixtures import write as write_to

pytestmark = pytest.mark.timeout(600)

#: Seconds that the broker may take to confirm: of the application that waits for the broker, and of
#: those that give up.
LONG = 300.0
SHORT = 2.0


@pytest.fixture(scope="module")
def settings(session_rabbitmq: RabbitMQServer, redis_url: str) -> dict[str, dict[str, Any]]:
    """The applications, by name."""
    prefix = f"test-{uuid4().hex[:8]}"
    good = small_configuration(session_rabbitmq.url, redis_url, prefix)
    return {
        "good": {**good, "rabbitdelay_confirm_timeout": LONG},
        "gives_up": {**good, "rabbitdelay_confirm_timeout": SHORT},
        "never": {**good, "rabbitdelay_declare": "never"},
        "bare": {**good, "rabbitdelay_declare": "never", "rabbitdelay_prefix": f"{prefix}-bare"},
    }


@pytest.fixture(scope="module")
def spark(settings: dict[str, dict[str, Any]]) -> Iterator[SparkSession]:
    with spark_session({**QUICK_JAVA, **environment(settings)}) as session:
        yield session


@pytest.fixture(scope="module")
def declared(settings: dict[str, dict[str, Any]]) -> None:
    """The levels and the queues of all applications but one are there."""
    app: Any = make_app(settings["good"])
    app.tasks["look"].apply_async(delay=0.1)
    app.close()


def write(spark: SparkSession, app: str, **options: str) -> None:
    """Write four rows in two partitions."""
    frame = spark.sql("select array(id) args, 1D delay from range(0, 4, 1, 2)")
    write_to(frame, app=f"tests.integration.spark_apps:{app}", task="look", **options)


@pytest.mark.parametrize(
    ("app", "options", "missing"),
    [("never", {"queue": "nowhere"}, "missing: nowhere."), ("bare", {}, "and 21 more")],
    ids=["queue", "levels"],
)
def test_what_nobody_may_declare_is_named_if_it_is_missing(
    spark: SparkSession, declared: None, app: str, options: dict[str, str], missing: str
) -> None:
    with pytest.raises(PySparkException, match="TopologyIncomplete") as failed:
        write(spark, app, **options)
    assert missing in str(failed.value)


@pytest.fixture
def alarmed(private_rabbitmq: RabbitMQServer, declared: None) -> Iterator[RabbitMQServer]:
    """A broker that takes no more messages, because it has too little memory."""
    private_rabbitmq.ctl("set_vm_memory_high_watermark", "absolute", "1MB")
    yield private_rabbitmq
    private_rabbitmq.ctl("set_vm_memory_high_watermark", "0.4")


def test_a_broker_in_alarm_holds_a_write_up_until_the_alarm_is_over(
    spark: SparkSession, alarmed: RabbitMQServer
) -> None:
    was_blocked: list[bool] = []

    def calm() -> None:
        def blocked() -> bool:
            return "blocked" in alarmed.ctl("list_connections", "state")

        try:
            wait_for(blocked, "a write that is held up", LONG / 2, interval=0.2)
            was_blocked.append(True)
        finally:
            alarmed.ctl("set_vm_memory_high_watermark", "0.4")

    operator = Thread(target=calm)
    operator.start()
    write(spark, "good")
    operator.join()
    assert was_blocked


def test_a_broker_that_stays_in_alarm_fails_the_write_after_the_time_out(
    spark: SparkSession, alarmed: RabbitMQServer
) -> None:
    with pytest.raises(PySparkException, match="block") as failed:
        write(spark, "gives_up")
    assert "This was partition" in str(failed.value)
