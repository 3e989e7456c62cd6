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

Eight threads, and 32, share one application, ours or Celery's, in a process that is new each round.
Each has sent one task before the clock starts.

Where the time goes is told by the processor time that the sender has taken for each task, and that
the broker has until it has everything: who takes most of it, is the wall.

With ``--signing``, ours are signed; see ``rabbitdelay_signing_key``. With ``--rows threads raw``,
only the rows whose names contain one of these words are measured, and nothing is written.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from threading import Barrier
from typing import Any, Final, NamedTuple

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

#: How many threads send at once, and the names of their rows: ours, and Celery's.
THREADS: Final = {
    number: (f"apply_async(delay=), {number} threads", f"Celery's, confirmed, {number} threads")
    for number in (8, 32)
}

#: The key of ``--signing``.
KEY: Final = "benchmark" * 4


def make_app(
    cls: type[celery.Celery],
    url: str,
    queue: str,
    confirms: bool = False,
    signing_key: str | None = None,
) -> Any:
    """An application of a class, with one task and one quorum queue."""
    app = cls("bench", broker=url, set_as_current=False)
    if signing_key:
        app.conf.rabbitdelay_signing_key = signing_key
    app.conf.update(
        task_default_queue=queue,
        task_queues=[waiting.quorum_queue(queue)],
        task_ignore_result=True,
        broker_transport_options={"confirm_publish": True} if confirms else {},
    )

    @app.task(name="remind", shared=False)
    def remind(order: int, text: str) -> None: ...

    return app


def one_by_one(app: Any, option: str, delays: Sequence[float]) -> int:
    """Send tasks by ``apply_async``; return how many messages that makes."""
    remind = app.tasks["remind"]
    for order, delay in enumerate(delays):
        remind.apply_async((order, TEXT), **{option: delay})
    return len(delays)


class Spent(NamedTuple):
    """Seconds that sending took: by the clock, of the sender's processor, of the broker's."""

    clock: float
    sender: float
    broker: float

    @classmethod
    def now(cls, broker: int) -> Spent:
        """Return what all clocks say."""
        return cls(time.monotonic(), time.process_time(), waiting.cpu(broker))

    def since(self, began: Spent) -> Spent:
        """Return the difference."""
        return Spent(*(now - then for now, then in zip(self, began, strict=True)))


