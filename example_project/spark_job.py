"""The Spark job: reads the orders and has the executors send a reminder each.

A process of its own, as with ``spark-submit``; its Java process ends with it.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project.dispatch import dispatch
from example_project.journal import Dispatch
from example_project.orders import FIELDS, LEAST_DOLLARS, ORDER_LINE, ORDERS_FILE, Calendar
from example_project.shop import journal

__all__ = ["EXECUTORS", "SECONDS_PER_DAY", "read_orders", "send_reminders"]

#: How many executor processes send at the same time.
EXECUTORS: Final = 2

#: A day of the shop's calendar lasts a second: a fortnight's delay becomes 14 s, January 31 s.
SECONDS_PER_DAY: Final = 1.0


def main() -> None:
    """Run the job in the current folder."""
    spark = start_spark(Path.cwd())
    try:
        send_reminders(read_orders(spark, ORDERS_FILE))
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


def read_orders(spark: SparkSession, path: Path) -> DataFrame:
    """Read the fixed-width file into the columns of :class:`example_project.orders.Order`."""
    lines = spark.read.text(str(path)).where(F.col("value").rlike(ORDER_LINE))
    texts = lines.select(
        *(F.trim(F.substring("value", start, width)).alias(name) for name, start, width in FIELDS)
    )
    # The data set has no order number. Its own columns make one that every run gives again.
    days = Window.partitionBy("customer_id", "ordered_on").orderBy("number_of_cds", "dollars")
    return texts.select(
        F.concat_ws("-", "customer_id", "ordered_on", F.row_number().over(days)).alias("order_id"),
        "customer_id",
        F.to_date("ordered_on", "yyyyMMdd").alias("ordered_on"),
        F.col("number_of_cds").cast("int").alias("number_of_cds"),
        F.col("dollars").cast("decimal(8,2)").alias("dollars"),
    )


def send_reminders(orders: DataFrame) -> None:
    """Have the executors send a reminder for each order that is worth it, the earliest first."""
    worth_it = orders.where(F.col("dollars") >= LEAST_DOLLARS)
    parts = worth_it.repartition(EXECUTORS).sortWithinPartitions("ordered_on").cache()
    summary = parts.agg(F.count("*").alias("orders"), F.min("ordered_on").alias("first_day"))
    row = summary.collect()[0]
    begins = time.time()
    calendar = Calendar(row.first_day, begins, SECONDS_PER_DAY)
    parts.foreachPartition(partial(dispatch, calendar=calendar))
    journal.write_dispatch(Dispatch(row.orders, time.time() - begins))


if __name__ == "__main__":
    main()
