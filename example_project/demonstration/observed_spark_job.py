"""The shop's Spark job as the demonstration runs it: settings for a small machine, and a journal.

It runs in a process of its own, as with ``spark-submit``; Spark's Java process ends with it.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project import spark_job
from example_project.demonstration import observed_shop
from example_project.demonstration.journal import Dispatch
from example_project.demonstration.servers import count_in_levels

#: No reminder runs before Spark commits the write. On a busy machine, the commit takes longer than
#: the 14 s until the first reminder is due.
HEAD_START: Final = timedelta(seconds=5)

#: Where Spark's Python processes import the application.
OBSERVED_APP: Final = "example_project.demonstration.observed_shop:app"

#: The number of executor processes that send at the same time.
EXECUTORS: Final = 2


def main() -> None:
    """Run the job, with all of Spark's files in the current folder."""
    spark = start_spark(Path.cwd())
    try:
        orders = spark_job.read_orders(spark).where(spark_job.CHOSEN).cache()
        count = orders.count()
        written_at = datetime.now(UTC)
        reminders = spark_job.reminders(orders, begins=written_at + HEAD_START)
        spark_job.send(reminders, OBSERVED_APP)
        seconds = (datetime.now(UTC) - written_at).total_seconds()
        # A format returns nothing: ask the registry and the broker what was sent.
        listed = observed_shop.app.rabbitdelay.count(task=observed_shop.remind.name)
        messages = count_in_levels(observed_shop.run)
        due_ms = reminders.select("order_id", F.unix_millis("eta").alias("due_ms")).collect()
        observed_shop.journal.write_sent({row.order_id: row.due_ms for row in due_ms})
        observed_shop.journal.write_dispatch(Dispatch(count, seconds, listed, messages))
    finally:
        spark.stop()


def start_spark(folder: Path) -> SparkSession:
    """Start Spark in this process, on the loopback interface, with all its files in a folder."""
    # Such a short job is mostly Java warming up; using only the quick compiler saves three seconds.
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


if __name__ == "__main__":
    main()
