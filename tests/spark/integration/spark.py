"""Spark sessions whose Python processes import the same code as the tests.

Starting Spark and its first jobs takes more than most tests, so one session serves all test modules
of a process that need no other; their applications are those of
:mod:`tests.spark.integration.spark_apps`.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from celery_rabbitdelay.testing.servers import PATIENCE
from tests.spark.integration.spark_apps import APPS

REPOSITORY: Final = Path(__file__).resolve().parents[3]

#: For a Java process that lives for a few tests: compiling thoroughly takes longer than it gains,
#: and so does verifying Spark's classes. Not for benchmarks.
QUICK_JAVA: Final = {
    "JAVA_TOOL_OPTIONS": (
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    )
}


def _end_java() -> None:
    """End the Java process, which PySpark keeps, with the environment that it was started with."""
    context: Any = SparkContext
    gateway = context._gateway
    gateway.shutdown()
    # Java ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(PATIENCE)
    context._gateway = context._jvm = None


#: The session that test modules share, while it runs.
_shared: Final[list[tuple[SparkSession, ExitStack]]] = []


def shared_session(folder: Path) -> SparkSession:
    """Return the session that test modules share; it tries each task of its own twice.

    Args:
        folder: That of :mod:`tests.spark.integration.spark_apps`; the log of events is in
        ``events``.
    """
    if not _shared:
        events = folder / "events"
        events.mkdir(exist_ok=True)
        settings = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": events.as_uri(),
            "spark.eventLog.compress": "false",
        }
        started = ExitStack()
        environment = {**QUICK_JAVA, APPS: str(folder)}
        wanted = spark_session(environment, settings, master="local[2,2]")
        _shared.append((started.enter_context(wanted), started))
    return _shared[0][0]


def end_shared_session() -> None:
    """End it, if it runs: a process has one session at a time."""
    while _shared:
        _shared.pop()[1].close()


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
    end_shared_session()
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
    # A busy machine may keep Spark's own processes waiting, too.
    builder = builder.config("spark.network.timeout", f"{PATIENCE:.0f}s")
    builder = builder.config("spark.python.authenticate.socketTimeout", f"{PATIENCE:.0f}s")
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
