"""Programs that only name the format: by ``spark-submit``, by Connect, and as the tutorial does."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.documentation.page import blocks
from tests.kernel.integration.notes import Notes
from tests.spark.integration.spark import REPOSITORY
from tests.spark.integration.spark_fixtures import shop
from tests.spark.integration.spark_programs import (
    ConnectServer,
    run,
    spark_environment,
    spark_submit,
)

__all__ = ["shop"]

ROWS = 200

#: A password that is wrong, and that no log may hold.
SECRET = "opensesame"

#: Each task is given its row's number, and the id of the process that has read the row. First come
#: a read with a wrong password of the broker, and one with a password of a Redis that does not
#: answer, as one that answers may take any password. Unlike writes, they give up at once.
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
redis = {"registry": nowhere, "registryPassword": secret}
for wrong in (
    {"what": "levels", "broker": broker, "brokerPassword": secret},
    {"what": "pending", "broker": broker, "brokerPassword": "guest", **redis},
):
    try:
        spark.read.format("rabbitdelay").options(**wrong).load().collect()
    except Exception as error:
        print("FAILED", error)
options = {"app": sys.argv[3], "task": "note", "idColumn": "args"}
rows.write.format("rabbitdelay").mode("append").options(**options).save()
spark.stop()
""".replace("ROWS", str(ROWS))


def run_program(
    command: list[str], environment: dict[str, str], noted: Notes, folder: Path, app: str
) -> tuple[int, set[int]]:
    """Run the program; each of its tasks runs once, and no file that Spark writes has the password.

    Returns:
        The id of its process, and of those that have read its rows.
    """
    (folder / "remind.py").write_text(PROGRAM)
    broker = noted.shop.conf.broker_url.replace(":guest@", "@")
    arguments = [str(folder / "remind.py"), noted.key, broker, app]
    own, said = run([*command, *arguments], {**environment, "SECRET": SECRET}, folder)
    files = {each: each.read_text(errors="replace") for each in folder.rglob("*") if each.is_file()}
    assert said.count("FAILED") == 2, said
    assert "RegistryUnavailable" in said
    events = "".join(text for path, text in files.items() if "events" in path.parts)
    assert "ACCESS_REFUSED" in said
    assert "ACCESS_REFUSED" in events
    for text in (said, *files.values()):
        assert SECRET not in text
    noted.wait(ROWS)
    given = noted.given()
    assert sorted(int(number) for number, _ in given) == [*range(ROWS)]
    return own, {int(process) for _, process in given}


def logging(folder: Path) -> dict[str, str]:
    """Return the settings with which Spark logs much, and writes a log of events."""
    (folder / "events").mkdir()
    return {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": (folder / "events").as_uri(),
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }


def test_a_submitted_file_sends_from_executors_that_it_ships_its_application_to(
    tmp_path: Path, spark_settings: dict[str, Any], noted: Notes
) -> None:
    shipped = tmp_path / "shipped.py"
    shipped.write_text("from tests.kernel.integration.shop import app")
    wanted = {
        # No task starts before both executors are there.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        **logging(tmp_path),
    }
    command = [*spark_submit("local-cluster[2,1,1024]", wanted), "--py-files", str(shipped)]
    environment = spark_environment(tmp_path, spark_settings)
    own, processes = run_program(command, environment, noted, tmp_path, "shipped:app")
    assert len(processes - {own}) == 2
    executors = [each.read_text() for each in tmp_path.rglob("stderr")]
    assert len(executors) == 2
    assert "ACCESS_REFUSED" in "".join(executors)


def test_a_client_of_spark_connect_names_the_format_and_the_server_sends(
    tmp_path: Path, spark_settings: dict[str, Any], noted: Notes
) -> None:
    with ConnectServer(spark_settings, logging(tmp_path)) as server:
        client = {**spark_environment(tmp_path), "SPARK_REMOTE": server.url}
        # The client needs neither the application nor this package.
        del client["PYTHONPATH"]
        app = "tests.kernel.integration.shop:app"
        _, processes = run_program([sys.executable], client, noted, tmp_path, app)
        assert processes == {server.pid}
        assert SECRET not in server.log


def test_the_tutorials_job_sends_and_shows_where_the_tasks_wait(
    private_rabbitmq: Any, tmp_path: Path
) -> None:
    page = REPOSITORY / "docs" / "tutorial" / "spark.md"
    files = {block.argument: block.code for block in blocks(page) if block.action == "file"}
    assert files.keys() == {"reminding.py", "job.py"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    with (tmp_path / "reminding.py").open("a") as application:
        # The job is the first to use this broker, and declares 180 queues.
        application.write("\napp.conf.rabbitdelay_confirm_timeout = 150\n")
    environment = {
        **spark_environment(tmp_path),
        "CELERY_BROKER_URL": private_rabbitmq.url,
        # As in a virtual environment that is activated.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    del environment["PYSPARK_PYTHON"]
    _, said = run([sys.executable, "job.py"], environment, tmp_path)
    assert "all tasks wait" in said
    # The other two may have come to their queue meanwhile; the columns are then narrower.
    assert re.search(r"^\|rabbitdelay\.days\.3 *\|1 +\|$", said, re.MULTILINE)
