# ruff: noqa: T201  # a program at the terminal prints
"""How many delayed tasks one process sends in a second, beside Celery's own and raw py-amqp.

``python -m tests.benchmarks.sends`` starts a private RabbitMQ. Tasks with small JSON arguments and
random delays, from a minute to a week, are sent by one thread to a quorum queue; nothing comes due
meanwhile. Ours are confirmed. Celery's own ``countdown`` takes its native delayed delivery (28
quorum levels, declared beforehand). Raw py-amqp publishes, to the very exchanges and routing keys
that ours go to, one message again and again: as many bytes as one of our tasks' takes, without a
header; and once more with all of a task's headers, which py-amqp writes anew for each message.

The rate is that of the calls: it ends when the last has returned. Without confirms, that is before
the broker has everything: some 10 MB lie in the buffers of the sockets, which is why so many are
sent that this is a small part. The rate until the broker has all is printed beside, and measured by
counting the queues, to about 0.1 s. Before the next contestant, everything that was sent is counted
as it is purged: what is missing is an error.

Where the time goes is told by the processor time that the sender has taken for each task, and that
the broker has until it has everything: who takes most of it, is the wall.

With ``--signing``, ours are signed; see ``rabbitdelay_signing_key``.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, Final

import amqp
import celery
from kombu import Connection

from celery_rabbitdelay import Celery, Row
from celery_rabbitdelay.publishing.wire import Content
from celery_rabbitdelay.testing import RabbitMQServer, wait_for
from tests.benchmarks import measure, waiting
from tests.benchmarks.measure import Target
from tests.private_broker import private_broker

TEXT: Final = "Your order is waiting for you."

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
NATIVE_UNCONFIRMED: Final = "apply_async(countdown=), unconfirmed"
RAW_CONFIRMED: Final = "raw, confirmed one by one"
RAW: Final = "raw, unconfirmed"
RAW_HEADERS: Final = "raw, unconfirmed, a task's headers"

#: The key of ``--signing``.
KEY: Final = "benchmark" * 4


def make_app(cls: type[celery.Celery], url: str, queue: str, confirms: bool = False) -> Any:
    """An application of a class, with one task and one quorum queue."""
    app = cls("bench", broker=url, set_as_current=False)
    app.conf.update(
        task_default_queue=queue,
        task_queues=[waiting.quorum_queue(queue)],
        task_ignore_result=True,
        broker_transport_options={"confirm_publish": True} if confirms else {},
    )

    @app.task(name="remind", shared=False)
    def remind(order: int, text: str) -> None: ...

    return app


class Bench:
    """The contestants, and the queues that what they send lies in.

    Args:
        broker: Where to.
        options: How many tasks those send that wait for each confirm, the others, and those in
            envelopes; and whether ours are signed.
    """

    def __init__(self, broker: RabbitMQServer, options: argparse.Namespace) -> None:
        self.options, self.broker = options, broker
        #: Microseconds of processor time for each task, of the sender and of the broker.
        self.cost: dict[str, list[tuple[float, float]]] = {}
        #: Tasks a second until the broker has them all, of those who do not wait for confirms.
        self.landed: dict[str, list[float]] = {}
        generator = random.Random(1)
        most = max(options.slow, options.fast, options.enveloped, GROUP_SIZE)
        #: Seconds, from a minute to a week.
        self.delays = [generator.uniform(60, waiting.WEEK) for _ in range(most)]
        self.connection = Connection(broker.url)
        self.ours = make_app(Celery, broker.url, "ours")
        if options.signing:
            self.ours.conf.rabbitdelay_signing_key = KEY
        self.native = make_app(celery.Celery, broker.url, "native")
        self.native_confirmed = make_app(celery.Celery, broker.url, "native", confirms=True)
        self.topology = self.ours.rabbitdelay.topology
        self.our_queues = [queue.name for queue in self.topology.queues] + ["ours"]
        self.native_queues = [*waiting.NATIVE_QUEUES, "native"]
        self.raw_connection = Connection(broker.url)
        self.raw_confirmed = Connection(broker.url, transport_options={"confirm_publish": True})
        waiting.declare_native(self.connection, waiting.quorum_queue("native"))
        self.task_message = self._warm_up()
        written = Content.of(self.task_message)
        self.plain_message = amqp.Message(b"x" * sum(map(len, written)), delivery_mode=2)

    def _warm_up(self) -> amqp.Message:
        """Connect and declare; return one of our tasks' messages."""
        self.one_by_one(self.ours, "delay", 1)
        (queue,) = (name for name in self.our_queues if waiting.count(self.connection, [name]))
        channel: Any = self.connection.default_channel
        message = channel.basic_get(queue, no_ack=True)
        own = {name: message.properties[name] for name in message.properties}
        for app in (self.native, self.native_confirmed):
            self.one_by_one(app, "countdown", 1)
        waiting.purge(self.connection, self.native_queues, 2)
        return amqp.Message(message.body, **own)

    def one_by_one(self, app: Any, option: str, tasks: int) -> int:
        """Send tasks by ``apply_async``; return how many messages that makes."""
        remind = app.tasks["remind"]
        for order, delay in enumerate(self.delays[:tasks]):
            remind.apply_async((order, TEXT), **{option: delay})
        return tasks

    def pipeline(self, tasks: int) -> int:
        """Send tasks by ``apply_async`` in a pipeline; return how many messages that makes."""
        with self.ours.rabbitdelay.pipeline():
            return self.one_by_one(self.ours, "delay", tasks)

    def group(self, app: Any, option: str) -> int:
        """Send a group of tasks, each with a delay of its own; return how many messages that is."""
        remind = app.tasks["remind"]
        members = [
            remind.si(order, TEXT).set(**{option: delay})
            for order, delay in enumerate(self.delays[:GROUP_SIZE])
        ]
        celery.group(members, app=app).apply_async()
        return GROUP_SIZE

    def many(self, tasks: int, **options: Any) -> int:
        """Send tasks by ``send_many``; return how many messages that makes."""
        report = self.ours.rabbitdelay.send_many(
            self.ours.tasks["remind"],
            (Row((order, TEXT), delay=delay) for order, delay in enumerate(self.delays[:tasks])),
            **options,
        )
        messages: int = report.messages
        return messages

    def raw(self, connection: Connection, message: amqp.Message, addresses: Any) -> int:
        """Publish one message to many addresses, by py-amqp alone."""
        channel: Any = connection.default_channel
        for exchange, routing_key in addresses:
            channel.basic_publish(message, exchange=exchange, routing_key=routing_key)
        return len(addresses)

    def contestants(self) -> dict[str, Callable[[], float]]:
        """What is measured, by its name."""
        slow, fast, enveloped = self.options.slow, self.options.fast, self.options.enveloped
        addresses = [self.topology.route(delay, "ours")[:2] for delay in self.delays[:fast]]
        plain, task = self.plain_message, self.task_message
        confirmed, unconfirmed = self.raw_confirmed, self.raw_connection
        ours, native = self.our_queues, self.native_queues
        of: dict[str, tuple[int, list[str], Callable[[], int]]] = {
            ONE: (slow, ours, partial(self.one_by_one, self.ours, "delay", slow)),
            PIPELINE: (slow, ours, partial(self.pipeline, slow)),
            GROUP: (GROUP_SIZE, ours, partial(self.group, self.ours, "delay")),
            NATIVE_GROUP: (
                *(GROUP_SIZE, native),
                partial(self.group, self.native_confirmed, "countdown"),
            ),
            MANY: (fast, ours, partial(self.many, fast, envelopes=False)),
            ENVELOPED: (
                *(enveloped, ours),
                partial(self.many, enveloped, envelopes=True, tolerance=TOLERANCE),
            ),
            NATIVE: (
                *(slow, native),
                partial(self.one_by_one, self.native_confirmed, "countdown", slow),
            ),
            NATIVE_UNCONFIRMED: (
                *(slow, native),
                partial(self.one_by_one, self.native, "countdown", slow),
            ),
            RAW_CONFIRMED: (slow, ours, partial(self.raw, confirmed, plain, addresses[:slow])),
            RAW: (fast, ours, partial(self.raw, unconfirmed, plain, addresses)),
            RAW_HEADERS: (fast, ours, partial(self.raw, unconfirmed, task, addresses)),
        }
        return {name: partial(self.rate, name, *each) for name, each in of.items()}

    def rate(self, name: str, tasks: int, queues: Sequence[str], send: Callable[[], int]) -> float:
        """Send; return tasks a second. Then count what arrived, and remove it."""
        gc.collect()
        spent = time.process_time(), waiting.cpu(self.broker.pid)
        began = time.monotonic()
        messages = send()
        taken, sender = time.monotonic() - began, time.process_time() - spent[0]
        if "unconfirmed" in name:
            wait_for(
                lambda: waiting.count(self.connection, queues) >= messages,
                name,
                waiting.PATIENCE,
                interval=0.0,
            )
            self.landed.setdefault(name, []).append(tasks / (time.monotonic() - began))
        broker = waiting.cpu(self.broker.pid) - spent[1]
        self.cost.setdefault(name, []).append((sender / tasks * 1e6, broker / tasks * 1e6))
        waiting.purge(self.connection, queues, messages)
        return tasks / taken

    def close(self) -> None:
        """Close all connections."""
        for app in (self.ours, self.native, self.native_confirmed):
            app.close()
        for connection in (self.connection, self.raw_connection, self.raw_confirmed):
            connection.release()


