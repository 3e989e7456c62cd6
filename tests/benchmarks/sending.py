# ruff: noqa: T201  # a program at the terminal prints
"""How many delayed tasks are sent in a second: by one process, and from Spark.

Everything goes into quorum queues. Nothing comes due meanwhile, and all that was sent is counted as
it is purged.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, Final

import amqp
import celery
from kombu import Connection, Queue

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.benchmarks import measure
from tests.private_broker import private_broker

WEEK: Final = 7 * 86_400

#: Seconds that a task in an envelope may start later.
TOLERANCE: Final = 60

ONE: Final = "apply_async(delay=)"
PIPELINE: Final = "apply_async(delay=), in a pipeline"
GROUP_SIZE: Final = 2_000
GROUP: Final = f"group of {GROUP_SIZE:,}, delay"
NATIVE_GROUP: Final = f"group of {GROUP_SIZE:,}, countdown, confirm_publish"
MANY: Final = "send_many, no envelopes"
ENVELOPED: Final = f"send_many, envelopes, tolerance {TOLERANCE} s"
NATIVE: Final = "apply_async(countdown=), confirm_publish"
UNCONFIRMED: Final = "apply_async(countdown=), unconfirmed"
RAW: Final = "raw, confirmed one by one"


def make_app(cls: type[celery.Celery], url: str, queue: str, **settings: Any) -> Any:
    """Return an application with one task and one quorum queue."""
    app = cls("bench", broker=url, set_as_current=False)
    queues = [measure.quorum_queue(queue)]
    app.conf.update(task_default_queue=queue, task_queues=queues, task_ignore_result=True)
    app.conf.update(settings)

    @app.task(name="remind", shared=False)
    def remind(order: int, text: str) -> None: ...

    return app


def one_by_one(app: Any, option: str, delays: Sequence[float]) -> int:
    """Send tasks by ``apply_async``; return how many messages that makes."""
    for order, delay in enumerate(delays):
        app.tasks["remind"].apply_async((order, "It waits for you."), **{option: delay})
    return len(delays)


def in_pipeline(app: Any, delays: Sequence[float]) -> int:
    """Send tasks by ``apply_async`` in a pipeline."""
    with app.rabbitdelay.pipeline():
        return one_by_one(app, "delay", delays)


def in_group(app: Any, option: str, delays: Sequence[float]) -> int:
    """Send a group of tasks, each with a delay of its own."""
    remind = app.tasks["remind"]
    members = [remind.si(each, "").set(**{option: delay}) for each, delay in enumerate(delays)]
    celery.group(members, app=app).apply_async()
    return len(members)


def many(app: Any, delays: Sequence[float], **options: Any) -> int:
    """Send tasks by ``send_many``."""
    rows = (Row((order, "It waits for you."), delay=delay) for order, delay in enumerate(delays))
    return int(app.rabbitdelay.send_many("remind", rows, **options).messages)


def by_amqp(connection: Connection, message: amqp.Message, addresses: Any) -> int:
    """Publish one message to many addresses by py-amqp alone."""
    channel: Any = connection.default_channel
    for exchange, routing_key in addresses:
        channel.basic_publish(message, exchange=exchange, routing_key=routing_key)
    return len(addresses)


def sends(
    *,
    rounds: int = 3,
    slow: int = 2_000,
    fast: int = 100_000,
    enveloped: int = 200_000,
    signing: bool = False,
) -> None:
    """Delayed sends of one process, beside Celery's confirmed countdown and py-amqp.

    Ours are confirmed. Celery's own take its native delayed delivery; unconfirmed, the calls return
    before the broker has everything, which is measured as well. ``--slow`` are those that wait for
    each confirm.
    """
    confirms = {"confirm_publish": True}
    with private_broker() as broker, Connection(broker.url) as connection:
        of_broker = partial(make_app, url=broker.url)
        signed = {"rabbitdelay_signing_key": "benchmark" * 4} if signing else {}
        ours = of_broker(Celery, queue="ours", **signed)
        confirmed = of_broker(celery.Celery, queue="native", broker_transport_options=confirms)
        native = of_broker(celery.Celery, queue="native")
        measure.declare_native(connection, measure.quorum_queue("native"))
        topology = ours.rabbitdelay.topology
        our_queues = [*(queue.name for queue in topology.queues), "ours"]
        native_queues = [*measure.NATIVE_QUEUES, "native"]
        delays = [random.uniform(60, WEEK) for _ in range(max(slow, fast, enveloped, GROUP_SIZE))]
        few, group = delays[:slow], delays[:GROUP_SIZE]
        addresses = [topology.route(delay, "ours")[:2] for delay in few]
        raw = Connection(broker.url, transport_options=confirms)
        message = amqp.Message(b"x" * 1000, delivery_mode=2)  # a task's with its headers
        cost: dict[str, list[tuple[float, float]]] = {}
        landed: dict[str, list[float]] = {UNCONFIRMED: []}

        def rate(name: str, queues: Sequence[str], tasks: int, send: Callable[[], int]) -> float:
            gc.collect()
            began, own, brokers = time.monotonic(), time.process_time(), measure.cpu(broker.pid)
            messages = send()
            taken, own = time.monotonic() - began, time.process_time() - own
            if name in landed:
                has_all = partial(measure.count, connection, queues)
                wait_for(lambda: has_all() >= messages, name, measure.PATIENCE, interval=0)
                landed[name].append(tasks / (time.monotonic() - began))
            brokers = measure.cpu(broker.pid) - brokers
            cost.setdefault(name, []).append((own / tasks * 1e6, brokers / tasks * 1e6))
            measure.purge(connection, queues, messages)
            return tasks / taken

        by_one, by_many = partial(one_by_one, ours, "delay"), partial(many, ours)
        enclosed = {"envelopes": True, "tolerance": TOLERANCE}
        rows: dict[str, tuple[list[str], int, Callable[[], int]]] = {
            ONE: (our_queues, slow, partial(by_one, few)),
            PIPELINE: (our_queues, slow, partial(in_pipeline, ours, few)),
            GROUP: (our_queues, len(group), partial(in_group, ours, "delay", group)),
            MANY: (our_queues, fast, partial(by_many, delays[:fast], envelopes=False)),
            ENVELOPED: (our_queues, enveloped, partial(by_many, delays[:enveloped], **enclosed)),
            NATIVE: (native_queues, slow, partial(one_by_one, confirmed, "countdown", few)),
            NATIVE_GROUP: (
                *(native_queues, len(group)),
                partial(in_group, confirmed, "countdown", group),
            ),
            UNCONFIRMED: (native_queues, slow, partial(one_by_one, native, "countdown", few)),
            RAW: (our_queues, slow, partial(by_amqp, raw, message, addresses)),
        }
        # Each connects and declares.
        for app, option in ((ours, "delay"), (confirmed, "countdown"), (native, "countdown")):
            one_by_one(app, option, few[:1])
        measure.purge(connection, our_queues, 1)
        measure.purge(connection, native_queues, 2)
        contestants = {name: partial(rate, name, *row) for name, row in rows.items()}
        figures = measure.in_turn(contestants, rounds)
        goals = {(ONE, NATIVE): 1, (PIPELINE, NATIVE): 2, (GROUP, NATIVE_GROUP): 2}
        title = "Delayed tasks sent by one process"
        measure.show(title, "tasks/s", figures, NATIVE, {**goals, (MANY, NATIVE): 10})
        measure.show("Until the broker had everything", "tasks/s", landed)
        print("\nMicroseconds of processor time a task, median: sender, broker")
        for name, seen in cost.items():
            sender, spent = (median(each) for each in zip(*seen, strict=True))
            print(f"  {name:44} {sender:8.0f} {spent:8.0f}")
        measure.draw("sends", "tasks/s", figures, measure.about(broker))
        for each in (ours, confirmed, native, raw):
            each.close()


def send_part(url: str, prefix: str, queue: str, numbers: range) -> int:
    """Send a part of Spark's rows by ``send_many``; return how many are confirmed."""
    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.update(rabbitdelay_prefix=prefix, task_queues=[Queue(queue, routing_key=queue)])
    rows = (
        Row((f"order-{n}", str(n % 9973), str(n % 7)), delay=n * 2_654_435_761 % (4 * WEEK) + 600)
        for n in numbers
    )
    report = app.rabbitdelay.send_many("remind", rows, tolerance=TOLERANCE, queue=queue)
    app.close()
    return report.confirmed


