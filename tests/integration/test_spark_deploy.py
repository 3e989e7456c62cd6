"""Programs that only name the format: by ``spark-submit`` on executors of their own, by Connect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app
from tests.integration.spark_servers import ConnectServer, spark_environment, spark_program
from tests.integration.worker import Worker

ROWS = 200

#: Each task is given its row's number, and the id of the process that has read the row.
PROGRAM = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
rows = spark.sql(
    "select array(string(id), java_method('java.lang.ProcessHandle', 'current')) args, "
    f"named_struct('key', '{sys.argv[1]}') kwargs, 1D delay from range(0, ROWS, 1, 4)"
)
options = {"app": "tests.integration.shop:app", "task": "note", "idColumn": "args"}
rows.write.format("rabbitdelay").mode("append").options(**options).save()
spark.stop()
""".replace("ROWS", str(ROWS))


@pytest.fixture(scope="module")
def registry() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def settings(module_broker_url: str, redis_url: str, registry: RedisServer) -> dict[str, Any]:
    return {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_registry_url": registry.url,
    }


@pytest.fixture(scope="module")
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(settings)
    with Worker(settings):
        yield app
    app.close()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "remind.py"
    path.write_text(PROGRAM)
    return path


def run(command: list[str], environment: dict[str, str]) -> int:
    """Run a program to its end; return the id of its process."""
    process = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return process.pid


def processes_of(noted: Notes) -> set[str]:
    """Wait for all tasks, each of which runs once; return which processes have read their rows."""
    wait_for(lambda: len(noted()) >= ROWS, "all tasks", PATIENCE)
    given = noted.given()
    assert sorted(int(number) for number, _ in given) == [*range(ROWS)]
    return {process for _, process in given}


@pytest.mark.timeout(500)
def test_a_submitted_file_that_names_the_format_sends_from_executors_of_their_own(
    settings: dict[str, Any], shop: Any, noted: Notes, program: Path, tmp_path: Path
) -> None:
    wanted = {
        # No task starts before both executors are there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    confs = [each for name, value in wanted.items() for each in ("--conf", f"{name}={value}")]
    submit = [spark_program("spark-submit"), "--master", "local-cluster[2,1,1024]", *confs]
    driver = run([*submit, str(program), noted.key], spark_environment(tmp_path, settings))
    executors = processes_of(noted)
    assert len(executors) == 2
    assert str(driver) not in executors


@pytest.mark.timeout(500)
def test_a_client_of_spark_connect_names_the_format_and_the_server_sends(
    settings: dict[str, Any], shop: Any, noted: Notes, program: Path, tmp_path: Path
) -> None:
    with ConnectServer(settings) as server:
        client = {**spark_environment(tmp_path), "SPARK_REMOTE": server.url}
        # The client needs neither the application nor this package.
        del client["PYTHONPATH"]
        run([sys.executable, str(program), noted.key], client)
        assert processes_of(noted) == {str(server.pid)}
