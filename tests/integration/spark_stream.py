"""A Spark program whose streaming query turns files into tasks; a file is a batch.

``python -m tests.integration.spark_stream KEY FOLDER CHECKPOINT DELAY`` ends when all files are
written, unless :mod:`tests.integration.spark_pausing` pauses it.
"""

from __future__ import annotations

import sys

from tests.integration.spark import spark_session


def main() -> None:
    key, folder, checkpoint, delay = sys.argv[1:]
    with spark_session() as spark:
        lines = spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 1).json(folder)
        frame = lines.repartition(2).selectExpr(
            "array(id) args", f"named_struct('key', '{key}') kwargs", f"{delay}D delay"
        )
        options = {"app": "tests.integration.spark_pausing:app", "task": "note"}
        query = frame.writeStream.format("rabbitdelay").options(**options)
        query = query.option("checkpointLocation", checkpoint).trigger(availableNow=True)
        query.start().awaitTermination()


if __name__ == "__main__":
    main()
