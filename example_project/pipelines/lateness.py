"""Report the lateness of delivered reminders, from the worker's log: p50, p99 and maximum."""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project.pipelines.delivered_log import FOLDER
from example_project.pipelines.replay import session

#: The schema of the log; further fields are ignored.
LOG: Final = "task_id string, due_ms bigint, started_ms bigint"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline; the arguments are those of the command line."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--log", default=str(FOLDER), help="the log folder (default: %(default)s)")
    parser.add_argument("--step", default="1 minute", help="time per row (default: %(default)s)")
    given = parser.parse_args(arguments)
    log = session("lateness").read.schema(LOG).json(given.log).where("task_id is not null").cache()
    report(log, given.step).show(1000, truncate=False)
    delivered, ids = log.agg(F.count("*"), F.count_distinct("task_id")).collect()[0]
    print(f"{delivered:,} reminders delivered, of {ids:,} different ids")


def report(log: DataFrame, step: str) -> DataFrame:
    """Return the lateness in milliseconds, start minus due time, for each step of due times.

    Args:
        log: The delivered reminders. Those sent without a delay are left out.
        step: The length of a step, as Spark's ``window`` takes it.
    """
    late = F.col("started_ms") - F.col("due_ms")
    due = F.window(F.timestamp_millis("due_ms"), step).start.alias("due")
    return (
        log.where("due_ms is not null")
        .groupBy(due)
        .agg(
            F.count("*").alias("delivered"),
            F.count_if(late < 0).alias("early"),
            F.percentile(late, 0.5).cast("long").alias("p50_ms"),
            F.percentile(late, 0.99).cast("long").alias("p99_ms"),
            F.max(late).alias("max_ms"),
        )
        .orderBy("due")
    )


if __name__ == "__main__":
    main()
