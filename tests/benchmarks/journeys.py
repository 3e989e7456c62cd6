# ruff: noqa: T201  # a program at the terminal prints
"""How many functions of this package one call goes through: what its reader has to follow.

``python tests/benchmarks/journeys.py`` starts a private RabbitMQ. It makes each call twice, and
counts the distinct functions that the third one runs, in all threads; ``-v`` lists them. With
``PYTHONPATH`` set to the folder of another version, it counts that one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeAlias
from uuid import uuid4

import pyarrow as pa
from kombu import Connection, Exchange, Queue
from pyspark.sql.types import ArrayType, DoubleType, StringType, StructType

import celery_rabbitdelay
from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.modules.service import ModuleService
from celery_rabbitdelay.spark.options import WriteOptions
from celery_rabbitdelay.spark.write import BatchWriter
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from celery_rabbitdelay.worker.bootsteps import WorkerDeclaration, _service

PACKAGE: Final = Path(celery_rabbitdelay.__file__).parent

ROWS: Final = 100

#: The file and the qualified name of a function.
Function: TypeAlias = tuple[str, str]


class Counted:
    """Notes the functions of the package that are called; lambdas and comprehensions are none."""

    def __init__(self) -> None:
        self.functions: set[Function] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event == "call" and PACKAGE in path.parents and not code.co_name.startswith("<"):
            self.functions.add((str(path.relative_to(PACKAGE)), code.co_qualname))

    def of(self, call: Callable[[], object]) -> set[Function]:
        """Return the functions that a call runs in this thread, after it was made twice."""
        call()
        call()
        self.functions.clear()
        sys.setprofile(self)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self.functions


def show(journey: str, functions: set[Function]) -> None:
    """Print the counts, and with ``-v`` the functions."""
    files = {file for file, _ in functions}
    rooms = {file.partition("/")[0] for file in files}
    print(f"{journey}: {len(rooms)} rooms, {len(files)} files, {len(functions)} functions")
    if "-v" in sys.argv:
        for file, name in sorted(functions):
            print(f"    {file:40} {name}")


def write(given: dict[str, str]) -> None:
    """Write rows as Spark's executor and driver do, in this process."""
    schema = StructType().add("args", ArrayType(StringType())).add("delay", DoubleType())
    writer = BatchWriter(schema, WriteOptions.of(given))
    numbers = range(ROWS)
    columns = {"args": [[f"order-{n}"] for n in numbers], "delay": [600.0 + n for n in numbers]}
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict(columns)]))])


def has_finished(service: ModuleService, messages: int) -> bool:
    return service.statistics.finished >= messages


def distribute(app: Any, exchange: Exchange) -> set[Function]:
    """Return the functions by which distribution passes one message on, in a thread of its own."""
    counted = Counted()
    threading.setprofile(counted)
    service = _service(app, "distribution", WorkerDeclaration(app))
    service.start()
    threading.setprofile(None)  # threads that start later have none
    for finished in range(3):
        counted.functions.clear()
        app.send_task("remind", ("order",), delay=0.3, exchange=exchange.name, routing_key="a.b")
        wait_for(partial(has_finished, service, finished + 1), "the message")
    time.sleep(1)  # nothing that all versions have says when its acknowledgement is written
    functions = set(counted.functions)
    service.stop()
    return functions


def remind(order: str) -> None:
    """The task; nobody runs it."""


def main() -> None:
    """Count, and print."""
    prefix, name = f"journey-{uuid4().hex[:8]}", f"journey-{uuid4().hex[:8]}"
    with RabbitMQServer() as broker, Connection(broker.url) as connection:
        app: Any = Celery("journeys", broker=broker.url)
        queue, exchange = Queue(name, routing_key=name), Exchange(f"{name}-topic", "topic")
        app.conf.update(rabbitdelay_prefix=prefix, task_queues=[queue], task_default_queue=name)
        task = app.task(name="remind")(remind)
        for each in (queue, Queue(f"{name}-topic", exchange, routing_key="#")):
            each(connection.default_channel).declare()

        def send_many() -> None:
            rows = [Row((f"order-{n}",), delay=600 + n) for n in range(ROWS)]
            app.rabbitdelay.send_many("remind", rows, tolerance=60, queue=name)

        given = {
            "broker": broker.url.replace("guest:guest@", "guest@"),
            "brokerPassword": "guest",
            "prefix": prefix,
            "task": "remind",
            "queue": name,
            "tolerance": "60",
        }
        show("apply_async(delay=)", Counted().of(lambda: task.apply_async(("order",), delay=100)))
        show("send_many(tolerance=)", Counted().of(send_many))
        show("a Spark write", Counted().of(lambda: write(given)))
        show("one message in distribution", distribute(app, exchange))
        app.close()


if __name__ == "__main__":
    main()
