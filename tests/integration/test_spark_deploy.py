"""Programs that only name the format: by ``spark-submit`` on executors of their own, by Connect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.notes import Notes
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
#: a write with a wrong password of the broker, and one with a password of a Redis that does not
#: answer, as one that answers may take any password.
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


def run(
    command: list[str], environment: dict[str, str], noted: Notes, folder: Path, app: str
) -> Run:
    """Run the program, and wait for its tasks, each of which runs once."""
    program = folder / "remind.py"
    program.write_text(PROGRAM)
    broker = noted.shop.conf.broker_url.replace(":guest@", "@")
    with subprocess.Popen(
        [*command, str(program), noted.key, broker, app],
        cwd=folder,
        env={**environment, "SECRET": SECRET},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        said, _ = process.communicate(timeout=STARTED)
    assert process.returncode == 0, said
    written = [each for each in folder.rglob("*") if each.is_file()]
    files = {str(path): path.read_text(errors="replace") for path in written}
    noted.wait(ROWS)
    given = noted.given()
    assert sorted(int(number) for number, _ in given) == [*range(ROWS)]
    return Run(process.pid, said, {process for _, process in given}, files)


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
    assert run.said.count("FAILED") == 2, run.said
    assert "RegistryUnavailable" in run.said
    events = [text for path, text in run.files.items() if "/events/" in path]
    for text in (run.said, "".join(events)):
        assert "ACCESS_REFUSED" in text
    for text in (run.said, log, *run.files.values()):
        assert SECRET not in text


def test_a_submitted_file_sends_from_executors_that_it_ships_its_application_to(
    tmp_path: Path, settings: dict[str, Any], noted: Notes
) -> None:
    shipped = tmp_path / "shipped.py"
    shipped.write_text("from tests.integration.shop import app")
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
    command = [*submit, *configured(wanted), "--py-files", str(shipped)]
    environment = spark_environment(tmp_path, settings)
    submitted = run(command, environment, noted, tmp_path, "shipped:app")
    assert len(submitted.processes - {str(submitted.process)}) == 2
    executors = [text for path, text in submitted.files.items() if path.endswith("stderr")]
    assert len(executors) == 2
    assert "ACCESS_REFUSED" in "".join(executors)
    assert_wrong_passwords_are_hidden(submitted)


def test_a_client_of_spark_connect_names_the_format_and_the_server_sends(
    tmp_path: Path, settings: dict[str, Any], noted: Notes
) -> None:
    with ConnectServer(settings, logging(tmp_path)) as server:
        client = {**spark_environment(tmp_path), "SPARK_REMOTE": server.url}
        # The client needs neither the application nor this package.
        del client["PYTHONPATH"]
        program = run([sys.executable], client, noted, tmp_path, "tests.integration.shop:app")
        assert program.processes == {str(server.pid)}
        assert_wrong_passwords_are_hidden(program, server.log)
