"""A Spark program that writes tasks and is killed before it commits.

``python -m tests.integration.spark_program KEY ROWS DELAY``. Spark's Python processes import its
application from here. It pauses for good where Spark has just asked for the commit, which it does
when all its tasks have ended, and before the registry hears of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.integration.shop import make_app

#: The environment variable that names the file which says that it pauses.
COMMITS = "SPARK_PROGRAM_COMMITS"

if __name__ != "__main__" and COMMITS in os.environ:
    app = make_app(json.loads(os.environ["SHOP"]))

    def _pause(job: str) -> None:
        Path(os.environ[COMMITS]).touch()
        signal.pause()

    delays: Any = app.rabbitdelay
    delays.commit_job = _pause


def main() -> None:
    from tests.integration.spark import spark_session

    key, rows, delay = sys.argv[1:]
    with spark_session() as spark:
        frame = spark.sql(
            f"select array(id) args, named_struct('key', '{key}') kwargs, {delay}D delay "
            f"from range({rows})"
        )
        options = {"app": "tests.integration.spark_program:app", "task": "note"}
        frame.write.format("rabbitdelay").mode("append").options(**options).save()


if __name__ == "__main__":
    main()
