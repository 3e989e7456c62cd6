"""Writes and reads that fail, or have to wait, because of a server, the queues or the rows."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final
from uuid import uuid4

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from celery_rabbitdelay.spark import dispatch
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.kernel.integration.conftest import small_configuration
from tests.kernel.integration.shop import make_app
from tests.kernel.integration.trouble import alarm
from tests.node_control import is_any_blocked, set_memory_limit
from tests.redis_servers import ConfiguredRedis
from tests.spark.integration.spark_apps import publish
from tests.spark.integration.spark_fixtures import write as write_to

#: Seconds that the broker may take to confirm: of the application that waits for the broker.
LONG: Final = 300.0

APPS: Final = "tests.spark.integration.spark_apps"


@pytest.fixture(scope="module", autouse=True)
def published(own_rabbitmq: RabbitMQServer, redis_url: str, spark_folder: Path) -> Iterator[None]:
    """The applications; the levels and the queues are there."""
    good = small_configuration(own_rabbitmq.url, redis_url, f"test-{uuid4().hex[:8]}")
    away = {**good, "rabbitdelay_confirm_timeout": 1.0}
    with ConfiguredRedis(password="opensesame") as redis:
        registry = f"@127.0.0.1:{redis.port}/0"
        settings = {
            "no_broker": {**away, "broker_url": "amqp://guest:opensesame@127.0.0.1:1//"},
            "no_redis": {**away, "rabbitdelay_registry_url": "redis://127.0.0.1:1/0"},
            "wrong_redis_password": {
                **away,
                "rabbitdelay_registry_url": f"redis://:wrong{registry}",
            },
            "untracked": {
                **good,
                "knows_tasks": False,
                "rabbitdelay_registry_url": f"redis://:opensesame{registry}",
            },
            "good": {**good, "rabbitdelay_confirm_timeout": LONG},
            "gives_up": {**good, "rabbitdelay_confirm_timeout": 2.0},
            "never": {**away, "rabbitdelay_declare": "never"},
        }
        for name, each in settings.items():
            publish(spark_folder, name, each)
        app: Any = make_app(settings["good"])
        app.tasks["look"].apply_async(delay=0.1)
        app.close()
        yield


def write(spark: SparkSession, app: str, **options: str) -> None:
    """Write four rows in two partitions."""
    frame = spark.sql("select array(id) args, 1D delay from range(0, 4, 1, 2)")
    write_to(frame, app=f"{APPS}:{app}", task="look", **options)


def test_a_broker_in_alarm_holds_a_write_up_until_the_alarm_is_over_or_it_gives_up(
    spark: SparkSession, private_rabbitmq: RabbitMQServer
) -> None:
    was_blocked: list[bool] = []

    def calm() -> None:
        try:
            wait_for(partial(is_any_blocked, private_rabbitmq), "a blocked write", LONG / 2)
            was_blocked.append(True)
        finally:
            set_memory_limit(private_rabbitmq, "0.4")

    with alarm(private_rabbitmq):
        with pytest.raises(PySparkException, match="block") as failed:
            write(spark, "gives_up")
        assert "This is partition" in str(failed.value)
        operator = Thread(target=calm)
        operator.start()
        write(spark, "good")
        operator.join()
    assert was_blocked


def read(spark: SparkSession, app: str) -> None:
    spark.read.format("rabbitdelay").options(app=f"{APPS}:{app}").load().collect()


@pytest.mark.parametrize(
    ("use", "app", "said"),
    [
        (write, "no_broker", "Connection ?refused"),
        (write, "wrong_redis_password", "invalid username-password pair"),
        (read, "no_redis", "Connection refused"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_line_of_error_without_a_traceback(
    spark: SparkSession, app: str, use: Callable[[SparkSession, str], None], said: str
) -> None:
    with pytest.raises(PySparkException) as failed:
        use(spark, app)
    text = str(failed.value)
    assert re.search(rf"^celery_rabbitdelay\S+: .*{said}", text, re.MULTILINE)
    assert "opensesame" not in text
    # Above these, there is only the place in this package that Spark has called.
    assert text.count('  File "') <= 2


def test_an_error_of_a_row_a_queue_or_a_setting_says_what_is_wrong(spark: SparkSession) -> None:
    frame = spark.sql("select array(id) args, if(id < 4, 9D, null) delay from range(0, 6, 1, 2)")
    with pytest.raises(PySparkException) as failed:
        dispatch(frame, "look", app=f"{APPS}:good")
    error = r"^celery_rabbitdelay.exceptions.InvalidRow: row .*: its delay is null$"
    notes = "See .*\nThis is partition 1. Its rows are numbered from 0"
    assert re.search(rf"{error}\n{notes}", str(failed.value), re.MULTILINE)
    with pytest.raises(PySparkException, match=r"TopologyIncomplete[^\n]* missing: nowhere\."):
        write(spark, "never", queue="nowhere")
    with pytest.raises(PySparkException, match="what = 'pending': lists tracked tasks, but"):
        read(spark, "untracked")
    with pytest.raises(PySparkException, match="rabbitdelay_registry_url"):
        read(spark, "good")
