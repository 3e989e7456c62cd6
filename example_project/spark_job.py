"""A Spark job: read the orders, and send a delayed reminder for each of them.

Run it with ``python -m example_project.spark_job``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay import Report

#: The orders of January 1997. The columns: the first character, counted from 1, and the width.
ORDERS: Final = Path(__file__).parent / "data" / "cdnow_orders_1997_01.txt"
COLUMNS: Final = {
    "customer_id": (2, 5),
    "ordered_on": (8, 8),
    "number_of_cds": (17, 2),
    "dollars": (20, 7),
}
ORDER_LINE: Final = r"^ \d{5} \d{8} "
FIRST_DAY: Final = date(1997, 1, 1)

#: Customers are asked for a review 14 days after an order of at least 15 dollars.
REMIND_AFTER: Final = timedelta(days=14)
LEAST_DOLLARS: Final = 15

#: The job replays January 1997 from now on, and a day lasts one second: 14 days become 14 s.
REPLAYED_DAY: Final = timedelta(seconds=1)


def main() -> None:
    """Run the job."""
    spark = SparkSession.builder.appName("reminders").getOrCreate()
    orders = read_orders(spark).cache()
    print(f"{orders.count():,} reminders to send")
    begins = datetime.now(UTC)

    def send(partition: Iterable[Row]) -> None:
        report = send_reminders(partition, begins)
        print(f"{report.confirmed:,} reminders confirmed, in {report.messages:,} messages")

    orders.foreachPartition(send)
    spark.stop()


def read_orders(spark: SparkSession) -> DataFrame:
    """Read the orders that get a reminder, and number each customer's orders of a day."""
    lines = spark.read.text(str(ORDERS)).where(F.col("value").rlike(ORDER_LINE))
    fields = {name: F.trim(F.substring("value", *columns)) for name, columns in COLUMNS.items()}
    texts = lines.select(*(text.alias(name) for name, text in fields.items()))
    days = Window.partitionBy("customer_id", "ordered_on").orderBy("number_of_cds", "dollars")
    return texts.select(
        F.concat_ws("-", "customer_id", "ordered_on", F.row_number().over(days)).alias("order_id"),
        "customer_id",
        F.to_date("ordered_on", "yyyyMMdd").alias("ordered_on"),
        F.col("number_of_cds").cast("int").alias("number_of_cds"),
        F.col("dollars").cast("decimal(8,2)").alias("dollars"),
    ).where(F.col("dollars") >= LEAST_DOLLARS)


def send_reminders(orders: Iterable[Row], begins: datetime) -> Report:
    """Send the reminders of one partition; RabbitMQ has confirmed all of them on return."""
    # Executors import the application, which then has a connection of its own in each of them.
    from example_project.shop import app, remind

    return app.rabbitdelay.send_many(remind, reminders(orders, begins))


def reminders(orders: Iterable[Row], begins: datetime) -> Iterator[dict[str, Any]]:
    """Yield a row of ``send_many`` for each order; its task id is the same at every attempt."""
    for order in orders:
        yield {
            "args": (order.order_id, order.customer_id, order.number_of_cds),
            "eta": remind_at(order, begins),
            "task_id": f"reminder-{order.order_id}",
        }


def remind_at(order: Row, begins: datetime) -> datetime:
    """Return when to send an order's reminder if January 1997 is replayed from ``begins`` on."""
    # The data has no time of day, so one is derived from the order's id.
    time_of_day = timedelta(days=zlib.crc32(order.order_id.encode()) / 2**32)
    delay: timedelta = order.ordered_on - FIRST_DAY + time_of_day + REMIND_AFTER
    return begins + delay / timedelta(days=1) * REPLAYED_DAY


if __name__ == "__main__":
    main()
