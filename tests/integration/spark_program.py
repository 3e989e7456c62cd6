"""A Spark program that writes tasks and is killed before Spark commits.

``python -m tests.integration.spark_program KEY ROWS DELAY``. Its application, which Spark's Python
processes import from here, stops for good where Spark is about to commit: it is imported for the
second time then by a process that runs no task of Spark's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from pyspark import TaskContext

from tests.integration.shop import make_app

#: Names the file that counts the processes.
COUNTED_IN = "SPARK_PROGRAM_COUNTS"

if __name__ != "__main__" and COUNTED_IN in os.environ:
    if TaskContext.get() is None:
        counted = Path(os.environ[COUNTED_IN])
        with counted.open("a") as file:
            file.write("x")
        if counted.stat().st_size >= 2:
            signal.pause()
    app = make_app(json.loads(os.environ["SHOP"]))


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
