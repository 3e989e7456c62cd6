"""Shared by the pipelines: the Spark session, the options, and the reminders."""

from argparse import ArgumentParser, Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from example_project import spark_job

#: The import path of the application, for Spark's Python processes; and the name of its task.
APP: Final = "example_project.shop:app"
TASK: Final = "example_project.shop.remind"


def session(name: str) -> SparkSession:
    """Return the running Spark session, or start one."""
    builder = SparkSession.builder.appName(name)
    return builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()


def options(description: str | None) -> ArgumentParser:
    """Return a parser with the options of a pipeline that reads the orders."""
    parser = ArgumentParser(description=description)
    add = parser.add_argument
    add("--orders", type=Path, default=spark_job.ORDERS, help="the file of orders (default: all)")
    add(
        "--begins",
        type=_instant,
        default=datetime.now(UTC).replace(microsecond=0),
        help="when the replay of 1 January 1997 begins, in ISO 8601 (default: now)",
    )
    add("--day", type=float, default=60.0, help="seconds that a replayed day lasts (default: 60)")
    add(
        "--tolerance",
        type=float,
        default=60.0,
        help="seconds by which a reminder may be late (default: 60)",
    )
    return parser


def reminders_of(spark: SparkSession, given: Namespace) -> DataFrame:
    """Return a row for each order, as :func:`.spark_job.reminders` does."""
    orders = spark_job.read_orders(spark, given.orders)
    # The data is small: Spark would send it from one core.
    orders = orders.repartition(spark.sparkContext.defaultParallelism)
    return spark_job.reminders(orders, given.begins, timedelta(seconds=given.day))


def _instant(text: str) -> datetime:
    instant = datetime.fromisoformat(text)
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
