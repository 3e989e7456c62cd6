"""How many delayed tasks are sent in a second: by one process, and from Spark.

Everything goes into quorum queues. Nothing comes due meanwhile, and all that was sent is counted as
it is purged.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import amqp
import celery
from kombu import Connection, Queue

from celery_rabbitdelay import Celery, Row
from tests.benchmarks import measure
from tests.private_broker import private_broker

WEEK: Final = 7 * 86_400

#: Seconds that a task in an envelope may start later.
TOLERANCE: Final = 60

#: The tasks of a group.
GROUP: Final = 2_000

#: Contestants that are compared, and the peer of all.
ONE, PIPELINE = "apply_async(delay=)", "apply_async(delay=), in a pipeline"
GROUPED: Final = f"group of {GROUP:,}, delay"
NATIVE_GROUPED: Final = f"group of {GROUP:,}, countdown, confirm_publish"
MANY: Final = "send_many, no envelopes"
ENVELOPED: Final = f"send_many, envelopes, tolerance {TOLERANCE} s"
OPTIONS: Final = {"envelopes": True, "tolerance": TOLERANCE}
NATIVE: Final = "apply_async(countdown=), confirm_publish"
UNCONFIRMED: Final = "apply_async(countdown=), unconfirmed"

#: Sends one task for each delay, and returns how many messages that makes.
Send: TypeAlias = Callable[[Sequence[float]], int]


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
    """Send tasks by ``apply_async``."""
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


def many(app: Any, options: dict[str, Any], delays: Sequence[float]) -> int:
    """Send tasks by ``send_many``."""
    rows = (Row((order, "It waits for you."), delay=delay) for order, delay in enumerate(delays))
    return int(app.rabbitdelay.send_many("remind", rows, **options).messages)


def sends(
    *, rounds: int = 3, slow: int = 2_000, fast: int = 100_000, signing: bool = False
) -> None:
    """Delayed sends of one process, beside Celery's confirmed countdown and py-amqp.

    Ours are confirmed. Celery's own take its native delayed delivery; unconfirmed, the calls return
    before the broker has everything. ``--slow`` are those that wait for each confirm.
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
        delays = [random.uniform(60, WEEK) for _ in range(max(slow, fast, GROUP))]
        few, group = delays[:slow], delays[:GROUP]
        raw = Connection(broker.url, transport_options=confirms)
        message = amqp.Message(b"x" * 1000, delivery_mode=2)  # a task's with its headers

        def by_amqp(delays: Sequence[float]) -> int:
            channel: Any = raw.default_channel
            for exchange, key, _ in (topology.route(delay, "ours") for delay in delays):
                channel.basic_publish(message, exchange=exchange, routing_key=key)
            return len(delays)

        def rate(queues: Sequence[str], delays: Sequence[float], send: Send) -> float:
            gc.collect()
            began = time.monotonic()
            messages = send(delays)
            taken = time.monotonic() - began
            measure.purge(connection, queues, messages)
            return len(delays) / taken

        by_one = partial(one_by_one, ours, "delay")
        by_one_confirmed = partial(one_by_one, confirmed, "countdown")
        rows: dict[str, tuple[list[str], list[float], Send]] = {
            ONE: (our_queues, few, by_one),
            PIPELINE: (our_queues, few, partial(in_pipeline, ours)),
            GROUPED: (our_queues, group, partial(in_group, ours, "delay")),
            MANY: (our_queues, delays[:fast], partial(many, ours, {"envelopes": False})),
            ENVELOPED: (our_queues, delays[:fast], partial(many, ours, OPTIONS)),
            NATIVE: (native_queues, few, by_one_confirmed),
            NATIVE_GROUPED: (native_queues, group, partial(in_group, confirmed, "countdown")),
            UNCONFIRMED: (native_queues, few, partial(one_by_one, native, "countdown")),
            "raw, confirmed one by one": (our_queues, few, by_amqp),
        }
        # Each connects and declares.
        for name in (ONE, NATIVE, UNCONFIRMED):
            rows[name][2](few[:1])
        measure.purge(connection, our_queues, 1)
        measure.purge(connection, native_queues, 2)
        contestants = {name: partial(rate, *row) for name, row in rows.items()}
        figures = measure.in_turn(contestants, rounds)
        goals = {(ONE, NATIVE): 1, (PIPELINE, NATIVE): 2, (GROUPED, NATIVE_GROUPED): 2}
        title = "Delayed tasks sent by one process"
        measure.show(title, "tasks/s", figures, NATIVE, {**goals, (MANY, NATIVE): 10})
        measure.draw("sends", "tasks/s", figures, measure.about(broker))
        for each in (ours, confirmed, native, raw):
            each.close()


def spark(*, rounds: int = 3, rows: int = 200_000) -> None:
    """Rows a second from Spark on two cores, one by one and grouped."""
    from celery_rabbitdelay.spark import grouped
    from tests.spark.integration.spark import spark_session

    prefix, queue = "bench-spark", "bench-rows"
    with private_broker() as broker, spark_session() as session:
        with Connection(broker.url) as connection:
            Queue(queue, channel=connection.default_channel).declare()
        url, own = broker.url.replace("guest:guest@", "guest@"), {"prefix": prefix, "queue": queue}
        given = {"broker": url, "brokerPassword": "guest", "task": "remind", **own}
        given["tolerance"] = str(TOLERANCE)
        frame = session.range(0, rows, 1, 2).selectExpr(
            "array(concat('order-', id), string(id % 9973), string(id % 7)) args",
            f"double(pmod(hash(id), {4 * WEEK}) + 600) delay",
        )

        def rate(frame: Any) -> float:
            began = time.monotonic()
            frame.write.format("rabbitdelay").mode("append").options(**given).save()
            return rows / (time.monotonic() - began)

        by_row = "format rabbitdelay, row by row"
        contestants: dict[str, Callable[[], float]] = {by_row: partial(rate, frame)}
        contestants["format rabbitdelay, grouped"] = lambda: rate(grouped(frame, **given))
        measure.in_turn(contestants, 1)  # warms up
        measure.show("Rows of Spark", "rows/s", measure.in_turn(contestants, rounds), by_row)