def spark(*, rounds: int = 3, rows: int = 200_000) -> None:
    """Rows a second from Spark on two cores, beside two processes of ``send_many``."""
    from celery_rabbitdelay.spark import grouped
    from tests.integration.spark import spark_session

    prefix, queue, peer = measure.a_name(), measure.a_name(), "send_many, two processes"
    with (
        private_broker() as broker,
        RedisServer() as redis,
        spark_session() as session,
        ProcessPoolExecutor(2, get_context("spawn")) as pool,
    ):
        with Connection(broker.url) as connection:
            Queue(queue, channel=connection.default_channel).declare()
        given = {
            "broker": broker.url.replace("guest:guest@", "guest@"),
            "brokerPassword": "guest",
            "prefix": prefix,
            "task": "remind",
            "queue": queue,
            "tolerance": str(TOLERANCE),
        }

        frame = session.range(0, rows, 1, 2).selectExpr(
            "array(concat('order-', id), string(id % 9973), string(id % 7)) args",
            f"double(pmod(hash(id), {4 * WEEK}) + 600) delay",
        )

        def write(frame: Any, **more: str) -> None:
            frame.write.format("rabbitdelay").mode("append").options(**given, **more).save()

        def send_many() -> None:
            parts = [range(rows // 2), range(rows // 2, rows)]
            sent = [pool.submit(send_part, broker.url, prefix, queue, part) for part in parts]
            assert sum(each.result() for each in sent) == rows

        def rate(run: Callable[[], None]) -> float:
            began = time.monotonic()
            run()
            return rows / (time.monotonic() - began)

        runs: dict[str, Callable[[], None]] = {
            peer: send_many,
            "format rabbitdelay, row by row": partial(write, frame),
            "format rabbitdelay, grouped": lambda: write(grouped(frame, **given)),
            "format rabbitdelay, with a registry": partial(write, frame, registry=redis.url),
        }
        contestants = {name: partial(rate, run) for name, run in runs.items()}
        measure.in_turn(contestants, 1)  # warms up
        figures = measure.in_turn(contestants, rounds)
    goals = {(name, peer): 0.7 for name in runs if name != peer}
    measure.show("Rows of Spark", "rows/s", figures, peer, goals)
