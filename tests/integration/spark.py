"""A Spark session whose Python processes import the same code as the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

REPOSITORY: Final = Path(__file__).resolve().parents[2]


@contextmanager
def spark_session(
    environment: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    master: str = "local[2]",
) -> Iterator[SparkSession]:
    """Start Spark; its Python processes have these environment variables.

    One session runs at a time in a process; Java takes the variables when it starts.

    Args:
        environment: The variables.
        settings: Further settings of Spark.
        master: Where it runs.
    """
    wanted = {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        **(environment or {}),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    builder = SparkSession.builder.master(master).appName("test")
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    for name, value in (settings or {}).items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()
    finally:
        for name, former in before.items():
            if former is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = former
