"""Rows a second from Spark into the levels, beside two processes of ``send_many``.

``python -m tests.benchmarks.spark`` starts a private broker and Redis, and Spark on two cores. Each
row is a reminder with three arguments, due within a month, a minute's tolerance. The contestants,
in turn: the format ``rabbitdelay`` row by row, grouped, and with a registry, the same rows to
Spark's own format ``noop`` through a function in Python, and two processes of ``send_many``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from typing import Any, Final
from uuid import uuid4

from kombu import Connection, Queue
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.spark import grouped
from celery_rabbitdelay.testing import RedisServer
from tests.benchmarks import measure
from tests.benchmarks.measure import Target
from tests.integration.spark import spark_session
from tests.private_broker import private_broker

MONTH_S: Final = 30 * 86_400
TOLERANCE_S: Final = 60
PROCESSES: Final = 2

#: Whom the format is compared with, and its rate row by row, and otherwise, as a part of theirs.
PEER: Final = "send_many, two processes"
ROW_BY_ROW: Final = "format rabbitdelay, row by row"
ROW_BY_ROW_TARGET: Final = 0.9
TARGET: Final = 0.7


def frame(spark: SparkSession, rows: int) -> DataFrame:
    """The rows."""
    return spark.range(0, rows, 1, PROCESSES).selectExpr(
        "array(concat('order-', id), string(id % 9973), string(id % 7)) args",
        f"double(pmod(hash(id), {MONTH_S}) + 600) delay",
    )


def application(url: str, prefix: str, queue: str) -> Celery:
    """The application of a process that calls ``send_many``."""
    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(rabbitdelay_prefix=prefix, task_queues=[Queue(queue, routing_key=queue)])
    return app


def send(url: str, prefix: str, queue: str, first: int, last: int) -> int:
    """Send a part of the rows; return how many RabbitMQ has confirmed."""
    app = application(url, prefix, queue)

    def rows() -> Iterator[Row]:
        for number in range(first, last):
            args = (f"order-{number}", str(number % 9973), str(number % 7))
            yield Row(args, delay=(number * 2_654_435_761) % MONTH_S + 600)

    report = app.rabbitdelay.send_many("remind", rows(), tolerance=TOLERANCE_S, queue=queue)
    app.close()
    return report.confirmed


def timed(rows: int, run: Callable[[], object]) -> float:
    """Return rows a second."""
    began = time.monotonic()
    run()
    return rows / (time.monotonic() - began)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prefix, queue = f"bench-{uuid4().hex[:8]}", f"bench-{uuid4().hex[:8]}"
    with (
        private_broker() as broker,
        RedisServer() as redis,
        spark_session() as spark,
        ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool,
    ):
        with Connection(broker.url) as connection:
            Queue(queue, channel=connection.default_channel).declare()
        given = {
            "broker": broker.url.replace("guest:guest@", "guest@"),
            "brokerPassword": "guest",
            "prefix": prefix,
            "task": "remind",
            "queue": queue,
            "tolerance": str(TOLERANCE_S),
        }

        def write(**more: str) -> None:
            made = frame(spark, options.rows).write.format("rabbitdelay").mode("append")
            made.options(**given, **more).save()

        def write_grouped() -> None:
            rows = grouped(frame(spark, options.rows), **given)
            rows.write.format("rabbitdelay").mode("append").options(**given).save()

        def to_nowhere() -> None:
            rows = frame(spark, options.rows)
            passed = rows.mapInArrow(_passed_on, rows.schema)
            passed.write.format("noop").mode("append").save()

        def send_many() -> None:
            edges = [options.rows * part // PROCESSES for part in range(PROCESSES + 1)]
            parts = list(pairwise(edges))
            futures = [pool.submit(send, broker.url, prefix, queue, *part) for part in parts]
            assert sum(each.result() for each in futures) == options.rows

        contestants: dict[str, Callable[[], None]] = {
            PEER: send_many,
            ROW_BY_ROW: write,
            "format rabbitdelay, grouped": write_grouped,
            "format rabbitdelay, with a registry": lambda: write(registry=redis.url),
            "Spark to nowhere, through Python": to_nowhere,
        }
        measures = {name: partial(timed, options.rows, run) for name, run in contestants.items()}
        measure.in_turn(measures, 1)  # warms up
        rates = measure.in_turn(measures, options.rounds)
    measure.show("Rows of Spark", "rows/s", rates, PEER)
    targets = [
        Target(f"{name} / {PEER}", ratio, ROW_BY_ROW_TARGET if name == ROW_BY_ROW else TARGET)
        for name, ratio in measure.ratios(rates, PEER).items()
        if name.startswith("format")
    ]
    return int(not all(each["met"] for each in measure.judge(targets)))


def _passed_on(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


if __name__ == "__main__":
    sys.exit(main())
