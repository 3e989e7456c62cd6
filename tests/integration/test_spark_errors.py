"""Writes that fail, or have to wait, because of the broker, the queues or the rows."""

from __future__ import annotations

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
from tests.integration.conftest import small_configuration
from tests.integration.shop import make_app
from tests.integration.spark import shared_session
from tests.integration.spark_apps import publish
from tests.integration.spark_fixtures import write as write_to
from tests.integration.trouble import alarm
from tests.node_control import is_any_blocked, set_memory_limit
from tests.redis_servers import ConfiguredRedis

#: Seconds that the broker may take to confirm: of the application that waits for the broker.
LONG: Final = 300.0

APPS: Final = "tests.integration.spark_apps"


@pytest.fixture(scope="module")
def redis() -> Iterator[ConfiguredRedis]:
    """A Redis with a password."""
    with ConfiguredRedis(password="opensesame") as server:
        yield server


@pytest.fixture(scope="module")
def settings(
    own_rabbitmq: RabbitMQServer, redis: ConfiguredRedis, redis_url: str
) -> dict[str, dict[str, Any]]:
    """The applications, by name."""
    prefix = f"test-{uuid4().hex[:8]}"
    good = small_configuration(own_rabbitmq.url, redis_url, prefix)
    away = {**good, "rabbitdelay_confirm_timeout": 1.0}
    # The broker takes its time to refuse a login.
    stranger = {**good, "rabbitdelay_confirm_timeout": 10}
    stranger["broker_url"] = own_rabbitmq.url.replace(":guest@", ":wrong@")
    registry = f"@127.0.0.1:{redis.port}/0"
    return {
        "no_broker": {**away, "broker_url": "amqp://guest:opensesame@127.0.0.1:1//"},
        "wrong_broker_password": stranger,
        "no_redis": {**away, "rabbitdelay_registry_url": "redis://127.0.0.1:1/0"},
        "wrong_redis_password": {**away, "rabbitdelay_registry_url": f"redis://:wrong{registry}"},
        "untracked": {
            **good,
            "knows_tasks": False,
            "rabbitdelay_registry_url": f"redis://:opensesame{registry}",
        },
        "good": {**good, "rabbitdelay_confirm_timeout": LONG},
        "gives_up": {**good, "rabbitdelay_confirm_timeout": 2.0},
        "never": {**good, "rabbitdelay_declare": "never"},
        "bare": {**good, "rabbitdelay_declare": "never", "rabbitdelay_prefix": f"{prefix}-bare"},
    }


@pytest.fixture(scope="module")
def spark(settings: dict[str, dict[str, Any]], spark_folder: Path) -> SparkSession:
    """The shared session; the levels and the queues of all applications but one are there."""
    for name, each in settings.items():
        publish(spark_folder, name, each)
    app: Any = make_app(settings["good"])
    app.tasks["look"].apply_async(delay=0.1)
    app.close()
    return shared_session(spark_folder)


def write(spark: SparkSession, app: str, **options: str) -> None:
    """Write four rows in two partitions."""
    frame = spark.sql("select array(id) args, 1D delay from range(0, 4, 1, 2)")
    write_to(frame, app=f"{APPS}:{app}", task="look", **options)


@pytest.mark.parametrize(
    ("app", "options", "missing"),
    [("never", {"queue": "nowhere"}, "missing: nowhere."), ("bare", {}, "and 21 more")],
    ids=["queue", "levels"],
)
def test_what_nobody_may_declare_is_named_if_it_is_missing(
    spark: SparkSession, app: str, options: dict[str, str], missing: str
) -> None:
    with pytest.raises(PySparkException, match="TopologyIncomplete") as failed:
        write(spark, app, **options)
    assert missing in str(failed.value)


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
        assert "This was partition" in str(failed.value)
        operator = Thread(target=calm)
        operator.start()
        write(spark, "good")
        operator.join()
    assert was_blocked


def stream(spark: SparkSession, app: str, folder: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 4).load()
    query = rows.selectExpr("array(value) args", "1D delay").writeStream.format("rabbitdelay")
    query = query.options(app=f"{APPS}:{app}", task="look")
    query.option("checkpointLocation", str(folder)).start().awaitTermination()


def read(spark: SparkSession, app: str, folder: Path) -> None:
    what = "pending" if "redis" in app else "levels"
    spark.read.format("rabbitdelay").options(app=f"{APPS}:{app}", what=what).load().collect()


def save(spark: SparkSession, app: str, folder: Path) -> None:
    write(spark, app)


#: What the error's own line says, and what the next one says to check.
UNREACHABLE: Final = {
    "no_broker": ("Connection ?refused", "RabbitMQ runs.*broker_url of the application"),
    "wrong_broker_password": ("ACCESS_REFUSED - Login was refused", "RabbitMQ runs.*broker_url"),
    "no_redis": ("Connection refused", "Redis runs.*rabbitdelay_registry_url of the application"),
    "wrong_redis_password": ("invalid username-password pair", "Redis runs.*registry_url"),
}


@pytest.mark.parametrize(
    ("use", "app"),
    [
        *((save, app) for app in UNREACHABLE),
        (stream, "no_redis"),
        *((read, app) for app in ("no_broker", "no_redis")),
    ],
)
def test_a_server_that_cannot_be_used_is_a_line_of_error_and_a_line_of_advice(
    spark: SparkSession, app: str, use: Callable[[SparkSession, str, Path], None], tmp_path: Path
) -> None:
    with pytest.raises(PySparkException) as failed:
        use(spark, app, tmp_path)
    text, _, _ = str(failed.value).partition("=== Streaming Query ===")
    said, advice = UNREACHABLE[app]
    found = rf"^\S+: .*{said}.*\n(This was partition .*\n)?Check that {advice}.*\.$"
    assert re.search(found, text, re.MULTILINE)
    assert "opensesame" not in text
    # Above these, there is only the place in this package that Spark has called.
    assert text.count('  File "') <= 2


def test_a_dispatch_that_fails_says_why_in_its_first_line_and_of_which_partition(
    spark: SparkSession,
) -> None:
    frame = spark.sql("select array(id) args, if(id < 4, 9D, null) delay from range(0, 6, 1, 2)")
    with pytest.raises(PySparkException) as failed:
        dispatch(frame, "look", app=f"{APPS}:good")
    first, where = str(failed.value).splitlines()
    assert first.startswith("celery_rabbitdelay.exceptions.InvalidRow: row ")
    assert first.endswith(": its delay is null")
    assert where.startswith("This was partition 1 of the write, whose rows")


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("untracked", "what = 'pending': lists tracked tasks, and"),
        ("good", "rabbitdelay_registry_url"),
    ],
)
def test_a_read_of_what_waits_where_nothing_can_be_seen_is_an_error(
    spark: SparkSession, app: str, said: str
) -> None:
    with pytest.raises(PySparkException) as failed:
        spark.read.format("rabbitdelay").options(app=f"{APPS}:{app}").load().collect()
    assert said in str(failed.value)
