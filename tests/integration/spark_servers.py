"""Servers of Spark as processes of their own, from the files that PySpark brings."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyspark

from celery_rabbitdelay.testing import Server
from tests.integration.spark import QUICK_JAVA, REPOSITORY
from tests.integration.worker import ShopProcess

DEPLOY: Final = "org.apache.spark.deploy"

#: What Spark's log of events leaves out of the commands of clients of Spark Connect.
CONNECT_PASSWORDS: Final = r'(?i)key: "\w*password"\s+value: "[^"]*"'


def spark_program(name: str) -> str:
    """Return the path of a program of Spark, such as ``spark-submit``."""
    return str(Path(pyspark.__file__).parent / "bin" / name)


def _spark_home(folder: Path) -> Path:
    """Return a home of Spark whose files are those of PySpark.

    The workers of ``local-cluster`` write into the home, which is the folder of PySpark by default.
    """
    home = folder / "spark"
    if not home.exists():
        home.mkdir()
        for each in Path(pyspark.__file__).parent.iterdir():
            (home / each.name).symlink_to(each)
    return home


def spark_environment(folder: Path, settings: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the environment of a process of Spark.

    Args:
        folder: Where it puts its files.
        settings: Those of the application, for a process whose Python processes import it.
    """
    return {
        **os.environ,
        **({} if settings is None else ShopProcess.environment(settings)),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_HOME": str(_spark_home(folder)),
        "SPARK_WORKER_DIR": str(folder / "work"),
        "TMPDIR": str(folder),
        "JAVA_TOOL_OPTIONS": f"{QUICK_JAVA['JAVA_TOOL_OPTIONS']} -Djava.io.tmpdir={folder}",
    }


def configured(settings: Mapping[str, str]) -> list[str]:
    """Return the arguments that give settings to ``spark-submit``."""
    return [each for name, value in settings.items() for each in ("--conf", f"{name}={value}")]


class SparkServer(Server):
    """A process of Spark that listens on a port.

    Args:
        settings: Those of the application.
    """

    package = "pyspark"

    def __init__(self, settings: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._settings = settings
        self.host = "127.0.0.1"

    def _environment(self) -> dict[str, str]:
        return spark_environment(self.folder, self._settings)

    def _ready(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0):
                return True
        except OSError:
            return False


class Master(SparkServer):
    """The master of a cluster."""

    @property
    def url(self) -> str:
        """What a session takes as its master."""
        return f"spark://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        options = f"--host 127.0.0.1 --port {self.port} --webui-port 0"
        return [spark_program("spark-class"), f"{DEPLOY}.master.Master", *options.split()]


class Executors(SparkServer):
    """A worker of a cluster, which starts executors with one core.

    Args:
        master: The master.
        host: Its address. Spark runs a task a second time only on another host.
        settings: Those of the application.
        variables: Further environment variables.
    """

    def __init__(
        self, master: Master, host: str, settings: dict[str, Any], variables: Mapping[str, str]
    ) -> None:
        super().__init__(settings)
        self._master = master
        self._variables = variables
        self.host = host

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), **self._variables}

    def _command(self) -> list[str]:
        options = f"--host {self.host} --port {self.port} --webui-port 0 --cores 1 --memory 1g"
        return [
            *(spark_program("spark-class"), f"{DEPLOY}.worker.Worker"),
            *options.split(),
            self._master.url,
        ]


class ConnectServer(SparkServer):
    """A server of Spark Connect, whose application runs in the server's own processes.

    Args:
        settings: Those of the application.
        spark: Those of Spark.
    """

    def __init__(self, settings: dict[str, Any], spark: Mapping[str, str]) -> None:
        super().__init__(settings)
        self._spark = spark

    @property
    def url(self) -> str:
        """What a client takes as ``SPARK_REMOTE``."""
        return f"sc://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.driver.host": "127.0.0.1",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.ui.enabled": "false",
            # Spark would show the text of each command, with the values of all options.
            "spark.sql.redaction.string.regex": CONNECT_PASSWORDS,
            **self._spark,
        }
        return [
            *(spark_program("spark-submit"), "--master", "local[2]"),
            *configured(settings),
            *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
            "spark-internal",
        ]
