"""Spark runs a task a second time on another host, because the first attempt is slow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.integration.notes import Notes
from tests.integration.spark import QUICK_JAVA, spark_session
from tests.integration.spark_fixtures import (
    notes,
    registry,
    settings,
    shop,
    without_registry,
    write,
)
from tests.integration.spark_pausing import PAUSED
from tests.integration.spark_servers import Executors, Master
from tests.integration.worker import ShopProcess

__all__ = ["registry", "settings", "shop", "without_registry"]

#: Rows of a write, half of them in each partition.
ROWS = 100

#: A second attempt after a tenth of a second, as soon as one of two tasks has ended.
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.efficiency.enabled": "false",
}


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculation") / "paused"


@pytest.fixture(scope="module")
def spark(settings: dict[str, Any], paused: Path) -> Iterator[SparkSession]:
    """A session on a cluster of two hosts, each of which runs one task at a time."""
    environment = {**QUICK_JAVA, **ShopProcess.environment(settings), PAUSED: str(paused)}
    with (
        Master() as master,
        Executors(master, "127.0.0.2", settings, {PAUSED: str(paused)}),
        Executors(master, "127.0.0.3", settings, {PAUSED: str(paused)}),
        spark_session(environment, SPECULATION, master.url) as session,
    ):
        yield session


def test_a_second_attempt_beside_a_slow_one_sends_each_row_once(
    spark: SparkSession, noted: Notes, paused: Path
) -> None:
    # The first attempt of the first partition has sent all its rows when the second begins.
    write(notes(spark, noted, ROWS, "2D", partitions=2), app="tests.integration.spark_pausing:app")
    assert paused.exists()
    noted.wait(ROWS)
    assert sorted(noted.until(1)) == [*range(ROWS)]