def rates(broker: RabbitMQServer, options: argparse.Namespace) -> None:
    """Measure all contestants, and write the results."""
    bench = Bench(broker, options)
    figures = measure.in_turn(bench.contestants(), options.rounds)
    bench.close()
    title, unit = "Delayed tasks sent by one process", "tasks/s"
    measure.show(title, unit, figures, NATIVE)
    measure.show(title, unit, figures, RAW)
    landed = bench.landed | {MANY: figures[MANY]}
    measure.show("Until the broker had everything", unit, landed, MANY)
    print("\nMicroseconds of processor time a task, median: sender, broker")
    for name, seen in bench.cost.items():
        sender, spent = (median(each) for each in zip(*seen, strict=True))
        print(f"  {name:44} {sender:8.0f} {spent:8.0f}")
    by_native, by_raw = measure.ratios(figures, NATIVE), measure.ratios(figures, RAW)
    targets = [
        Target(f"{ONE} / {NATIVE}", by_native[ONE], 1),
        Target(f"{PIPELINE} / {NATIVE}", by_native[PIPELINE], 2),
        Target(f"{GROUP} / {NATIVE_GROUP}", measure.ratios(figures, NATIVE_GROUP)[GROUP], 2),
        Target(f"{MANY} / {NATIVE}", by_native[MANY], 10),
        Target(f"{MANY} / {RAW}", by_raw[MANY], 0.7),
        Target(f"{MANY} / {RAW_HEADERS}", measure.ratios(figures, RAW_HEADERS)[MANY], 0.7),
        Target(f"{ENVELOPED} (tasks/s)", median(figures[ENVELOPED]), 40_000),
    ]
    results = {
        "unit": unit,
        "options": vars(options),
        "message_bytes": sum(map(len, Content.of(bench.task_message))),
        "figures": figures,
        "until_the_broker_has_everything": bench.landed,
        "microseconds_of_processor_time_of_sender_and_broker": bench.cost,
        "targets": measure.judge(targets),
    }
    measure.save("sends_signed" if options.signing else "sends", broker, results)
    if options.signing:
        return
    footnote = (
        f"RabbitMQ {measure.version_of(broker)}, Celery {celery.__version__}, quorum queues; "
        f"medians of {options.rounds} rounds. Without confirms: until the calls have returned."
    )
    measure.bars("sends", title, unit, figures, footnote)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sends")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--slow", type=int, default=2_000, help="tasks one by one (2000)")
    parser.add_argument("--fast", type=int, default=100_000, help="tasks many at a time (100000)")
    parser.add_argument("--enveloped", type=int, default=200_000, help="in envelopes (200000)")
    parser.add_argument("--signing", action="store_true", help="sign ours")
    options = parser.parse_args(arguments)
    with private_broker() as broker:
        rates(broker, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
