"""What waits, and what could not be delivered, as DataFrames: real Spark, RabbitMQ and Redis."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import amqp
import pytest
from kombu import Connection
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's users know

from celery_rabbitdelay.levels import headers as header_names
from tests.kernel.integration.arrivals import wait_until_waiting
from tests.operations.integration.undeliverable_messages import FAR_TIMESTAMP, Raw
from tests.spark.integration.spark_apps import APP
from tests.spark.integration.spark_fixtures import shop

__all__ = ["shop"]


def read(spark: SparkSession, **options: str) -> DataFrame:
    return spark.read.format("rabbitdelay").options(app=APP, **options).load()


@pytest.fixture
def job(shop: Any) -> Iterator[str]:
    """A job with 40 tracked tasks that wait, each a second longer, under keys of the job's name."""
    job = f"job-{uuid4().hex}"
    shop.rabbitdelay.open_job(job, expires=36_000)
    rows = [{"delay": 9000 + number, "key": f"{job}:{number}"} for number in range(40)]
    shop.rabbitdelay.send_many(shop.tasks["at"], rows, job=job, track=True)
    yield job
    shop.rabbitdelay.abort_job(job)


def test_tracked_tasks_that_wait_are_read_with_filters_and_in_partitions(
    spark: SparkSession, shop: Any, job: str
) -> None:
    found = read(spark, partitions="4", job=job)
    assert found.rdd.getNumPartitions() == 4
    taken = found.orderBy("due").collect()
    assert [row.key for row in taken] == [f"{job}:{number}" for number in range(40)]
    assert {row.task for row in taken} == {"at"}
    assert {(row.job, row.job_state) for row in taken} == {(job, "open")}
    (one,) = read(spark, key=f"{job}:7").collect()
    assert one == taken[7]
    shop.tasks["at"].apply_async(delay=8999, key=f"{job}:alone", track=True)
    shop.rabbitdelay.abort_job(job)
    of_both = read(spark, task="at").where(F.col("key").startswith(job)).collect()
    assert Counter(row.job_state for row in of_both) == {None: 1, "aborted": 40}
    shop.rabbitdelay.cancel(key=f"{job}:alone")


def test_tasks_that_wait_are_filtered_by_a_query(spark: SparkSession, job: str) -> None:
    of_job = read(spark).where(F.col("job") == job)
    (one,) = of_job.where(F.col("key") == f"{job}:7").collect()
    assert of_job.where(F.col("due") >= one.due).count() == 33
    assert of_job.where(F.col("due") < one.due).count() == 7
    assert of_job.where("key is not null and task = 'no'").count() == 0


@pytest.fixture
def undeliverable(shop: Any) -> Iterator[str]:
    """The queue of undeliverable messages, with a task, a large body, and bytes of a stranger."""
    queue = shop.rabbitdelay.topology.module_queues.undeliverable
    told = {
        "id": "4d5e",
        "task": "shop.remind",
        header_names.QUEUE: "reminders",
        header_names.DUE: 1_900_000_000_123,
        header_names.REASON: "nobody took it",
        header_names.FAILED_SINCE: 1_900_000_060_123,
        header_names.ATTEMPTS: 1,
        header_names.FIRST_REASON: "nobody took it",
    }
    messages = [
        amqp.Message(b"[[7], {}, {}]", application_headers=told),
        amqp.Message(bytes(9_000_000), application_headers={"id": "\ud800"}),
        Raw("bad", FAR_TIMESTAMP),
    ]
    with Connection(shop.conf.broker_url) as connection:
        channel: Any = connection.default_channel
        queue(channel).purge()
        for message in messages:
            channel.basic_publish(message, queue.exchange.name, "")
        wait_until_waiting(connection, queue.name, len(messages))
        yield queue.name
        wait_until_waiting(connection, queue.name, len(messages))
        queue(channel).purge()


def test_the_levels_are_read_with_what_waits_in_each_queue(spark: SparkSession, shop: Any) -> None:
    queues = {row.queue: row for row in read(spark, what="levels").collect()}
    assert queues.keys() == {queue.name for queue in shop.rabbitdelay.topology.digit_queues}
    assert all(row.wait_ms > 0 and row.messages >= 0 for row in queues.values())


def test_a_copy_of_each_undeliverable_message_is_read_and_stays_where_it_is(
    spark: SparkSession, undeliverable: str
) -> None:
    frame = read(spark, what="undeliverable")
    assert frame.rdd.getNumPartitions() == 1
    task, large, bad = frame.collect()
    assert (task.task_id, task.task, task.queue) == ("4d5e", "shop.remind", "reminders")
    assert (task.reason, task.last_stop) == ("nobody took it", None)
    assert (bytes(task.body), task.size) == (b"[[7], {}, {}]", 13)
    assert json.loads(task.headers)["task"] == "shop.remind"
    assert task.since - task.due == timedelta(minutes=1)
    # As Spark has it: Python would show it in local time.
    ((due,),) = frame.where("task = 'shop.remind'").selectExpr("unix_millis(due)").collect()
    assert due == 1_900_000_000_123
    assert (large.task_id, large.size, len(large.body)) == ("\\ud800", 9_000_000, 9_000_000)
    assert bad.task is None
    assert "properties cannot be read" in bad.reason
    assert bytes(bad.body) == b"bad"
    assert read(spark, what="undeliverable", limit="2").count() == 2
    assert frame.limit(1).count() == 1
