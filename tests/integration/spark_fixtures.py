"""Fixtures that the tests of Spark share: an application with a registry, its worker, a session.

The application is that of the module, ``app_of(__name__)``.

A test module imports those that it needs, and names them in its ``__all__``. One that needs another
session, or no worker, has its own fixture instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import pytest
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay.testing import RedisServer
from tests.integration import spark_apps
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import make_app
from tests.integration.spark import shared_session
from tests.integration.worker import Worker

#: Seconds; long enough for Spark to commit before the tasks are due.
DELAY: Final = 4.0


@pytest.fixture(scope="module")
def registry() -> Iterator[RedisServer]:
    """The Redis server of the registry."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def without_registry(module_broker_url: str, redis_url: str) -> dict[str, Any]:
    """The configuration of an application without a registry."""
    return small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}")


@pytest.fixture(scope="module")
def settings(without_registry: dict[str, Any], registry: RedisServer) -> dict[str, Any]:
    """The same with a registry."""
    return {**without_registry, "rabbitdelay_registry_url": registry.url}


@pytest.fixture(scope="module")
def spark(
    request: pytest.FixtureRequest, settings: dict[str, Any], spark_folder: Path
) -> SparkSession:
    """The shared session, whose Python processes find the application."""
    name = spark_apps.name_of(request.module.__name__)
    spark_apps.publish(spark_folder, name, settings)
    return shared_session(spark_folder)


@pytest.fixture(scope="module")
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    """The application; a worker serves its queues."""
    app = make_app(settings)
    with Worker(settings):
        yield app
    app.close()


@pytest.fixture
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shop: Any) -> None:
    """This process is a driver, which finds the application where the executors do."""
    name = spark_apps.name_of(request.module.__name__)
    monkeypatch.setattr(spark_apps, name, shop, raising=False)
    monkeypatch.setattr("celery_rabbitdelay.spark.application._applications", {})


def notes(
    spark: SparkSession,
    noted: Notes,
    number: int,
    delay: str = f"{DELAY}D",
    partitions: int | None = None,
) -> DataFrame:
    """Return rows for the task ``note``, which is given their numbers.

    Args:
        spark: The session.
        noted: The notes of the test.
        number: How many rows.
        delay: Their delay, as an expression of SQL, in which ``id`` is the row's number.
        partitions: How many partitions; None for Spark's default.
    """
    divided = "" if partitions is None else f", 1, {partitions}"
    return spark.sql(
        f"select array(id) args, named_struct('key', '{noted.key}') kwargs, {delay} delay "
        f"from range(0, {number}{divided})"
    )


def write(frame: DataFrame, **options: Any) -> None:
    """Send a DataFrame's rows by the format, by default to the task ``note``."""
    given = {"task": "note", **options}
    frame.write.format("rabbitdelay").mode("append").options(**given).save()
