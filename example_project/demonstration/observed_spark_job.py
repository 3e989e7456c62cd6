"""The shop's Spark job as the demonstration runs it: settings for a small machine, and a journal.

A process of its own, as with ``spark-submit``; its Java process ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pyspark.sql import Row, SparkSession

from example_project import spark_job
from example_project.demonstration.journal import Dispatch

__all__ = ["EXECUTORS", "NotAllConfirmed", "main", "send_and_write"]

#: How many executor processes send at the same time.
EXECUTORS: Final = 2


class NotAllConfirmed(Exception):
    """The report of ``send_many`` has another number of confirmed rows than were given to it."""


def main() -> None:
    """Run the job, with all of Spark's files in the current folder."""
    from example_project.demonstration.observed_shop import journal

    spark = start_spark(Path.cwd())
    try:
        orders = spark_job.read_orders(spark).cache()
        count = orders.count()
        begins = datetime.now(UTC)
        orders.foreachPartition(lambda partition: send_and_write(partition, begins))
        seconds = (datetime.now(UTC) - begins).total_seconds()
        journal.write_dispatch(Dispatch(count, seconds))
    finally:
        spark.stop()


def start_spark(folder: Path) -> SparkSession:
    """Start Spark in this process, on the loopback interface, with all its files in a folder."""
    # Most of a job this short is Java warming up; the quick compiler alone saves three seconds.
    quick = "-XX:TieredStopAtLevel=1"
    java_options = f"{quick} -Djava.io.tmpdir={folder} -Dderby.system.home={folder}"
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": False,
        "spark.ui.showConsoleProgress": False,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": java_options,
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.sql.shuffle.partitions": EXECUTORS,
        # Small data: the default would join the two partitions into one.
        "spark.sql.adaptive.enabled": False,
    }
    builder = SparkSession.builder.master(f"local[{EXECUTORS}]").appName("record_shop")
    spark = builder.config(map=settings).getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    return spark


def send_and_write(orders: Iterable[Row], begins: datetime) -> None:
    """Let the shop send the reminders of a partition, then note them as sent.

    Raises:
        NotAllConfirmed: The report does not count each reminder as confirmed.
    """
    # An executor imports it, and with it the shop; Spark cannot send it an application.
    from example_project.demonstration.observed_shop import journal

    due_ms: dict[str, int] = {}

    def noted() -> Iterator[Row]:
        for order in orders:
            due_ms[order.order_id] = _milliseconds(spark_job.remind_at(order, begins))
            yield order

    report = spark_job.send_reminders(noted(), begins)
    if report.confirmed != len(due_ms):
        raise NotAllConfirmed(f"{report.confirmed:,} confirmed of {len(due_ms):,} reminders")
    journal.write_sent(due_ms, report.messages)


def _milliseconds(instant: datetime) -> int:
    return int(instant.timestamp() * 1000)


if __name__ == "__main__":
    main()
