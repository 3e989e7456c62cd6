"""The session of Spark that test modules share, and an application that its processes find."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.integration.conftest import application, small_configuration
from tests.kernel.integration.worker import Worker
from tests.registry.integration.conftest import *  # noqa: F403 - its fixtures
from tests.spark.integration.spark_apps import publish


@pytest.fixture(scope="session")
def spark_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the session of Spark that test modules share; the session ends with it."""
    from tests.spark.integration.spark import end_shared_session  # only here: it imports PySpark

    yield tmp_path_factory.mktemp("spark")
    end_shared_session()


@pytest.fixture
def spark(spark_folder: Path) -> Any:
    """That session."""
    from tests.spark.integration.spark import shared_session

    return shared_session(spark_folder)


@pytest.fixture(scope="session")
def spark_settings(
    request: pytest.FixtureRequest, redis_url: str, spark_folder: Path
) -> dict[str, Any]:
    """The settings of an application with a registry that Spark's Python processes find."""
    url = os.environ.get("RABBITDELAY_BROKER_URL")
    url = url or request.getfixturevalue("session_rabbitmq").url
    settings = small_configuration(url, redis_url, rabbitdelay_registry_url=redis_url)
    publish(spark_folder, "shop", settings)
    return settings


@pytest.fixture(scope="session")
def spark_shop(spark_settings: dict[str, Any]) -> Iterator[Any]:
    """The application; one worker serves its queues for all tests of Spark."""
    with application(spark_settings) as app, Worker(spark_settings):
        yield app
