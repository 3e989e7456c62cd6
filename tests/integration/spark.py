"""A Spark session whose Python processes import the same code as the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from celery_rabbitdelay.testing.servers import PATIENCE

REPOSITORY: Final = Path(__file__).resolve().parents[2]

#: For a Java process that lives for a few tests: compiling thoroughly takes longer than it gains.
#: Not for benchmarks.
QUICK_JAVA: Final = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def _end_java() -> None:
    """End the Java process, which PySpark keeps, with the environment that it was started with."""
    context: Any = SparkContext
    gateway = context._gateway
    gateway.shutdown()
    # Java ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(PATIENCE)
    context._gateway = context._jvm = None


@contextmanager
def spark_session(
    environment: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    master: str = "local[2]",
) -> Iterator[SparkSession]:
    """Start Spark in a Java process of its own; its Python processes have these variables.

    Args:
        environment: The variables.
        settings: Further settings of Spark.
        master: Where it runs.
    """
    with TemporaryDirectory() as folder:
        # Java leaves files behind if it is killed.
        java = {"spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder}"}
        places = {"spark.local.dir": folder, "spark.sql.warehouse.dir": f"{folder}/warehouse"}
        with _session(environment or {}, {**java, **places, **(settings or {})}, master) as spark:
            yield spark


@contextmanager
def _session(
    environment: Mapping[str, str], settings: Mapping[str, str], master: str
) -> Iterator[SparkSession]:
    wanted = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), **environment}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    builder = SparkSession.builder.master(master).appName("test")
    builder = builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
        try:
            yield session
        finally:
            session.stop()
            _end_java()
    finally:
        for name, former in before.items():
            if former is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = former
