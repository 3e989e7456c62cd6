"""Spark runs a task a second time on another host, because the first attempt is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE
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

PAUSING = "tests.integration.spark_pausing"

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


def write_with_a_second_attempt(spark: SparkSession, noted: Notes, app: str, paused: Path) -> None:
    """The first attempt of the first partition has sent all its rows when the second begins."""
    paused.unlink(missing_ok=True)
    write(notes(spark, noted, ROWS, "2D", partitions=2), app=f"{PAUSING}:{app}")
    assert paused.exists()


def test_a_second_attempt_beside_a_slow_one_sends_each_row_once(
    spark: SparkSession, noted: Notes, paused: Path
) -> None:
    write_with_a_second_attempt(spark, noted, "app", paused)
    wait_for(lambda: len(set(noted())) >= ROWS, "all tasks", PATIENCE)
    assert sorted(noted.until(3)) == [*range(ROWS)]


def test_without_a_registry_a_second_attempt_sends_all_rows_of_its_partition_again(
    spark: SparkSession, noted: Notes, paused: Path
) -> None:
    write_with_a_second_attempt(spark, noted, "without_registry", paused)
    wait_for(lambda: len(noted()) >= ROWS * 3 // 2, "all tasks, some twice", PATIENCE)
    times = Counter(noted.until(3))
    assert [times[number] for number in range(ROWS)] == [2] * (ROWS // 2) + [1] * (ROWS // 2)