def from_threads(
    make: Callable[[], Any], option: str, delays: Sequence[float], threads: int, broker: int
) -> Spent:
    """Send tasks from threads of this process; all but the first of each thread are measured.

    Args:
        make: Makes the application.
        option: The option of ``apply_async``.
        delays: The delay of each task.
        threads: How many threads.
        broker: The broker's process.
    """
    app = make()
    began = []
    connected = Barrier(threads, lambda: began.append(Spent.now(broker)))

    def send(first: int) -> None:
        own = delays[first::threads]
        one_by_one(app, option, own[:1])
        connected.wait(waiting.PATIENCE)
        one_by_one(app, option, own[1:])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(send, range(threads)))
    spent = Spent.now(broker).since(began[0])
    app.close()
    return spent


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
        key = KEY if options.signing else None
        self.make_ours = partial(make_app, Celery, broker.url, "ours", signing_key=key)
        self.make_confirmed = partial(make_app, celery.Celery, broker.url, "native", confirms=True)
        self.ours, self.native_confirmed = self.make_ours(), self.make_confirmed()
        self.native = make_app(celery.Celery, broker.url, "native")
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
        one_by_one(self.ours, "delay", self.delays[:1])
        (queue,) = (name for name in self.our_queues if waiting.count(self.connection, [name]))
        channel: Any = self.connection.default_channel
        message = channel.basic_get(queue, no_ack=True)
        own = {name: message.properties[name] for name in message.properties}
        for app in (self.native, self.native_confirmed):
            one_by_one(app, "countdown", self.delays[:1])
        waiting.purge(self.connection, self.native_queues, 2)
        return amqp.Message(message.body, **own)

    def pipeline(self, tasks: int) -> int:
        """Send tasks by ``apply_async`` in a pipeline; return how many messages that makes."""
        with self.ours.rabbitdelay.pipeline():
            return one_by_one(self.ours, "delay", self.delays[:tasks])

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
        some = self.delays[:slow]
        of: dict[str, tuple[int, list[str], Callable[[], int]]] = {
            ONE: (slow, ours, partial(one_by_one, self.ours, "delay", some)),
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
                partial(one_by_one, self.native_confirmed, "countdown", some),
            ),
            NATIVE_UNCONFIRMED: (
                *(slow, native),
                partial(one_by_one, self.native, "countdown", some),
            ),
            RAW_CONFIRMED: (slow, ours, partial(self.raw, confirmed, plain, addresses[:slow])),
            RAW: (fast, ours, partial(self.raw, unconfirmed, plain, addresses)),
            RAW_HEADERS: (fast, ours, partial(self.raw, unconfirmed, task, addresses)),
        }
        rows = {name: partial(self.rate, name, *each) for name, each in of.items()}
        for threads, (of_ours, of_celery) in THREADS.items():
            for name, queues, make, option in (
                (of_ours, ours, self.make_ours, "delay"),
                (of_celery, native, self.make_confirmed, "countdown"),
            ):
                rows[name] = partial(self.rate_of_threads, name, queues, make, option, threads)
        words = self.options.rows
        return {name: row for name, row in rows.items() if any(word in name for word in words)}

    def rate(self, name: str, tasks: int, queues: Sequence[str], send: Callable[[], int]) -> float:
        """Send; return tasks a second. Then count what arrived, and remove it."""
        gc.collect()
        began = Spent.now(self.broker.pid)
        messages = send()
        spent = Spent.now(self.broker.pid).since(began)
        if "unconfirmed" in name:
            wait_for(
                lambda: waiting.count(self.connection, queues) >= messages,
                name,
                waiting.PATIENCE,
                interval=0.0,
            )
            has_all = Spent.now(self.broker.pid).since(began)
            self.landed.setdefault(name, []).append(tasks / has_all.clock)
            spent = spent._replace(broker=has_all.broker)
        waiting.purge(self.connection, queues, messages)
        return self._noted(name, tasks, spent)

    def rate_of_threads(
        self,
        name: str,
        queues: Sequence[str],
        make: Callable[[], Any],
        option: str,
        threads: int,
    ) -> float:
        """Send from threads of a new process; return tasks a second. Count and remove them."""
        delays = self.delays[: self.options.slow]
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            sending = pool.submit(from_threads, make, option, delays, threads, self.broker.pid)
            spent = sending.result(waiting.PATIENCE)
        waiting.purge(self.connection, queues, len(delays))
        return self._noted(name, len(delays) - threads, spent)

    def _noted(self, name: str, tasks: int, spent: Spent) -> float:
        sender, broker = (each / tasks * 1e6 for each in spent[1:])
        self.cost.setdefault(name, []).append((sender, broker))
        return tasks / spent.clock

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
    peers = [peer for peer in (NATIVE, RAW) if peer in figures]
    for peer in peers or (None,):
        measure.show(title, unit, figures, peer)
    if MANY in figures:
        landed = bench.landed | {MANY: figures[MANY]}
        measure.show("Until the broker had everything", unit, landed, MANY)
    print("\nMicroseconds of processor time a task, median: sender, broker")
    for name, seen in bench.cost.items():
        sender, spent = (median(each) for each in zip(*seen, strict=True))
        print(f"  {name:44} {sender:8.0f} {spent:8.0f}")
    goals = [
        (ONE, NATIVE, 1),
        (PIPELINE, NATIVE, 2),
        (GROUP, NATIVE_GROUP, 2),
        (MANY, NATIVE, 10),
        (MANY, RAW, 0.7),
        (MANY, RAW_HEADERS, 0.7),
        *((*names, 2) for names in THREADS.values()),
    ]
    targets = [
        Target(f"{name} / {peer}", measure.ratios(figures, peer)[name], bound)
        for name, peer, bound in goals
        if {name, peer} <= figures.keys()
    ]
    if ENVELOPED in figures:
        targets.append(Target(f"{ENVELOPED} (tasks/s)", median(figures[ENVELOPED]), 40_000))
    judged = measure.judge(targets)
    if options.rows != [""]:
        return
    results = {
        "unit": unit,
        "options": vars(options),
        "message_bytes": sum(map(len, Content.of(bench.task_message))),
        "figures": figures,
        "until_the_broker_has_everything": bench.landed,
        "microseconds_of_processor_time_of_sender_and_broker": bench.cost,
        "targets": judged,
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
    parser.add_argument(
        "--rows", nargs="+", default=[""], metavar="WORD", help="only those named so (all)"
    )
    options = parser.parse_args(arguments)
    with private_broker() as broker:
        rates(broker, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
