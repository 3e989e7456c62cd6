"""Programs that only name the format: by ``spark-submit`` on executors of their own, by Connect."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_rabbitdelay.testing import wait_for
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE
from tests.integration.spark import REPOSITORY
from tests.integration.spark_fixtures import registry, settings, shop, without_registry
from tests.integration.spark_killing import STARTED
from tests.integration.spark_servers import (
    ConnectServer,
    configured,
    spark_environment,
    spark_program,
)

__all__ = ["registry", "settings", "shop", "without_registry"]

ROWS = 200

#: A password that is wrong, and that no log may hold.
SECRET = "opensesame"

#: Each task is given its row's number, and the id of the process that has read the row. First come
#: a write by an application that cannot be imported, one with a wrong password of the broker, and
#: one with a password of a Redis that does not answer, as one that answers may take any password.
PROGRAM = """
import os
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
rows = spark.sql(
    "select array(string(id), java_method('java.lang.ProcessHandle', 'current')) args, "
    f"named_struct('key', '{sys.argv[1]}') kwargs, 1D delay from range(0, ROWS, 1, 4)"
)
broker, secret, nowhere = sys.argv[2], os.environ["SECRET"], "redis://127.0.0.1:1/0"
for wrong in (
    {"app": "zipped:app"},
    {"broker": broker, "brokerPassword": secret},
    {"broker": broker, "brokerPassword": "guest", "registry": nowhere, "registryPassword": secret},
):
    try:
        rows.write.format("rabbitdelay").mode("append").options(task="note", **wrong).save()
    except Exception as error:
        print("FAILED", error)
options = {"app": sys.argv[3], "task": "note", "idColumn": "args"}
rows.write.format("rabbitdelay").mode("append").options(**options).save()
spark.stop()
""".replace("ROWS", str(ROWS))


#: The Python of an archive.
ARCHIVED_PYTHON = "./environment/bin/python"

#: An application that is not installed, and is imported by that Python alone.
SHIPPED = f"""
import os
from tests.integration.shop import app

assert os.environ["PYTHON"] == {ARCHIVED_PYTHON!r}
"""

#: A program that names the format, and sends without it.
NAMES_THE_FORMAT = """
from pyspark.sql import SparkSession
from celery_rabbitdelay.spark import dispatch

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
rows = spark.sql("select array(id) args, 9D delay from range(2)")
broker = "amqp://guest@127.0.0.1:1//"
try:
    rows.write.format("rabbitdelay").mode("append").option("broker", broker).save()
except Exception as error:
    print("FAILED", error)
try:
    dispatch(rows, "note", broker=broker)
except Exception as error:
    print("FAILED", error, *error.__notes__)
"""


class Run(NamedTuple):
    """A program that has run to its end.

    Attributes:
        process: The id of its process.
        said: What it has printed.
        processes: Which processes have read its rows.
        files: What all files say that Spark has written.
    """

    process: int
    said: str
    processes: set[str]
    files: dict[str, str]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], shop: Any
) -> Callable[..., Run]:
    """Runs the program, and waits for its tasks, each of which runs once."""

    def run_program(
        command: list[str],
        environment: dict[str, str],
        written: Path,
        app: str = "tests.integration.shop:app",
    ) -> Run:
        noted = Notes(shop)
        program = tmp_path_factory.mktemp("program") / "remind.py"
        program.write_text(PROGRAM)
        broker = settings["broker_url"].replace(":guest@", "@")
        arguments = [str(program), noted.key, broker, app]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=written,
            env={**environment, "SECRET": SECRET},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with process:
            said, _ = process.communicate(timeout=STARTED)
        assert process.returncode == 0, said
        files = {
            str(path): path.read_text(errors="replace")
            for path in written.rglob("*")
            if path.is_file()
        }
        wait_for(lambda: len(noted()) >= ROWS, "all tasks", PATIENCE)
        given = noted.given()
        noted.forget()
        assert sorted(int(number) for number, _ in given) == [*range(ROWS)]
        return Run(process.pid, said, {process for _, process in given}, files)

    return run_program


def logging(folder: Path) -> dict[str, str]:
    """Return the settings with which Spark logs much, and writes a log of events."""
    (folder / "events").mkdir()
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }


def assert_wrong_passwords_are_hidden(run: Run, log: str = "") -> None:
    """Assert that these writes were refused, and that nothing that was written shows the secret."""
    assert run.said.count("FAILED") == 3, run.said
    assert "RegistryUnavailable" in run.said
    assert "app = 'zipped:app': cannot be imported here, on the driver" in run.said
    events = [text for path, text in run.files.items() if "/events/" in path]
    for text in (run.said, "".join(events)):
        assert "ACCESS_REFUSED" in text
    for text in (run.said, log, *run.files.values()):
        assert SECRET not in text


def ship(folder: Path) -> list[str]:
    """Return the arguments that ship applications, one of them in a ZIP file, and a Python."""
    application, zipped = folder / "shipped.py", folder / "zipped.zip"
    application.write_text(SHIPPED)
    with zipfile.ZipFile(zipped, "w") as files:
        files.write(application, "zipped.py")
    python, archive = folder / ARCHIVED_PYTHON, folder / "environment.tar.gz"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHON="$0" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(archive, "w:gz") as files:
        files.add(python, "bin/python")
    return ["--py-files", f"{application},{zipped}", "--archives", f"{archive}#environment"]


def test_a_submitted_file_sends_from_executors_that_it_ships_its_application_and_python_to(
    tmp_path: Path, settings: dict[str, Any], run: Callable[..., Run]
) -> None:
    wanted = {
        # No task starts before both executors are there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        **logging(tmp_path),
    }
    submit = [spark_program("spark-submit"), "--master", "local-cluster[2,1,1024]"]
    # Relative to the folder of the driver and of each executor.
    environment = {
        **spark_environment(tmp_path, settings),
        "PYSPARK_PYTHON": ARCHIVED_PYTHON,
    }
    command = [*submit, *configured(wanted), *ship(tmp_path)]
    submitted: Run = run(command, environment, tmp_path, "shipped:app")
    assert len(submitted.processes) == 2
    assert str(submitted.process) not in submitted.processes
    executors = [text for path, text in submitted.files.items() if path.endswith("stderr")]
    assert len(executors) == 2
    assert "ACCESS_REFUSED" in "".join(executors)
    assert_wrong_passwords_are_hidden(submitted)


def test_a_client_of_spark_connect_names_the_format_and_the_server_sends(
    tmp_path: Path, settings: dict[str, Any], run: Callable[..., Run]
) -> None:
    with ConnectServer(settings, logging(tmp_path)) as server:
        client = {**spark_environment(tmp_path), "SPARK_REMOTE": server.url}
        # The client needs neither the application nor this package.
        del client["PYTHONPATH"]
        program: Run = run([sys.executable], client, tmp_path)
        assert program.processes == {str(server.pid)}
        assert_wrong_passwords_are_hidden(program, server.log)


def test_a_python_called_by_its_path_is_not_that_of_sparks_own_processes(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(NAMES_THE_FORMAT)
    folders = dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path))
    # That of the system, which does not have what the package needs.
    environment = {**folders, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STARTED,
        check=True,
    )
    assert "DATA_SOURCE_NOT_FOUND" in done.stdout
    assert "set PYSPARK_PYTHON" in done.stdout
