"""Send a reminder for each order, through the format ``rabbitdelay``.

If it is run again with the same options, each customer still gets one reminder: the tasks have the
same ids, and the registry drops duplicates.
"""

import time
from collections.abc import Sequence

from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from example_project.pipelines.replay import APP, TASK, options, reminders_of, session
from example_project.spark_job import send


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline; the arguments are those of the command line."""
    given = options(__doc__).parse_args(arguments)
    spark = session("reminders")
    reminders = reminders_of(spark, given).cache()
    first, last = (F.date_format(of("eta"), "yyyy-MM-dd HH:mm:ss") for of in (F.min, F.max))
    number, first_due, last_due = reminders.agg(F.count("*"), first, last).collect()[0]
    print(f"{number:,} reminders, due from {first_due} to {last_due} UTC")

    began = time.monotonic()
    send(reminders, APP, given.tolerance)
    seconds = time.monotonic() - began
    print(f"all confirmed in {seconds:.1f} s: {number / seconds:,.0f} a second")

    # save() returns nothing, so ask the broker and the registry what waits now.
    read = spark.read.format("rabbitdelay").option("app", APP)
    messages = read.option("what", "levels").load().agg(F.sum("messages")).collect()[0][0]
    waiting = read.option("what", "pending").option("task", TASK).load().count()
    print(f"{waiting:,} wait according to the registry; RabbitMQ holds {messages:,} messages")
    print(f"to send the same again: --begins {given.begins.isoformat()} --day {given.day:g}")


if __name__ == "__main__":
    main()
