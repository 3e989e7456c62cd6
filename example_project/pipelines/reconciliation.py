"""Find out what became of each order's reminder, and send missing reminders again.

The registry lists the tasks that wait, Celery's results show those that have run, and RabbitMQ
counts its messages. Missing reminders are sent again with the same ids. If a lost task
arrives after all, the registry drops the second message.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay.spark import task_id
from example_project.pipelines.replay import APP, TASK, options, reminders_of, session
from example_project.shop import app, remind
from example_project.spark_job import JOB_ID, send

#: The states of a reminder and their conditions, of which the first that holds applies. ``due`` is
#: the due time in the registry, null once the task has arrived.
STATES: Final = {
    "delivered": "result = 'SUCCESS'",
    "failed": "result in ('FAILURE', 'REVOKED')",
    "waiting": "due >= '{overdue}'",
    "retry missing": "due is not null and result = 'RETRY'",
    "missing": "due is not null",
    "not sent": "result is null and (eta > '{now}' or eta < '{overdue}')",
    "running": "true",
}

#: The shortest delay with which a reminder is sent again: the registry lists only delayed tasks.
SOON: Final = timedelta(seconds=10)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pipeline; the arguments are those of the command line."""
    parser = options(__doc__)
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        help="seconds beyond the tolerance until a reminder counts as missing (default: 60)",
    )
    parser.add_argument("--dry-run", action="store_true", help="send nothing")
    given = parser.parse_args(arguments)
    spark = session("reconciliation")

    queued = show_broker(spark)
    now = datetime.now(UTC)
    overdue = now - timedelta(seconds=given.tolerance + given.grace)
    found = states_of(reminders_of(spark, given).cache(), now, overdue).cache()
    counts: dict[str, int] = dict(found.groupBy("state").count().collect())
    print(f"{sum(counts.values()):8,} orders; the states of their reminders:")
    for state in STATES:
        print(f"{counts.get(state, 0):8,} {state}")

    if queued:
        print("nothing is sent: missing reminders may be in the queue; let workers empty it first")
    elif not given.dry_run:
        print(f"{send_again(found, given.tolerance):,} were sent again")


def show_broker(spark: SparkSession) -> int:
    """Print the number of messages in each level and in the tasks' queue; return the latter."""
    levels = spark.read.format("rabbitdelay").option("app", APP).option("what", "levels").load()
    held = levels.groupBy("level").sum("messages").where("sum(messages) > 0").collect()
    with app.connection_for_read() as connection:
        name: str = app.conf.task_default_queue
        channel: Any = connection.default_channel
        queue = channel.queue_declare(name, passive=True)
    for level, messages in [*held, (f"the queue {name}", queue.message_count)]:
        print(f"{messages:8,} messages in {level}")
    return int(queue.message_count)


def states_of(reminders: DataFrame, now: datetime, overdue: datetime) -> DataFrame:
    """Return the reminders with the ids of their tasks and with their states.

    Args:
        reminders: A row for each order.
        now: The current time.
        overdue: A reminder that was due before this time and has not arrived is missing.
    """
    read = reminders.sparkSession.read.format("rabbitdelay").option("app", APP)
    listed = read.option("task", TASK).load().select("task_id", "due").cache()
    # The registry is read before the results: a task that leaves it meanwhile counts as running, or
    # has a result.
    listed.count()
    columns = "order_id string, task_id string, result string"
    results = reminders.select("order_id").mapInArrow(read_results, columns)
    state = F.lit(None)
    for name, condition in reversed(STATES.items()):
        state = F.when(F.expr(condition.format(now=now, overdue=overdue)), name).otherwise(state)
    known = reminders.join(results, "order_id").join(listed, "task_id", "left")
    return known.withColumn("state", state).drop("due", "result")


def read_results(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the ids of the orders' tasks and the states of their results; runs in the executors."""
    from example_project.shop import app

    backend: Any = app.backend
    for batch in batches:
        orders = batch.column("order_id").to_pylist()
        tasks = [task_id(JOB_ID, [order]) for order in orders]
        stored = backend.mget([backend.get_key_for_task(task) for task in tasks])
        results = [each and backend.decode_result(each)["status"] for each in stored]
        yield pa.RecordBatch.from_arrays(
            [pa.array(each, pa.string()) for each in (orders, tasks, results)],
            ["order_id", "task_id", "result"],
        )


def send_again(found: DataFrame, tolerance: float) -> int:
    """Send missing reminders again with the same ids; return their number."""
    missing = found.where(F.col("state").isin("missing", "not sent")).drop("task_id", "state")
    number = missing.count()
    if number:
        soon = F.lit(datetime.now(UTC) + SOON)
        send(missing.withColumn("eta", F.greatest("eta", soon)), APP, tolerance)
    # The first attempt of these has run, so `once` would drop them as duplicates. Send without it.
    retries = found.where("state = 'retry missing'").collect()
    for row in retries:
        kwargs = {name: row[name] for name in ("order_id", "customer_id", "number_of_cds")}
        remind.apply_async(kwargs=kwargs, task_id=row.task_id, countdown=SOON.total_seconds())
    return number + len(retries)


if __name__ == "__main__":
    main()
