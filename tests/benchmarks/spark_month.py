# ruff: noqa: T201  # a program at the terminal prints
"""Ten million reminders, due over a month, from Spark on two cores with the broker beside it.

``python -m tests.benchmarks.spark_month`` starts a private broker and Redis, and Spark on two
cores. The same rows go to Spark's own format ``noop`` through Python, then into the levels row by
row, then grouped, with a tolerance of a minute. It prints rows a second, the most memory that
driver, Python processes and broker have had, and the broker's bytes for a task that waits. At the
end, one ``abort_job`` cancels the grouped ones, a worker starts, and none of them may run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final
from uuid import uuid4

from kombu import Connection
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from celery_rabbitdelay.spark import dispatch
from celery_rabbitdelay.spark.grouped import Grouping
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.benchmarks.measure import Target, judge, private_broker, save
from tests.benchmarks.memory import process_tree
from tests.benchmarks.pending import used
from tests.integration.shop import make_app
from tests.integration.spark import spark_session
from tests.integration.worker import Worker

MONTH_S: Final = 30 * 86_400
TOLERANCE_S: Final = 60

#: Seconds until the first reminder is due.
LEAD_S: Final = 60

#: Seconds that the worker has for what is due, after the job was aborted.
AFTER_S: Final = 60

PARTITIONS: Final = 16

#: As Spark has it by default: a partition of more than 64 MB is divided, and its ticks with it.
SPARK: Final = {"spark.sql.shuffle.partitions": "200"}

#: Seconds between two looks at the memory.
LOOK_EVERY: Final = 1.0

GIB: Final = 2**30


def frame(spark: SparkSession, rows: int, key: str) -> DataFrame:
    """The rows: reminders with three arguments."""
    return spark.range(0, rows, 1, PARTITIONS).selectExpr(
        "array(concat('order-', id), string(id % 9973), string(id % 7)) args",
        f"named_struct('key', '{key}') kwargs",
        f"pmod(xxhash64(id), {MONTH_S}) + {LEAD_S} delay",
    )


class Peaks:
    """The most memory that some processes have had, in bytes: PSS, summed over them.

    Attributes:
        peaks: By what they are.
    """

    def __init__(self, broker: RabbitMQServer) -> None:
        self._broker = broker
        self._ended = Event()
        self.peaks = dict.fromkeys(("driver", "Python processes", "broker"), 0)

    def _look(self) -> None:
        context: Any = SparkContext
        java = context._gateway.proc.pid
        while not self._ended.wait(LOOK_EVERY):
            everything, driver = _memory(java), _memory(java, descends=False)
            found = {
                "driver": driver,
                "Python processes": everything - driver,
                "broker": _memory(self._broker.pid),
            }
            for name, size in found.items():
                self.peaks[name] = max(self.peaks[name], size)

    @contextmanager
    def watched(self) -> Iterator[dict[str, int]]:
        """Watch the processes meanwhile; yield the peaks."""
        self.peaks = dict.fromkeys(self.peaks, 0)
        self._ended.clear()
        thread = Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self.peaks
        finally:
            self._ended.set()
            thread.join()


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.spark_month")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--skip-rows", action="store_true", help="do not send row by row")
    chosen = parser.parse_args()
    with private_broker() as broker, RedisServer() as redis, spark_session(settings=SPARK) as spark:
        return Month(broker, redis, spark, chosen.rows).run(chosen.skip_rows)


def _memory(pid: int, descends: bool = True) -> int:
    """The PSS of a process, and of those that descend from it."""
    total = 0
    for each in process_tree(pid) if descends else [pid]:
        with suppress(OSError):  # it has ended meanwhile
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


class Month:
    """One run.

    Args:
        broker: The broker.
        redis: The registry, and where the worker's tasks note that they ran.
        spark: The session.
        rows: How many rows.
    """

    def __init__(
        self, broker: RabbitMQServer, redis: RedisServer, spark: SparkSession, rows: int
    ) -> None:
        self._broker = broker
        self._redis = redis
        self._spark = spark
        self._rows = rows
        self._peaks = Peaks(broker)
        self._figures: dict[str, Any] = {}
        self._began = 0.0

    def run(self, skips_rows: bool) -> int:
        """Send, cancel, and report."""
        to_nowhere = self._timed("Spark to nowhere, grouped, through Python", self._to_nowhere)
        self._timed("Spark to nowhere, row by row", lambda: self._to_nowhere(False))
        if not skips_rows:
            self._timed("row by row", lambda: self._send(f"rows-{uuid4().hex[:8]}", group=False))
        prefix = f"month-{uuid4().hex[:8]}"
        rate = self._timed("grouped", lambda: self._send(prefix, group=True))
        ran = self._cancel(prefix)
        met = judge(
            [
                Target("tasks that ran although their job was aborted", ran, 0, at_most=True),
                Target("grouped, as a part of Spark to nowhere", rate / to_nowhere, 0.3),
            ]
        )
        save("spark-month", self._broker, {"figures": self._figures, "targets": met})
        return int(not all(each["met"] for each in met))

    def _timed(self, name: str, run: Callable[[], Any]) -> float:
        """Run; print rows a second, peaks of memory and what it says about itself."""
        before = used(self._broker.folder / "data")
        with self._peaks.watched() as peaks:
            began = time.monotonic()
            told = run()
            seconds = time.monotonic() - began
        grown = (used(self._broker.folder / "data") - before) / self._rows
        rate = self._rows / seconds
        shown = ", ".join(f"{what} {size / GIB:.2f} GiB" for what, size in peaks.items())
        print(f"\n{name}: {rate:,.0f} rows/s, {seconds:.0f} s; at most {shown}")
        print(f"  the broker's disk: {grown:,.1f} bytes for a task", flush=True)
        if told is not None:
            print(f"  {told.confirmed:,} confirmed in {told.messages:,} messages", flush=True)
        self._figures[name] = {"rate": rate, "seconds": seconds, "disk": grown, **peaks}
        return rate

    def _given(self, prefix: str) -> dict[str, str]:
        return {
            "broker": self._broker.url.replace("guest:guest@", "guest@"),
            "brokerPassword": "guest",
            "registry": self._redis.url,
            "prefix": prefix,
            "task": "note",
            "queue": f"{prefix}.default",
            "tolerance": str(TOLERANCE_S),
            "idColumn": "args",
        }

    def _frame(self) -> DataFrame:
        return frame(self._spark, self._rows, "ran")

    def _to_nowhere(self, group: bool = True) -> None:
        rows = self._frame()
        if group:
            given = {name.lower(): value for name, value in self._given("nowhere").items()}
            rows = Grouping(rows.schema, WriteOptions.of(given)).of(rows)
        passed = rows.mapInArrow(_passed_on, rows.schema)
        passed.write.format("noop").mode("append").save()

    def _settings(self, prefix: str) -> dict[str, Any]:
        return {
            "prefix": prefix,
            "broker_url": self._broker.url,
            "result_backend": self._redis.url,
            "rabbitdelay_registry_url": self._redis.url,
            "rabbitdelay_prefix": prefix,
        }

    def _send(self, prefix: str, group: bool) -> Any:
        app: Any = make_app(self._settings(prefix))
        with Connection(self._broker.url) as connection:
            app.amqp.queues[app.conf.task_default_queue](connection.default_channel).declare()
        app.rabbitdelay.open_job(prefix, expires=86_400)
        app.close()
        self._began = time.monotonic()
        report = dispatch(self._frame(), group=group, job=prefix, **self._given(prefix))
        assert report.confirmed == self._rows
        return report

    def _cancel(self, prefix: str) -> int:
        """Abort the job; let a worker meet what is due; return how many tasks ran."""
        app: Any = make_app(self._settings(prefix))
        began = time.monotonic()
        app.rabbitdelay.abort_job(prefix)
        print(f"\naborted in {time.monotonic() - began:.3f} s", flush=True)
        with Worker(self._settings(prefix)):
            app.tasks["note"].apply_async(("later",), {"key": "ran"}, delay=AFTER_S)
            redis: Any = app.backend.client
            wait_for(lambda: redis.llen("ran"), "the later task", timeout=AFTER_S * 3)
            ran = int(redis.llen("ran")) - 1
        seconds = int(time.monotonic() - self._began)
        due = self._frame().where(f"delay + {TOLERANCE_S} < {seconds}").count()
        print(f"due meanwhile: {due:,}; of these ran: {ran}")
        app.close()
        return ran


def _passed_on(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


if __name__ == "__main__":
    sys.exit(main())
