# ruff: noqa: T201  # a program at the terminal prints
"""How many functions of this package one call goes through: what its reader has to follow.

``python tests/benchmarks/journeys.py`` does without the rest of the tests, so that, with
``PYTHONPATH`` set to the folder of another version, it counts that one; ``-v`` lists the functions.
"""

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
from kombu import Connection, Exchange, Queue
from pyspark.sql.types import ArrayType, DoubleType, StringType, StructType

import celery_rabbitdelay
from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.write import Writer
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.worker.bootsteps import WorkerDeclaration, module_service

PACKAGE: Final = Path(celery_rabbitdelay.__file__).parent
ROWS: Final = 100


def counting(functions: set[tuple[str, str]]) -> Callable[[FrameType, str, object], None]:
    """Return a profiler that adds each function of the package that is called; no lambdas."""

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and PACKAGE in path.parents and not code.co_name.startswith("<"):
            functions.add((str(path.relative_to(PACKAGE)), code.co_qualname))

    return called


def called_by(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Return the functions that a call runs in this thread, after it was made twice."""
    functions: set[tuple[str, str]] = set()
    for profiler in (None, None, counting(functions)):
        sys.setprofile(profiler)
        call()
    sys.setprofile(None)
    return functions


def distribute(app: Any, exchange: Exchange) -> set[tuple[str, str]]:
    """Return the functions by which distribution passes one message on, in a thread of its own."""
    functions: set[tuple[str, str]] = set()
    threading.setprofile(counting(functions))
    service = module_service(app, WorkerDeclaration(app), "distribution")
    service.start()
    threading.setprofile(None)  # threads that start later have none

    def has_finished(messages: int) -> bool:
        return service.module.statistics.finished >= messages

    for number in range(3):
        functions.clear()
        app.send_task("remind", ("order",), delay=0.3, exchange=exchange.name, routing_key="a.b")
        wait_for(partial(has_finished, number + 1), "the message")
    time.sleep(1)  # nothing that all versions have says when its acknowledgement is written
    found = set(functions)
    service.stop()
    return found


def write(given: dict[str, str]) -> None:
    """Write rows as Spark's executor and driver do, in this process."""
    schema = StructType().add("args", ArrayType(StringType())).add("delay", DoubleType())
    writer = Writer(schema, WriteOptions.of(given))
    args, delays = [[f"order-{n}"] for n in range(ROWS)], [600.0 + n for n in range(ROWS)]
    columns = {"args": args, "delay": delays}
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict(columns)]))])


def remind(order: str) -> None:
    """The task; nobody runs it."""


def journeys(*, verbose: bool = False) -> None:
    """How many functions one send, one Spark write and one message in distribution go through."""
    name = f"journey-{uuid4().hex[:8]}"
    with RabbitMQServer() as broker, Connection(broker.url) as connection:
        app: Any = Celery("journeys", broker=broker.url)
        queue, exchange = Queue(name, routing_key=name), Exchange(f"{name}-topic", "topic")
        app.conf.update(rabbitdelay_prefix=name, task_queues=[queue], task_default_queue=name)
        app.task(name="remind")(remind)
        for each in (queue, Queue(f"{name}-topic", exchange, routing_key="#")):
            each(connection.default_channel).declare()
        rows = [Row((f"order-{n}",), delay=600 + n) for n in range(ROWS)]
        url, own = broker.url.replace("guest:guest@", "guest@"), {"prefix": name, "queue": name}
        given = {"broker": url, "brokerPassword": "guest", "task": "remind", **own}
        given["tolerance"] = "60"
        many = partial(app.rabbitdelay.send_many, "remind", rows, tolerance=60, queue=name)
        one = partial(app.tasks["remind"].apply_async, ("order",), delay=100)
        for journey, functions in {
            "apply_async(delay=)": called_by(one),
            "send_many(tolerance=)": called_by(many),
            "a Spark write": called_by(partial(write, given)),
            "one message in distribution": distribute(app, exchange),
        }.items():
            files = {file for file, _ in functions}
            rooms = {file.partition("/")[0] for file in files}
            print(f"{journey}: {len(rooms)} rooms, {len(files)} files, {len(functions)} functions")
            for file, called in sorted(functions if verbose else ()):
                print(f"    {file:40} {called}")
        app.close()


if __name__ == "__main__":
    journeys(verbose="-v" in sys.argv)
