"""Programs of Spark as processes of their own, from the files that PySpark brings."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyspark

from celery_rabbitdelay.testing import Server
from tests.kernel.integration.worker import ShopProcess
from tests.spark.integration.spark import QUICK_JAVA, REPOSITORY

#: Seconds that a program may take to start Spark, on a machine that does much else.
STARTED: Final = 300.0

#: What Spark's log of events leaves out of the commands of clients of Spark Connect.
CONNECT_PASSWORDS: Final = r'(?i)key: "\w*password"\s+value: "[^"]*"'


def spark_submit(master: str, settings: Mapping[str, str]) -> list[str]:
    """Return the beginning of the command line of ``spark-submit``."""
    given = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false", **settings}
    configured = [each for name, value in given.items() for each in ("--conf", f"{name}={value}")]
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    return [str(program), "--master", master, *configured]


def spark_environment(folder: Path, settings: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the environment of a process of Spark.

    Args:
        folder: Where it puts its files. The workers of ``local-cluster`` write into Spark's home,
            so it has one there, whose files are those of PySpark.
        settings: Those of the application, for a process whose Python processes import it.
    """
    home = folder / "spark"
    if not home.exists():
        home.mkdir()
        for each in Path(pyspark.__file__).parent.iterdir():
            (home / each.name).symlink_to(each)
    return {
        **os.environ,
        **({} if settings is None else ShopProcess.environment(settings)),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        "SPARK_LOCAL_DIRS": str(folder),
        "SPARK_HOME": str(home),
        "TMPDIR": str(folder),
        "JAVA_TOOL_OPTIONS": f"{QUICK_JAVA['JAVA_TOOL_OPTIONS']} -Djava.io.tmpdir={folder}",
    }


def run(command: list[str], environment: Mapping[str, str], folder: Path) -> tuple[int, str]:
    """Run a program in a folder to its end; return its process's id, and what it has printed."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        said, _ = process.communicate(timeout=STARTED)
    assert process.returncode == 0, said
    return process.pid, said


class ConnectServer(Server):
    """A server of Spark Connect, whose application runs in the server's own processes.

    Args:
        settings: Those of the application.
        spark: Those of Spark.
    """

    package = "pyspark"

    def __init__(self, settings: dict[str, Any], spark: Mapping[str, str]) -> None:
        super().__init__()
        self._settings, self._spark = settings, spark

    @property
    def url(self) -> str:
        """What a client takes as ``SPARK_REMOTE``."""
        return f"sc://127.0.0.1:{self.port}"

    def _environment(self) -> dict[str, str]:
        return spark_environment(self.folder, self._settings)

    def _ready(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _command(self) -> list[str]:
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(self.port),
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            # Spark would show the text of each command, with the values of all options.
            "spark.sql.redaction.string.regex": CONNECT_PASSWORDS,
            **self._spark,
        }
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        return [*spark_submit("local[2]", settings), "--class", server, "spark-internal"]
