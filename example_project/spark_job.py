"""A Spark job: read the orders, and send a delayed reminder for each of them.

Run it with ``python -m example_project.spark_job``.
"""

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

#: The file of all orders; for each column, its first character, counted from 1, and its width.
ORDERS: Final = Path(__file__).parent / "data" / "cdnow_orders.txt.gz"
COLUMNS: Final = {
    "customer_id": (2, 5),
    "ordered_on": (8, 8),
    "number_of_cds": (17, 2),
    "dollars": (20, 7),
}
ORDER_LINE: Final = r"^ \d{5} \d{8} "
FIRST_DAY: Final = date(1997, 1, 1)

#: Customers are asked for a review 14 days after an order.
REMIND_AFTER: Final = timedelta(days=14)

#: The job sends reminders for the orders of January 1997 of at least 15 dollars.
CHOSEN: Final = "ordered_on < date '1997-02-01' and dollars >= 15"

#: The job replays the month from now on, with days of one second: 14 days become 14 s.
REPLAYED_DAY: Final = timedelta(seconds=1)

#: The tasks' ids are derived from this id and the orders, so another run sends the same ids.
JOB_ID: Final = "review-reminders"


def main() -> None:
    """Run the job."""
    spark = SparkSession.builder.appName("reminders").getOrCreate()
    orders = read_orders(spark).where(CHOSEN).cache()
    print(f"{orders.count():,} reminders to send")
    send(reminders(orders, begins=datetime.now(UTC)))
    print("RabbitMQ has confirmed all of them")
    spark.stop()


def read_orders(spark: SparkSession, path: Path = ORDERS) -> DataFrame:
    """Read orders, and number each customer's orders of a day."""
    lines = spark.read.text(str(path)).where(F.col("value").rlike(ORDER_LINE))
    fields = {name: F.trim(F.substring("value", *columns)) for name, columns in COLUMNS.items()}
    texts = lines.select(*(text.alias(name) for name, text in fields.items()))
    days = Window.partitionBy("customer_id", "ordered_on").orderBy("number_of_cds", "dollars")
    return texts.select(
        F.concat_ws("-", "customer_id", "ordered_on", F.row_number().over(days)).alias("order_id"),
        "customer_id",
        F.to_date("ordered_on", "yyyyMMdd").alias("ordered_on"),
        F.col("number_of_cds").cast("int").alias("number_of_cds"),
        F.col("dollars").cast("decimal(8,2)").alias("dollars"),
    )


def reminders(orders: DataFrame, begins: datetime, day: timedelta = REPLAYED_DAY) -> DataFrame:
    """Return a row for each order: the arguments of its task, and its due time.

    Args:
        orders: The orders.
        begins: When the replay of 1 January 1997 begins.
        day: How long a replayed day lasts.
    """
    # The data has no time of day, so one is derived from the order's id.
    time_of_day = F.crc32(F.col("order_id").cast("binary")) / 2**32
    days = F.datediff("ordered_on", F.lit(FIRST_DAY)) + REMIND_AFTER.days + time_of_day
    microseconds = round(begins.timestamp() * 1e6) + days * (day / timedelta(microseconds=1))
    eta = F.timestamp_micros(microseconds.cast("long")).alias("eta")
    return orders.select("order_id", "customer_id", "number_of_cds", eta)


def send(reminders: DataFrame, app: str = "example_project.shop:app", tolerance: float = 0) -> None:
    """Send the reminders; on return, RabbitMQ has confirmed all of them, and they may run."""
    (
        reminders.write.format("rabbitdelay")
        .mode("append")
        .option("app", app)
        .option("task", "example_project.shop.remind")
        .option("kwargsFromColumns", True)
        .option("jobId", JOB_ID)
        .option("idColumn", "order_id")
        .option("tolerance", tolerance)
        .save()
    )


if __name__ == "__main__":
    main()
