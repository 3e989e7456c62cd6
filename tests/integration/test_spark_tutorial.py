"""The job of Spark's tutorial sends what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.celery_process import REPOSITORY
from tests.documentation.page import blocks

PAGE = REPOSITORY / "docs" / "tutorial" / "spark.md"


def test_the_tutorials_job_sends_and_shows_where_the_tasks_wait(
    private_rabbitmq: Any, tmp_path: Path
) -> None:
    files = {block.argument: block.code for block in blocks(PAGE) if block.action == "file"}
    assert files.keys() == {"reminding.py", "job.py"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    with (tmp_path / "reminding.py").open("a") as application:
        # The job is the first to use this broker, and declares 180 queues.
        application.write("\napp.conf.rabbitdelay_confirm_timeout = 150\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"},
        "CELERY_BROKER_URL": private_rabbitmq.url,
        # As in a virtual environment that is activated.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "all tasks wait" in done.stdout
    # The other two may have come to their queue meanwhile; the columns are then narrower.
    assert re.search(r"^\|rabbitdelay\.days\.3 *\|1 +\|$", done.stdout, re.MULTILINE)
